"""Async handlers of a worker: on one event loop, its own or the program's."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT, Told, comes_true

from litebroker import (
    AsyncContext,
    Backoff,
    CancelledTooLateError,
    Context,
    Counts,
    LeaseLostError,
    NewJob,
    Queue,
    SQLiteStorage,
    current_job,
)
from litebroker.testing import ManualClock


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def queue(storage: SQLiteStorage, told: Told) -> Iterator[Queue[Any]]:
    queue: Queue[Any] = Queue("emails", storage, backoff=Backoff.fixed(0), on_error=told)
    yield queue
    queue.close()


class Gate:
    """An async handler that tells when it runs, and goes on when it may."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.seen: list[Any] = []
        self.cancelled: list[Any] = []
        self._opened: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def __call__(self, data: Any) -> None:
        opened = asyncio.Event()
        self._opened.append((asyncio.get_running_loop(), opened))
        self.seen.append(data)
        self.entered.release()
        try:
            await asyncio.wait_for(opened.wait(), LIMIT)
        except asyncio.CancelledError:
            self.cancelled.append(data)
            raise

    def is_entered(self, times: int = 1) -> bool:
        return all(self.entered.acquire(timeout=LIMIT) for _ in range(times))

    def open(self) -> None:
        for loop, opened in self._opened:
            loop.call_soon_threadsafe(opened.set)


@pytest.fixture
def gate() -> Gate:
    return Gate()


# Running


def test_a_job_whose_async_handler_returns_is_gone(queue: Queue[Any]) -> None:
    seen = []

    async def handler(data: Any) -> None:
        await asyncio.sleep(0)
        seen.append(data)

    queue.add_many([1, 2, 3])
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(seen) == [1, 2, 3]


async def with_context(data: Any, context: AsyncContext | None = None, *, seen: list[Any]) -> None:
    seen.append((data, type(context)))


class Callee:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    async def __call__(self, data: Any, it: AsyncContext) -> None:
        self.seen.append((data, type(it)))

    async def method(self, data: Any) -> None:
        self.seen.append((data,))


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda seen: functools.partial(with_context, seen=seen), (1, AsyncContext)),
        (Callee, (1, AsyncContext)),
        (lambda seen: Callee(seen).method, (1,)),
    ],
    ids=["partial with context", "callable object", "method"],
)
def test_an_async_handler_gets_the_context_if_it_wants(
    queue: Queue[Any], make: Callable[..., Any], call: tuple[Any]
) -> None:
    seen: list[Any] = []
    queue.add(1)

    queue.process(make(seen))

    assert comes_true(lambda: bool(seen))
    assert seen == [call]


def test_as_many_async_handlers_run_at_once_as_was_asked_for_and_no_more(queue: Queue[Any], gate: Gate) -> None:
    queue.add_many(range(101))
    threads = threading.active_count()

    queue.process(gate, concurrency=100)

    assert gate.is_entered(100)
    assert not gate.entered.acquire(timeout=0.05)
    assert threading.active_count() - threads < 10
    gate.open()
    assert gate.is_entered()
    gate.open()
    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(gate.seen) == list(range(101))


def test_all_handlers_of_a_worker_run_on_one_loop_which_is_not_the_callers_thread(queue: Queue[Any]) -> None:
    loops = set()

    async def handler(_: Any) -> None:
        loops.add((asyncio.get_running_loop(), threading.get_ident()))
        await asyncio.sleep(0.001)

    queue.add_many(range(50))
    queue.process(handler, concurrency=8)

    assert comes_true(lambda: queue.stats() == Counts())
    assert len(loops) == 1
    assert threading.get_ident() not in {thread for _, thread in loops}


def test_jobs_that_are_added_while_others_run_start_at_once(queue: Queue[Any], gate: Gate) -> None:
    queue.process(gate, concurrency=2)
    queue.add("long")
    assert gate.is_entered()

    queue.add("short")

    assert gate.is_entered()
    gate.open()


def test_a_finished_job_is_settled_though_another_takes_long(queue: Queue[Any], gate: Gate) -> None:
    async def handler(data: Any) -> None:
        if data == "long":
            await gate(data)

    queue.add_many(["long", "short"])

    queue.process(handler, concurrency=2)

    assert gate.is_entered()
    assert comes_true(lambda: queue.stats() == Counts(active=1))
    gate.open()


def test_many_short_jobs_run_once_each(queue: Queue[Any]) -> None:
    seen: list[int] = []

    async def handler(data: int) -> None:
        seen.append(data)

    queue.add_many(range(3000))
    queue.process(handler, concurrency=20)

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(seen) == list(range(3000))


def test_sync_and_async_workers_share_a_queue(queue: Queue[Any]) -> None:
    seen: list[tuple[str, int]] = []

    async def awaited(data: int) -> None:
        seen.append(("async", data))
        await asyncio.sleep(0.001)

    def called(data: int) -> None:
        seen.append(("sync", data))

    queue.process(awaited, concurrency=4)
    queue.process(called, concurrency=2)
    queue.add_many(range(500))

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(data for _, data in seen) == list(range(500))


def test_a_batch_is_one_call_of_an_async_handler(queue: Queue[Any]) -> None:
    batches: list[tuple[list[int], int]] = []

    async def handler(numbers: list[int], contexts: list[AsyncContext]) -> None:
        batches.append((numbers, len(contexts)))
        for number, context in zip(numbers, contexts, strict=True):
            if number == 2:
                await context.fail("no twos", retry=False)

    queue.add_many([1, 2, 3])
    queue.process_many(handler, batch=10)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    assert batches == [([1, 2, 3], 3)]


def test_the_task_of_a_handler_knows_its_job(queue: Queue[Any]) -> None:
    seen = []

    async def handler(_: Any) -> None:
        await asyncio.sleep(0)
        job = current_job()
        seen.append(job and job.id)

    jobs = queue.add_many([1, 2, 3])
    queue.process(handler, concurrency=3)

    assert comes_true(lambda: len(seen) == 3)
    assert sorted(seen, key=str) == sorted((job.id for job in jobs), key=str)


# Endings


def test_a_job_whose_async_handler_raises_is_tried_again_and_its_stack_begins_at_the_handler(
    queue: Queue[Any], told: Told
) -> None:
    async def handler(_: Any) -> None:
        raise ValueError("no")

    queue.add(1, attempts=2)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.type, dead.error.message, dead.attempts) == ("ValueError", "no", 2)
    assert [line.strip() for line in dead.error.stack.splitlines()][1].endswith("in handler")
    assert told.kinds == ["handler", "handler"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_an_async_handler_raises_the_worker_goes_on(queue: Queue[Any], error: type[BaseException]) -> None:
    async def handler(data: str) -> None:
        if data == "bad":
            raise error

    queue.add("bad", attempts=1)
    queue.add("good")
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))


def test_what_is_cancelled_with_its_loop_while_the_worker_closes_is_given_back(queue: Queue[Any], gate: Gate) -> None:
    async def main() -> None:
        queue.add("x")
        worker = queue.process(gate, loop=asyncio.get_running_loop())
        assert await asyncio.to_thread(gate.is_entered)
        closer = threading.Thread(target=worker.close)
        closer.start()
        assert await asyncio.to_thread(comes_true, lambda: worker._closing)  # noqa: SLF001 (nothing else tells)

    asyncio.run(main())

    assert comes_true(lambda: queue.stats() == Counts(ready=1))
    assert gate.cancelled == ["x"]


def test_a_handler_that_is_cancelled_by_something_else_has_failed(queue: Queue[Any]) -> None:
    async def handler(_: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    queue.add(1, attempts=1)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert dead.error.type == "CancelledError"


def test_a_handler_can_settle_its_job_and_add_what_follows(queue: Queue[Any], storage: SQLiteStorage) -> None:
    follow: Queue[Any] = Queue("follow", storage)
    answers = []

    async def handler(data: int, context: AsyncContext) -> None:
        if data == 1:
            answers.append(await context.complete(then=[NewJob("next", queue="follow")]))
            answers.append(await context.complete())
        elif context.attempt == 1:
            answers.append(await context.fail("later", retry_in=timedelta(hours=1)))
        raise ValueError("too late to matter")

    queue.add(1)
    queue.process(handler).close()
    queue.process(handler)
    assert comes_true(lambda: follow.size() == 1)
    queue.add(2)

    assert comes_true(lambda: answers == [True, False, True])
    assert queue.stats() == Counts(delayed=1)


def test_a_handler_can_complete_its_job_in_a_transaction_of_its_own_thread(
    queue: Queue[Any], storage: SQLiteStorage
) -> None:
    def write(data: Any, context: Context) -> None:
        with closing(sqlite3.connect(str(storage.path), timeout=LIMIT)) as db, db:
            db.execute("create table if not exists sent(data)")
            db.execute("insert into sent values(?)", (data,))
            context.complete(connection=db)
            if context.attempt == 1:
                raise ValueError("roll it back")

    async def handler(data: Any, context: AsyncContext) -> None:
        await asyncio.to_thread(write, data, context.sync)

    queue.add("x")
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    with closing(sqlite3.connect(str(storage.path))) as db:
        assert db.execute("select data from sent").fetchall() == [("x",)]


def test_what_an_async_handler_returns_is_kept(queue: Queue[Any]) -> None:
    async def handler(data: int) -> int:
        await asyncio.sleep(0)
        return data * 2

    job = queue.add(21, keep_result=60)
    queue.process(handler)

    assert job.result(timeout=LIMIT) == 42


# Leases


def test_the_lease_of_a_waiting_coroutine_is_renewed(storage: SQLiteStorage, gate: Gate) -> None:
    queue: Queue[Any] = Queue("short", storage, lease=0.3)
    with closing(queue):
        job = queue.add(1)
        queue.process(gate)
        assert gate.is_entered()
        first = queue.list("active")[0].lease_until

        def renewed() -> bool:
            now = queue.get(job.id)
            assert now is not None
            assert now.attempts == 1
            return now.lease_until is not None and first is not None and now.lease_until > first

        assert comes_true(renewed)
        gate.open()


def test_a_lost_lease_cancels_the_task(tmp_path: Path, told: Told, gate: Gate) -> None:
    clock = ManualClock()
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    queue: Queue[Any] = Queue("emails", storage, lease=0.6, on_error=told)
    contexts: list[AsyncContext] = []

    async def handler(data: Any, context: AsyncContext) -> None:
        contexts.append(context)
        await gate(data)

    with closing(storage), closing(queue):
        queue.add("x", attempts=1)
        queue.process(handler)
        assert gate.is_entered()

        clock.advance(10)

        assert comes_true(lambda: gate.cancelled == ["x"])
        assert contexts[0].cancelled.is_set()
        assert comes_true(lambda: bool(told.kinds))
        assert told.kinds[0] == "heartbeat"
        assert isinstance(told.errors[0][0], LeaseLostError)


# The end


def test_close_waits_for_coroutines_and_gives_back_the_rest(queue: Queue[Any], gate: Gate) -> None:
    queue.add_many(["runs", "waits"])
    worker = queue.process(gate, concurrency=1)
    assert gate.is_entered()

    closer = threading.Thread(target=worker.close)
    closer.start()
    assert comes_true(lambda: queue.stats() == Counts(ready=1, active=1))
    gate.open()
    closer.join(LIMIT)

    assert worker.closed
    assert queue.stats() == Counts(ready=1)
    assert gate.cancelled == []


def test_what_a_shutdown_cancels_is_given_back(queue: Queue[Any], gate: Gate) -> None:
    job = queue.add("x")
    worker = queue.process(gate)
    assert gate.is_entered()

    assert not worker.close(0)
    assert worker.close()

    assert gate.cancelled == ["x"]
    found = queue.get(job.id)
    assert found is not None
    assert (found.state, found.attempts) == ("pending", 0)


def test_a_handler_may_end_well_though_a_shutdown_cancels_it(queue: Queue[Any]) -> None:
    entered = threading.Event()

    async def handler(data: str) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if data == "tidies up and fails":
                raise ValueError(data) from None

    queue.add("ends")
    worker = queue.process(handler)
    assert entered.wait(LIMIT)
    assert not worker.close(0)
    assert worker.close()
    assert queue.stats() == Counts()

    entered.clear()
    queue.add("tidies up and fails", attempts=1)
    worker = queue.process(handler)
    assert entered.wait(LIMIT)
    assert not worker.close(0)
    assert worker.close()
    assert queue.stats() == Counts(failed=1)


class Hesitant:
    """A serializer that tells when it is asked to, and goes on when it may."""

    name = "hesitant"

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_go_on = threading.Event()

    def dumps(self, data: Any, /) -> bytes:
        if data == "follows":
            self.asked.set()
            assert self.may_go_on.wait(LIMIT)
        return json.dumps(data).encode()

    def loads(self, data: bytes, /) -> Any:
        return json.loads(data)


def test_a_handler_that_is_cancelled_while_it_settles_learns_that_it_has(storage: SQLiteStorage) -> None:
    hesitant = Hesitant()
    learned: list[CancelledTooLateError | None] = []
    queue: Queue[Any] = Queue("emails", storage, serializer=hesitant)

    async def handler(_: Any, context: AsyncContext) -> None:
        try:
            await context.complete(then=["follows"])
        except asyncio.CancelledError as error:
            learned.append(CancelledTooLateError.of(error))
            raise

    queue.add("x")
    worker = queue.process(handler)
    assert hesitant.asked.wait(LIMIT)
    assert not worker.close(0)
    hesitant.may_go_on.set()
    assert worker.close()

    assert [error and error.result for error in learned] == [True]
    assert [job.data for job in queue.list("pending")] == ["follows"]


def test_an_async_handler_can_close_its_own_worker(queue: Queue[Any]) -> None:
    answers = []

    async def handler(_: Any) -> None:
        answers.append(worker.close())

    queue.add_many([1, 2])
    worker = queue.process(handler)

    assert comes_true(lambda: worker.closed)
    assert answers == [False]
    assert queue.stats() == Counts(ready=1)


def test_what_handlers_leave_on_the_loop_is_cancelled_at_its_end(queue: Queue[Any]) -> None:
    left: list[Any] = []
    started = threading.Event()

    async def linger() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append("cancelled")
            raise

    async def handler(_: Any) -> None:
        left.append(asyncio.ensure_future(linger()))
        await asyncio.sleep(0)

    queue.add(1)
    worker = queue.process(handler)
    assert started.wait(LIMIT)
    worker.close()

    assert left[1:] == ["cancelled"]


def test_no_threads_are_left_of_a_closed_worker(queue: Queue[Any]) -> None:
    before = set(threading.enumerate())

    async def handler(_: Any, context: AsyncContext) -> None:
        await context.complete()

    queue.add_many(range(20))
    worker = queue.process(handler, concurrency=10)
    assert comes_true(lambda: queue.stats() == Counts())
    worker.close()

    assert comes_true(lambda: set(threading.enumerate()) <= before)


# On the program's own loop


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, LIMIT))


def test_handlers_run_on_the_loop_that_they_are_given(queue: Queue[Any]) -> None:
    async def main() -> None:
        seen = asyncio.Event()
        loops = []

        async def handler(_: Any) -> None:
            loops.append(asyncio.get_running_loop())
            seen.set()

        queue.add(1)
        worker = queue.process(handler, loop=asyncio.get_running_loop())
        await seen.wait()
        assert loops == [asyncio.get_running_loop()]
        assert await asyncio.to_thread(worker.close)

    run(main())


def test_a_close_that_would_block_the_loop_of_its_handlers_does_not_wait(queue: Queue[Any], gate: Gate) -> None:
    async def main() -> None:
        queue.add(1)
        worker = queue.process(gate, loop=asyncio.get_running_loop())
        assert await asyncio.to_thread(gate.is_entered)

        assert not worker.close()

        gate.open()
        assert await asyncio.to_thread(worker.close)

    run(main())
    assert queue.stats() == Counts()


def test_a_loop_that_was_closed_ends_its_worker_and_gives_the_jobs_back(
    queue: Queue[Any], gate: Gate, told: Told
) -> None:
    loop = asyncio.new_event_loop()
    queue.add("x")
    worker = queue.process(gate, loop=loop)

    async def until_entered() -> None:
        assert await asyncio.to_thread(gate.is_entered)

    loop.run_until_complete(until_entered())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()

    assert comes_true(lambda: worker.closed)
    assert queue.stats() == Counts(ready=1)
    assert "claim" in told.kinds


def test_a_loop_that_stands_still_does_not_keep_close_waiting(queue: Queue[Any], gate: Gate) -> None:
    loop = asyncio.new_event_loop()
    queue.add("x")
    worker = queue.process(gate, loop=loop)

    async def until_entered() -> None:
        assert await asyncio.to_thread(gate.is_entered)

    loop.run_until_complete(until_entered())
    assert worker.close()
    assert queue.stats() == Counts(ready=1)

    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    assert gate.cancelled == ["x"]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_a_loop_for_a_handler_in_threads_is_refused(queue: Queue[Any]) -> None:
    loop = asyncio.new_event_loop()

    with closing(loop), pytest.raises(ValueError, match="async handlers"):
        queue.process(print, loop=loop)


def test_tasks_of_handlers_do_not_share_their_context_variables(queue: Queue[Any]) -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)
    seen = []

    async def handler(data: Any) -> None:
        seen.append(variable.get())
        variable.set(data)
        await asyncio.sleep(0)
        assert variable.get() == data

    queue.add_many(range(10))
    queue.process(handler, concurrency=5)

    assert comes_true(lambda: queue.stats() == Counts())
    assert seen == [None] * 10


# Processes

PROGRAM = """
import asyncio, sys
from litebroker import Queue

queue = Queue("emails", sys.argv[1], lease=30)


async def handler(data, context):
    print("runs", data, flush=True)
    await asyncio.sleep(0.3)
    await context.complete()
    print("ends", data, flush=True)


queue.process(handler, concurrency=10)
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(after: str = "") -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text(PROGRAM + after)
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "jobs.db")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def test_a_program_that_ends_waits_for_its_coroutines(
    queue: Queue[Any], program: Callable[[str], subprocess.Popen[str]]
) -> None:
    queue.add_many([1, 2, 3])

    process = program("import time\nwhile queue.size(): time.sleep(0.01)\n")
    output, _ = process.communicate(timeout=LIMIT)

    assert sorted(output.splitlines()) == ["ends 1", "ends 2", "ends 3", "runs 1", "runs 2", "runs 3"]
    assert queue.stats() == Counts()


def test_the_jobs_of_a_killed_program_run_again(
    queue: Queue[Any], program: Callable[[str], subprocess.Popen[str]]
) -> None:
    queue.add_many([1, 2, 3])
    process = program("import time\ntime.sleep(60)\n")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline().startswith("runs")
    process.kill()
    process.communicate(timeout=LIMIT)
    seen = []

    async def handler(data: Any) -> None:
        seen.append(data)

    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(seen) == [1, 2, 3]


TASKS = """
import asyncio

loops = set()


async def handler(data):
    loops.add(asyncio.get_running_loop())
    print(f"{data} on loop {len(loops)}", flush=True)
"""


def test_the_command_line_has_one_loop_for_all_queues(tmp_path: Path, storage: SQLiteStorage) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    queues: list[Queue[Any]] = [Queue(name, storage) for name in ("a", "b")]
    for queue in queues:
        queue.add(queue.name)
    command = [sys.executable, "-m", "litebroker", "worker", "tasks:handler", "--queue", "a", "--queue", "b"]

    process = subprocess.Popen(
        [*command, "--concurrency", "500", "--db", str(storage.path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = sorted(process.stdout.readline() for _ in range(2))
    process.terminate()
    process.communicate(timeout=LIMIT)

    assert said == ["a on loop 1\n", "b on loop 1\n"]
    assert process.returncode == 0
    assert all(queue.stats() == Counts() for queue in queues)

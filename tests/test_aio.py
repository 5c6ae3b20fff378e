"""`AsyncQueue`: the queue for asyncio, its waits and its cancellations."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from litebroker import (
    Counts,
    Job,
    JobFailedError,
    JobRecord,
    Lease,
    NewJob,
    Observer,
    PayloadError,
    Queue,
    ResultTimeoutError,
    SQLiteStorage,
    StorageClosedError,
)
from litebroker.aio import AsyncContext, AsyncQueue, CancelledTooLateError
from litebroker.testing import ManualClock

LIMIT = 20  # seconds for what takes milliseconds

Test = Callable[[Path], Coroutine[Any, Any, None]]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, LIMIT * 2))


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db?durability=relaxed"


class Gate:
    """What a thread waits for, and tells that it does."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(LIMIT)


class Hesitant:
    """A serializer at whose gate the payload "slow" waits, in the thread that adds it."""

    name = "hesitant"

    def __init__(self) -> None:
        self.gate = Gate()
        self.asked: list[Any] = []

    def dumps(self, data: Any, /) -> bytes:
        self.asked.append(data)
        if data == "slow":
            self.gate()
        return json.dumps(data).encode()

    def loads(self, data: bytes, /) -> Any:
        return json.loads(data)


async def comes_true(condition: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    """Whether it does, within the limit."""
    ends_at = asyncio.get_running_loop().time() + LIMIT
    while not await condition():
        if asyncio.get_running_loop().time() > ends_at:
            return False
        await asyncio.sleep(0.002)
    return True


# All of Queue


def test_it_has_all_of_queue() -> None:
    not_awaited = {"bind", "transaction", "future", "observe", "name", "storage"}  # As the docs say.
    mine = {name for name in vars(AsyncQueue) if not name.startswith("_")}
    its = {name for name in vars(Queue) if not name.startswith("_")}

    assert its - mine == not_awaited - {"name", "storage"}
    assert mine - its == {"closed", "run_in_transaction"}
    for name in its - not_awaited:
        assert inspect.iscoroutinefunction(vars(AsyncQueue)[name]), name
        assert vars(AsyncQueue)[name].__doc__, name


def test_jobs_are_added_claimed_and_settled(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where, attempts=2) as queue:
            first = await queue.add({"to": "a@example.com"}, priority=5)
            await queue.add_many([{"to": "b@example.com"}, NewJob({"to": "c@example.com"}, delay=60)])
            claimed = await queue.claim(limit=10, lease=60)
            assert [job.data["to"] for job in claimed] == ["a@example.com", "b@example.com"]
            assert claimed[0].id == first.id
            assert await queue.extend(claimed[0], 30)
            assert await queue.complete(claimed[0], then=[{"to": "d@example.com"}])
            assert not await queue.complete(claimed[0])
            assert await queue.fail(claimed[1], ValueError("no"), retry=False)
            assert await queue.stats() == Counts(ready=1, delayed=1, failed=1)
            assert await queue.size() == 2
            (dead,) = await queue.dead_letters()
            assert dead.error is not None
            assert dead.error.type == "ValueError"
            assert await queue.retry(dead)
            (again, other) = await queue.claim(2)
            assert await queue.release(again)
            assert await queue.release(other)

    run(main())


def test_jobs_are_looked_at_and_changed(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            job = await queue.add(1, ref="r", dedupe_key="k", delay=60)
            assert (await queue.add(2, dedupe_key="k")).duplicate
            assert [it.id for it in await queue.find(ref="r")] == [job.id]
            assert [it.id for it in await queue.list("pending")] == [job.id]
            found = await queue.get(job.id)
            assert found is not None
            assert (await queue.why(job)).job_id == job.id
            assert await queue.progress(job) is None
            assert await queue.reschedule(job, delay=10)
            assert await queue.pause()
            assert await queue.paused()
            assert await queue.resume()
            assert await queue.cancel(job)
            assert await queue.remove(job)
            await queue.add(3)
            assert await queue.purge() == 1
            assert await queue.retry_all() == 0
            await queue.notify()
            assert (await queue.schedule("tick", id="daily", cron="0 6 * * *")).id == "daily"
            assert [it.id for it in await queue.schedules()] == ["daily"]
            assert await queue.get_schedule("daily") is not None
            assert await queue.remove_schedule("daily")

    run(main())


def test_what_queue_raises_is_raised_here(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            with pytest.raises(PayloadError):
                await queue.add({1, 2})
            with pytest.raises(ValueError, match="limit"):
                await queue.claim(0)
            with pytest.raises(ValueError, match="wait"):
                await queue.claim(wait=-1)

    run(main())


def test_type_checkers_see_the_payloads_type_and_the_options(where: str) -> None:
    async def main() -> None:
        queue: AsyncQueue[str]
        async with AsyncQueue("emails", where) as queue:
            job: Job[str] = await queue.add("x", delay=1)
            await queue.add(5)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await queue.add("x", delai=1)  # type: ignore[call-arg]
            found: Job[int] | None = await queue.get(job.id)  # type: ignore[assignment]
            assert found is not None

    run(main())


def test_it_can_be_made_of_a_queue_which_stays_open(where: str) -> None:
    sync: Queue[str] = Queue("emails", where)

    async def main() -> None:
        async with AsyncQueue(sync) as queue:
            assert queue.sync is sync
            assert queue.name == "emails"
            assert queue.storage is sync.storage
            await queue.add("x")

    run(main())

    assert sync.size() == 1
    sync.close()


def test_a_storage_that_it_was_given_stays_open(where: str) -> None:
    storage = SQLiteStorage(where)

    async def main() -> None:
        async with AsyncQueue("emails", storage) as queue:
            await queue.add("x")

    run(main())

    assert storage.counts("emails") == Counts(ready=1)
    storage.close()


def test_a_connection_is_refused_since_it_belongs_to_a_thread(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db, pytest.raises(TypeError, match="belongs to its thread"):
        AsyncQueue("emails", db)


def test_nothing_is_opened_before_the_first_operation(tmp_path: Path) -> None:
    queue: AsyncQueue[Any] = AsyncQueue("emails", tmp_path / "jobs.db")

    assert list(tmp_path.iterdir()) == []
    run(queue.close())


# Transactions


def test_a_function_runs_in_one_transaction(where: str) -> None:
    def move(queue: Queue[Any]) -> int:
        queue.add("x")
        queue.add("y")
        return queue.size()

    def fail(queue: Queue[Any]) -> None:
        queue.add("z")
        raise KeyError("roll it back")

    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            assert await queue.run_in_transaction(move) == 2
            with pytest.raises(KeyError):
                await queue.run_in_transaction(fail)
            assert await queue.size() == 2

    run(main())


def test_an_async_function_is_refused_in_a_transaction(where: str) -> None:
    async def function(queue: Queue[Any]) -> None: ...

    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            with pytest.raises(TypeError, match="async"):
                await queue.run_in_transaction(function)  # type: ignore[unused-coroutine]

    run(main())


def test_context_variables_are_those_of_the_task(where: str) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

    class Traced(Observer):
        def adding(self, specs: Any) -> Any:
            seen.append(variable.get())
            return super().adding(specs)

    seen: list[str] = []

    async def add(queue: AsyncQueue[Any], value: str) -> None:
        variable.set(value)
        await queue.add(value)

    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            queue.sync.observe(Traced())
            await asyncio.gather(add(queue, "a"), add(queue, "b"))

    run(main())

    assert sorted(seen) == ["a", "b"]


# Waiting


def test_a_waiting_claim_gets_the_job_that_comes(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            claim = asyncio.ensure_future(queue.claim(wait=LIMIT))
            await waits(queue, 1)

            await queue.add("x")

            assert [job.data for job in await claim] == ["x"]

    run(main())


async def waits(queue: AsyncQueue[Any], count: int) -> None:
    """Until so many claims wait in the line."""

    async def condition() -> bool:
        return len(queue._line._waiters) == count  # noqa: SLF001 (nothing else tells)

    assert await comes_true(condition)


def test_a_hundred_waiting_claims_take_one_thread_and_get_a_job_each(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            claims = [asyncio.ensure_future(queue.claim(wait=LIMIT)) for _ in range(100)]
            await waits(queue, 100)
            idle = [it for it in threading.enumerate() if it.name == "litebroker-emails-hop"]
            assert len([it for it in threading.enumerate() if it.name == "litebroker-emails-claim"]) == 1
            assert len(idle) <= 16

            await queue.add_many(range(100))

            jobs = await asyncio.gather(*claims)
            # In the order in which they came.
            assert [job.data for (job,) in jobs] == list(range(100))

    run(main())


def test_waiting_claims_have_limits_and_leases_of_their_own(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            short = asyncio.ensure_future(queue.claim(2, wait=LIMIT, lease=10))
            await waits(queue, 1)
            long = asyncio.ensure_future(queue.claim(5, wait=LIMIT, lease=timedelta(hours=1)))
            await waits(queue, 2)

            await queue.add_many(range(4))

            jobs = [*await short, *await long]
            assert [job.data for job in jobs] == [0, 1, 2, 3]
            lengths = [job.lease_until - job.claimed_at for job in jobs if job.lease_until and job.claimed_at]
            assert [round(it.total_seconds()) for it in lengths] == [10, 10, 3600, 3600]

    run(main())


def test_a_delayed_job_ends_the_wait_when_it_is_due(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            await queue.add("x", delay=0.1)

            assert [job.data for job in await queue.claim(wait=LIMIT)] == ["x"]

    run(main())


def test_a_claim_that_does_not_wait_gets_what_is_due(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            await queue.add_many(range(20))

            claimed = [await queue.claim(wait=0) for _ in range(20)]

            assert [job.data for (job,) in claimed] == list(range(20))

    run(main())


def test_a_claim_on_other_terms_does_not_wait_for_the_one_before_it(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            first = asyncio.ensure_future(queue.claim(lease=10, wait=LIMIT))
            await asyncio.sleep(0)

            assert await asyncio.wait_for(queue.claim(lease=20, wait=0), LIMIT / 2) == []

            await queue.add("x")
            assert [job.data for job in await first] == ["x"]

    run(main())


def test_a_claim_waits_no_longer_than_it_was_told(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            assert await queue.claim(wait=0) == []
            assert await queue.claim(wait=0.05) == []
            await queue.pause()
            await queue.add("x")
            assert await queue.claim(wait=timedelta(milliseconds=50)) == []
            assert (await queue.stats()).active == 0

    run(main())


def test_two_loops_wait_at_one_queue(where: str) -> None:
    queue: AsyncQueue[int] = AsyncQueue("emails", where)
    got: list[int] = []

    async def main() -> None:
        for _ in range(20):
            (job,) = await queue.claim(wait=LIMIT)
            got.append(job.data)
            await queue.complete(job)

    threads = [threading.Thread(target=run, args=(main(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(40):
        queue.sync.add(number)
    for thread in threads:
        thread.join(LIMIT)

    assert sorted(got) == list(range(40))
    run(queue.close())


def test_close_ends_waiting_claims_and_loops(where: str) -> None:
    async def loop(queue: AsyncQueue[Any]) -> str:
        async for job in queue:
            await queue.complete(job)
        return "ended"

    async def main() -> None:
        queue: AsyncQueue[Any] = AsyncQueue("emails", where)
        claim = asyncio.ensure_future(queue.claim(wait=LIMIT))
        loops = [asyncio.ensure_future(loop(queue)) for _ in range(3)]
        await waits(queue, 4)

        await queue.close()

        assert await claim == []
        assert await asyncio.gather(*loops) == ["ended"] * 3
        assert queue.closed
        with pytest.raises(StorageClosedError):
            await queue.add("x")

    run(main())


def test_no_threads_are_left_of_a_closed_queue(where: str) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            await asyncio.gather(*[queue.add(number) for number in range(50)])
            await queue.purge()
            assert await queue.claim(wait=0.01) == []

        async def gone() -> bool:
            return set(threading.enumerate()) <= before

        assert await comes_true(gone)

    run(main())


def test_an_error_of_the_storage_reaches_all_who_wait(where: str) -> None:
    storage = SQLiteStorage(where)

    async def main() -> None:
        async with AsyncQueue("emails", storage) as queue:
            claims = [asyncio.ensure_future(queue.claim(wait=LIMIT)) for _ in range(3)]
            await waits(queue, 3)

            storage.close()

            errors = await asyncio.gather(*claims, return_exceptions=True)
            assert [type(error) for error in errors] == [StorageClosedError] * 3

    run(main())


# A loop over jobs


def test_a_loop_claims_one_job_after_the_other(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            await queue.add_many(range(5))
            seen = []
            async for job in queue:
                assert (await queue.stats()).active == 1
                seen.append(job.data)
                await queue.complete(job)
                if job.data == 3:
                    break
            assert seen == [0, 1, 2, 3]
            assert await queue.stats() == Counts(ready=1)

    run(main())


def test_several_tasks_loop_over_the_jobs_of_a_queue(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            seen: list[int] = []

            async def loop() -> None:
                async for job in queue:
                    seen.append(job.data)
                    await queue.complete(job)

            loops = [asyncio.ensure_future(loop()) for _ in range(10)]
            for number in range(50):
                await queue.add(number)

            async def done() -> bool:
                return await queue.stats() == Counts()

            assert await comes_true(done)
            assert sorted(seen) == list(range(50))
            for task in loops:
                task.cancel()
            await asyncio.wait(loops)

    run(main())


def test_no_job_is_lost_to_consumers_that_are_cancelled(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            random = Random(4)
            done: list[int] = []

            async def consume() -> None:
                while True:
                    jobs = await queue.claim(random.randint(1, 3), wait=random.choice([0, 0.01, LIMIT]))
                    # What it has got it settles, come what may.
                    settled = asyncio.ensure_future(asyncio.gather(*[queue.complete(job) for job in jobs]))
                    try:
                        await asyncio.shield(settled)
                    finally:
                        assert all(await settled)
                        done.extend(job.data for job in jobs)

            consumers = [asyncio.ensure_future(consume()) for _ in range(20)]
            for number in range(200):
                await queue.add_many([number] * 5)
                victim = random.randrange(20)
                consumers[victim].cancel()
                await asyncio.wait([consumers[victim]])
                consumers[victim] = asyncio.ensure_future(consume())

            async def all_done() -> bool:
                return len(done) == 1000

            assert await comes_true(all_done)
            assert await queue.stats() == Counts()
            for task in consumers:
                task.cancel()
            await asyncio.wait(consumers)

    run(main())


# Cancellation


async def cancelled(task: asyncio.Task[Any]) -> asyncio.CancelledError:
    """What a cancelled task has ended with."""
    try:
        await task
    except asyncio.CancelledError as error:
        return error
    raise AssertionError("it was not cancelled")


async def note(operation: Coroutine[Any, Any, Any], errors: list[BaseException]) -> Any:
    try:
        return await operation
    except BaseException as error:
        errors.append(error)
        raise


@asynccontextmanager
async def hesitant(tmp_path: Path) -> AsyncIterator[tuple[AsyncQueue[Any], Hesitant]]:
    serializer = Hesitant()
    async with AsyncQueue("emails", tmp_path / "jobs.db", serializer=serializer, durability="relaxed") as queue:
        try:
            yield queue, serializer
        finally:
            serializer.gate.opened.set()


def test_a_cancelled_add_that_had_begun_happens_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with hesitant(tmp_path) as (queue, serializer):
            errors: list[BaseException] = []
            task = asyncio.ensure_future(note(queue.add("slow"), errors))
            assert await asyncio.to_thread(serializer.gate.entered.wait, LIMIT)

            task.cancel()
            task.cancel()  # Impatience changes nothing.
            await asyncio.sleep(0)
            assert not task.done()
            serializer.gate.opened.set()
            await cancelled(task)

            assert [type(error) for error in errors] == [asyncio.CancelledError]  # Timeouts want no subclass.
            error = CancelledTooLateError.of(errors[0])
            assert error is not None
            assert [job.id for job in await queue.list("pending")] == [error.result.id]

    run(main())


def test_a_cancelled_add_that_had_not_begun_does_not_happen(tmp_path: Path) -> None:
    async def main() -> None:
        async with hesitant(tmp_path) as (queue, serializer):
            errors: list[BaseException] = []
            # They have all the threads.
            slow = [asyncio.ensure_future(queue.add("slow")) for _ in range(16)]

            async def all_begun() -> bool:
                return serializer.asked.count("slow") == 16

            assert await comes_true(all_begun)
            task = asyncio.ensure_future(note(queue.add("x"), errors))
            await asyncio.sleep(0)

            task.cancel()
            await cancelled(task)
            serializer.gate.opened.set()
            await asyncio.gather(*slow)

            assert [type(error) for error in errors] == [asyncio.CancelledError]
            assert CancelledTooLateError.of(errors[0]) is None
            assert "x" not in serializer.asked
            assert await queue.size() == 16

    run(main())


def test_a_cancelled_add_that_fails_says_that_nothing_happened(tmp_path: Path) -> None:
    async def main() -> None:
        async with hesitant(tmp_path) as (queue, serializer):
            errors: list[BaseException] = []
            task = asyncio.ensure_future(note(queue.add_many(["slow", NewJob("x", priority=2**70)]), errors))
            assert await asyncio.to_thread(serializer.gate.entered.wait, LIMIT)

            task.cancel()
            serializer.gate.opened.set()
            await cancelled(task)

            (error,) = errors
            assert type(error) is asyncio.CancelledError
            assert isinstance(error.__cause__, ValueError)
            assert CancelledTooLateError.of(error) is None
            assert await queue.size() == 0

    run(main())


def test_a_timeout_tells_by_its_cause_that_the_job_was_added(tmp_path: Path) -> None:
    async def main() -> None:
        async with hesitant(tmp_path) as (queue, serializer):
            opener = asyncio.get_running_loop().call_later(0.1, serializer.gate.opened.set)
            with pytest.raises(asyncio.TimeoutError) as caught:
                await asyncio.wait_for(queue.add("slow"), 0.01)

            opener.cancel()
            error = CancelledTooLateError.of(caught.value)
            assert error is not None
            assert isinstance(error.result, Job)
            assert await queue.size() == 1

    run(main())


def test_cancelled_adds_tell_the_truth_whatever_the_moment(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            happened = set()
            random = Random(4)

            async def add(number: int) -> None:
                try:
                    job = await queue.add(number)
                except asyncio.CancelledError as error:
                    late = CancelledTooLateError.of(error)
                    if late is None:
                        return
                    job = late.result
                happened.add(job.id)

            for _ in range(20):
                tasks = [asyncio.ensure_future(add(number)) for number in range(50)]
                for task in tasks:
                    if random.random() < 0.1:
                        await asyncio.sleep(0)
                    if random.random() < 0.5:
                        task.cancel()
                await asyncio.wait(tasks)

            there = await queue.list("pending", limit=1000)
            assert {job.id for job in there} == happened
            assert 0 < len(happened) < 1000

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
def test_a_timeout_block_sees_a_cancellation_that_came_too_late(tmp_path: Path) -> None:
    async def main() -> None:
        async with hesitant(tmp_path) as (queue, serializer):
            asyncio.get_running_loop().call_later(0.1, serializer.gate.opened.set)
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.01):  # type: ignore[attr-defined]
                    await queue.add("slow")

            assert CancelledTooLateError.of(caught.value) is not None
            assert await queue.size() == 1

    run(main())


def test_who_only_reads_is_cancelled_at_once(where: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with AsyncQueue("emails", where) as queue:
            await queue.add("x")
            transaction = asyncio.ensure_future(asyncio.to_thread(hold, queue.sync, gate))
            assert await asyncio.to_thread(gate.entered.wait, LIMIT)
            errors: list[BaseException] = []
            adding = asyncio.ensure_future(note(queue.add("y"), errors))
            looking = asyncio.ensure_future(queue.get(1))
            await asyncio.sleep(0)

            looking.cancel()
            await cancelled(looking)

            gate.opened.set()
            await transaction
            await adding

    run(main())


def hold(queue: Queue[Any], gate: Gate) -> None:
    """A transaction, which others have to wait for."""
    with queue.transaction():
        gate()


def test_a_cancelled_claim_gives_its_jobs_back(where: str) -> None:
    class Slow(SQLiteStorage):
        def claim(self, *args: Any, **options: Any) -> list[JobRecord]:
            claimed = super().claim(*args, **options)
            if claimed and not gate.opened.is_set():
                gate()
            return claimed

    gate = Gate()
    storage = Slow(where)

    async def main() -> None:
        async with AsyncQueue("emails", storage) as queue:
            job = await queue.add("x")
            errors: list[BaseException] = []
            task = asyncio.ensure_future(note(queue.claim(10), errors))
            assert await asyncio.to_thread(gate.entered.wait, LIMIT)
            assert (await queue.stats()).active == 1

            task.cancel()
            await asyncio.sleep(0)
            gate.opened.set()
            await cancelled(task)

            assert [type(error) for error in errors] == [asyncio.CancelledError]
            found = await queue.get(job.id)
            assert found is not None
            assert (found.state, found.attempts) == ("pending", 0)

    run(main())
    storage.close()


def test_a_cancelled_waiting_claim_leaves_the_line(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            first, second = (asyncio.ensure_future(queue.claim(wait=LIMIT)) for _ in range(2))
            await waits(queue, 2)

            first.cancel()
            await cancelled(first)
            await queue.add("x")

            assert [job.data for job in await second] == ["x"]
            assert await queue.stats() == Counts(active=1)

    run(main())


def test_a_waiting_claim_that_is_cancelled_as_its_jobs_come_gives_them_back(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            for number in range(300):
                task = asyncio.ensure_future(queue.claim(wait=LIMIT))
                await waits(queue, 1)
                await queue.add(number)
                for _ in range(number % 10):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])

                # Whatever the moment was: the job was given, or given back.
                given = 0 if task.cancelled() else len(task.result())
                assert await queue.stats() == Counts(ready=1 - given, active=given)
                if given:
                    await queue.complete(task.result()[0])
                else:
                    await queue.purge()

    run(main())


def test_a_loop_that_ends_gives_back_what_was_claimed_for_it(where: str) -> None:
    storage = SQLiteStorage(where)
    queue: AsyncQueue[Any] = AsyncQueue("emails", storage)

    async def main() -> None:
        asyncio.ensure_future(queue.claim(wait=LIMIT))  # noqa: RUF006 (left behind on purpose)
        await waits(queue, 1)

    run(main())
    queue.sync.add("x")

    assert queue.sync.stats() == Counts(ready=1)
    run(queue.close())
    storage.close()


# Results


def test_results_are_awaited(where: str) -> None:
    async def double(data: int) -> int:
        if data < 0:
            raise ValueError("negative")
        return data * 2

    async def main() -> None:
        async with AsyncQueue("emails", where, results=60, attempts=1) as queue:
            jobs = await queue.add_many(range(100))
            bad = await queue.add(-1)
            results = asyncio.gather(*[queue.result(job, timeout=LIMIT) for job in jobs])
            await queue.process(double, concurrency=10)

            assert await results == [data * 2 for data in range(100)]
            with pytest.raises(JobFailedError, match="negative"):
                await queue.result(bad.id, timeout=LIMIT)

    run(main())


def test_a_result_that_does_not_come_in_time_is_a_timeout(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where, results=60) as queue:
            job = await queue.add(1)
            for timeout in (0, 0.05):
                with pytest.raises(ResultTimeoutError):
                    await queue.result(job, timeout=timeout)
            task = asyncio.ensure_future(queue.result(job))
            await asyncio.sleep(0)
            task.cancel()
            await cancelled(task)

    run(main())


# Workers


def test_async_handlers_run_on_the_callers_loop(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            loops = set()
            answers = []

            async def handler(data: int, context: AsyncContext) -> None:
                loops.add(asyncio.get_running_loop())
                await queue.add(data + 100, delay=60)
                answers.append(await context.complete())

            await queue.add_many(range(20))
            worker = await queue.process(handler, concurrency=10)

            async def done() -> bool:
                return await queue.stats() == Counts(delayed=20)

            assert await comes_true(done)
            assert await worker.close()
            assert worker.closed
            assert loops == {asyncio.get_running_loop()}
            assert answers == [True] * 20

    run(main())


def test_sync_handlers_run_in_threads_beside_async_ones(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            threads = set()

            def handler(_: int) -> None:
                threads.add(threading.get_ident())

            async def awaited(_: int) -> None:
                threads.add(threading.get_ident())

            await queue.add_many(range(20))
            async with await queue.process(handler, concurrency=2), await queue.process(awaited, concurrency=2):

                async def done() -> bool:
                    return await queue.stats() == Counts()

                assert await comes_true(done)
            assert len(threads) <= 3

    run(main())


def test_batches_are_handled(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            seen: list[list[int]] = []

            async def handler(numbers: list[int]) -> None:
                seen.append(numbers)

            await queue.add_many(range(5))
            await queue.process_many(handler, batch=5)

            async def done() -> bool:
                return await queue.stats() == Counts()

            assert await comes_true(done)
            assert seen == [[0, 1, 2, 3, 4]]

    run(main())


def test_closing_the_queue_waits_for_its_handlers(where: str) -> None:
    async def main() -> None:
        entered, may_end = asyncio.Event(), asyncio.Event()
        ended = []

        async def handler(data: str) -> None:
            entered.set()
            await may_end.wait()
            ended.append(data)

        queue: AsyncQueue[str] = AsyncQueue("emails", where)
        await queue.add("x")
        await queue.process(handler)
        await entered.wait()
        closing_ = asyncio.ensure_future(queue.close())
        await asyncio.sleep(0.01)
        assert not closing_.done()

        may_end.set()
        await closing_

        assert ended == ["x"]

    run(main())


def test_a_handler_may_close_its_queue(where: str) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        queue: AsyncQueue[str] = AsyncQueue("emails", where)

        async def handler(_: str) -> None:
            await queue.close()
            closed.set()

        await queue.add("x")
        worker = await queue.process(handler)
        await closed.wait()

        async def gone() -> bool:
            return worker.closed

        assert await comes_true(gone)
        await queue.close()
        with pytest.raises(StorageClosedError):
            await queue.size()

    run(main())


def test_a_close_with_a_timeout_cancels_handlers_and_gives_their_jobs_back(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            entered = asyncio.Event()

            async def handler(_: str) -> None:
                entered.set()
                await asyncio.Event().wait()

            await queue.add("x")
            worker = await queue.process(handler)
            await entered.wait()

            assert not await worker.close(0.01)
            assert await worker.close()
            assert await queue.stats() == Counts(ready=1)

    run(main())


def test_who_cancels_run_cancels_the_handlers(where: str) -> None:
    async def main() -> None:
        async with AsyncQueue("emails", where) as queue:
            entered = asyncio.Event()

            async def handler(_: str) -> None:
                entered.set()
                await asyncio.Event().wait()

            await queue.add("x")
            worker = await queue.process(handler)
            await entered.wait()
            task = asyncio.ensure_future(worker.run())
            await asyncio.sleep(0)  # So that it has begun.

            task.cancel()
            await cancelled(task)

            assert worker.closed
            assert await queue.stats() == Counts(ready=1)

    before = signal.getsignal(signal.SIGTERM)
    run(main())
    assert signal.getsignal(signal.SIGTERM) is before


PROGRAM = """
import asyncio, sys
from litebroker.aio import AsyncQueue

ready = asyncio.Event()


async def handler(data):
    await ready.wait()
    print("runs", data, flush=True)
    try:
        await asyncio.sleep(data)
    finally:
        print("ends", data, flush=True)


async def main():
    async with AsyncQueue("emails", sys.argv[1]) as queue:
        worker = await queue.process(handler, concurrency=10)
        running = asyncio.ensure_future(worker.run())
        await asyncio.sleep(0)  # Signals are caught from now on.
        ready.set()
        print("ended", await running, flush=True)


if "--uvloop" in sys.argv:
    import uvloop
    uvloop.install()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("option", ["", "--uvloop"])
def test_a_signal_ends_a_program_in_order(tmp_path: Path, number: signal.Signals, option: str) -> None:
    if option:
        pytest.importorskip("uvloop")
    (tmp_path / "program.py").write_text(PROGRAM)
    with closing(Queue("emails", tmp_path / "jobs.db")) as queue:
        queue.add(0.3)
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "jobs.db"), option]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "runs 0.3\n"

        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT)

        assert output.splitlines() == ["ends 0.3", "ended True"]
        assert process.returncode == 0
        assert queue.stats() == Counts()


def test_a_second_signal_cancels_the_handlers(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with closing(Queue("emails", tmp_path / "jobs.db")) as queue:
        queue.add(LIMIT * 2)
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "jobs.db")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("runs")

        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT)

        assert output.splitlines() == [f"ends {LIMIT * 2}", "ended True"]
        assert queue.stats() == Counts(ready=1)


def test_a_queue_on_uvloop_waits_and_works(where: str) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with AsyncQueue("emails", where, results=60) as queue:
            claim = asyncio.ensure_future(queue.claim(wait=LIMIT))
            await waits(queue, 1)
            await queue.add(1)
            (job,) = await claim
            assert await queue.complete(job)
            await queue.process(double, concurrency=10)
            jobs = await queue.add_many(range(20))
            assert await asyncio.gather(*[queue.result(it, timeout=LIMIT) for it in jobs]) == [n * 2 for n in range(20)]

    async def double(data: int) -> int:
        await asyncio.sleep(0)
        return data * 2

    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), LIMIT))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


# Forks


def test_it_works_on_in_a_forked_child(where: str) -> None:
    queue: AsyncQueue[Any] = AsyncQueue("emails", where)

    async def use(data: str) -> None:
        await queue.add(data)
        claimed = await queue.claim(wait=LIMIT)
        await queue.release(claimed[0])
        assert await queue.claim(2, wait=0.01)

    run(use("parent"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(use("child"))
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    run(queue.close())


# What the clock decides


def test_a_lost_lease_is_told_by_false(tmp_path: Path) -> None:
    clock = ManualClock()
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)

    async def main() -> None:
        async with AsyncQueue("emails", storage) as queue:
            await queue.add("x")
            (job,) = await queue.claim()
            clock.advance(31)
            assert not await queue.extend(job)
            assert not await queue.complete(job)
            assert isinstance(job.record.lease, Lease)

    run(main())
    storage.close()

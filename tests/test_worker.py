"""Workers: threads that run handlers, settle jobs, renew leases, and end in order."""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT, Told, comes_true

from litebroker import (
    Backoff,
    Context,
    Counts,
    DatabaseBusyError,
    ErrorContext,
    JobRecord,
    LeaseLostError,
    NewJob,
    Observer,
    Queue,
    Retention,
    Worker,
)
from litebroker.observers import Outcome
from litebroker.sqlite import SQLiteStorage
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
    """A handler that tells when it runs, and goes on when it may."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.seen: list[Any] = []

    def __call__(self, data: Any) -> None:
        self.seen.append(data)
        self.entered.release()
        assert self.opened.wait(LIMIT)

    def is_entered(self) -> bool:
        return self.entered.acquire(timeout=LIMIT)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def in_haste(queue: Queue[Any], *, concurrency: int = 1) -> Callable[[Callable[[Any], object]], None]:
    """Start a worker that has seen short jobs only, and so claims ahead; then give it a handler."""
    handlers: list[Callable[[Any], object]] = [lambda _: None]
    queue.add_many([0] * 500)
    queue.process(lambda data: handlers[-1](data), concurrency=concurrency)  # noqa: PLW0108 (the last one then)
    assert comes_true(lambda: queue.stats() == Counts())
    return handlers.append


# Running


def test_a_job_whose_handler_returns_is_gone(queue: Queue[Any]) -> None:
    seen: list[Any] = []
    queue.add({"to": "a@example.com"})

    queue.process(seen.append)

    assert comes_true(lambda: queue.stats() == Counts())
    assert seen == [{"to": "a@example.com"}]


def test_an_idle_worker_runs_what_is_added_later(queue: Queue[Any]) -> None:
    ran = threading.Event()
    queue.process(lambda _: ran.set(), concurrency=4)
    assert not ran.wait(0.1)

    queue.add(1)

    assert ran.wait(LIMIT)


def test_jobs_run_in_the_order_of_their_priority(queue: Queue[Any]) -> None:
    seen: list[int] = []
    queue.add_many([NewJob(number, priority=number % 7) for number in range(100)])

    queue.process(seen.append)

    assert comes_true(lambda: len(seen) == 100)
    assert seen == sorted(range(100), key=lambda number: (-(number % 7), number))


def test_as_many_handlers_run_at_once_as_was_asked_for(queue: Queue[Any]) -> None:
    together = threading.Barrier(8)
    queue.add_many([0] * 16)

    queue.process(lambda _: together.wait(LIMIT), concurrency=8)

    assert comes_true(lambda: queue.stats() == Counts())
    assert not together.broken


def test_no_more_handlers_run_at_once(queue: Queue[Any], gate: Gate) -> None:
    queue.add_many([0] * 20)
    queue.process(gate, concurrency=3)

    entered = [gate.entered.acquire(timeout=LIMIT) for _ in range(3)]

    assert all(entered)
    assert not gate.entered.acquire(timeout=0.1)
    assert queue.stats() == Counts(ready=17, active=3)


def test_each_job_runs_once_though_many_threads_and_workers_take_them(queue: Queue[Any]) -> None:
    seen: list[int] = []
    queue.add_many(range(3000))

    for _ in range(3):
        queue.process(seen.append, concurrency=4)

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(seen) == list(range(3000))


def test_jobs_that_handlers_add_run_too(queue: Queue[Any]) -> None:
    seen: list[int] = []

    def countdown(number: int) -> None:
        seen.append(number)
        if number:
            queue.add(number - 1)

    queue.process(countdown, concurrency=2)
    queue.add(50)

    assert comes_true(lambda: len(seen) == 51)
    assert seen == list(range(50, -1, -1))


def test_a_worker_leaves_a_paused_queue_alone_until_it_is_resumed(queue: Queue[Any]) -> None:
    ran = threading.Event()
    queue.pause()
    queue.add(1)
    queue.process(lambda _: ran.set())
    assert not ran.wait(0.1)

    queue.resume()

    assert ran.wait(LIMIT)


def test_a_worker_takes_only_what_its_threads_can_run_soon(queue: Queue[Any], gate: Gate) -> None:
    queue.add_many([0] * 100)

    queue.process(gate, concurrency=2)

    assert gate.is_entered()
    assert queue.stats() == Counts(ready=98, active=2)


def test_a_finished_job_is_settled_though_the_next_one_takes_long(queue: Queue[Any], gate: Gate) -> None:
    handle_with = in_haste(queue)
    handle_with(lambda data: gate(data) if data == "long" else None)
    queue.add_many(["short"] * 5 + ["long"])
    assert gate.is_entered()

    assert comes_true(lambda: queue.stats() == Counts(active=1), limit=0.5)


def test_jobs_that_were_claimed_ahead_are_given_back_when_one_takes_long(queue: Queue[Any], gate: Gate) -> None:
    handle_with = in_haste(queue)
    handle_with(gate)
    queue.add_many([0] * 20)
    assert gate.is_entered()

    assert comes_true(lambda: queue.stats() == Counts(ready=19, active=1))
    assert {job.attempts for job in queue.list("pending")} == {0}


# Handlers


def with_default(data: Any, retries: int = 3, *, seen: list[Any]) -> None:
    seen.append((data, retries))


def with_context(data: Any, context: Context | None = None, *, seen: list[Any]) -> None:
    seen.append((data, type(context)))


class Callee:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, data: Any, it: Context) -> None:
        self.seen.append((data, type(it)))

    def method(self, data: Any) -> None:
        self.seen.append((data,))


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda seen: lambda data: seen.append((data,)), (1,)),
        (lambda seen: lambda data, it: seen.append((data, type(it))), (1, Context)),
        (lambda seen: lambda *data: seen.append(data), (1,)),
        (lambda seen: functools.partial(with_default, seen=seen), (1, 3)),
        (lambda seen: functools.partial(with_context, seen=seen), (1, Context)),
        (Callee, (1, Context)),
        (lambda seen: Callee(seen).method, (1,)),
    ],
    ids=["data", "data and context", "any arguments", "a default", "named context", "callable object", "method"],
)
def test_a_handler_gets_the_context_if_it_wants(queue: Queue[Any], make: Callable[..., Any], call: tuple[Any]) -> None:
    seen: list[Any] = []
    queue.add(1)

    queue.process(make(seen))

    assert comes_true(lambda: bool(seen))
    assert seen == [call]


async def asynchronous(_: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (lambda: None, "takes no argument"),
        (lambda _a, _b, _c: None, "more than the data and a context"),
        (with_default, "more than the data and a context"),
        ("print", "cannot be called"),
    ],
    ids=["no argument", "three arguments", "a required keyword", "no callable"],
)
def test_what_cannot_be_a_handler_is_refused(queue: Queue[Any], handler: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        queue.process(handler)


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5])
def test_a_bad_concurrency_is_refused(queue: Queue[Any], concurrency: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="concurrency"):
        queue.process(print, concurrency=concurrency)


def test_a_context_tells_about_the_job(queue: Queue[Any]) -> None:
    contexts: list[Context] = []
    job = queue.add(1, priority=5, group="g", headers={"trace": "1"}, task="send", ref="r", attempts=7)

    queue.process(lambda _, context: contexts.append(context))

    assert comes_true(lambda: bool(contexts))
    (it,) = contexts
    assert (it.job_id, it.queue, it.attempt, it.max_attempts, it.priority) == (job.id, "emails", 1, 7, 5)
    assert (it.group, it.headers, it.task, it.ref) == ("g", {"trace": "1"}, "send", "r")
    assert abs(it.created_at - job.created_at) < timedelta(seconds=5)
    assert not it.cancelled.is_set()


def test_a_coroutine_that_a_handler_returns_fails_the_job(queue: Queue[Any]) -> None:
    queue.add(1, attempts=1)

    queue.process(lambda data: asynchronous(data))  # noqa: PLW0108 (it does not look async)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert dead.error.type == "TypeError"


# Failures


def test_a_job_whose_handler_raises_is_tried_again(queue: Queue[Any], told: Told) -> None:
    attempts: list[int] = []

    def handler(_: Any, context: Context) -> None:
        attempts.append(context.attempt)
        if context.attempt < 3:
            raise ValueError("not yet")

    queue.add(1)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert attempts == [1, 2, 3]
    assert told.kinds == ["handler", "handler"]


def test_a_job_that_keeps_failing_is_a_dead_letter_with_its_error(queue: Queue[Any], told: Told) -> None:
    job = queue.add(1, attempts=2)

    def handler(_: Any) -> None:
        raise ValueError("no such mailbox")

    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert (dead.error.reason, dead.error.type, dead.error.message) == ("handler", "ValueError", "no such mailbox")
    assert [attempt.outcome for attempt in dead.history] == ["retried", "failed"]
    about: dict[str, Any] = {"kind": "handler", "queue": "emails", "job_id": job.id, "max_attempts": 2}
    assert [(type(error), context) for error, context in told.errors] == [
        (ValueError, ErrorContext(**about, attempt=1, retry_in=0.0)),
        (ValueError, ErrorContext(**about, attempt=2, dead=True)),
    ]


def test_a_stack_begins_at_the_handler(queue: Queue[Any]) -> None:
    def handler(_: Any) -> None:
        raise ValueError("no such mailbox")

    queue.add(1, attempts=1)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    error = queue.dead_letters()[0].error
    assert error is not None
    first, second, *_ = error.stack.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "test_worker.py" in second


def test_a_failed_job_waits_for_its_backoff(storage: SQLiteStorage, told: Told) -> None:
    with Queue("emails", storage, backoff=Backoff.fixed(1000), on_error=told) as queue:
        queue.add("x")
        queue.process(int)

        assert comes_true(lambda: queue.stats() == Counts(delayed=1))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError])
def test_whatever_a_handler_raises_the_worker_goes_on(queue: Queue[Any], error: type[BaseException]) -> None:
    def handler(data: str) -> None:
        if data == "bad":
            raise error

    queue.add_many([NewJob("bad", attempts=1), "good"])
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))


def test_a_payload_that_cannot_be_read_fails_and_the_next_job_runs(
    queue: Queue[Any], storage: SQLiteStorage, told: Told
) -> None:
    class Foreign:
        name = "foreign"

        def dumps(self, _: Any, /) -> bytes:
            return b"\x80"

        def loads(self, data: bytes, /) -> Any:
            return data

    seen: list[Any] = []
    Queue("emails", storage, serializer=Foreign()).add(1, attempts=1)
    queue.add("good")

    queue.process(seen.append)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert dead.error.reason == "parse"
    assert (seen, told.kinds) == (["good"], ["parse"])


@pytest.mark.parametrize("second", [KeyError("on_error"), SystemExit(1)])
def test_an_error_in_on_error_does_no_harm(
    storage: SQLiteStorage, caplog: pytest.LogCaptureFixture, second: BaseException
) -> None:
    def raising(error: BaseException, context: ErrorContext) -> None:
        raise second

    with Queue("emails", storage, on_error=raising) as queue:
        queue.add_many([NewJob("x", attempts=1), NewJob("y", attempts=1)])
        queue.process(int)

        assert comes_true(lambda: queue.stats() == Counts(failed=2))
    assert "on_error itself raised" in caplog.text


def test_an_error_that_cannot_be_looked_at_ends_no_thread(storage: SQLiteStorage) -> None:
    with Queue("emails", storage) as queue:
        queue.add_many([NewJob("x", attempts=1), NewJob("y", attempts=1)])
        queue.process(raise_unseen)

        assert comes_true(lambda: queue.stats() == Counts(failed=2))


class UnseenError(Exception):
    """Nothing can be asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise SystemExit(1)


def raise_unseen(_: Any) -> None:
    raise UnseenError


def test_an_observer_that_exits_does_no_harm(storage: SQLiteStorage) -> None:
    class Exiting(Observer):
        def claimed(self, jobs: Sequence[JobRecord]) -> None:
            raise SystemExit(1)

        def running(self, jobs: Sequence[JobRecord]) -> AbstractContextManager[object]:
            raise SystemExit(2)

        def settled(self, job: JobRecord, outcome: Outcome) -> None:
            raise SystemExit(3)

    done = threading.Event()
    with Queue("emails", storage) as queue:
        queue.observe(Exiting())
        queue.add_many([NewJob(1), NewJob(2)])
        queue.process(lambda _: done.set())

        assert comes_true(lambda: queue.stats() == Counts())
    assert done.is_set()


def test_errors_are_logged_with_the_job_and_without_the_payload(
    storage: SQLiteStorage, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(_: Any) -> None:
        raise ValueError("no such mailbox")

    with caplog.at_level(logging.INFO, "litebroker"), Queue("emails", storage) as queue:
        job = queue.add("secret-token", attempts=1)
        queue.process(handler)
        assert comes_true(lambda: queue.stats() == Counts(failed=1))

    (record,) = caplog.records
    assert f"job {job.id} of queue 'emails', attempt 1, handler: ValueError: no such mailbox" in record.getMessage()
    assert record.exc_info is not None
    assert "secret-token" not in caplog.text


# Leases


def test_the_lease_of_a_running_job_is_renewed(storage: SQLiteStorage, gate: Gate) -> None:
    with Queue("emails", storage, lease=0.6) as queue:
        job = queue.add(1)
        queue.process(gate)
        assert gate.is_entered()
        ends = set()

        def renewed() -> bool:
            found = queue.get(job.id)
            assert found is not None
            ends.add(found.lease_until)
            return len(ends) > 6  # three times the lease's length

        assert comes_true(renewed)
        gate.opened.set()
    assert (gate.seen, queue.stats()) == ([1], Counts())


def test_a_lost_lease_cancels_the_job(tmp_path: Path, told: Told) -> None:
    clock = ManualClock()
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    running = threading.Event()
    cancelled: list[bool] = []

    def handler(_: Any, context: Context) -> None:
        running.set()
        cancelled.append(context.cancelled.wait(LIMIT))

    queue: Queue[Any] = Queue("emails", storage, lease=0.3, on_error=told)
    job = queue.add(1, attempts=1)
    queue.process(handler)
    assert running.wait(LIMIT)

    clock.advance(0.4)

    assert comes_true(lambda: bool(cancelled))
    assert cancelled == [True]
    queue.close()
    # That it is a dead letter now is told apart, by whoever finds it so.
    ((error, context),) = (it for it in told.errors if it[1].kind != "lapsed")
    assert isinstance(error, LeaseLostError)
    assert (context.kind, context.job_id) == ("heartbeat", job.id)
    storage.close()


def test_a_job_that_another_took_over_stays_with_the_other(tmp_path: Path, gate: Gate, told: Told) -> None:
    clock = ManualClock()
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    queue: Queue[Any] = Queue("emails", storage, lease=600, on_error=told)
    job = queue.add(1)
    worker = queue.process(gate)
    assert gate.is_entered()
    clock.advance(601)
    (taken,) = queue.claim()

    gate.opened.set()
    worker.close()

    ((error, context),) = told.errors
    assert isinstance(error, LeaseLostError)
    assert (context.kind, context.job_id, context.attempt) == ("complete", job.id, 1)
    assert queue.complete(taken)
    storage.close()


# Settling in the handler


def test_a_handler_can_add_what_follows(queue: Queue[Any], storage: SQLiteStorage) -> None:
    letters: Queue[Any] = Queue("letters", storage)
    answers: list[bool] = []

    def handler(data: int, context: Context) -> None:
        if data == 1:
            answers.append(context.complete(then=[2, NewJob(3, queue="letters")]))

    queue.add(1)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert answers == [True]
    assert [job.data for job in letters.claim(5)] == [3]


def test_a_handler_can_fail_its_job_in_its_own_way(queue: Queue[Any], told: Told) -> None:
    def handler(data: int, context: Context) -> None:
        if data == 1:
            context.fail("later", retry_in=1000)
        else:
            context.fail("never", retry=False)

    queue.add_many([1, 2])
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(delayed=1, failed=1))
    (later,), (never,) = queue.list("pending"), queue.dead_letters()
    assert later.error is not None
    assert never.error is not None
    assert [(it.reason, it.message) for it in (later.error, never.error)] == [
        ("handler", "later"),
        ("rejected", "never"),
    ]
    assert told.errors == []


def test_a_handler_can_give_its_job_back(queue: Queue[Any]) -> None:
    job = queue.add(1)

    queue.process(lambda _, context: context.release(delay=1000))

    assert comes_true(lambda: queue.stats() == Counts(delayed=1))
    released = queue.get(job.id)
    assert released is not None
    assert released.attempts == 0


def test_an_error_after_the_job_was_completed_changes_nothing(queue: Queue[Any], told: Told) -> None:
    def handler(_: Any, context: Context) -> None:
        context.complete()
        raise ValueError("too late")

    queue.add(1)
    queue.process(handler)

    assert comes_true(lambda: told.kinds == ["handler"])
    assert queue.stats() == Counts()


@pytest.fixture
def own(storage: SQLiteStorage) -> Callable[[], sqlite3.Connection]:
    """Makes the handler's own connections to the same file, which has a table of its own."""
    storage.open()
    with closing(sqlite3.connect(str(storage.path))) as connection:
        connection.execute("create table sent (address text)")

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(str(storage.path), isolation_level=None)

    return connect


def sent(connect: Callable[[], sqlite3.Connection]) -> int:
    with closing(connect()) as connection:
        return int(connection.execute("select count(*) from sent").fetchone()[0])


def test_a_handler_can_complete_its_job_in_its_own_transaction(
    queue: Queue[Any], own: Callable[[], sqlite3.Connection], told: Told
) -> None:
    def handler(data: str, context: Context) -> None:
        with closing(own()) as connection:
            connection.execute("begin immediate")
            connection.execute("insert into sent values (?)", [data])
            context.complete(connection=connection)
            connection.execute("commit")

    queue.add("a@example.com")
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert (sent(own), told.errors) == (1, [])


def test_a_handler_that_rolls_back_has_not_completed_its_job(
    queue: Queue[Any], own: Callable[[], sqlite3.Connection], told: Told
) -> None:
    def handler(data: str, context: Context) -> None:
        with closing(own()) as connection:
            connection.execute("begin immediate")
            connection.execute("insert into sent values (?)", [data])
            context.complete(connection=connection)
            if context.attempt == 1:
                connection.execute("rollback")
                raise ValueError("no")
            connection.execute("commit")

    queue.add("a@example.com")
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    assert (sent(own), told.kinds) == (1, ["handler"])


def test_a_handler_that_forgets_to_commit_has_not_completed_its_job(
    queue: Queue[Any], own: Callable[[], sqlite3.Connection]
) -> None:
    def handler(_: Any, context: Context) -> None:
        with closing(own()) as connection:
            connection.execute("begin immediate")
            context.complete(connection=connection)

    queue.add("a@example.com", attempts=1)
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    error = queue.dead_letters()[0].error
    assert error is not None
    assert "not committed" in error.message


# Batches


def test_a_batch_has_what_is_there_up_to_its_size(queue: Queue[Any]) -> None:
    batches: list[list[int]] = []
    queue.add_many(range(25))

    queue.process_many(batches.append, batch=10)

    assert comes_true(lambda: queue.stats() == Counts())
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert sorted(number for batch in batches for number in batch) == list(range(25))


def test_the_jobs_of_a_batch_fail_together(queue: Queue[Any], told: Told) -> None:
    def handler(_: list[int]) -> None:
        raise ValueError("all of you")

    queue.add_many([NewJob(number, attempts=1) for number in range(3)])
    queue.process_many(handler, batch=10)

    assert comes_true(lambda: queue.stats() == Counts(failed=3))
    assert told.kinds == ["handler"] * 3


def test_jobs_of_a_batch_can_be_settled_one_by_one(queue: Queue[Any]) -> None:
    def handler(numbers: list[int], contexts: list[Context]) -> None:
        for number, context in zip(numbers, contexts, strict=True):
            if number == 1:
                context.fail("not you", retry=False)

    queue.add_many([0, 1, 2])
    queue.process_many(handler, batch=10)

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    assert [job.data for job in queue.dead_letters()] == [1]


@pytest.mark.parametrize("batch", [0, True, 2.5])
def test_a_bad_batch_size_is_refused(queue: Queue[Any], batch: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="batch"):
        queue.process_many(print, batch=batch)


# The end


def test_close_waits_for_what_runs_and_gives_back_the_rest(queue: Queue[Any], gate: Gate) -> None:
    handle_with = in_haste(queue, concurrency=2)
    handle_with(gate)
    queue.add_many(range(30))
    assert gate.is_entered()
    assert gate.is_entered()
    threading.Timer(0.1, gate.opened.set).start()

    queue.close()

    assert len(gate.seen) == 2
    assert queue.stats() == Counts(ready=28)
    assert {job.attempts for job in queue.list("pending")} == {0}


def test_a_closed_worker_claims_no_more(queue: Queue[Any]) -> None:
    seen: list[Any] = []
    worker = queue.process(seen.append)

    answers = worker.close(), worker.close()

    queue.add(1)
    assert (answers, worker.closed) == ((True, True), True)
    assert queue.stats() == Counts(ready=1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("litebroker-")]


def test_after_the_timeout_of_close_handlers_are_cancelled(queue: Queue[Any]) -> None:
    running = threading.Event()
    cancelled: list[bool] = []

    def handler(_: Any, context: Context) -> None:
        running.set()
        cancelled.append(context.cancelled.wait(LIMIT))

    queue.add(1)
    worker = queue.process(handler)
    assert running.wait(LIMIT)

    first = worker.close(timeout=0.05)

    assert not first
    assert worker.close(LIMIT)
    assert (cancelled, queue.stats()) == ([True], Counts())


def test_a_close_without_need_for_its_timeout_cancels_nothing(queue: Queue[Any]) -> None:
    running, opened = threading.Event(), threading.Event()
    cancelled: list[bool] = []

    def handler(_: Any, context: Context) -> None:
        running.set()
        opened.wait(LIMIT)
        cancelled.append(context.cancelled.is_set())

    queue.add(1)
    worker = queue.process(handler)
    assert running.wait(LIMIT)
    threading.Timer(0.05, opened.set).start()

    assert worker.close(timeout=LIMIT)
    assert cancelled == [False]


def test_a_handler_can_close_its_own_worker(queue: Queue[Any]) -> None:
    answers: list[bool] = []
    queue.add_many([1, 2, 3])

    workers: list[Worker] = []

    workers.append(queue.process(lambda _: answers.append(comes_true(lambda: bool(workers)) and workers[0].close())))

    assert comes_true(lambda: workers[0].closed)
    assert answers == [False]
    assert queue.stats() == Counts(ready=2)


def test_a_handler_that_closes_its_queue_still_settles_its_job(tmp_path: Path) -> None:
    queue: Queue[Any] = Queue("emails", tmp_path / "jobs.db")
    queue.add(1)
    worker = queue.process(lambda _: queue.close())

    assert comes_true(lambda: worker.closed)

    assert queue.stats() == Counts()
    queue.close()


def test_a_with_block_closes_the_worker(queue: Queue[Any]) -> None:
    with queue.process(print) as worker:
        assert not worker.closed

    assert worker.closed


def test_run_outside_of_the_main_thread_ends_with_the_worker(queue: Queue[Any]) -> None:
    answers: list[bool] = []
    worker = queue.process(print)
    thread = threading.Thread(target=lambda: answers.append(worker.run()))
    thread.start()

    worker.close()
    thread.join(LIMIT)

    assert answers == [True]
    assert worker.run()


def test_a_worker_whose_storage_is_closed_ends(tmp_path: Path, told: Told) -> None:
    storage = SQLiteStorage(tmp_path / "jobs.db")
    worker = Queue("emails", storage, on_error=told).process(print)

    storage.close()

    assert comes_true(lambda: worker.closed)
    assert worker.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_worker_does_not_go_along_with_a_fork(queue: Queue[Any]) -> None:
    worker = queue.process(print)

    child = os.fork()
    if not child:
        try:
            worker.close()
        except RuntimeError as error:
            os._exit(7 if "before the fork" in str(error) else 1)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    queue.add(1)
    assert comes_true(lambda: queue.stats() == Counts())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_that_a_handler_forks_leaves_the_jobs_alone(queue: Queue[Any]) -> None:
    pids: list[int] = []
    children: list[int] = []

    def handler(_: Any) -> None:
        pids.append(os.getpid())
        if child := os.fork():
            children.append(child)

    queue.add_many([1, 2])
    queue.process(handler)

    assert comes_true(lambda: queue.stats() == Counts())
    for child in children:
        os.waitpid(child, 0)
    assert pids == [os.getpid()] * 2


# Bad days


@pytest.fixture
def impatient(tmp_path: Path, told: Told) -> Iterator[Queue[Any]]:
    """A queue on a storage that waits for other writers for a moment only."""
    storage = SQLiteStorage(tmp_path / "busy.db", busy_timeout=0.05)
    queue: Queue[Any] = Queue("emails", storage, on_error=told)
    yield queue
    queue.close()
    storage.close()


def test_a_job_that_cannot_be_settled_now_is_settled_later(impatient: Queue[Any], gate: Gate, told: Told) -> None:
    impatient.add(1)
    impatient.process(gate)
    assert gate.is_entered()
    with closing(sqlite3.connect(impatient.storage.location, isolation_level=None)) as other:
        other.execute("begin immediate")

        gate.opened.set()

        assert comes_true(lambda: "complete" in told.kinds)
        other.execute("rollback")
    assert comes_true(lambda: impatient.stats() == Counts())
    assert gate.seen == [1]
    assert {type(error) for error, _ in told.errors} == {DatabaseBusyError}


def test_an_error_that_repeats_is_told_once(impatient: Queue[Any], told: Told) -> None:
    impatient.add(1)
    with closing(sqlite3.connect(impatient.storage.location, isolation_level=None)) as other:
        other.execute("begin immediate")
        seen: list[int] = []

        worker = impatient.process(seen.append)

        assert comes_true(lambda: worker._troubles > 3)  # noqa: SLF001 (nothing else shows that it tries again)
        other.execute("rollback")
    assert comes_true(lambda: impatient.stats() == Counts())
    assert (seen, told.kinds) == ([1], ["claim"])


def test_close_does_not_wait_for_ever_for_a_file_that_stays_busy(tmp_path: Path, gate: Gate, told: Told) -> None:
    storage = SQLiteStorage(tmp_path / "busy.db", busy_timeout=0.05)
    queue: Queue[Any] = Queue("emails", storage, lease=1, on_error=told)
    queue.add(1)
    worker = queue.process(gate)
    assert gate.is_entered()
    with closing(sqlite3.connect(storage.location, isolation_level=None)) as other:
        other.execute("begin immediate")
        gate.opened.set()

        assert worker.close(LIMIT)

        other.execute("rollback")
    assert "complete" in told.kinds
    assert gate.seen == [1]
    storage.close()


# Upkeep


def test_upkeep_fires_schedules(tmp_path: Path) -> None:
    clock = ManualClock()
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    seen: list[Any] = []
    with Queue("emails", storage) as queue:
        queue.schedule("tick", id="hourly", every=3600)
        queue.process(seen.append)

        clock.advance(3600)

        assert comes_true(lambda: seen == ["tick"])
        clock.advance(3600)
        assert comes_true(lambda: seen == ["tick", "tick"])
    storage.close()


def test_upkeep_removes_what_has_been_kept_long_enough(storage: SQLiteStorage) -> None:
    with Queue("emails", storage, retention=Retention(completed=10, failed=5), on_error=lambda *_: None) as queue:
        queue.add_many([NewJob("x", attempts=1)] * 30 + [NewJob("1", attempts=1)] * 30)
        queue.process(int)

        assert comes_true(lambda: queue.stats() == Counts(completed=10, failed=5))

"""Observers hear of every step of a job in this process, and can do it no harm."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT, comes_true

from litebroker import (
    RAW,
    Added,
    Backoff,
    Context,
    Counts,
    ErrorContext,
    Group,
    GroupConflictError,
    JobRecord,
    JobSpec,
    NewJob,
    Observer,
    Queue,
    SQLiteStorage,
    current_job,
)
from litebroker.testing import ManualClock


class Diary(Observer):
    """Writes down what it is told, as ``step value``."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def adding(self, specs: Sequence[JobSpec]) -> Iterator[Sequence[JobSpec]]:
        self.lines.append(f"adding {len(specs)}")
        try:
            yield [spec._replace(headers={**(spec.headers or {}), "seen": "yes"}) for spec in specs]
        except GroupConflictError as error:
            self.lines.append(f"not added: {error}")
            raise

    def added(self, specs: Sequence[JobSpec], added: Sequence[Added]) -> None:
        del specs
        self.lines.append(f"added {sum(it.created for it in added)}")

    def claimed(self, jobs: Sequence[JobRecord]) -> None:
        self.lines.append(f"claimed {len(jobs)}")

    @contextmanager
    def running(self, jobs: Sequence[JobRecord]) -> Iterator[None]:
        self.lines.append(f"running {len(jobs)}")
        try:
            yield
        except ValueError as error:
            self.lines.append(f"raised {error}")
            raise

    def settled(self, job: JobRecord, outcome: str) -> None:
        self.lines.append(f"{outcome} {job.attempts}")


class Clumsy(Observer):
    def adding(self, specs: Sequence[JobSpec]) -> Any:
        raise RuntimeError("clumsy")

    def added(self, specs: Sequence[JobSpec], added: Sequence[Added]) -> None:
        raise RuntimeError("clumsy")

    def claimed(self, jobs: Sequence[JobRecord]) -> None:
        raise RuntimeError("clumsy")

    @contextmanager
    def running(self, jobs: Sequence[JobRecord]) -> Iterator[None]:
        yield
        raise RuntimeError("clumsy")

    def settled(self, job: JobRecord, outcome: str) -> None:
        raise RuntimeError("clumsy")


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    with Queue("emails", tmp_path / "jobs.db", durability="relaxed", backoff=Backoff.fixed(0)) as queue:
        yield queue


@pytest.fixture
def diary(queue: Queue[Any]) -> Diary:
    diary = Diary()
    queue.observe(diary)
    return diary


def work(queue: Queue[Any], handler: Callable[..., object]) -> None:
    """Until nothing is pending or active any more."""
    worker = queue.process(handler)
    # In one look: between two, the only job can end, and what follows it come.
    assert comes_true(lambda: not (counts := queue.stats()).pending and not counts.active)
    worker.close()


def test_an_observer_hears_of_a_job_from_its_beginning_to_its_end(queue: Queue[Any], diary: Diary) -> None:
    queue.add(1)

    work(queue, lambda _: None)

    assert diary.lines == ["adding 1", "added 1", "claimed 1", "running 1", "completed 1"]


def test_an_observer_hears_what_each_failed_attempt_has_come_to(queue: Queue[Any], diary: Diary) -> None:
    queue.add(1, attempts=2)

    def fail(_: Any) -> None:
        raise ValueError("no such mailbox")

    work(queue, fail)

    told = [line for line in diary.lines if not line.startswith(("add", "claimed"))]
    assert told == [
        "running 1",
        "raised no such mailbox",
        "retried 1",
        "running 1",
        "raised no such mailbox",
        "failed 2",
    ]


def test_an_observer_hears_of_what_a_handler_settles_itself_once(queue: Queue[Any], diary: Diary) -> None:
    queue.add_many([1, 2, 3])

    def handler(data: int, context: Context) -> None:
        if data == 1:
            context.complete()
        elif data == 2:
            context.fail("no", retry=False)
        elif context.attempt == 1 and not released:
            released.append(data)
            context.release()

    released: list[int] = []
    work(queue, handler)

    ends = [line for line in diary.lines if line.partition(" ")[0] in {"completed", "failed", "released", "retried"}]
    assert sorted(ends) == ["completed 1", "completed 1", "failed 1", "released 1"]


def test_an_observer_can_add_headers_which_the_job_then_has(queue: Queue[Any], diary: Diary) -> None:
    added = queue.add(1, headers={"mine": "too"})
    (many, other) = queue.add_many([2, NewJob(3, queue="other")])

    stored = queue.get(added.id)
    assert stored is not None
    assert stored.headers == added.headers == {"mine": "too", "seen": "yes"}
    assert many.headers == other.headers == {"seen": "yes"}
    assert diary.lines == ["adding 1", "added 1", "adding 2", "added 2"]


def test_an_observer_hears_of_what_follows_a_job(queue: Queue[Any], diary: Diary) -> None:
    queue.add(2)

    work(queue, lambda data, context: context.complete(then=[data - 1] if data else []))

    assert diary.lines.count("adding 1") == 3
    assert diary.lines.count("completed 1") == 3


def test_an_error_while_adding_passes_through_the_observers(queue: Queue[Any], diary: Diary) -> None:
    queue.add(1, group=Group("g", concurrency=1))

    with pytest.raises(GroupConflictError) as caught:
        queue.add(1, group=Group("g", concurrency=2))

    assert diary.lines == ["adding 1", "added 1", "adding 1", f"not added: {caught.value}"]


def test_what_an_observer_raises_is_logged_and_changes_nothing(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue.observe(Clumsy())
    queue.observe(diary := Diary())
    seen: list[int] = []

    with caplog.at_level(logging.ERROR, "litebroker"):
        queue.add(1)
        work(queue, seen.append)

    assert seen == [1]
    assert queue.stats() == Counts()
    assert diary.lines == ["adding 1", "added 1", "claimed 1", "running 1", "completed 1"]
    assert [str(it.exc_info[1]) for it in caplog.records if it.exc_info] == ["clumsy"] * 5


def test_an_observer_hears_of_a_loop_of_ones_own(queue: Queue[Any], diary: Diary) -> None:
    queue.add_many([1, 2, 3, 4])
    diary.lines.clear()

    done, bad, back, gone = queue.claim(4)
    queue.complete(done)
    queue.fail(bad, "no")
    queue.release(back)
    queue.fail(gone, "no", retry=False)
    queue.complete(gone)
    queue.claim(lease=60)

    assert diary.lines == ["claimed 4", "completed 1", "retried 1", "released 1", "failed 1", "lost 1", "claimed 1"]


def test_an_observer_hears_of_a_payload_that_cannot_be_read(queue: Queue[Any], diary: Diary) -> None:
    Queue("emails", queue.storage, serializer=RAW).add(b"{", attempts=1)
    queue.storage.add([JobSpec("emails", b"{", max_attempts=1)])

    jobs = queue.claim(2)

    assert [job.data for job in jobs] == [b"{"]
    assert diary.lines == ["claimed 2", "failed 1"]


def test_jobs_that_an_observer_invents_or_loses_are_not_taken(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Greedy(Observer):
        def adding(self, specs: Sequence[JobSpec]) -> Any:
            return nullcontext([])

    queue.observe(Greedy())

    job = queue.add(1)

    assert queue.get(job.id)
    assert "it gave 0 jobs for 1" in caplog.text


def test_a_job_whose_last_worker_vanished_is_told_by_whoever_finds_it(tmp_path: Path) -> None:
    clock = ManualClock()
    told: list[tuple[str, ErrorContext]] = []
    found = threading.Event()

    def on_error(error: BaseException, context: ErrorContext) -> None:
        told.append((type(error).__name__, context))
        found.set()

    storage = SQLiteStorage(tmp_path / "jobs.db", clock=clock)
    queue: Queue[Any] = Queue("emails", storage, on_error=on_error)
    diary = Diary()
    queue.observe(diary)
    job = queue.add(1, attempts=1, task="greet")
    Queue("other", storage).add(1, attempts=1)
    queue.claim(lease=1)
    clock.advance(2)

    queue.process(lambda _: None)
    queue.process(lambda _: None)
    assert found.wait(LIMIT)
    queue.close()
    storage.close()

    context = ErrorContext(
        kind="lapsed", queue="emails", job_id=job.id, attempt=1, max_attempts=1, task="greet", dead=True
    )
    assert told == [("LeaseLostError", context)]
    assert diary.lines == ["adding 1", "added 1", "claimed 1", "failed 1"]


def test_a_stack_begins_at_the_handler_though_it_is_observed(queue: Queue[Any], diary: Diary) -> None:
    queue.add(1, attempts=1)

    def handler(_: Any) -> None:
        raise ValueError("no such mailbox")

    work(queue, handler)

    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert "in handler" in dead.error.stack.splitlines()[1]


def test_what_is_no_observer_is_refused(queue: Queue[Any]) -> None:
    with pytest.raises(TypeError, match="42 is no Observer"):
        queue.observe(42)  # type: ignore[arg-type]


def test_a_job_completed_in_a_transaction_of_its_handler_is_told_once_it_is_committed(
    queue: Queue[Any], diary: Diary, tmp_path: Path
) -> None:
    queue.add(1)

    def handler(_: int, context: Context) -> None:
        db = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        db.execute("begin immediate")
        context.complete(connection=db)
        db.execute("commit" if context.attempt > 1 else "rollback")
        db.close()

    work(queue, handler)

    assert [line for line in diary.lines if line.split()[0] in {"retried", "completed"}] == ["retried 1", "completed 2"]


def test_a_handler_can_ask_for_its_job(queue: Queue[Any]) -> None:
    job = queue.add(1, task="greet")
    seen: list[JobRecord | None] = []

    work(queue, lambda _: seen.append(current_job()))

    assert [(it.id, it.task, it.attempts) for it in seen if it] == [(job.id, "greet", 1)]
    assert current_job() is None


def test_after_a_handler_its_thread_has_no_job(queue: Queue[Any]) -> None:
    jobs: list[JobRecord | None] = []
    storage = queue.storage
    assert isinstance(storage, SQLiteStorage)
    told = threading.Event()

    class After(Observer):
        def settled(self, job: JobRecord, outcome: str) -> None:
            jobs.append(current_job())
            told.set()

    queue.observe(After())
    queue.add(1)
    work(queue, lambda _: None)

    assert told.wait(LIMIT)
    assert jobs == [None]


def test_a_handler_of_several_jobs_has_no_single_one(queue: Queue[Any]) -> None:
    seen: list[JobRecord | None] = []
    queue.add_many([1, 2])

    worker = queue.process_many(lambda _: seen.append(current_job()), batch=2)
    assert comes_true(lambda: queue.stats() == Counts())
    worker.close()

    assert seen == [None]

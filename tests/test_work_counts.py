"""What operations cost, in units that are the same on every machine: transactions, statements, steps, bytes.

Times are measured by `tests/benchmarks`; these hold what makes them short.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from litebroker import JobError, JobRecord, JobSpec, NewJob, Queue, Retention, SQLiteStorage, Worker
from litebroker.sqlite.schema import PAGE_BYTES
from litebroker.testing import ManualClock

Operation = Callable[[SQLiteStorage], object]
# A page in the WAL, with its header.
FRAME_BYTES = PAGE_BYTES + 24

SPEC = JobSpec(queue="q", payload=b"x" * 100)
DELAYED = JobSpec(queue="q", payload=b"x" * 100, delay_ms=86_400_000, priority=5)
LEASE_MS = 30_000


def claim(storage: SQLiteStorage, limit: int = 1) -> list[JobRecord]:
    claimed = storage.claim(["q"], limit=limit, lease_ms=LEASE_MS)
    assert len(claimed) == limit
    return claimed


# What is counted of each is the last step; the first brings about what it needs.
OPERATIONS: dict[str, tuple[Callable[[SQLiteStorage], Any], Callable[[SQLiteStorage, Any], object]]] = {
    "add": (lambda _: None, lambda storage, _: storage.add([SPEC])),
    "claim": (lambda _: None, lambda storage, _: claim(storage)),
    "claim 32": (lambda _: None, lambda storage, _: claim(storage, 32)),
    "extend": (claim, lambda storage, jobs: storage.extend([jobs[0].lease], LEASE_MS)),
    "complete": (claim, lambda storage, jobs: storage.complete([jobs[0].lease])),
    "complete 32": (
        lambda storage: claim(storage, 32),
        lambda storage, jobs: storage.complete([job.lease for job in jobs]),
    ),
    "release": (claim, lambda storage, jobs: storage.release([jobs[0].lease])),
    "retry later": (
        claim,
        lambda storage, jobs: storage.fail(jobs[0].lease, JobError("handler"), retry_in_ms=60_000),
    ),
    "bury": (claim, lambda storage, jobs: storage.fail(jobs[0].lease, JobError("handler"), retry_in_ms=None)),
}


class Probe:
    """Counts what the connections do that were opened through the standard library's driver."""

    def __init__(self) -> None:
        self.connections: list[sqlite3.Connection] = []
        self.statements: list[str] = []
        self.steps = 0

    def _statement(self, text: str) -> None:
        # The look for dead processes comes twice a second, whatever is done.
        if not text.startswith("--") and not (text.startswith("select") and "litebroker_process" in text):
            self.statements.append(text)

    def _step(self) -> int:
        self.steps += 1
        return 0

    @contextmanager
    def counting(self, *, steps: bool = False) -> Iterator[None]:
        self.statements.clear()
        self.steps = 0
        self._watch(self._statement, self._step if steps else None)
        yield
        self._watch(None, None)

    def _watch(self, trace: Callable[[str], None] | None, step: Callable[[], int] | None) -> None:
        for connection in self.connections:
            with contextlib.suppress(sqlite3.ProgrammingError):  # It is closed.
                connection.set_trace_callback(trace)
                connection.set_progress_handler(step, 1)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    probe = Probe()
    connect = sqlite3.connect

    def spied(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        probe.connections.append(connection)
        return connection

    monkeypatch.setattr(sqlite3, "connect", spied)
    return probe


@contextmanager
def a_queue_with(path: Path, pending: int, delayed: int = 0, **options: Any) -> Iterator[SQLiteStorage]:
    """A storage, warm, with so many jobs, whose clock stands still."""
    filling = SQLiteStorage(path, durability="relaxed")
    for spec, count in ((SPEC, pending), (DELAYED, delayed)):
        for done in range(0, count, 10_000):
            filling.add([spec] * min(10_000, count - done))
    filling.close()
    storage = SQLiteStorage(path, clock=ManualClock(), durability="relaxed", **options)
    for prepare, operation in OPERATIONS.values():
        operation(storage, prepare(storage))
    yield storage
    storage.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_transaction(tmp_path: Path, name: str) -> None:
    prepare, operation = OPERATIONS[name]
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        prepared = prepare(storage)
        before = storage.transactions

        operation(storage, prepared)

        assert storage.transactions == before + 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_statement(tmp_path: Path, probe: Probe, name: str) -> None:
    """Each costs a hand-over of the GIL: with a thread that computes, several take many times as long as one."""
    prepare, operation = OPERATIONS[name]
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        prepared = prepare(storage)

        with probe.counting():
            operation(storage, prepared)

        assert len(probe.statements) == 1, probe.statements


def test_a_claim_looks_for_what_is_due_once_a_millisecond(tmp_path: Path, probe: Probe) -> None:
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        clock = storage.clock
        assert isinstance(clock, ManualClock)
        clock.advance(0.001)

        with probe.counting():
            claim(storage)
            first = len(probe.statements)
            claim(storage)

        assert (first, len(probe.statements)) == (2, 3)


def test_a_batch_is_one_transaction(tmp_path: Path, probe: Probe) -> None:
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        before = storage.transactions

        with probe.counting():
            storage.add([SPEC] * 100)

        assert storage.transactions == before + 1
        assert len(probe.statements) == 12  # begin, the inserts of ten jobs each, commit


def test_a_claim_from_an_empty_queue_writes_nothing(tmp_path: Path) -> None:
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        while storage.claim(["q"], limit=100, lease_ms=LEASE_MS):
            pass
        before = storage.transactions

        claimed = storage.claim(["q"], limit=1, lease_ms=LEASE_MS)

        assert claimed == []
        assert storage.transactions == before


def test_the_queue_adds_nothing_to_what_the_storage_does(tmp_path: Path, probe: Probe) -> None:
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        queue: Queue[str] = Queue("q", storage)
        queue.purge()
        queue.add("first")
        queue.complete(queue.claim()[0])  # It has looked for schedules, and does so twice a second.

        with probe.counting():
            queue.add("second")
            (job,) = queue.claim()
            queue.complete(job)

        assert len(probe.statements) == 3, probe.statements


def test_a_worker_settles_and_claims_many_short_jobs_in_one_transaction(tmp_path: Path) -> None:
    ended = threading.Event()
    done = 0

    def handler(_data: object) -> None:
        nonlocal done
        done += 1
        if done == 2000:
            ended.set()

    with Queue("q", tmp_path / "jobs.db", durability="relaxed") as queue:
        storage = queue.storage
        assert isinstance(storage, SQLiteStorage)
        storage.add([SPEC._replace(payload=b"1")] * 2000)
        before = storage.transactions

        worker = queue.process(handler)
        assert ended.wait(30)
        worker.close()

        assert storage.transactions - before < 500  # One each for claiming and completing were 4,000.


def test_a_result_costs_a_worker_one_statement_and_where_none_is_kept_nothing(tmp_path: Path, probe: Probe) -> None:
    made: dict[int, list[str]] = {}
    # The clock stands still: a claim looks for what is due once a millisecond.
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=ManualClock(), durability="relaxed")
    with closing(storage), Queue("q", storage) as queue:
        worker = Worker(queue.storage, queue._terms, lambda numbers: numbers, batch=8)  # noqa: SLF001 (as `process`)
        for keep_result in (0, 60, 0, 60):  # The first time, it opens the file and makes itself known.
            queue.add_many([NewJob(number, keep_result=keep_result) for number in range(8)])
            with probe.counting():
                assert worker.step()
            made[keep_result] = list(probe.statements)
        worker.close()

    results = [statement for statement in made[60] if "litebroker_value" in statement]
    assert len(results) == 8
    assert len(made[60]) == len(made[0]) + 8
    assert not [statement for statement in made[0] if "litebroker_value" in statement]
    assert sum(statement.lower().startswith("begin") for statement in made[60]) == 1


def work_of(path: Path, probe: Probe, pending: int, delayed: int = 0) -> dict[str, int]:
    """The steps of SQLite's virtual machine for each operation."""
    steps = {}
    with a_queue_with(path, pending, delayed) as storage:
        for name, (prepare, operation) in OPERATIONS.items():
            prepared = prepare(storage)
            with probe.counting(steps=True):
                operation(storage, prepared)
            steps[name] = probe.steps
    return steps


def test_an_operation_takes_as_many_steps_over_100_000_jobs_as_over_1000(tmp_path: Path, probe: Probe) -> None:
    few = work_of(tmp_path / "few.db", probe, 1000)

    many = work_of(tmp_path / "many.db", probe, 100_000)

    assert many == few
    assert 0 < few["claim"] < 500


def test_jobs_of_the_far_future_cost_a_claim_nothing(tmp_path: Path, probe: Probe) -> None:
    """Even those of a higher priority, which a look past them for the first that is due would have to pass."""
    few = work_of(tmp_path / "few.db", probe, 1000)

    many = work_of(tmp_path / "many.db", probe, 1000, delayed=100_000)

    assert many == few


def wal_bytes_a_job(path: Path, probe: Probe, pending: int) -> float:
    """What a job writes to the WAL from its addition to its completion."""
    with a_queue_with(path, pending) as storage:
        writing = sqlite3.connect(path, isolation_level=None)
        assert writing.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0
        with probe.counting():
            for _ in range(50):
                storage.add([SPEC])
                storage.complete([claim(storage)[0].lease])
        assert not [text for text in probe.statements if "checkpoint" in text]
        size = Path(f"{path}-wal").stat().st_size
        writing.close()
    return size / 50


def test_a_job_writes_no_more_to_the_wal_over_100_000_jobs_than_over_1000(tmp_path: Path, probe: Probe) -> None:
    few = wal_bytes_a_job(tmp_path / "few.db", probe, 1000)

    many = wal_bytes_a_job(tmp_path / "many.db", probe, 100_000)

    assert many < few * 1.25
    assert few < 10 * FRAME_BYTES  # Its row and its index entry, three times over.


@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_a_claim_does_not_write_a_large_payload_again(tmp_path: Path, probe: Probe, size: int) -> None:
    path = tmp_path / "jobs.db"
    with a_queue_with(path, 300) as storage:
        storage.add([JobSpec(queue="q", payload=b"x" * size, priority=1)])
        writing = sqlite3.connect(path, isolation_level=None)
        assert writing.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0

        (job,) = claim(storage)

        assert len(job.payload) == size
        assert Path(f"{path}-wal").stat().st_size < 6 * FRAME_BYTES
        writing.close()


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_no_statement_is_prepared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    """SQLite from 3.5x on does so, at each execution, where a bound parameter could change the plan.

    It asks the authorizer whenever it prepares a statement, and never else (sqlite.org/c3ref/set_authorizer.html).
    """
    prepared: list[object] = []

    def authorizer(*what: object) -> int:
        prepared.append(what)
        return 0

    if driver == "apsw":
        apsw = pytest.importorskip("apsw")
        monkeypatch.setattr(apsw, "connection_hooks", [lambda connection: connection.set_authorizer(authorizer)])
    else:
        connect = sqlite3.connect

        def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            connection.set_authorizer(authorizer)
            return connection

        monkeypatch.setattr(sqlite3, "connect", watched)
    with a_queue_with(tmp_path / "jobs.db", 1000, driver=driver) as storage:
        assert prepared
        prepared.clear()

        for prepare, operation in OPERATIONS.values():
            operation(storage, prepare(storage))

        assert not prepared


# -- groups, dedupe keys, what is kept, and bytes --


def grouped(name: str) -> JobSpec:
    return SPEC._replace(group=name)


@contextmanager
def a_queue_with_saturated_groups(path: Path, number: int) -> Iterator[SQLiteStorage]:
    """So many groups that have an active job and one that waits for it, and one group that is free."""
    storage = SQLiteStorage(path, clock=ManualClock(), durability="relaxed")
    storage.add([grouped(f"g{it}") for it in range(number) for _ in range(2)])
    held = storage.claim(["q"], limit=number, lease_ms=LEASE_MS)
    assert len({job.group for job in held}) == number
    storage.add([grouped("free")] * 20)
    for _ in range(3):
        storage.complete([claim(storage)[0].lease])
    yield storage
    storage.close()


# The most statements for a job of a group, whose turns and limits have rows of their own.
IN_A_GROUP = {"add": 6, "claim": 13, "complete": 3}


def work_in_a_group(path: Path, probe: Probe, saturated: int) -> dict[str, tuple[int, int]]:
    """Steps and statements of each operation."""
    found = {}
    with a_queue_with_saturated_groups(path, saturated) as storage:
        with probe.counting(steps=True):
            storage.add([grouped("free")])
        found["add"] = (probe.steps, len(probe.statements))
        with probe.counting(steps=True):
            (job,) = claim(storage)
        found["claim"] = (probe.steps, len(probe.statements))
        with probe.counting(steps=True):
            assert storage.complete([job.lease]) == [True]
        found["complete"] = (probe.steps, len(probe.statements))
    return found


def test_a_thousand_saturated_groups_cost_a_claim_no_more_than_ten(tmp_path: Path, probe: Probe) -> None:
    few = work_in_a_group(tmp_path / "few.db", probe, 10)

    many = work_in_a_group(tmp_path / "many.db", probe, 1000)

    assert many == few
    assert {name: statements for name, (_, statements) in few.items() if statements > IN_A_GROUP[name]} == {}


def test_an_operation_on_a_group_s_job_is_one_transaction(tmp_path: Path) -> None:
    with a_queue_with_saturated_groups(tmp_path / "jobs.db", 10) as storage:
        before = storage.transactions

        storage.add([grouped("free")])
        storage.complete([claim(storage)[0].lease])

        assert storage.transactions == before + 3


def test_an_add_with_a_key_that_is_held_writes_nothing_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with a_queue_with(path, 300) as storage:
        storage.add([SPEC._replace(dedupe_key="key")])
        size = Path(f"{path}-wal").stat().st_size

        (added,) = storage.add([SPEC._replace(dedupe_key="key")])

        assert not added.created
        assert Path(f"{path}-wal").stat().st_size == size


def test_a_completed_job_that_is_kept_costs_one_statement_more_twice_a_second_at_most(
    tmp_path: Path, probe: Probe
) -> None:
    with a_queue_with(tmp_path / "jobs.db", 300) as storage:
        queue: Queue[str] = Queue("q", storage, retention=Retention(completed=10))
        queue.purge()
        queue.add_many(["it"] * 20)
        counts = []
        for _ in range(20):
            (job,) = queue.claim()
            with probe.counting():
                queue.complete(job)
            counts.append(len(probe.statements))

    assert counts[0] <= 3  # It looks for what has been kept long enough.
    assert set(counts[1:]) == {1}  # The clock stands still.


@pytest.mark.parametrize(("operation", "most"), [("add", 700), ("claim", 600), ("complete", 400)])
def test_a_job_in_a_batch_of_100_writes_little_to_the_wal(
    tmp_path: Path, probe: Probe, operation: str, most: int
) -> None:
    """Less than a tenth of what one alone writes: two pages to complete it, three to claim it, and more to add it."""
    path = tmp_path / "jobs.db"
    with a_queue_with(path, 1000) as storage:
        jobs = claim(storage, 100)
        operations: dict[str, Callable[[], object]] = {
            "add": lambda: storage.add([SPEC] * 100),
            "claim": lambda: claim(storage, 100),
            "complete": lambda: storage.complete([job.lease for job in jobs]),
        }

        written = wal_bytes(path, operations[operation])

        assert 0 < written / 100 < most


def test_a_large_payload_is_written_once(tmp_path: Path) -> None:
    path, size = tmp_path / "jobs.db", 200_000
    with a_queue_with(path, 300) as storage:

        def through() -> None:
            storage.add([JobSpec(queue="q", payload=b"x" * size, priority=1)])
            storage.complete([claim(storage)[0].lease])

        through()  # What is freed then is used again.

        assert size < wal_bytes(path, through) < 1.4 * size


def wal_bytes(path: Path, operation: Callable[[], object]) -> int:
    """What it adds to a log that was empty."""
    writing = sqlite3.connect(path, isolation_level=None)
    assert writing.execute("pragma wal_checkpoint(truncate)").fetchone()[0] == 0
    operation()
    writing.close()
    return Path(f"{path}-wal").stat().st_size

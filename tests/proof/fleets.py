"""What is killed: workers of every kind, as their commands start them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.proof.ledger import DeadLetter

from litebroker import JobRecord, SQLiteStorage, State


@dataclass(frozen=True)
class Fleet:
    """A kind of worker.

    Attributes:
        app: The module in `tests.proof.apps` that produces its jobs.
        command: Starts one worker; each may be several processes.
        workers: How many are at work.
        pause_s: The mean time between two kills.
        whole: How often all processes of a worker are killed at once, and not one of them.
        spare: One process of each worker is not killed alone: it only starts the others.
        needs: Modules without which it cannot run.
        backlog: How many jobs wait for it, at most.
    """

    name: str
    app: str
    command: Sequence[str]
    workers: int
    pause_s: float
    whole: float
    spare: bool = False
    needs: Sequence[str] = ()
    backlog: int = 300

    @property
    def can_run(self) -> bool:
        return all(find_spec(module) is not None for module in self.needs)


_HUEY = ("-m", "huey.bin.huey_consumer", "tests.proof.apps.huey_app.huey")
_RQ = ("-m", "rq.cli", "worker", "--quiet", "-w")

FLEETS = {
    fleet.name: fleet
    for fleet in (
        Fleet("claims", "engine", ("-m", "tests.proof.apps.engine", "forked"), 1, 0.06, 0.02, spare=True),
        Fleet("threads", "engine", ("-m", "tests.proof.apps.engine", "work"), 2, 0.5, 1.0),
        Fleet(
            "command",
            "engine",
            (
                *("-m", "litebroker", "worker", "tests.proof.apps.engine:handle"),
                *("--processes", "2", "--concurrency", "2", "--log-level", "warning"),
            ),
            1,
            0.5,
            0.3,
            needs=("click",),
        ),
        Fleet(
            "dramatiq",
            "dramatiq_app",
            ("-m", "dramatiq", "tests.proof.apps.dramatiq_app", "--processes", "2", "--threads", "2"),
            2,
            1.0,
            0.7,
            needs=("dramatiq",),
        ),
        *(
            Fleet(
                f"huey {kind}",
                "huey_app",
                (*_HUEY, "--worker-type", kind, "--workers", "2", "--health-check-interval", "1"),
                2,
                0.8,
                0.5 if kind == "process" else 1.0,
                needs=("huey", "gevent") if kind == "greenlet" else ("huey",),
            )
            for kind in ("thread", "process", "greenlet")
        ),
        Fleet("rq fork", "rq_app", (*_RQ, "rq.Worker", "proof"), 2, 0.8, 0.4, needs=("rq",), backlog=60),
        Fleet("rq simple", "rq_app", (*_RQ, "rq.SimpleWorker", "proof"), 2, 0.8, 1.0, needs=("rq",)),
    )
}


def count_left(path: Path) -> int:
    """How many jobs have not come to an end, in all queues of the file."""
    with closing(SQLiteStorage(path)) as storage:
        found = [storage.counts(queue.name) for queue in storage.queues()]
        left = sum(counts.pending + counts.active for counts in found)
    return left + _rq_jobs(path, _count_unfinished)


def dead_letters(path: Path) -> tuple[dict[str, DeadLetter], set[str]]:
    """The dead letters of the file, by the job's key, and the keys of what has not come to an end."""
    dead: dict[str, DeadLetter] = {}
    left: set[str] = set()
    with closing(SQLiteStorage(path)) as storage:
        for queue in storage.queues():
            for state in (State.PENDING, State.ACTIVE, State.FAILED):
                last: JobRecord | None = None
                while page := storage.page(queue.name, state, limit=500, after=last):
                    last = page[-1]
                    for record in page:
                        if state is State.FAILED:
                            dead[str(record.ref)] = _letter(record)
                        else:
                            left.add(str(record.ref))
    _rq_jobs(path, lambda path: _rq_dead(path, dead, left))
    return dead, left


def _letter(record: JobRecord) -> DeadLetter:
    assert record.error is not None
    text = f"{record.error.type} {record.error.message}"
    lapsed = [attempt for attempt in record.history if attempt.outcome == "lapsed"]
    pids = tuple(int(attempt.worker.rpartition(":")[2]) for attempt in lapsed if attempt.worker)
    return DeadLetter("planned" if "PlannedError" in text else record.error.reason, pids)


def _rq_jobs(path: Path, ask: Callable[[Path], int]) -> int:
    """RQ keeps its jobs in keys of its own, and needs rq to read them."""
    with closing(SQLiteStorage(path)) as storage:
        there = storage.execute("select 1 from sqlite_master where name like 'litebroker_rq_%'")
    return ask(path) if there else 0


def _count_unfinished(path: Path) -> int:
    import rq

    from litebroker_rq import connect

    queue = rq.Queue("proof", connection=connect(path))
    started = queue.started_job_registry.get_job_ids(cleanup=False)
    return int(queue.count) + len(started) + int(queue.scheduled_job_registry.count)


def _rq_dead(path: Path, dead: dict[str, DeadLetter], left: set[str]) -> int:
    from rq.job import Job, JobStatus

    from litebroker_rq import connect

    connection = connect(path)
    for key in connection.scan_iter(match="rq:job:*", count=1000):
        name = key.decode().removeprefix("rq:job:")
        job = Job.fetch(name, connection=connection)
        result = job.latest_result()
        text = "" if result is None else str(result.exc_string)
        if job.get_status() != JobStatus.FAILED:
            left.add(name)
        elif "PlannedError" in text:
            dead[name] = DeadLetter("planned")
        elif "AbandonedJobError" in text or "Work-horse terminated unexpectedly" in text:
            dead[name] = DeadLetter("lapsed")
        else:
            dead[name] = DeadLetter(text[-200:] or "none")
    return len(dead)

"""RQ's jobs as tools show and mend them, and that RQ agrees."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import rq
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from tests.rq import tasks
from tests.rq.conftest import Processes, wait_until

from litebroker import JobRow, State, open_storage
from litebroker.inspection import Filter, Inspection
from litebroker_rq import SQLiteConnection

DEFAULT = "rq:queue:default"


@pytest.fixture
def inspection(path: Path) -> Iterator[Inspection]:
    storage = open_storage(path)
    yield Inspection(storage)
    storage.close()


def work(queue: rq.Queue) -> None:
    rq.SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="CRITICAL")


def listed(inspection: Inspection, *states: State, **options: Any) -> list[JobRow]:
    return inspection.jobs(Filter(states=states, **options)).rows


def the(inspection: Inspection, job: Job | str) -> JobRow:
    (row,) = inspection.find(job if isinstance(job, str) else job.id)
    return row


def answers(outcomes: Any) -> list[str | None]:
    return [outcome.why_not for outcome in outcomes]


def as_bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


class TrapError(Exception):
    """Raised where a pickle was read."""


class Trap:
    """What nobody may unpickle."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return spring, ("unpickled",)


def spring(word: str) -> None:
    raise TrapError(word)


def test_jobs_are_listed_by_what_became_of_them(queue: rq.Queue, inspection: Inspection) -> None:
    done = queue.enqueue(tasks.nothing)
    failed = queue.enqueue(tasks.fail)
    work(queue)
    waiting = queue.enqueue(tasks.nothing)
    deferred = queue.enqueue(tasks.nothing, depends_on=waiting)
    scheduled = queue.enqueue_in(timedelta(hours=1), tasks.nothing)
    cancelled = queue.enqueue(tasks.nothing)
    cancelled.cancel()

    rows = listed(inspection)

    assert {(row.id, str(row.state), row.stage) for row in rows} == {
        (done.id, "completed", None),
        (failed.id, "failed", None),
        (waiting.id, "pending", None),
        (deferred.id, "pending", "deferred"),
        (scheduled.id, "pending", "scheduled"),
        (cancelled.id, "cancelled", None),
    }
    assert {(row.framework, row.queue) for row in rows} == {("rq", DEFAULT)}
    assert inspection.queues() == [DEFAULT]


def test_a_row_tells_what_the_job_was(queue: rq.Queue, inspection: Inspection) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)

    (row,) = listed(inspection, State.FAILED)

    assert row == the(inspection, job)
    assert row.task == "tests.rq.tasks.fail()"
    assert row.error is not None
    assert (row.error.type, row.error.message) == ("ValueError", "as it was told")
    assert "Traceback" in row.error.stack
    assert row.attempts == 1
    assert row.ended_at_ms is not None
    ended = datetime.fromtimestamp(row.ended_at_ms / 1000, timezone.utc)
    assert abs(ended - datetime.now(timezone.utc)) < timedelta(minutes=1)
    (attempt,) = inspection.attempts(row)
    assert (attempt.number, attempt.outcome, attempt.error) == (1, "failed", "ValueError: as it was told")


def test_pages_follow_each_other_through_all_registries(queue: rq.Queue, inspection: Inspection) -> None:
    for _ in range(3):
        queue.enqueue(tasks.fail)
        queue.enqueue(tasks.nothing)
    work(queue)
    for minutes in range(3):
        queue.enqueue_in(timedelta(minutes=minutes + 1), tasks.nothing)
        queue.enqueue(tasks.nothing)
    whole = [row.id for row in listed(inspection)]

    ids: list[str] = []
    cursor = None
    while True:
        page = inspection.jobs(Filter(), limit=2, after=cursor)
        ids += [row.id for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break

    assert len(set(whole)) == 12
    assert ids == whole


def test_entries_of_jobs_that_are_gone_do_not_end_a_listing(queue: rq.Queue, inspection: Inspection) -> None:
    jobs = [queue.enqueue_in(timedelta(minutes=minutes), tasks.nothing) for minutes in range(1, 9)]
    for job in jobs[:7]:
        queue.connection.delete(job.key)

    page = inspection.jobs(Filter(), limit=2)

    assert [row.id for row in page.rows] == [jobs[7].id]


def test_a_job_that_runs_names_its_worker_and_whether_that_lives(
    queue: rq.Queue, inspection: Inspection, processes: Processes, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = queue.enqueue(tasks.note_and_wait, str(tmp_path / "notes"), "began", str(gate))
    worker = processes.rq("worker", "--worker-class", "rq.SimpleWorker", "default")
    wait_until((tmp_path / "notes").exists)

    (running,) = listed(inspection, State.ACTIVE)
    processes.kill_all(worker)
    (dead,) = listed(inspection, State.ACTIVE)

    assert running.id == job.id
    assert running.worker is not None
    assert running.worker.endswith(f":{worker.pid}")
    assert (running.alive, dead.alive) == (True, False)


def test_a_failed_job_is_queued_again_by_rqs_rules_and_runs(
    queue: rq.Queue, inspection: Inspection, tmp_path: Path
) -> None:
    gate = tmp_path / "missing" / "notes"
    job = queue.enqueue(tasks.note, str(gate), "ran")
    work(queue)
    gate.parent.mkdir()
    row = the(inspection, job)

    first, second = inspection.retry([row]), inspection.retry([row])
    requeued = (queue.job_ids, job.get_status(), job.id in queue.failed_job_registry)
    work(queue)

    assert (answers(first), answers(second)) == ([None], ["it is queued"])
    assert requeued == ([job.id], JobStatus.QUEUED, False)
    assert gate.read_text() == "ran\n"
    assert job.get_status(refresh=True) == JobStatus.FINISHED


def test_what_rqs_own_command_requeued_is_no_dead_letter_any_more(
    queue: rq.Queue, inspection: Inspection, processes: Processes
) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)
    row = the(inspection, job)

    processes.run("requeue", "--queue", "default", job.id)

    assert listed(inspection, State.FAILED) == []
    assert answers(inspection.retry([row])) == ["it is queued"]
    assert the(inspection, job).state is State.PENDING


def test_a_failed_job_may_go_on_in_another_queue(
    queue: rq.Queue, inspection: Inspection, connection: SQLiteConnection
) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)

    done = inspection.retry([the(inspection, job)], queue="rq:queue:second chance")

    assert answers(done) == [None]
    assert rq.Queue("second chance", connection=connection).job_ids == [job.id]
    assert Job.fetch(job.id, connection=connection).origin == "second chance"
    assert queue.job_ids == []


def test_jobs_that_wait_are_cancelled_and_others_are_not(queue: rq.Queue, inspection: Inspection) -> None:
    done = queue.enqueue(tasks.nothing)
    work(queue)
    jobs = [queue.enqueue(tasks.nothing), queue.enqueue_in(timedelta(hours=1), tasks.nothing)]

    told = inspection.cancel([the(inspection, job) for job in (*jobs, done)])

    assert answers(told) == [None, None, "it is finished"]
    assert [job.get_status() for job in jobs] == [JobStatus.CANCELED] * 2
    assert (len(queue), len(queue.scheduled_job_registry)) == (0, 0)


def test_jobs_that_do_not_run_are_deleted(queue: rq.Queue, inspection: Inspection) -> None:
    job, running = queue.enqueue(tasks.nothing), queue.enqueue(tasks.nothing)
    running.set_status(JobStatus.STARTED)
    rows = [the(inspection, job), the(inspection, running)]

    told = inspection.remove(rows)

    assert answers(told) == [None, "it is started"]
    assert inspection.find(job.id) == []
    assert answers(inspection.remove(rows[:1])) == ["it is gone"]


def test_a_job_is_due_at_another_time(queue: rq.Queue, inspection: Inspection) -> None:
    waiting, scheduled = queue.enqueue(tasks.nothing), queue.enqueue_in(timedelta(hours=1), tasks.nothing)
    due_at_ms = (inspection.now_ms() // 1000 + 60) * 1000

    told = inspection.reschedule([the(inspection, waiting), the(inspection, scheduled)], due_at_ms)

    assert answers(told) == [None, None]
    assert (the(inspection, waiting).due_at_ms, the(inspection, scheduled).due_at_ms) == (due_at_ms, due_at_ms)
    assert len(queue) == 0
    registry = queue.scheduled_job_registry
    assert {registry.get_scheduled_time(job).timestamp() * 1000 for job in (waiting, scheduled)} == {due_at_ms}


def test_jobs_wait_in_another_queue_and_run_there(
    queue: rq.Queue, inspection: Inspection, connection: SQLiteConnection, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    other = rq.Queue("other", connection=connection)
    waiting = queue.enqueue(tasks.note, str(notes), "ran")
    scheduled = queue.enqueue_in(timedelta(hours=1), tasks.nothing)
    due = queue.scheduled_job_registry.get_scheduled_time(scheduled)

    told = inspection.move([the(inspection, waiting), the(inspection, scheduled)], "rq:queue:other")
    work(other)

    assert answers(told) == [None, None]
    assert notes.read_text() == "ran\n"
    assert (queue.job_ids, len(queue.scheduled_job_registry)) == ([], 0)
    assert other.scheduled_job_registry.get_scheduled_time(scheduled) == due


def test_a_job_of_rq_goes_to_no_queue_of_others(queue: rq.Queue, inspection: Inspection) -> None:
    job = queue.enqueue(tasks.nothing)

    (outcome,) = inspection.move([the(inspection, job)], "emails")

    assert outcome.why_not == "rq has no queue 'emails'; its queues are called like 'rq:queue:default'"
    assert queue.job_ids == [job.id]


def test_nothing_is_unpickled_to_look_or_to_change(queue: rq.Queue, inspection: Inspection) -> None:
    job = queue.enqueue(tasks.add, 1, Trap(), meta={"kept": Trap()})
    job.set_status(JobStatus.FAILED)
    queue.remove(job)
    queue.failed_job_registry.add(job, ttl=60)
    meta = as_bytes(queue.connection.hget(job.key, "meta"))
    row = the(inspection, job)

    content = inspection.content(row)
    told = inspection.retry([row])

    assert (content.kind, content.value) == ("pickle", None)
    assert inspection.facts(row)["meta"] == f"a pickle of {len(meta)} bytes"
    assert answers(told) == [None]
    assert as_bytes(queue.connection.hget(job.key, "meta")) == meta
    with pytest.raises(TrapError):
        pickle.loads(meta)  # noqa: S301 - it is a trap indeed


def test_a_pickle_is_read_when_that_was_asked_for(queue: rq.Queue, inspection: Inspection) -> None:
    job = queue.enqueue(tasks.add, 1, 2)

    content = inspection.content(the(inspection, job), unpickle=True)

    assert content.value == "('tests.rq.tasks.add', None, (1, 2), {})"


def test_arguments_in_json_are_shown(connection: SQLiteConnection, inspection: Inspection) -> None:
    queue = rq.Queue(connection=connection, serializer=JSONSerializer)
    job = queue.enqueue(tasks.add, 1, 2)

    content = inspection.content(the(inspection, job))

    assert (content.kind, content.value) == ("json", ["tests.rq.tasks.add", None, [1, 2], {}])


def test_jobs_are_listed_where_rq_is_not_installed_and_a_change_says_what_to_install(
    queue: rq.Queue, path: Path
) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)
    waiting = queue.enqueue(tasks.nothing)
    script = """
import json, sys
sys.modules["rq"] = sys.modules["redis"] = sys.modules["lupa"] = None
from litebroker import LitebrokerError, open_storage
from litebroker.inspection import Filter, Inspection
inspection = Inspection(open_storage(sys.argv[1]))
rows = inspection.jobs(Filter()).rows
try:
    inspection.retry(inspection.find(sys.argv[2]))
except LitebrokerError as error:
    print(json.dumps([[row.id for row in rows], str(error)]))
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(path), job.id], capture_output=True, text=True, check=True, timeout=30
    )

    ids, error = json.loads(done.stdout)
    assert ids == [waiting.id, job.id]
    assert error.endswith("pip install 'litebroker[rq]'")


def test_a_walk_reaches_all_though_they_change_on_the_way(queue: rq.Queue, inspection: Inspection) -> None:
    for number in range(7):
        queue.enqueue(tasks.fail if number % 2 else tasks.nothing)
    work(queue)
    for number in range(9):
        queue.enqueue_in(timedelta(minutes=number), tasks.nothing)
        queue.enqueue(tasks.nothing)

    done: list[str | None] = []
    for page in inspection.walk(Filter(states=[State.FAILED]), size=2):
        done += answers(inspection.retry(page))
    cancelled: list[str | None] = []
    for page in inspection.walk(Filter(states=[State.PENDING]), size=2):
        cancelled += answers(inspection.cancel(page))

    assert done == [None] * 3
    assert cancelled == [None] * 21
    assert (len(queue), len(queue.scheduled_job_registry)) == (0, 0)

"""RQ's jobs as other tools show them, and what they do to them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import rq
from rq.job import JobStatus
from tests.rq import tasks

from litebroker_rq.inspector import RQInspector


@pytest.fixture
def inspector(path: Path) -> RQInspector:
    return RQInspector(str(path))


def work(queue: rq.Queue) -> None:
    rq.SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="ERROR")


def test_jobs_are_counted_by_what_became_of_them(queue: rq.Queue, inspector: RQInspector) -> None:
    queue.enqueue(tasks.nothing)
    queue.enqueue(tasks.fail)
    work(queue)
    first = queue.enqueue(tasks.nothing)
    queue.enqueue(tasks.nothing, depends_on=first)
    queue.enqueue_in(timedelta(hours=1), tasks.nothing)
    queue.enqueue(tasks.nothing).cancel()

    counts = inspector.counts("default")

    assert counts == {
        "waiting": 1, "started": 0, "scheduled": 1, "deferred": 1, "finished": 1, "failed": 1, "canceled": 1,
    }  # fmt: skip
    assert inspector.queues() == ["default"]


def test_a_row_tells_what_the_job_was(queue: rq.Queue, inspector: RQInspector) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)

    (row,) = inspector.jobs("default", "failed")

    assert (row.framework, row.queue, row.id, row.state) == ("rq", "default", job.id, "failed")
    assert row.task == "tests.rq.tasks.fail()"
    assert row.error == "ValueError: as it was told"
    assert row.attempts == 1
    assert row.created_at is not None
    assert row.started_at is not None
    assert row.ended_at is not None
    assert abs(row.ended_at - datetime.now(timezone.utc)) < timedelta(minutes=1)
    assert inspector.job("default", job.id) == row


def test_pages_follow_the_order_of_the_queue(queue: rq.Queue, inspector: RQInspector) -> None:
    jobs = [queue.enqueue(tasks.nothing) for _ in range(5)]

    pages = [inspector.jobs("default", "waiting", limit=2, offset=offset) for offset in (0, 2, 4)]

    assert [[row.id for row in page] for page in pages] == [[j.id for j in jobs[n : n + 2]] for n in (0, 2, 4)]


def test_a_failed_job_is_queued_again_by_rqs_rules(queue: rq.Queue, inspector: RQInspector) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)

    answers = [inspector.retry("default", job.id) for _ in range(2)]

    assert answers == [True, False]
    assert queue.job_ids == [job.id]
    assert job.get_status() == JobStatus.QUEUED


def test_what_rq_requeued_is_no_dead_letter_any_more(queue: rq.Queue, inspector: RQInspector) -> None:
    job = queue.enqueue(tasks.fail)
    work(queue)

    queue.failed_job_registry.requeue(job)

    assert inspector.jobs("default", "failed") == []
    assert not inspector.retry("default", job.id)


def test_jobs_that_wait_are_cancelled_and_others_are_not(queue: rq.Queue, inspector: RQInspector) -> None:
    done = queue.enqueue(tasks.nothing)
    work(queue)
    job = queue.enqueue(tasks.nothing)

    answers = [inspector.cancel("default", job_id) for job_id in (job.id, done.id, "none")]

    assert answers == [True, False, False]
    assert (job.get_status(), len(queue)) == (JobStatus.CANCELED, 0)


def test_jobs_that_do_not_run_are_deleted(queue: rq.Queue, inspector: RQInspector) -> None:
    job, running = queue.enqueue(tasks.nothing), queue.enqueue(tasks.nothing)
    running.set_status(JobStatus.STARTED)

    answers = [inspector.delete("default", job_id) for job_id in (job.id, running.id)]

    assert answers == [True, False]
    assert inspector.job("default", job.id) is None

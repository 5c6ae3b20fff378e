"""`litebroker_rq.Queue`: rq's own, with priority and dedupe_key."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import redis
import rq
from rq.job import Job, JobStatus
from tests.rq import tasks
from tests.rq.conftest import Processes

from litebroker_rq import Queue, SQLiteConnection


@pytest.fixture
def queue(connection: SQLiteConnection) -> Queue:
    return Queue(connection=connection)


def order(queue: Queue) -> list[int]:
    return [job.args[0] for job in queue.jobs]


def work(queue: Queue) -> None:
    rq.SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="ERROR")


def test_higher_priorities_go_first_and_equal_ones_in_their_order(queue: Queue) -> None:
    for number, priority in enumerate([None, 5, -1, 5, 9, 0]):
        queue.enqueue(tasks.add, number, 0, priority=priority)

    assert order(queue) == [4, 1, 3, 0, 5, 2]


def test_at_front_goes_before_all_priorities(queue: Queue) -> None:
    queue.enqueue(tasks.add, 1, 0, priority=100)

    queue.enqueue(tasks.add, 2, 0, at_front=True)
    queue.enqueue(tasks.add, 3, 0, at_front=True, priority=1)

    assert order(queue) == [3, 2, 1]


def test_a_job_keeps_its_priority_when_it_is_requeued(queue: Queue) -> None:
    job = queue.enqueue(tasks.fail, priority=5)
    work(queue)
    queue.enqueue(tasks.add, 1, 0)

    queue.failed_job_registry.requeue(job)

    assert queue.job_ids[0] == job.id


def test_a_scheduled_job_keeps_its_priority(queue: Queue) -> None:
    job = queue.enqueue_in(timedelta(seconds=-1), tasks.nothing, priority=5)
    queue.enqueue(tasks.add, 1, 0)
    scheduler = rq.scheduler.RQScheduler([queue], connection=queue.connection)
    scheduler.acquire_locks()

    scheduler.enqueue_scheduled_jobs()

    assert queue.job_ids[0] == job.id
    scheduler.release_locks()


def test_while_a_job_with_the_key_lives_it_is_answered(queue: Queue) -> None:
    first = queue.enqueue(tasks.add, 1, 0, dedupe_key="k")

    again = queue.enqueue(tasks.add, 2, 0, dedupe_key="k")
    other = queue.enqueue(tasks.add, 3, 0, dedupe_key="l")
    scheduled = queue.enqueue_in(timedelta(hours=1), tasks.add, 4, 0, dedupe_key="k")

    assert again.id == first.id == scheduled.id
    assert order(queue) == [1, 3]
    assert other.id != first.id


@pytest.mark.parametrize("end", ["finished", "failed", "canceled", "deleted"])
def test_a_job_that_has_ended_lets_go_of_its_key(end: str, queue: Queue) -> None:
    first = queue.enqueue(tasks.fail if end == "failed" else tasks.nothing, dedupe_key="k")
    if end == "canceled":
        first.cancel()
    elif end == "deleted":
        first.delete()
    else:
        work(queue)
        assert first.get_status() == end

    second = queue.enqueue(tasks.nothing, dedupe_key="k")

    assert second.id != first.id
    assert queue.job_ids == [second.id]


def test_a_running_job_holds_its_key(queue: Queue) -> None:
    job = queue.enqueue(tasks.nothing, dedupe_key="k")
    queue.connection.lpop(queue.key)
    job.set_status(JobStatus.STARTED)

    assert queue.enqueue(tasks.nothing, dedupe_key="k").id == job.id


def test_an_enqueue_that_fails_takes_no_key(queue: Queue) -> None:
    with pytest.raises(AttributeError):
        queue.enqueue(object(), dedupe_key="k")

    job = queue.enqueue(tasks.nothing, dedupe_key="k")

    assert queue.job_ids == [job.id]


def test_of_many_processes_one_makes_the_job(queue: Queue, path: Path, processes: Processes) -> None:
    racer = (
        "import sys\n"
        "from litebroker_rq import Queue, connect\n"
        "from tests.rq import tasks\n"
        "queue = Queue(connection=connect(sys.argv[1]))\n"
        "for n in range(20): print(queue.enqueue(tasks.nothing, dedupe_key=str(n)).id)\n"
    )
    racers = [processes.script(racer, str(path)) for _ in range(4)]

    for process in racers:
        assert processes.finish(process) == 0, processes.log(process)

    answers = {tuple(processes.log(process).split()) for process in racers}
    assert len(answers) == 1
    assert len(queue) == 20


def test_what_cannot_be_promised_is_refused(queue: Queue, connection: SQLiteConnection) -> None:
    with pytest.raises(ValueError, match="pipeline"):
        queue.enqueue(tasks.nothing, priority=1, pipeline=connection.pipeline())
    with pytest.raises(ValueError, match="is_async"):
        Queue(connection=connection, is_async=False).enqueue(tasks.nothing, dedupe_key="k")
    with pytest.raises(ValueError, match="64 bits"):
        queue.enqueue(tasks.nothing, priority=2**63)
    with pytest.raises(TypeError, match="litebroker_rq"):
        Queue(connection=redis.Redis()).enqueue(tasks.nothing, priority=1)
    assert len(queue) == 0


def test_it_is_rqs_queue_in_all_else(queue: Queue) -> None:
    job = queue.enqueue(tasks.add, 1, 2)

    work(queue)

    assert isinstance(queue, rq.Queue)
    assert Job.fetch(job.id, connection=queue.connection).return_value() == 3

"""A job between its queue and its start: no worker that dies there takes it along."""

from __future__ import annotations

from pathlib import Path

import pytest
import rq
from rq.job import JobStatus
from tests.rq import tasks
from tests.rq.conftest import Processes

from litebroker import open_storage
from litebroker_rq import SQLiteConnection, connect

# A worker that kills itself at a point of its life.
DOOMED = """
import os, signal, sys
import rq
from rq.worker import Worker
from litebroker_rq import connect

point, path, *names = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "popped":
    Worker.execute_job = die
elif point == "registered":
    Worker.fork_work_horse = die
else:
    raise SystemExit(point)
connection = connect(path)
Worker([rq.Queue(name, connection=connection) for name in names], connection=connection).work(burst=True)
"""

# A worker that performs its jobs itself, and is killed when it has registered its second.
DOOMED_AT_ITS_SECOND = """
import os, signal, sys
import rq
from litebroker_rq import connect

class Doomed(rq.SimpleWorker):
    done = 0

    def perform_job(self, *arguments, **named):
        if self.done:
            os.kill(os.getpid(), signal.SIGKILL)
        self.done += 1
        return super().perform_job(*arguments, **named)

connection = connect(sys.argv[1])
Doomed([rq.Queue(connection=connection)], connection=connection).work(burst=True)
"""

QUEUES = pytest.mark.parametrize("names", [["default"], ["default", "low"]], ids=["one queue", "two queues"])


def work(connection: SQLiteConnection, *names: str) -> None:
    """Be a healthy worker until all queues are empty."""
    queues = [rq.Queue(name, connection=connection) for name in names or ("default",)]
    rq.SimpleWorker(queues, connection=connection).work(burst=True, logging_level="ERROR")


@QUEUES
@pytest.mark.parametrize("point", ["popped", "registered"])
def test_a_job_whose_worker_was_killed_before_it_started_is_delivered_again(
    point: str, names: list[str], path: Path, queue: rq.Queue, processes: Processes
) -> None:
    connection = connect(path)
    job = queue.enqueue(tasks.add, 1, 2)
    doomed = processes.script(DOOMED, point, str(path), *names)
    assert processes.finish(doomed) == -9

    work(connection, *names)

    assert job.get_status(refresh=True) == JobStatus.FINISHED
    assert job.return_value() == 3
    assert connection.lrange("rq:queue:default:intermediate", 0, -1) == []
    assert queue.started_job_registry.get_job_ids(cleanup=False) == []
    assert queue.failed_job_registry.get_job_ids() == []


@QUEUES
def test_a_job_that_is_delivered_again_goes_before_those_behind_it(
    names: list[str], path: Path, connection: SQLiteConnection, queue: rq.Queue, processes: Processes
) -> None:
    order = path.parent / "order.txt"
    for word in ("first", "second", "third"):
        queue.enqueue(tasks.note, str(order), word)
    processes.finish(processes.script(DOOMED, "popped", str(path), *names))

    work(connection, *names)

    assert order.read_text().split() == ["first", "second", "third"]


def test_a_job_of_a_worker_that_performs_its_jobs_itself_is_delivered_again_when_it_dies_before_the_start(
    path: Path, queue: rq.Queue, connection: SQLiteConnection, processes: Processes
) -> None:
    queue.enqueue(tasks.nothing)
    job = queue.enqueue(tasks.add, 1, 2)
    assert processes.finish(processes.script(DOOMED_AT_ITS_SECOND, str(path))) == -9

    work(connection)

    assert job.get_status(refresh=True) == JobStatus.FINISHED
    assert queue.started_job_registry.get_job_ids(cleanup=False) == []
    assert queue.failed_job_registry.get_job_ids() == []


def test_a_job_stands_in_the_intermediate_list_until_it_starts(connection: SQLiteConnection, queue: rq.Queue) -> None:
    job = queue.enqueue(tasks.nothing)
    key = queue.intermediate_queue_key
    connection.rpush(key, "another")

    connection.lmove(queue.key, key)

    assert connection.lrange(key, 0, -1) == [job.id.encode(), b"another"]
    assert connection.lpos(key, job.id) == 0
    job.set_status(JobStatus.STARTED)
    assert connection.lrange(key, 0, -1) == [b"another"]


@pytest.mark.parametrize("leave", ["lrem", "lpop", "delete"])
def test_a_job_that_left_the_intermediate_list_does_not_come_back(
    leave: str, connection: SQLiteConnection, queue: rq.Queue
) -> None:
    job = queue.enqueue(tasks.nothing)
    key = queue.intermediate_queue_key
    connection.lmove(queue.key, key)
    assert connection.exists(key)

    if leave == "lrem":
        assert connection.lrem(key, 1, job.id) == 1
    elif leave == "lpop":
        assert connection.lpop(key) == job.id.encode()
    else:
        assert connection.delete(key) == 1

    assert not connection.exists(key)
    assert connection.llen(key) == 0


def test_a_living_worker_keeps_its_job_until_the_lease_ends(path: Path) -> None:
    connection = connect(path, lease=0.3)
    queue = rq.Queue(connection=connection)
    job = queue.enqueue(tasks.nothing)
    assert connection.lpop(queue.key) == job.id.encode()

    at_once = connection.lpop(queue.key)
    again = connection.blpop(queue.key, timeout=5)

    assert at_once is None
    assert again == (queue.key.encode(), job.id.encode())


def test_an_execution_that_is_registered_prolongs_the_lease_to_its_end(path: Path) -> None:
    connection = connect(path, lease=0.2)
    queue = rq.Queue(connection=connection)
    job = queue.enqueue(tasks.nothing)
    connection.lmove(queue.key, queue.intermediate_queue_key)
    with connection.pipeline() as pipeline:
        rq.executions.Execution.create(job, 90, pipeline=pipeline, worker_name="w")
        pipeline.execute()

    again = connection.blpop(queue.key, timeout=1)

    assert again is None


@pytest.mark.parametrize("settle", ["status", "delete", "lrem"])
def test_what_rq_does_next_settles_the_claim(settle: str, path: Path) -> None:
    connection = connect(path, lease=0.1)
    queue = rq.Queue(connection=connection)
    job = queue.enqueue(tasks.nothing)
    connection.lmove(queue.key, queue.intermediate_queue_key)

    if settle == "status":
        job.set_status(JobStatus.STARTED)
    elif settle == "delete":
        connection.delete(job.key)
    else:
        connection.lrem(queue.intermediate_queue_key, 1, job.id)

    again = connection.blpop(queue.key, timeout=1)
    counts = open_storage(path).counts(queue.key)
    assert again is None
    assert sum(counts) == 0


def test_a_job_that_is_queued_again_is_delivered_once_for_each_time(path: Path) -> None:
    connection = connect(path, lease=0.1)
    queue = rq.Queue(connection=connection)
    job = queue.enqueue(tasks.nothing)
    connection.lpop(queue.key)

    connection.rpush(queue.key, job.id)
    job.set_status(JobStatus.FINISHED)

    assert connection.blpop(queue.key, timeout=1) == (queue.key.encode(), job.id.encode())
    assert connection.blpop(queue.key, timeout=1) is None


def test_a_job_that_was_deleted_while_it_waited_is_not_protected(connection: SQLiteConnection, path: Path) -> None:
    queue = rq.Queue(connection=connection)
    connection.rpush(queue.key, "no-such-job")

    popped = connection.lpop(queue.key)

    counts = open_storage(path).counts(queue.key)
    assert popped == b"no-such-job"
    assert counts.active == counts.pending == 0


def test_waiting_jobs_are_jobs_of_the_engine(connection: SQLiteConnection, queue: rq.Queue, path: Path) -> None:
    job = queue.enqueue(tasks.add, 1, 2)

    (found,) = open_storage(path).find(queue.key, ref=job.id)

    assert found.task == "tests.rq.tasks.add(1, 2)"
    assert open_storage(path).counts(queue.key).ready == 1


def test_flushdb_leaves_the_jobs_of_other_frameworks(connection: SQLiteConnection, queue: rq.Queue, path: Path) -> None:
    from litebroker import JobSpec

    storage = open_storage(path)
    storage.add([JobSpec(queue="default", payload=b"{}")])
    queue.enqueue(tasks.nothing)

    connection.flushdb()

    assert storage.counts("default").ready == 1
    assert connection.keys("*") == []
    assert len(queue) == 0

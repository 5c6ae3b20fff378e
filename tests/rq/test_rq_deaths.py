"""kill -9, at chosen and at random moments: what dies is noticed in seconds, and no job vanishes."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import rq
from rq.job import JobStatus
from tests.rq import tasks
from tests.rq.conftest import Processes, descendants, failure, wait_until

from litebroker_rq import SQLiteConnection, answers, reaper
from litebroker_rq.database import opened
from litebroker_rq.processes import own


def status(job: rq.job.Job) -> JobStatus:
    return job.get_status(refresh=True)


@pytest.mark.parametrize("kind", ["rq.Worker", "rq.SimpleWorker"])
def test_a_job_whose_worker_and_horse_were_killed_fails_as_abandoned_in_seconds(
    kind: str, queue: rq.Queue, path: Path, processes: Processes
) -> None:
    began = path.parent / "began.txt"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(path.parent / "never"))
    doomed = processes.rq("worker", "-w", kind)
    wait_until(began.exists)
    processes.rq("worker", "-w", "rq.SimpleWorker")

    processes.kill_all(doomed)

    wait_until(lambda: status(job) == JobStatus.FAILED, seconds=5)
    assert queue.failed_job_registry.get_job_ids() == [job.id]
    assert "AbandonedJobError" in failure(job)
    assert queue.started_job_registry.get_job_ids(cleanup=False) == []


def test_a_job_that_may_be_retried_is_retried_instead(queue: rq.Queue, path: Path, processes: Processes) -> None:
    began, gate = path.parent / "began.txt", path.parent / "gate"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(gate), retry=rq.Retry(max=1))
    doomed = processes.rq("worker")
    wait_until(began.exists)
    processes.rq("worker", "-w", "rq.SimpleWorker")

    processes.kill_all(doomed)
    gate.touch()

    wait_until(lambda: status(job) == JobStatus.FINISHED, seconds=5)
    assert began.read_text().split() == ["x", "x"]


def test_an_abandoned_job_is_seen_to_though_who_was_at_it_was_killed(
    connection: SQLiteConnection, queue: rq.Queue, path: Path, processes: Processes
) -> None:
    began = path.parent / "began.txt"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(path.parent / "never"))
    doomed = processes.rq("worker")
    wait_until(began.exists)
    processes.kill_all(doomed)
    queue.acquire_maintenance_lock()  # for a quarter of an hour
    assert not connection.exists("rq:worker:x")  # as a worker asks that is about to start

    processes.rq("worker", "-w", "rq.SimpleWorker")

    wait_until(lambda: status(job) == JobStatus.FAILED, seconds=5)
    assert "AbandonedJobError" in failure(job)


def test_when_only_the_horse_is_killed_its_worker_fails_the_job(
    queue: rq.Queue, path: Path, processes: Processes
) -> None:
    began = path.parent / "began.txt"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(path.parent / "never"))
    worker = processes.rq("worker")
    wait_until(began.exists)

    kill_horses(worker)

    wait_until(lambda: status(job) == JobStatus.FAILED, seconds=5)
    assert "Work-horse terminated unexpectedly" in failure(job)
    assert worker.poll() is None


def test_when_only_the_worker_is_killed_the_horse_finishes_the_job(
    queue: rq.Queue, path: Path, processes: Processes
) -> None:
    began, gate = path.parent / "began.txt", path.parent / "gate"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(gate))
    doomed = processes.rq("worker")
    wait_until(began.exists)
    healthy = processes.rq("worker", "-w", "rq.SimpleWorker")
    wait_until(lambda: "Listening on" in processes.log(healthy))

    processes.kill(doomed)
    wait_until(lambda: "its process is gone" in processes.log(healthy), seconds=5)
    gate.touch()

    wait_until(lambda: status(job) == JobStatus.FINISHED, seconds=5)
    assert began.read_text().split() == ["x"]


def test_the_name_of_a_worker_that_was_killed_is_free(
    queue: rq.Queue, connection: SQLiteConnection, processes: Processes
) -> None:
    doomed = processes.rq("worker", "--name", "w1")
    wait_until(lambda: rq.Worker.all(connection=connection))
    processes.kill_all(doomed)

    again = processes.rq("worker", "--name", "w1", "--burst")

    assert processes.finish(again) == 0, processes.log(again)
    assert rq.Worker.all(connection=connection) == []


def test_who_buries_a_worker_keeps_the_answer_to_its_own_work_horse(
    connection: SQLiteConnection, path: Path, processes: Processes
) -> None:
    doomed = processes.rq("worker")
    wait_until(lambda: rq.Worker.all(connection=connection))
    database = opened(f"sqlite:///{path}")
    with database.writing() as session:
        session.write(
            "insert into litebroker_rq_answers (worker, horse, question, answer) values (?, ?, ?, ?)",
            own(),
            own(),
            7,
            pickle.dumps([b"done"]),
        )

    processes.kill_all(doomed)
    reaper.bury_dead(database)

    assert rq.Worker.all(connection=connection) == []
    assert answers.find(database, 7) == answers.Answer([b"done"])


def test_the_name_of_a_living_worker_is_not_free(connection: SQLiteConnection, processes: Processes) -> None:
    processes.rq("worker", "--name", "w1")
    wait_until(lambda: rq.Worker.all(connection=connection))

    second = processes.rq("worker", "--name", "w1", "--burst")

    assert processes.finish(second) != 0
    assert "There exists an active worker named" in processes.log(second)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", [["default"], ["default", "low"]], ids=["one queue", "two queues"])
def test_no_job_vanishes_when_workers_are_killed_at_random(
    names: list[str], path: Path, connection: SQLiteConnection, processes: Processes
) -> None:
    queues = [rq.Queue(name, connection=connection) for name in names]
    log = path.parent / "log.txt"
    jobs = []
    for number, queue in enumerate(queues):
        data = [
            rq.Queue.prepare_data(tasks.note, args=[str(log), f"{number}-{n}"], result_ttl=-1)
            for n in range(1000 // len(queues))
        ]
        jobs += queue.enqueue_many(data)
    draw = random.Random(os.environ.get("LITEBROKER_SEED", "7"))

    def start() -> subprocess.Popen[str]:
        return processes.rq("worker", "--quiet", "-w", draw.choice(["rq.SimpleWorker", "rq.Worker"]), *names)

    workers = [start() for _ in range(3)]
    kills = 0
    while sum(len(queue) for queue in queues) > 100 and kills < 25:
        time.sleep(draw.uniform(0.5, 2.5))
        victim = draw.randrange(3)
        if draw.random() < 0.5:
            processes.kill_all(workers[victim])
        else:
            kill_horses(workers[victim])
            processes.kill(workers[victim])
        workers[victim] = start()
        kills += 1
    wait_until(lambda: settled(jobs), seconds=120, what="the end of all jobs")

    ends = Counter(status(job) for job in jobs)
    done = Counter(log.read_text().split())
    assert kills >= 3
    assert set(ends) <= {JobStatus.FINISHED, JobStatus.FAILED}
    for job in jobs:
        if status(job) == JobStatus.FAILED:
            assert any(reason in failure(job) for reason in ("AbandonedJobError", "Work-horse terminated unexpectedly"))
        else:
            assert done[job.args[1]] >= 1
    print(f"{kills} kills, {ends}, {sum(done.values())} runs")


def kill_horses(worker: subprocess.Popen[str]) -> None:
    for pid in descendants(worker.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def settled(jobs: list[rq.job.Job]) -> bool:
    return all(status(job) in {JobStatus.FINISHED, JobStatus.FAILED} for job in jobs)

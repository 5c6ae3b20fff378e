"""Unmodified RQ: its commands, its workers of every kind, what they are told, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import rq
from rq.command import send_kill_horse_command, send_shutdown_command, send_stop_job_command
from rq.job import Dependency, JobStatus
from rq.suspension import resume, suspend
from tests.rq import tasks
from tests.rq.conftest import Processes, failure, wait_until

from litebroker_rq import SQLiteConnection, commandline, connect


def status(job: rq.job.Job) -> JobStatus:
    return job.get_status(refresh=True)


@pytest.mark.parametrize("kind", ["rq.Worker", "rq.SimpleWorker", "rq.SpawnWorker"])
def test_each_kind_of_worker_runs_jobs(kind: str, queue: rq.Queue, processes: Processes) -> None:
    good, bad = queue.enqueue(tasks.add, 1, 2), queue.enqueue(tasks.fail)

    processes.run("worker", "--burst", "-w", kind)

    assert (status(good), good.return_value()) == (JobStatus.FINISHED, 3)
    assert status(bad) == JobStatus.FAILED
    assert "as it was told" in failure(bad)
    assert queue.failed_job_registry.get_job_ids() == [bad.id]


def test_the_work_horse_is_a_process_of_its_own(queue: rq.Queue, processes: Processes) -> None:
    jobs = [queue.enqueue(tasks.process) for _ in range(3)]

    processes.run("worker", "--burst")

    assert len({job.return_value() for job in jobs}) == 3


def test_an_idle_worker_starts_a_job_at_once(queue: rq.Queue, processes: Processes) -> None:
    worker = processes.rq("worker", "-w", "rq.SimpleWorker")
    wait_until(lambda: "Listening on" in processes.log(worker))
    first = queue.enqueue(tasks.nothing)
    wait_until(lambda: status(first) == JobStatus.FINISHED)

    delays = []
    for _ in range(20):
        job = queue.enqueue(tasks.nothing)
        wait_until(lambda job=job: status(job) == JobStatus.FINISHED)  # type: ignore[misc]
        job.refresh()
        assert job.started_at is not None
        assert job.enqueued_at is not None
        delays.append((job.started_at - job.enqueued_at).total_seconds())

    assert sorted(delays)[10] < 0.1


def test_the_commands_of_rq_work(queue: rq.Queue, processes: Processes) -> None:
    processes.run("enqueue", "tests.rq.tasks.fail")
    assert "default" in processes.run("info")
    processes.run("worker", "--burst")
    assert "1 failed" in processes.run("info", "-W") or queue.failed_job_registry.count == 1

    processes.run("requeue", "--all", "--queue", "default")
    assert len(queue) == 1

    processes.run("empty", "default")
    assert len(queue) == 0


def test_litebroker_rq_is_the_same_shorter(path: Path, queue: rq.Queue, capsys: pytest.CaptureFixture[str]) -> None:
    job = queue.enqueue(tasks.nothing)
    script = f"import sys; from litebroker_rq.commandline import main; sys.exit(main({str(path)!r}, sys.argv[1:]))"

    worked = subprocess.run([sys.executable, "-c", script, "worker", "--burst"], check=False, capture_output=True)
    refused = subprocess.run([sys.executable, "-c", script, "no-such-command"], check=False, capture_output=True)

    assert (worked.returncode, refused.returncode) == (0, 2), worked.stderr
    assert status(job) == JobStatus.FINISHED
    assert commandline.main.__doc__


def test_a_pool_shares_the_jobs(queue: rq.Queue, processes: Processes) -> None:
    jobs = [queue.enqueue(tasks.nothing) for _ in range(40)]

    processes.run("worker-pool", "default", "-n", "4", "--burst")

    assert {status(job) for job in jobs} == {JobStatus.FINISHED}


def test_a_running_job_is_stopped_on_command(queue: rq.Queue, path: Path, processes: Processes) -> None:
    began = path.parent / "began.txt"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(path.parent / "never"))
    processes.rq("worker", "--name", "w1")
    wait_until(began.exists)

    send_stop_job_command(queue.connection, job.id)

    wait_until(lambda: status(job) == JobStatus.STOPPED, seconds=5)


def test_a_work_horse_is_killed_on_command(queue: rq.Queue, path: Path, processes: Processes) -> None:
    began = path.parent / "began.txt"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(path.parent / "never"))
    processes.rq("worker", "--name", "w1")
    wait_until(began.exists)

    send_kill_horse_command(queue.connection, "w1")

    wait_until(lambda: status(job) == JobStatus.FAILED, seconds=5)


def test_an_idle_worker_shuts_down_on_command(queue: rq.Queue, processes: Processes) -> None:
    worker = processes.rq("worker", "--name", "w1")
    wait_until(lambda: "Listening on" in processes.log(worker) and rq.Worker.all(connection=queue.connection))

    send_shutdown_command(queue.connection, "w1")

    assert processes.finish(worker, seconds=10) == 0
    assert rq.Worker.all(connection=queue.connection) == []


def test_a_warm_shutdown_lets_the_job_finish(queue: rq.Queue, path: Path, processes: Processes) -> None:
    began, gate = path.parent / "began.txt", path.parent / "gate"
    job, left = queue.enqueue(tasks.note_and_wait, str(began), "x", str(gate)), queue.enqueue(tasks.nothing)
    worker = processes.rq("worker")
    wait_until(began.exists)

    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "warm shut down" in processes.log(worker))
    gate.touch()

    assert processes.finish(worker) == 0
    assert (status(job), status(left)) == (JobStatus.FINISHED, JobStatus.QUEUED)


def test_suspended_workers_wait(queue: rq.Queue, processes: Processes) -> None:
    worker = processes.rq("worker", "--name", "w1")
    wait_until(lambda: "Listening on" in processes.log(worker))
    suspend(queue.connection)
    first, job = queue.enqueue(tasks.nothing), queue.enqueue(tasks.nothing)
    wait_until(lambda: "suspended" in processes.log(worker))

    wait_until(lambda: [w.get_state() for w in rq.Worker.all(connection=queue.connection)] == ["suspended"])
    before = status(job)
    resume(queue.connection)

    wait_until(lambda: status(job) == JobStatus.FINISHED)
    assert (status(first), before) == (JobStatus.FINISHED, JobStatus.QUEUED)


def test_a_job_that_takes_too_long_is_ended(queue: rq.Queue, path: Path, processes: Processes) -> None:
    began, never = path.parent / "began.txt", path.parent / "never"
    job = queue.enqueue(tasks.note_and_wait, str(began), "x", str(never), job_timeout=1)

    processes.run("worker", "--burst", "-w", "rq.SimpleWorker")

    assert status(job) == JobStatus.FAILED
    assert "JobTimeoutException" in failure(job)


def test_dependents_run_when_what_they_depend_on_has_finished(queue: rq.Queue, processes: Processes) -> None:
    first = queue.enqueue(tasks.add, 1, 1)
    second = queue.enqueue(tasks.add, 2, 2, depends_on=first)
    third = queue.enqueue(tasks.add, 3, 3, depends_on=Dependency(jobs=[first, second]))

    processes.run("worker", "--burst")

    assert [status(job) for job in (first, second, third)] == [JobStatus.FINISHED] * 3


def test_a_retry_comes_back(queue: rq.Queue, processes: Processes) -> None:
    job = queue.enqueue(tasks.fail, retry=rq.Retry(max=2))

    processes.run("worker", "--burst")

    job.refresh()
    assert (status(job), job.retries_left) == (JobStatus.FAILED, 0)


def test_a_scheduled_job_runs_when_its_time_has_come(queue: rq.Queue, processes: Processes) -> None:
    soon = queue.enqueue_in(timedelta(seconds=1), tasks.nothing)
    later = queue.enqueue_at(datetime.now(timezone.utc) + timedelta(hours=1), tasks.nothing)
    processes.rq("worker", "--with-scheduler")

    wait_until(lambda: status(soon) == JobStatus.FINISHED)

    assert status(later) == JobStatus.SCHEDULED


def test_cron_enqueues(queue: rq.Queue, path: Path, processes: Processes) -> None:
    if not hasattr(rq, "cron") and not _has_cron():
        pytest.skip("this release of rq has no cron")
    config = path.parent / "crontab.py"
    config.write_text(
        "from rq import cron\nfrom tests.rq import tasks\n"
        "cron.register(tasks.nothing, queue_name='default', interval=1)\n"
    )
    processes.rq("cron", str(config))

    wait_until(lambda: len(queue) >= 2)

    assert queue.jobs[0].func_name == "tests.rq.tasks.nothing"


def _has_cron() -> bool:
    try:
        import rq.cron  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_job_that_cannot_be_loaded_fails_and_the_next_one_runs(queue: rq.Queue, processes: Processes) -> None:
    broken = queue.enqueue(tasks.nothing)
    queue.connection.hset(broken.key, "data", b"not a pickle")
    good = queue.enqueue(tasks.nothing)

    processes.run("worker", "--burst")

    assert queue.connection.hget(broken.key, "status") == b"failed"
    assert status(good) == JobStatus.FINISHED


def test_large_arguments_and_results_come_through(queue: rq.Queue, processes: Processes) -> None:
    job = queue.enqueue(tasks.large, 5 * 1024 * 1024)
    echoed = queue.enqueue(tasks.add, "a" * 1024 * 1024, "b")

    processes.run("worker", "--burst")

    assert job.return_value() == b"x" * 5 * 1024 * 1024
    assert echoed.return_value() == "a" * 1024 * 1024 + "b"


def test_somebody_who_waits_for_a_result_has_it_at_once(queue: rq.Queue, path: Path, processes: Processes) -> None:
    if not hasattr(rq.job.Job, "latest_result") or "timeout" not in rq.job.Job.latest_result.__code__.co_varnames:
        pytest.skip("this release of rq cannot wait for results")
    gate = path.parent / "gate"
    job = queue.enqueue(tasks.note_and_wait, str(path.parent / "began"), "x", str(gate))
    processes.rq("worker")
    wait_until((path.parent / "began").exists)

    gate.touch()
    result = job.latest_result(timeout=10)

    assert result is not None
    assert result.return_value == "x"


def test_unique_jobs_raced_by_many_processes_have_one_winner(path: Path, queue: rq.Queue, processes: Processes) -> None:
    if "unique" not in rq.Queue.enqueue_call.__code__.co_varnames:
        pytest.skip("this release of rq has no unique jobs")
    racer = (
        "import sys, time, rq\n"
        "from litebroker_rq import connect\n"
        "from tests.rq import tasks\n"
        "queue = rq.Queue(connection=connect(sys.argv[1]))\n"
        "len(queue)\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "for n in range(10):\n"
        "    try: queue.enqueue(tasks.nothing, job_id=f'job-{n}', unique=True); print('won')\n"
        "    except rq.exceptions.DuplicateJobError: pass\n"
    )
    start = str(time.time() + 2)
    racers = [processes.script(racer, str(path), start) for _ in range(8)]

    for process in racers:
        assert processes.finish(process) == 0, processes.log(process)

    assert sum(processes.log(process).count("won") for process in racers) == 10
    assert sorted(queue.job_ids) == [f"job-{n}" for n in range(10)]


def test_two_schedulers_enqueue_each_job_once(path: Path, queue: rq.Queue, processes: Processes) -> None:
    jobs = [queue.enqueue_in(timedelta(seconds=2), tasks.nothing) for _ in range(100)]
    # Both believe that the lock is theirs.
    scheduler = (
        "import sys, time, rq\n"
        "from rq.scheduler import RQScheduler\n"
        "from litebroker_rq import connect\n"
        "scheduler = RQScheduler(['default'], connection=connect(sys.argv[1]))\n"
        "scheduler._acquired_locks = {'default'}\n"
        "scheduler.prepare_registries()\n"
        "end = time.time() + 6\n"
        "while time.time() < end:\n"
        "    scheduler.enqueue_scheduled_jobs()\n"
    )
    both = [processes.script(scheduler, str(path)) for _ in range(2)]

    for process in both:
        assert processes.finish(process) == 0, processes.log(process)

    assert sorted(queue.job_ids) == sorted(job.id for job in jobs)


def test_the_connection_travels_to_other_processes(connection: SQLiteConnection, path: Path) -> None:
    import pickle

    import redis

    connection.set("k", "v")
    pool = pickle.loads(pickle.dumps(connection.connection_pool))  # noqa: S301
    kwargs = connection.connection_pool.connection_kwargs
    rebuilt = SQLiteConnection(
        connection_pool=redis.ConnectionPool(connection_class=connection.connection_pool.connection_class, **kwargs)
    )

    assert redis.Redis(connection_pool=pool).get("k") == b"v"
    assert rebuilt.get("k") == b"v"
    assert redis.Redis(**kwargs).get("k") == b"v"
    assert connect(f"sqlite:///{path}").get("k") == b"v"


def test_a_forked_child_goes_on_with_the_connection(connection: SQLiteConnection) -> None:
    connection.set("k", "parent")
    child = os.fork()
    if child == 0:
        connection.set("k", "child")
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    assert connection.get("k") == b"child"
    assert connection.set("k", "parent again")

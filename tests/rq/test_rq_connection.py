"""The connection as such: URLs, errors, signals, threads, transactions, and how many of them RQ takes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from rq.job import JobStatus
from rq.timeouts import JobTimeoutException, UnixSignalDeathPenalty
from tests.rq import tasks
from tests.rq.conftest import Processes, wait_until

from litebroker import SQLiteStorage
from litebroker_rq import SQLiteConnection, connect, install, pool
from litebroker_rq.database import opened


def storage_of(connection: SQLiteConnection) -> SQLiteStorage:
    return opened(connection.connection_pool.database_url).storage  # type: ignore[attr-defined]


def counted(storage: SQLiteStorage, action: Callable[[], object]) -> int:
    """How many write transactions the action takes."""
    before = storage.transactions
    action()
    return storage.transactions - before


def test_enqueue_takes_one_write_transaction(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)

    assert counted(storage_of(connection), lambda: queue.enqueue(tasks.nothing)) == 1


def test_enqueue_many_takes_one_write_transaction(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)
    data = [rq.Queue.prepare_data(tasks.nothing) for _ in range(50)]

    assert counted(storage_of(connection), lambda: queue.enqueue_many(data)) == 1


def test_a_job_takes_at_most_three_write_transactions(connection: SQLiteConnection, queue: rq.Queue) -> None:
    def drain() -> None:
        rq.SimpleWorker([queue], connection=connection).work(burst=True, logging_level="ERROR")

    for _ in range(20):
        queue.enqueue(tasks.nothing)
    few = counted(storage_of(connection), drain)
    for _ in range(40):
        queue.enqueue(tasks.nothing)
    many = counted(storage_of(connection), drain)

    # What a worker takes besides its jobs cancels out.
    assert (many - few) / 20 <= 3


def test_a_worker_that_waits_writes_nothing(connection: SQLiteConnection, queue: rq.Queue, path: Path) -> None:
    connection.blpop(queue.key, timeout=1)
    with contextlib.closing(sqlite3.connect(path)) as other:
        before = other.execute("pragma data_version").fetchone()

        connection.blpop(queue.key, timeout=2)

        assert other.execute("pragma data_version").fetchone() == before


def test_a_job_is_saved_and_queued_or_neither(connection: SQLiteConnection, queue: rq.Queue) -> None:
    pipeline = connection.pipeline()
    queue.enqueue(tasks.nothing, job_id="j", pipeline=pipeline)
    pipeline.geoadd("k", (1, 2, "x"))

    with pytest.raises(redis.ResponseError):
        pipeline.execute()

    assert not connection.exists("rq:job:j")
    assert len(queue) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_time_limit_that_strikes_in_a_transaction_rolls_it_back(connection: SQLiteConnection) -> None:
    connection.set("n", 0)
    strikes = 0
    while strikes < 100:
        previous = signal.signal(signal.SIGPROF, _strike)
        signal.setitimer(signal.ITIMER_PROF, 0.002)
        try:
            for _ in range(100):  # it may strike where Python swallows it: in a `__del__`
                with connection.pipeline() as pipeline:
                    pipeline.incr("n")
                    pipeline.hset("h", "n", "x")
                    pipeline.incr("m")
                    pipeline.execute()
        except _StruckError:
            strikes += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)

    assert connection.get("n") == connection.get("m")
    assert connection.set("after", 1)


class _StruckError(Exception):
    pass


def _strike(*_: object) -> None:
    raise _StruckError


@pytest.mark.timeout(60, method="thread")  # rq's own limit is the alarm that pytest-timeout would use
def test_rqs_own_time_limit_ends_a_blocked_command(connection: SQLiteConnection) -> None:
    with pytest.raises(JobTimeoutException), UnixSignalDeathPenalty(1, JobTimeoutException):
        connection.blpop("rq:queue:none", timeout=30)

    assert connection.ping()


def test_a_signal_handler_may_use_the_connection_anywhere(connection: SQLiteConnection) -> None:
    handled: list[int] = []
    number = itertools.count()

    def handler(*_: object) -> None:
        mine = next(number)
        connection.set(f"from-handler-{mine}", 1)
        connection.hset("both", f"from-handler-{mine}", 1)
        handled.append(mine)

    connection.set("n", 0)
    previous = signal.signal(signal.SIGPROF, handler)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        runs = 0
        while len(handled) < 300:
            with connection.pipeline() as pipeline:
                pipeline.incr("n")
                pipeline.sadd("s", runs)
                pipeline.hset("both", "n", runs)
                pipeline.execute()
            runs += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)

    assert int(connection.get("n") or 0) == runs == connection.scard("s")
    assert len(connection.keys("from-handler-*")) == len(handled)
    assert connection.hlen("both") == len(handled) + 1


def test_threads_share_a_connection(connection: SQLiteConnection) -> None:
    def count() -> None:
        for _ in range(50):
            connection.incr("n")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert connection.get("n") == b"400"


def test_messages_reach_those_who_are_subscribed(connection: SQLiteConnection, path: Path) -> None:
    heard: list[object] = []
    subscription = connection.pubsub()  # type: ignore[no-untyped-call]
    subscription.subscribe(news=lambda message: heard.append(message["data"]))
    subscription.psubscribe(**{"w*": lambda message: heard.append(message["channel"])})
    thread = subscription.run_in_thread(sleep_time=60, daemon=True)
    try:
        receivers = connection.publish("news", "one")
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from litebroker_rq import connect; connect({str(path)!r}).publish('weather', 'two')",
            ],
            check=True,
        )
        connection.publish("other", "three")

        wait_until(lambda: len(heard) == 2)
    finally:
        thread.stop()
        subscription.unsubscribe()
        subscription.punsubscribe()
        thread.join(2)
    assert (receivers, heard) == (1, [b"one", b"weather"])
    assert connection.publish("news", "nobody") == 0


def test_the_database_of_another_application_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("create table invoices (id integer primary key)")
    other.close()

    with pytest.raises(redis.ConnectionError, match=r"invoices|other application"):
        connect(path).set("k", "v")


@pytest.mark.parametrize("url", ["redis://localhost", "sqlite:", "sqlite:///", "sqlite:///jobs.db?lease=0", ":memory:"])
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises((ValueError, redis.ConnectionError)):
        SQLiteConnection.from_url(url).ping()


@pytest.mark.parametrize("name", ["with space.db", "100%.db", "a%20b.db", "what?.db", "käse.db"])
def test_a_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    connection = connect(tmp_path / name)

    connection.set("k", "v")

    assert (tmp_path / name).exists()
    assert SQLiteConnection(connection.connection_pool.database_url).get("k") == b"v"  # type: ignore[attr-defined]
    assert connect(tmp_path / name, durability="full").get("k") == b"v"


def test_tools_that_take_only_a_url_take_one_of_ours(path: Path, connection: SQLiteConnection) -> None:
    install()
    install()

    client = redis.Redis.from_url(f"sqlite:///{path}")
    elsewhere = redis.Redis.from_url("redis://localhost:1/3")

    client.set("k", "v")
    assert connection.get("k") == b"v"
    assert elsewhere.connection_pool.connection_kwargs["db"] == 3


def test_a_module_is_run_with_the_scheme_known(path: Path, connection: SQLiteConnection) -> None:
    tool = path.parent / "tool.py"
    tool.write_text(
        "import sys, redis\nassert __name__ == '__main__'\nredis.Redis.from_url(sys.argv[1]).set('k', 'v')\n"
    )
    command = [sys.executable, "-m", "litebroker_rq", "tool", f"sqlite:///{path}"]

    subprocess.run(command, check=True, cwd=path.parent)

    assert connection.get("k") == b"v"


def test_a_pool_is_written_as_source_code_that_makes_it(path: Path, connection: SQLiteConnection) -> None:
    connection.set("k", "v")
    source = f"from redis import Redis; print(Redis(**{connection.connection_pool.connection_kwargs!r}).get('k'))"

    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert done.stdout == "b'v'\n"
    assert pool(f"sqlite:///{path}") == connection.connection_pool


def test_what_a_worker_says_of_itself_is_read_back_at_once(connection: SQLiteConnection, queue: rq.Queue) -> None:
    worker = rq.SimpleWorker([queue], connection=connection, name="w1")
    worker.register_birth()

    worker.set_state("idle")
    worker.heartbeat()

    assert connection.hget(worker.key, "state") == b"idle"
    assert 0 < connection.ttl(worker.key) <= worker.worker_ttl + 60
    worker.register_death()


def test_a_worker_that_waits_has_said_what_it_kept_back(
    connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    worker = rq.SimpleWorker([queue], connection=connection, name="w1")
    worker.register_birth()
    worker.set_state("idle")

    connection.blpop(queue.key, timeout=1)

    with sqlite3.connect(path) as other:
        ((value,),) = other.execute("select value from litebroker_rq_keys where key = cast('rq:worker:w1' as blob)")
    other.close()
    assert '"state":"idle"' in value
    worker.register_death()


def test_an_execution_that_a_worker_registers_is_read_back_at_once(
    connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    worker, job = performing_worker(connection, queue)

    execution = worker.prepare_execution(job)

    assert connection.keys("rq:execution:*") == [execution.key.encode()]
    assert [member for member, _ in entries(path)] == [execution.composite_key.encode()]
    worker.register_death()


def test_an_execution_is_written_before_what_its_worker_writes_next(
    connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    worker, job = performing_worker(connection, queue)
    worker.prepare_execution(job)

    connection.set("next", 1)

    assert len(entries(path)) == 1
    worker.register_death()


@pytest.mark.parametrize("beside", [[], ["DBSIZE"]])
def test_a_command_that_is_refused_beside_an_execution_is_refused_at_once(
    beside: list[str], connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    worker, job = performing_worker(connection, queue)
    pipeline: Any = connection.pipeline()
    rq.executions.Execution.create(job, 90, pipeline=pipeline, worker_name=worker.name)
    for name in beside:
        pipeline.execute_command(name)
    pipeline.execute_command("HSET", worker.key, "state", "busy", "odd")

    replies = pipeline.execute(raise_on_error=False)

    assert isinstance(replies[-1], redis.ResponseError)
    assert len(entries(path)) == 1
    worker.register_death()


def test_a_worker_that_has_others_perform_its_jobs_registers_them_at_once(
    connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    performing_worker(connection, queue)[0].register_death()
    worker = rq.Worker([queue], connection=connection)
    worker.register_birth()

    worker.prepare_execution(queue.enqueue(tasks.nothing))

    assert len(entries(path)) == 1
    worker.register_death()


def test_what_was_kept_back_before_a_watch_is_no_change(connection: SQLiteConnection, queue: rq.Queue) -> None:
    worker = performing_worker(connection, queue)[0]
    worker.set_state("idle")
    pipeline = connection.pipeline()
    pipeline.watch(worker.key)  # type: ignore[no-untyped-call]

    state = pipeline.hget(worker.key, "state")
    pipeline.multi()
    pipeline.hset(worker.key, "seen", "yes")

    assert pipeline.execute() == [1]
    assert state == b"idle"
    worker.register_death()


def test_what_is_kept_back_after_a_watch_is_a_change(connection: SQLiteConnection, queue: rq.Queue) -> None:
    worker = performing_worker(connection, queue)[0]
    pipeline = connection.pipeline()
    pipeline.watch(worker.key)  # type: ignore[no-untyped-call]
    worker.set_state("idle")
    pipeline.multi()
    pipeline.hset(worker.key, "seen", "yes")

    with pytest.raises(redis.WatchError):
        pipeline.execute()

    assert not connection.hexists(worker.key, "seen")
    worker.register_death()


def test_what_was_kept_back_outlives_a_transaction_that_failed(
    connection: SQLiteConnection, queue: rq.Queue, path: Path
) -> None:
    worker, job = performing_worker(connection, queue)
    worker.prepare_execution(job)
    worker.set_state("idle")

    with (
        contextlib.suppress(_StruckError),
        opened(connection.connection_pool.database_url).writing(),  # type: ignore[attr-defined]
    ):
        raise _StruckError

    assert len(entries(path)) == 0
    assert connection.hget(worker.key, "state") == b"idle"
    assert len(entries(path)) == 1
    worker.register_death()


def performing_worker(connection: SQLiteConnection, queue: rq.Queue) -> tuple[rq.SimpleWorker, rq.job.Job]:
    """A worker that has performed a job, and is about to perform another."""
    worker = rq.SimpleWorker([queue], connection=connection, name="w1")
    worker.register_birth()
    done, job = queue.enqueue(tasks.nothing), queue.enqueue(tasks.nothing)
    worker.execute_job(done, queue)
    return worker, job


def entries(path: Path) -> list[tuple[bytes, float]]:
    """What stands in the StartedJobRegistry, as others see it."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        return other.execute(
            "select member, score from litebroker_rq_members where key_id = (select id from litebroker_rq_keys"
            " where key = cast('rq:wip:default' as blob))"
        ).fetchall()


def test_a_queue_that_somebody_deleted_is_known_again_with_its_next_job(
    connection: SQLiteConnection, queue: rq.Queue, processes: Processes, path: Path
) -> None:
    queue.enqueue(tasks.nothing)
    queue.enqueue(tasks.nothing)
    deleting = processes.script(
        "import sys; from litebroker_rq import connect; connect(sys.argv[1]).delete('rq:queues')", str(path)
    )
    assert processes.finish(deleting) == 0

    queue.enqueue(tasks.nothing)

    assert connection.smembers("rq:queues") == {b"rq:queue:default"}


def test_a_fork_inherits_no_lock_that_another_thread_held(connection: SQLiteConnection) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            connection.incr("n")

    threads = [threading.Thread(target=write, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            child = os.fork()
            if child == 0:
                connection.incr("children")
                os._exit(0)
            wait_for_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert connection.get("children") == b"60"


def wait_for_child(pid: int) -> None:
    end = time.monotonic() + 20
    while True:
        found, ended = os.waitpid(pid, os.WNOHANG)
        if found:
            assert ended == 0
            return
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hung")
        time.sleep(0.001)


def test_names_may_be_long(connection: SQLiteConnection) -> None:
    name = b"k" * (1 << 20)

    connection.hset(name, name, name)

    assert connection.hgetall(name) == {name: name}
    assert connection.delete(name) == 1


def test_jobs_run_in_the_process_when_that_is_asked_for(connection: SQLiteConnection) -> None:
    queue = rq.Queue(connection=connection, is_async=False)

    job = queue.enqueue(tasks.add, 1, 2)

    assert (job.get_status(), job.return_value()) == (JobStatus.FINISHED, 3)

"""What work horses do in test_rq_horses.py. It is imported by their workers' processes, as `tests.rq.horses`."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

import rq
from redis.client import PubSub
from rq.job import get_current_job

from litebroker_rq import Queue as SQLiteQueue
from litebroker_rq import SQLiteConnection
from litebroker_rq.database import all_opened


def connection() -> SQLiteConnection:
    job = get_current_job()
    assert job is not None
    assert isinstance(job.connection, SQLiteConnection)
    return job.connection


def alone() -> bool:
    """Whether this process uses the file by itself."""
    (database,) = all_opened()
    return database.line is None


def ask() -> tuple[bool, bytes | None]:
    value = connection().set("word", "x") and connection().get("word")
    assert value is None or isinstance(value, bytes)
    return alone(), value


def wait_for_a_list() -> tuple[object, bool]:
    connection().rpush("list", "x")
    popped = connection().blpop(["list"], timeout=5)
    return popped, alone()


def subscribe() -> tuple[bytes, bool]:
    channel: PubSub = connection().pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    channel.subscribe("news")
    channel.get_message(timeout=1)
    connection().publish("news", "x")
    message = channel.get_message(timeout=5)
    assert message is not None
    return message["data"], alone()


def load_a_script() -> tuple[object, bool]:
    """And have it run after the work horse has left its worker."""
    name = connection().script_load("return redis.call('incr', KEYS[1])")
    wait_for_a_list()
    return connection().evalsha(name, 1, "count"), alone()


def enqueue_once() -> tuple[bool, bool]:
    queue = SQLiteQueue("other", connection=connection())
    jobs = [queue.enqueue("tests.rq.tasks.nothing", dedupe_key="one") for _ in range(2)]
    return jobs[0].id == jobs[1].id, alone()


def work() -> tuple[int, bool]:
    """A worker within a job."""
    queue = rq.Queue("inner", connection=connection())
    queue.enqueue("tests.rq.tasks.nothing")
    rq.SimpleWorker([queue], connection=connection()).work(burst=True, logging_level="ERROR")
    return queue.finished_job_registry.count, alone()


def fork() -> tuple[int, bool]:
    """Two generations that use the connection, beside this one."""
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            connection().incr("count")
            inner = os.fork()
            if inner == 0:
                connection().incr("count")
                os._exit(0)
            os.waitpid(inner, 0)
            os._exit(0)
        connection().incr("count")
        os.waitpid(pid, 0)
    return int(connection().get("count") or 0), alone()


def count_in_threads() -> tuple[int, bool]:
    client = connection()  # the current job is known to this thread only
    threads = [threading.Thread(target=lambda: [client.incr("count") for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(connection().get("count") or 0), alone()


class Interrupted(BaseException):
    """As RQ's time limit: it strikes anywhere."""


def be_interrupted() -> tuple[int, int, int]:
    """Count until a signal handler's exception strikes: what was counted in the file, acknowledged, and struck."""

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, strike)
    client = connection()
    acknowledged = struck = 0
    for turn in range(40):
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + turn * 0.00005)
        try:
            for _ in range(100):
                client.incr("count")
                acknowledged += 1
        except Interrupted:
            struck += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return int(client.get("count") or 0), acknowledged, struck


def ask_in_handlers() -> tuple[int, int, int, int]:
    """Count, and have a signal handler write, too: how often either did, and what stands in the file."""
    client = connection()
    numbers = itertools.count()
    handled = []

    def count(_number: int, _frame: FrameType | None) -> None:
        handled.append(client.set(f"handled-{next(numbers)}", 1))

    signal.signal(signal.SIGUSR1, count)
    script = f"import os, time; [(time.sleep(0.002), os.kill({os.getpid()}, {int(signal.SIGUSR1)})) for _ in range(50)]"
    with subprocess.Popen([sys.executable, "-c", script]) as sender:
        own = 0
        while sender.poll() is None:
            client.incr("count")
            own += 1
    return own, int(client.get("count") or 0), len(handled), len(client.keys("handled-*"))


def kill_worker_and_ask() -> tuple[object, bool]:
    os.kill(os.getppid(), signal.SIGKILL)
    connection().set("word", "x")
    value = connection().get("word")
    return value, alone()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

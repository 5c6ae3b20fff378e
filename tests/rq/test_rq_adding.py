"""What enqueue sends, as one job saved and pushed: what it takes, and that it does what its commands say."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from tests.rq import tasks

from litebroker import JobRecord, State
from litebroker_rq import SQLiteConnection, connect
from litebroker_rq.database import opened

SAVED = {"status": "queued", "origin": "default", "description": "f()"}


@contextlib.contextmanager
def statements(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SQLiteConnection, list[str]]]:
    """A connection, and the statements that are run for it."""
    found: list[str] = []
    connect_to = sqlite3.connect

    def spied(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = connect_to(*arguments, **options)
        made.set_trace_callback(found.append)
        return made

    monkeypatch.setattr(sqlite3, "connect", spied)
    yield connect(path), found


def push(connection: redis.Redis, job_id: str, fields: Any, *, front: bool = False) -> list[Any]:
    """The replies to the pipeline that enqueue sends."""
    with connection.pipeline() as pipeline:
        pipeline.hset(f"rq:job:{job_id}", "status", "queued")
        pipeline.hset(f"rq:job:{job_id}", mapping=fields)
        (pipeline.lpush if front else pipeline.rpush)("rq:queue:default", job_id)
        return pipeline.execute()


def jobs(connection: SQLiteConnection) -> list[JobRecord]:
    """The engine's jobs of the queue, as they wait."""
    storage = opened(connection.connection_pool.database_url).storage  # type: ignore[attr-defined]
    return list(storage.page("rq:queue:default", State.PENDING, limit=100))


def test_enqueue_takes_five_statements(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with statements(path, monkeypatch) as (connection, run):
        queue = rq.Queue(connection=connection)
        for _ in range(3):
            queue.enqueue(tasks.nothing)
        runs: list[list[str]] = []

        for _ in range(20):
            run.clear()
            queue.enqueue(tasks.nothing)
            runs.append(list(run))

    # Once a second what has expired is deleted, and twice a second dead processes are looked for.
    fewest = min(runs, key=len)
    assert [text.split(maxsplit=1)[0].lower() for text in fewest] == ["begin", "select", "insert", "insert", "commit"]


def test_a_job_of_enqueue_many_takes_less_than_two_statements(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with statements(path, monkeypatch) as (connection, run):
        queue = rq.Queue(connection=connection)
        queue.enqueue(tasks.nothing)
        data = [rq.Queue.prepare_data(tasks.nothing) for _ in range(480)]
        run.clear()

        queue.enqueue_many(data)

    # One of twelve looks, one of sixteen hashes, and one of ten jobs, and a few for all of them.
    assert len(run) <= 480 * (1 / 12 + 1 / 16 + 1 / 10) + 12


def test_enqueue_answers_what_redis_answers(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)

    assert push(connection, "j", SAVED) == [1, 2, 1]
    assert push(connection, "j", {**SAVED, "timeout": 180}) == [0, 1, 1]


@pytest.mark.parametrize("front", [False, True])
def test_the_first_job_and_the_next_are_saved_alike(connection: SQLiteConnection, front: bool) -> None:
    for job_id in ("first", "next"):  # the queue is not known yet at the first
        connection.sadd("rq:queues", "rq:queue:default")
        push(connection, job_id, {**SAVED, "data": b"\x00\xff"}, front=front)

    first, following = sorted(jobs(connection), key=lambda job: str(job.ref))
    assert (first.ref, following.ref) == ("first", "next")
    fields = {"queue", "state", "priority", "attempts", "max_attempts", "task", "encoding", "payload", "headers"}
    assert {name: getattr(first, name) for name in fields} == {name: getattr(following, name) for name in fields}
    assert connection.lrange("rq:queue:default", 0, -1) == ([b"next", b"first"] if front else [b"first", b"next"])
    assert connection.hgetall("rq:job:first") == connection.hgetall("rq:job:next")
    assert connection.type("rq:job:next") == b"hash"
    assert connection.ttl("rq:job:next") == -1


def test_a_job_that_is_there_keeps_what_is_not_set_again(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)
    connection.hset("rq:job:j", mapping={"mine": "1", "description": "old"})
    connection.expire("rq:job:j", 100)

    push(connection, "j", SAVED)

    assert connection.hgetall("rq:job:j") == {
        b"mine": b"1", b"status": b"queued", b"origin": b"default", b"description": b"f()",
    }  # fmt: skip
    assert 0 < connection.ttl("rq:job:j") <= 100
    assert len(queue) == 2


def test_a_job_that_has_expired_is_a_new_one(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)
    connection.hset("rq:job:j", "mine", "1")
    connection.pexpire("rq:job:j", 1)
    while connection.exists("rq:job:j"):
        pass

    push(connection, "j", SAVED)

    assert connection.hget("rq:job:j", "mine") is None
    assert connection.ttl("rq:job:j") == -1


def test_another_kind_of_value_is_refused_and_the_job_pushed_as_redis_does(
    connection: SQLiteConnection, queue: rq.Queue
) -> None:
    queue.enqueue(tasks.nothing)
    connection.set("rq:job:j", "text")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        push(connection, "j", SAVED)

    assert connection.get("rq:job:j") == b"text"
    assert connection.lrange("rq:queue:default", -1, -1) == [b"j"]


def test_what_is_large_and_what_is_no_ascii_come_back_as_they_are(
    connection: SQLiteConnection, queue: rq.Queue
) -> None:
    queue.enqueue(tasks.nothing)

    push(connection, "large", {**SAVED, "data": b"\x00" * 10_000})
    push(connection, "größe", {**SAVED, "description": "größe()"})

    assert connection.hget("rq:job:large", "data") == b"\x00" * 10_000
    assert connection.hget("rq:job:größe", "description") == "größe()".encode()
    assert connection.lrange("rq:queue:default", 1, -1) == [b"large", "größe".encode()]


def test_watch_sees_a_job_that_was_enqueued(connection: SQLiteConnection, queue: rq.Queue) -> None:
    queue.enqueue(tasks.nothing)
    with connection.pipeline() as pipeline:
        pipeline.watch("rq:job:j")
        push(connection, "j", SAVED)
        pipeline.multi()
        pipeline.set("k", "v")

        with pytest.raises(redis.WatchError):
            pipeline.execute()


def test_a_queue_that_this_process_removed_is_known_again_with_its_next_job(
    connection: SQLiteConnection, queue: rq.Queue
) -> None:
    queue.enqueue(tasks.nothing)
    queue.enqueue(tasks.nothing)
    connection.srem("rq:queues", queue.key)

    queue.enqueue(tasks.nothing)

    assert connection.smembers("rq:queues") == {b"rq:queue:default"}
    assert len(queue) == 3


def test_jobs_of_two_queues_in_turn_make_both_known(connection: SQLiteConnection) -> None:
    queues = [rq.Queue(name, connection=connection) for name in ("high", "low")]
    for queue in queues * 2:
        queue.enqueue(tasks.nothing)
    connection.delete("rq:queues")

    for queue in queues:
        queue.enqueue(tasks.nothing)

    assert connection.smembers("rq:queues") == {b"rq:queue:high", b"rq:queue:low"}
    assert [len(queue) for queue in queues] == [3, 3]


def test_a_worker_enqueues_while_it_keeps_its_own_heartbeat_back(connection: SQLiteConnection, queue: rq.Queue) -> None:
    worker = rq.SimpleWorker([queue], connection=connection, name="w")
    worker.register_birth()
    queue.enqueue(tasks.nothing)
    worker.heartbeat()
    worker.set_state("busy")

    queue.enqueue(tasks.nothing)

    with contextlib.closing(connect(connection.connection_pool.database_url)) as other:  # type: ignore[attr-defined]
        assert other.hget(worker.key, "state") == b"busy"
        assert other.llen(queue.key) == 2
    worker.register_death()


class _StruckError(Exception):
    pass


def _strike(*_: object) -> None:
    raise _StruckError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_time_limit_that_strikes_in_an_enqueue_leaves_a_job_whole_or_none(
    connection: SQLiteConnection, queue: rq.Queue
) -> None:
    queue.enqueue(tasks.nothing)
    strikes = 0
    while strikes < 60:
        previous = signal.signal(signal.SIGPROF, _strike)
        signal.setitimer(signal.ITIMER_PROF, 0.002)
        try:
            for _ in range(50):
                queue.enqueue(tasks.nothing)
        except _StruckError:
            strikes += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)

    queued = {f"rq:job:{job_id}".encode() for job_id in queue.job_ids}
    assert queued == set(connection.keys("rq:job:*"))
    assert connection.smembers("rq:queues") == {b"rq:queue:default"}

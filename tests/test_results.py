"""Results: what becomes of a job, for whoever waits for it; and how far a running one has come."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT, Told, comes_true

from litebroker import (
    RAW,
    Backoff,
    Context,
    Counts,
    Job,
    JobCancelledError,
    JobFailedError,
    JobLapsedError,
    JobRemovedError,
    NewJob,
    PayloadError,
    PayloadTooLargeError,
    Progress,
    Queue,
    ResultError,
    ResultExpiredError,
    ResultNotKeptError,
    ResultRefusedError,
    ResultTimeoutError,
    Retention,
    State,
    StorageClosedError,
)
from litebroker.results import PROGRESS, RESULTS
from litebroker.sqlite import SQLiteStorage
from litebroker.testing import ManualClock
from litebroker.testing.model import ModelStorage

FOREVER = 30  # seconds that nobody waits in vain


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def queue(storage: SQLiteStorage, told: Told) -> Iterator[Queue[Any]]:
    queue: Queue[Any] = Queue("sums", storage, results=3600, backoff=Backoff.fixed(0), on_error=told)
    yield queue
    queue.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(tmp_path: Path, clock: ManualClock) -> Iterator[Queue[Any]]:
    """A queue whose time is turned by hand."""
    storage = SQLiteStorage(tmp_path / "timed.db", clock=clock, durability="relaxed")
    queue: Queue[Any] = Queue("sums", storage, results=60, lease=30, backoff=Backoff.fixed(0))
    yield queue
    queue.close()
    storage.close()


def claimed(queue: Queue[Any]) -> Job[Any]:
    (job,) = queue.claim()
    return job


def kept(queue: Queue[Any]) -> int:
    """How many results there are."""
    return queue.storage.size(RESULTS)


def values_in(path: Path) -> int:
    """How many rows the file has for values, be they over or not."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("select count(*) from litebroker_value").fetchone()[0])


# What is kept


@pytest.mark.parametrize("value", [None, 0, "", [], {"total": [1, 2.5, "ä", None, True]}, "x" * 100_000], ids=repr)
def test_what_the_handler_returned_comes_back(queue: Queue[Any], value: Any) -> None:
    queue.process(lambda _: value)

    result = queue.add("go").result(LIMIT)

    assert (type(result), result) == (type(value), value)


def test_an_async_handlers_result_comes_back(queue: Queue[Any]) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    queue.process(double)

    assert queue.add(21).result(LIMIT) == 42


def test_a_result_is_read_as_often_as_one_likes_and_by_id(queue: Queue[Any], storage: SQLiteStorage) -> None:
    job = queue.add(1)
    queue.complete(claimed(queue), result="one")

    elsewhere: Queue[Any] = Queue("sums", storage)

    assert [job.result(), job.result(0), queue.result(job.id), elsewhere.result(job.id, timeout=0)] == ["one"] * 4
    assert queue.get(job.id) is None


@pytest.mark.parametrize("where", ["a model", ":memory:", "sqlite:///{}/jobs.db?driver=apsw&durability=full"])
def test_it_works_on_any_storage(where: str, tmp_path: Path) -> None:
    storage = ModelStorage() if where == "a model" else where.format(tmp_path)
    queue: Queue[Any] = Queue("sums", storage, results=60)
    queue.process(lambda number: number + 1)

    assert queue.add(1).result(LIMIT) == 2
    queue.close()


def test_nothing_is_kept_unless_it_is_asked_for(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("plain", storage)
    job = queue.add(1)

    queue.complete(claimed(queue), result="dropped")

    assert kept(queue) == 0
    with pytest.raises(ResultNotKeptError, match=rf"job {job.id} keeps no result: ask for it.*keep_result="):
        job.result()


def test_that_nothing_is_kept_is_said_before_anyone_waits_in_vain(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("plain", storage)
    job = queue.add(1)

    for ask in (job.result, lambda: queue.result(job.id), lambda: queue.future(job)):
        with pytest.raises(ResultNotKeptError):
            ask()


def test_a_dead_letter_says_why_though_it_keeps_no_result(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("plain", storage)
    job = queue.add(1)
    queue.fail(claimed(queue), ValueError("no"), retry=False)

    with pytest.raises(JobFailedError, match="ValueError: no"):
        queue.result(job.id)


def test_a_job_goes_its_own_way(queue: Queue[Any], storage: SQLiteStorage) -> None:
    plain: Queue[Any] = Queue("plain", storage)
    without = queue.add(1, keep_result=0)
    _, with_one = plain.add_many([1, NewJob(2, keep_result=timedelta(minutes=1))])

    queue.complete(claimed(queue), result="dropped")
    for job in plain.claim(2):
        plain.complete(job, result=job.data)

    assert with_one.result() == 2
    with pytest.raises(ResultNotKeptError):
        without.result()
    assert kept(queue) == 1


def test_what_follows_a_job_and_what_a_schedule_adds_keeps_results_too(timed: Queue[Any], clock: ManualClock) -> None:
    timed.schedule("tick", id="s", every=10)
    timed.add("first")
    timed.complete(claimed(timed), then=["second"])
    clock.advance(10)

    jobs = timed.claim(5)
    for job in jobs:
        timed.complete(job, result=job.data)

    assert [timed.result(job.id) for job in jobs] == ["second", "tick"]


def test_the_worker_needs_no_setting_for_it(storage: SQLiteStorage) -> None:
    added: Queue[Any] = Queue("sums", storage, results=60)
    working: Queue[Any] = Queue("sums", storage)
    working.process(sum)

    assert added.add([1, 2]).result(LIMIT) == 3
    working.close()


def test_headers_show_what_the_user_gave(queue: Queue[Any]) -> None:
    seen = []
    queue.process(lambda _, context: seen.append(dict(context.headers)))

    job = queue.add(1, headers={"trace": "7"})
    job.result(LIMIT)

    assert (dict(job.headers), seen) == ({"trace": "7"}, [{"trace": "7"}])
    with pytest.raises(ValueError, match="litebroker's own: give keep_result"):
        queue.add(1, headers=dict(job.record.headers))


@pytest.mark.parametrize("results", [0, -1, "1h", True, float("nan")])
def test_a_time_that_is_none_is_refused(storage: SQLiteStorage, results: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="results="):
        Queue("sums", storage, results=results)


def test_results_are_kept_whether_or_not_the_job_is(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("sums", storage, results=60, retention=Retention(completed=10))
    job = queue.add(1)
    queue.complete(claimed(queue), result="one")

    found = queue.get(job.id)

    assert found is not None
    assert (found.state, found.result()) == (State.COMPLETED, "one")


# Serializers and limits


class Pickle:
    """A serializer of one's own."""

    name = "pickle"

    def dumps(self, value: Any, /) -> bytes:
        return pickle.dumps(value)

    def loads(self, data: bytes, /) -> Any:
        return pickle.loads(data)  # noqa: S301 (our own)


def test_a_result_is_encoded_as_payloads_are(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("sums", storage, results=60, serializer=Pickle())
    queue.process(lambda data: {data, 2})

    job = queue.add(1)

    assert job.result(LIMIT) == {1, 2}
    with pytest.raises(PayloadError, match="pickle"):
        Queue("sums", storage).result(job.id)
    queue.close()


def test_a_queue_of_bytes_keeps_bytes_and_none(storage: SQLiteStorage) -> None:
    queue: Queue[bytes] = Queue("raw", storage, results=60, serializer=RAW)
    queue.process(lambda data: data[::-1] or None)

    assert [queue.add(b"\x00\n\xff").result(LIMIT), queue.add(b"").result(LIMIT)] == [b"\xff\n\x00", None]
    queue.close()


@pytest.mark.parametrize(
    ("value", "kind"), [(object(), PayloadError), ((1, 2), PayloadError), ("x" * 2000, PayloadTooLargeError)], ids=repr
)
def test_a_job_whose_result_cannot_be_kept_is_done_all_the_same(
    storage: SQLiteStorage, told: Told, value: Any, kind: type[Exception]
) -> None:
    ran = []
    queue: Queue[Any] = Queue("sums", storage, results=60, max_payload_bytes=1000, on_error=told)

    def handler(data: Any) -> Any:
        ran.append(data)
        return value

    queue.process(handler)
    job = queue.add(1)

    with pytest.raises(ResultRefusedError, match=rf"job {job.id} is done, but .*{kind.__name__}: "):
        job.result(LIMIT)
    assert (ran, queue.stats(), told.kinds) == ([1], Counts(), ["result"])
    assert type(told.errors[0][0]) is kind
    queue.close()


def test_a_result_given_by_hand_is_refused_before_anything_is_done(queue: Queue[Any]) -> None:
    queue.add(1)
    job = claimed(queue)

    with pytest.raises(PayloadError, match=r"\$ is nan"):
        queue.complete(job, result=float("nan"))

    assert queue.stats().active == 1
    assert queue.complete(job, result=1) is True


# How a job ends


def test_a_failed_job_raises_what_it_raised_elsewhere(queue: Queue[Any]) -> None:
    def handler(_: Any) -> None:
        try:
            {"there": 1}["missing"]
        except KeyError as error:
            raise ValueError("no price") from error

    queue.process(handler)
    job = queue.add(1, attempts=1)

    with pytest.raises(JobFailedError) as raised:
        job.result(LIMIT)

    error = raised.value
    assert (str(error), error.job_id, error.reason) == (f"job {job.id} failed: ValueError: no price", job.id, "handler")
    assert (error.type, error.message, error.causes) == ("ValueError", "no price", ("KeyError: 'missing'",))
    assert 'raise ValueError("no price") from error' in error.stack
    assert error.stack in str(error.__cause__)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
    assert (type(again), str(again), vars(again)) == (JobFailedError, str(error), vars(error))


def test_an_attempt_that_is_tried_again_is_no_end(queue: Queue[Any]) -> None:
    def handler(_: Any, context: Context) -> int:
        if context.attempt < 3:
            raise ValueError("not yet")
        return context.attempt

    job = queue.add(1)
    future = queue.future(job)
    queue.process(handler)

    assert future.result(LIMIT) == 3


def test_why_a_job_failed_is_kept_as_long_as_a_result(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("sums", storage, results=60, retention=Retention(failed=0))
    job = queue.add(1)
    queue.fail(claimed(queue), ValueError("no"), retry=False)

    assert queue.get(job.id) is None
    with pytest.raises(JobFailedError, match="ValueError: no") as raised:
        job.result()
    assert raised.value.reason == "rejected"


def test_a_payload_that_cannot_be_read_is_an_end_too(queue: Queue[Any], storage: SQLiteStorage) -> None:
    job = queue.add(1, attempts=1)
    with storage.transaction() as transaction:
        transaction.execute("update litebroker_job set payload = x'ff' where id = ?", [job.id])

    assert queue.claim() == []

    with pytest.raises(JobFailedError) as raised:
        job.result()
    assert raised.value.reason == "parse"


def test_a_dead_letter_that_is_tried_again_has_not_ended(queue: Queue[Any]) -> None:
    job = queue.add(1)
    queue.fail(claimed(queue), ValueError("no"), retry=False)
    queue.retry(job)

    with pytest.raises(ResultTimeoutError, match="it is pending"):
        job.result(0)
    queue.complete(claimed(queue), result="at last")
    assert job.result() == "at last"


def test_a_cancelled_job_says_so(queue: Queue[Any]) -> None:
    job = queue.add(1)
    future = queue.future(job)

    queue.cancel(job)

    with pytest.raises(JobCancelledError, match=f"job {job.id} was cancelled"):
        future.result(LIMIT)
    with pytest.raises(JobCancelledError, match=f"job {job.id} was cancelled"):
        job.result()


def test_a_removed_job_says_so(queue: Queue[Any]) -> None:
    job = queue.add(1)
    future = queue.future(job)

    queue.remove(job)

    with pytest.raises(JobRemovedError, match="was removed"):
        future.result(LIMIT)
    with pytest.raises(JobRemovedError, match="was removed"):
        job.result()
    with pytest.raises(ResultExpiredError, match="has expired, or the job was removed, or the transaction"):
        queue.result(job.id)


def test_a_result_expires(timed: Queue[Any], clock: ManualClock) -> None:
    job = timed.add(1)
    timed.complete(claimed(timed), result="one")

    clock.advance(59.999)
    in_time = job.result()
    clock.advance(0.001)

    assert in_time == "one"
    with pytest.raises(ResultExpiredError, match=f"job {job.id} is not there"):
        job.result()


def test_of_a_job_that_is_kept_it_is_known_that_its_result_expired(timed: Queue[Any], clock: ManualClock) -> None:
    queue: Queue[Any] = Queue("kept", timed.storage, results=60, retention=Retention(completed=None))
    job = queue.add(1)
    queue.complete(claimed(queue), result="one")
    clock.advance(60)

    with pytest.raises(ResultExpiredError, match=f"job {job.id} is completed, and its result has expired"):
        job.result()


def test_a_timeout_says_where_the_job_stands(queue: Queue[Any]) -> None:
    pending, active = queue.add(1), queue.add(2, priority=1)
    claimed(queue)

    with pytest.raises(TimeoutError, match=rf"job {pending.id} had not ended after 0\.01 s: it is pending") as raised:
        pending.result(0.01)
    with pytest.raises(ResultTimeoutError, match=rf"job {active.id} had not ended: it is active"):
        active.result(0)
    assert isinstance(raised.value, ResultError)
    assert raised.value.job_id == pending.id


@pytest.mark.parametrize("timeout", [-1, "1", True])
def test_a_timeout_that_is_none_is_refused(queue: Queue[Any], timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout="):
        queue.add(1).result(timeout)


def test_a_job_of_another_queue_is_refused(queue: Queue[Any], storage: SQLiteStorage) -> None:
    other: Queue[Any] = Queue("other", storage, results=60)
    job = other.add(1)

    for wrong in (job, job.id):
        with pytest.raises(ValueError, match="is of queue 'other', and this is 'sums'"):
            queue.result(wrong)


def test_a_duplicate_waits_for_the_job_that_holds_the_key(queue: Queue[Any]) -> None:
    queue.add(1, dedupe_key="k")
    again = queue.add(2, dedupe_key="k")

    queue.complete(claimed(queue), result="the first's")

    assert again.result() == "the first's"


# In one transaction with the job's end


def test_a_lost_lease_keeps_no_result(timed: Queue[Any], clock: ManualClock) -> None:
    job = timed.add(1)
    stalled = claimed(timed)
    clock.advance(30)
    current = claimed(timed)

    assert timed.complete(stalled, result="late") is False
    assert kept(timed) == 0
    assert timed.complete(current, result="in time") is True
    assert timed.complete(stalled, result="late") is False
    assert job.result() == "in time"


def test_what_is_rolled_back_has_no_result(queue: Queue[Any]) -> None:
    job = queue.add(1)
    mine = claimed(queue)

    with pytest.raises(LookupError), queue.transaction():  # noqa: PT012 (the transaction is what is tested)
        queue.complete(mine, result="one")
        raise LookupError

    with pytest.raises(ResultTimeoutError):
        job.result(0)
    assert kept(queue) == 0


def test_a_handler_completes_its_job_with_a_result_and_what_follows(queue: Queue[Any]) -> None:
    def handler(data: Any, context: Context) -> str:
        if data == "first":
            assert context.complete(result="by hand", then=["second"])
        return "returned"

    queue.process(handler)

    job = queue.add("first")

    assert job.result(LIMIT) == "by hand"
    assert comes_true(lambda: kept(queue) == 2)


@pytest.mark.parametrize("commit", [True, False])
def test_a_result_joins_the_handlers_own_transaction(queue: Queue[Any], tmp_path: Path, *, commit: bool) -> None:
    db = tmp_path / "jobs.db"

    def handler(_: Any, context: Context) -> None:
        with closing(sqlite3.connect(db, isolation_level=None, timeout=LIMIT)) as connection:
            connection.execute("begin immediate")
            if context.attempt == 1:
                context.complete(result="first", connection=connection)
                connection.execute("commit" if commit else "rollback")
            else:
                context.complete(result="second", connection=connection)
                connection.execute("commit")

    queue.process(handler)

    assert queue.add(1).result(LIMIT) == ("first" if commit else "second")


KILLED = """
import os, signal, sys
import litebroker.worker
from litebroker import Queue

def keep(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "killed":
    litebroker.worker.keep = keep  # within the transaction that completes the job
queue = Queue("work", sys.argv[1])
queue.process(lambda data, context: context.attempt).run()
"""


def test_a_worker_killed_before_the_commit_leaves_one_result_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    queue: Queue[Any] = Queue("work", path, results=60)
    job = queue.add(1)
    future = queue.future(job)

    killed = subprocess.run([sys.executable, "-c", KILLED, path, "killed"], check=False, timeout=FOREVER)
    assert killed.returncode == -signal.SIGKILL
    assert kept(queue) == 0
    with subprocess.Popen([sys.executable, "-c", KILLED, path, "lives"]) as worker:
        try:
            result = future.result(FOREVER)
        finally:
            worker.terminate()

    assert (result, kept(queue)) == (2, 1)
    queue.close()


WORKING = """
import sys, time
from litebroker import Queue

def square(number, context):
    context.progress(0.5)
    time.sleep(0.002)
    return number * number

Queue("work", sys.argv[1]).process(square, concurrency=2).run()
"""


def test_however_many_workers_are_killed_each_job_has_its_one_result(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    queue: Queue[Any] = Queue("work", path, results=3600, attempts=None)
    jobs = queue.add_many(list(range(1500)))
    futures = [queue.future(job) for job in jobs]
    chance = random.Random(4)
    kills = 0

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WORKING, path])

    workers = [start(), start()]
    try:
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            assert comes_true(lambda: kept(queue) > share * len(jobs), FOREVER)  # noqa: B023 (now)
            workers.append(start())
            victim = workers.pop(chance.randrange(len(workers) - 1))
            victim.kill()
            victim.wait()
            kills += 1
        results = [future.result(FOREVER) for future in futures]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()

    assert results == [number * number for number in range(1500)]
    assert (kept(queue), queue.stats(), kills) == (1500, Counts(), 5)
    queue.close()


HOLDING = """
import os, sys, time
from litebroker import Queue

queue = Queue("work", sys.argv[1])
queue.claim(lease=600)
print("claimed", flush=True)
time.sleep(600)
"""


def test_who_waits_for_a_killed_worker_hears_of_it_though_nobody_else_works(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    queue: Queue[Any] = Queue("work", path, results=60, attempts=1)
    job = queue.add(1)

    with subprocess.Popen([sys.executable, "-c", HOLDING, path], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        future = queue.future(job)
        worker.kill()
        worker.wait()
        started = time.monotonic()
        with pytest.raises(JobLapsedError) as raised:
            future.result(FOREVER)

    assert raised.value.reason == "lapsed"
    assert time.monotonic() - started < LIMIT  # The lease would last for ten minutes.
    queue.close()


def test_who_waits_hears_of_a_lease_that_ran_out(queue: Queue[Any]) -> None:
    job = queue.add(1, attempts=1)
    queue.claim(lease=0.01)

    with pytest.raises(JobLapsedError):
        job.result(LIMIT)


# Batches


def test_a_batch_returns_a_result_for_each(queue: Queue[Any]) -> None:
    jobs = queue.add_many([1, 2, 3, 4, 5])
    queue.process_many(lambda numbers: [number * number for number in numbers], batch=2)

    assert [job.result(LIMIT) for job in jobs] == [1, 4, 9, 16, 25]


def test_a_batch_that_returns_nothing_has_none_for_each(queue: Queue[Any]) -> None:
    jobs = queue.add_many([1, 2])
    queue.process_many(lambda _: None, batch=2)

    assert [job.result(LIMIT) for job in jobs] == [None, None]


@pytest.mark.parametrize(("returned", "what"), [(3, "a int"), ([1], "1 results"), ({"a": 1, "b": 2}, "a dict")])
def test_a_batch_that_returns_something_else_is_done_and_its_results_are_refused(
    queue: Queue[Any], told: Told, returned: Any, what: str
) -> None:
    jobs = queue.add_many([1, 2])
    queue.process_many(lambda _: returned, batch=2)

    for job in jobs:
        with pytest.raises(ResultRefusedError, match=f"was given 2 jobs, and gave {what}: return a list of as many"):
            job.result(LIMIT)
    assert told.kinds == ["result", "result"]


def test_in_a_batch_one_bad_result_spoils_no_other(queue: Queue[Any], told: Told) -> None:
    jobs = queue.add_many([1, 2, 3])
    queue.process_many(lambda _: ["one", object(), "three"], batch=3)

    assert [jobs[0].result(LIMIT), jobs[2].result(LIMIT)] == ["one", "three"]
    with pytest.raises(ResultRefusedError):
        jobs[1].result(LIMIT)


def test_in_a_batch_a_job_that_was_settled_by_hand_keeps_that(queue: Queue[Any]) -> None:
    def handler(_: list[Any], contexts: list[Context]) -> list[str]:
        contexts[0].complete(result="by hand")
        contexts[1].fail("no", retry=False)
        return ["returned"] * 3

    jobs = queue.add_many([1, 2, 3])
    queue.process_many(handler, batch=3)

    assert [jobs[0].result(LIMIT), jobs[2].result(LIMIT)] == ["by hand", "returned"]
    with pytest.raises(JobFailedError):
        jobs[1].result(LIMIT)


# Waiting


def test_a_result_that_is_there_needs_no_thread(queue: Queue[Any]) -> None:
    job = queue.add(1)
    queue.complete(claimed(queue), result="one")
    before = threading.active_count()

    assert queue.future(job).result(0) == "one"

    assert threading.active_count() == before


def test_thousands_wait_in_one_thread(queue: Queue[Any]) -> None:
    jobs = queue.add_many(list(range(3000)))
    threads, files = threading.active_count(), _open_files()
    futures = [queue.future(job) for job in jobs]
    waiting = threading.active_count() - threads, _open_files() - files
    queue.process(lambda number: -number)

    done = concurrent.futures.wait(futures, timeout=LIMIT)

    assert not done.not_done
    assert [future.result() for future in futures] == [-number for number in range(3000)]
    assert waiting[0] == 1
    assert waiting[1] <= 3


def _open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_who_waits_is_woken_and_does_not_look_now_and_then(queue: Queue[Any]) -> None:
    started = time.monotonic()

    for number in range(60):
        first, second = queue.add_many([number, -number])
        futures = [queue.future(first), queue.future(second)]
        for job in queue.claim(2):
            queue.complete(job, result=job.data)
        assert [future.result(LIMIT) for future in futures] == [number, -number]

    assert time.monotonic() - started < 15  # By looks alone it would take 30 seconds; woken, it takes a tenth of one.


def test_those_who_wait_for_one_job_all_get_its_result(queue: Queue[Any]) -> None:
    job = queue.add(1)
    futures = [queue.future(job) for _ in range(20)]

    queue.complete(claimed(queue), result="one")

    assert [future.result(LIMIT) for future in futures] == ["one"] * 20


def test_a_future_can_be_awaited(queue: Queue[Any]) -> None:
    queue.process(lambda number: number * 2)

    async def double(number: int) -> Any:
        return await asyncio.wrap_future(queue.future(queue.add(number)))

    async def main() -> list[Any]:
        return await asyncio.gather(*(double(number) for number in range(20)))

    assert asyncio.run(main()) == [number * 2 for number in range(20)]


def test_who_waits_no_longer_is_forgotten_and_the_job_goes_on(queue: Queue[Any]) -> None:
    job = queue.add(1)
    future, other = queue.future(job), queue.future(job)

    assert future.cancel() is True
    queue.complete(claimed(queue), result="one")

    assert other.result(LIMIT) == "one"
    assert future.cancelled()


def test_the_thread_that_waits_ends_when_nobody_does(queue: Queue[Any]) -> None:
    job = queue.add(1)
    before = threading.active_count()
    future = queue.future(job)
    running = threading.active_count()

    future.cancel()

    assert running == before + 1
    assert comes_true(lambda: threading.active_count() == before)


def test_one_waits_anew_after_the_thread_has_ended(queue: Queue[Any]) -> None:
    before = threading.active_count()
    queue.future(queue.add(1)).cancel()
    assert comes_true(lambda: threading.active_count() == before)
    queue.process(lambda data: data)

    assert queue.add("again").result(LIMIT) == "again"


def test_closing_the_queue_ends_the_wait(queue: Queue[Any]) -> None:
    future = queue.future(queue.add(1))
    before = threading.active_count()

    queue.close()

    with pytest.raises(StorageClosedError):
        future.result(LIMIT)
    assert threading.active_count() == before - 1


def test_closing_the_storage_ends_the_wait(queue: Queue[Any], storage: SQLiteStorage) -> None:
    future = queue.future(queue.add(1))

    storage.close()

    with pytest.raises(StorageClosedError):
        future.result(LIMIT)


def test_a_job_added_in_a_transaction_of_ones_own_is_waited_for_after_its_commit(
    queue: Queue[Any], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, timeout=LIMIT)) as db:
        db.execute("begin immediate")
        with queue.bind(db) as bound:
            job = bound.add([1, 2])
        db.execute("commit")
    queue.process(sum)

    assert job.result(LIMIT) == 3


def test_on_a_connection_of_ones_own_one_looks_and_does_not_wait(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as db:
        queue: Queue[Any] = Queue("sums", db, results=60)
        job = queue.add(1)

        with pytest.raises(ResultTimeoutError):
            job.result(0)
        with pytest.raises(ValueError, match="wait"):
            job.result(1)
        queue.complete(claimed(queue), result="one")
        assert job.result() == "one"
        queue.close()


FORKING = """
import os, sys, threading
from litebroker import Queue

queue = Queue("work", sys.argv[1], results=60)
mine = queue.add("parent's")
future = queue.future(mine)  # A thread waits from here on.
theirs = queue.add("child's")
pid = os.fork()
if pid == 0:
    code = 1
    try:
        worker = queue.process(str.upper)
        code = 0 if theirs.result(20) == "CHILD'S" else 2
        worker.close()
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), future.result(20))
queue.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_both_sides_of_a_fork_wait_for_themselves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, tmp_path / "jobs.db"],
        check=False,
        capture_output=True,
        text=True,
        timeout=2 * FOREVER,
    )

    assert (done.stdout, done.stderr) == ("0 PARENT'S\n", "")


SHORT_LIVED = """
import sys
from litebroker import Queue

queue = Queue("work", sys.argv[1], results=60)
queue.process(lambda data: data)
print(queue.add("done").result(20))
"""


def test_a_program_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SHORT_LIVED, tmp_path / "jobs.db"], check=True, timeout=FOREVER)

    left = [it for it in (tmp_path / "jobs.db-litebroker" / "wake").rglob("*") if not it.is_dir()]

    assert left == []


# What is over is deleted


def test_a_worker_deletes_results_that_have_expired(storage: SQLiteStorage, tmp_path: Path) -> None:
    queue: Queue[Any] = Queue("sums", storage, results=0.001)
    queue.add_many(list(range(700)))

    queue.process(lambda number: number, concurrency=2)

    assert comes_true(lambda: queue.stats() == Counts())
    assert comes_true(lambda: values_in(tmp_path / "jobs.db") == 0)
    queue.close()


def test_a_loop_of_ones_own_deletes_them_too(timed: Queue[Any], clock: ManualClock, tmp_path: Path) -> None:
    for number in range(5):
        timed.add(number)
        timed.complete(claimed(timed), result=number)
        clock.advance(60)

    assert values_in(tmp_path / "timed.db") <= 1


def test_values_that_are_put_one_by_one_go_as_fast_as_they_come(timed: Queue[Any], clock: ManualClock) -> None:
    storage = timed.storage
    with storage.transaction():
        for number in range(3000):
            storage.put("s", str(number), ttl_ms=1)
    clock.advance(1)

    storage.put("s", "now", ttl_ms=1)

    assert storage.sweep() == 0


# Progress


class Stepwise:
    """A handler that reports what it is told to, and then waits."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.reports: list[tuple[float, str]] = [(0.4, "reading")]

    def __call__(self, _: Any, context: Context) -> None:
        for fraction, note in self.reports:
            context.progress(fraction, note)
        self.entered.set()
        assert self.opened.wait(LIMIT)


@pytest.fixture
def stepwise() -> Iterator[Stepwise]:
    stepwise = Stepwise()
    yield stepwise
    stepwise.opened.set()


def test_how_far_a_job_is_can_be_seen_while_it_runs(queue: Queue[Any], stepwise: Stepwise) -> None:
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    job = queue.add(1)
    not_yet = job.progress()
    queue.process(stepwise)

    assert comes_true(lambda: job.progress() is not None)
    seen = queue.progress(job.id)
    stepwise.opened.set()
    job.result(LIMIT)

    assert not_yet is None
    assert isinstance(seen, Progress)
    assert (seen.fraction, seen.note) == (0.4, "reading")
    assert before < seen.at < datetime.now(timezone.utc) + timedelta(seconds=1)
    assert job.progress() is None


def test_the_latest_report_is_seen_though_none_follows(queue: Queue[Any], stepwise: Stepwise) -> None:
    stepwise.reports = [(number / 1000, f"step {number}") for number in range(1001)]
    job = queue.add(1)
    queue.process(stepwise)

    assert comes_true(lambda: _seen(job) == (1.0, "step 1000"))


def _seen(job: Job[Any]) -> tuple[float, str] | None:
    progress = job.progress()
    return None if progress is None else (progress.fraction, progress.note)


def test_a_hot_loop_that_reports_writes_next_to_nothing(
    queue: Queue[Any], storage: SQLiteStorage, stepwise: Stepwise
) -> None:
    stepwise.reports = [(0.5, "")] * 100_000
    queue.add(1)
    before = storage.transactions
    started = time.monotonic()
    queue.process(stepwise)

    assert stepwise.entered.wait(LIMIT)

    # Twice a second, and a few for the claim and the upkeep.
    assert storage.transactions - before <= 20 + 10 * (time.monotonic() - started)


def test_progress_ends_with_the_attempt(queue: Queue[Any]) -> None:
    opened = threading.Event()

    def handler(_: Any, context: Context) -> None:
        if context.attempt == 1:
            context.progress(0.9)
            assert comes_true(lambda: job.progress() is not None)
            raise ValueError("again")
        assert opened.wait(LIMIT)

    job = queue.add(1)
    queue.process(handler)

    assert comes_true(lambda: queue.get(job.id) is not None and _attempts(queue, job) == 2)
    assert job.progress() is None
    opened.set()


def _attempts(queue: Queue[Any], job: Job[Any]) -> int:
    found = queue.get(job.id)
    return 0 if found is None else found.attempts


def test_progress_is_written_while_the_worker_is_closing(queue: Queue[Any]) -> None:
    closing_now, opened = threading.Event(), threading.Event()

    def handler(_: Any, context: Context) -> None:
        assert closing_now.wait(LIMIT)
        context.progress(0.7, "last words")
        assert opened.wait(LIMIT)

    job = queue.add(1)
    worker = queue.process(handler)
    assert comes_true(lambda: queue.stats().active == 1)

    assert worker.close(0) is False
    closing_now.set()

    assert comes_true(lambda: _seen(job) == (0.7, "last words"))
    opened.set()
    assert worker.close(LIMIT)


def test_each_job_of_a_batch_reports_for_itself(queue: Queue[Any]) -> None:
    opened = threading.Event()

    def handler(_: list[Any], contexts: list[Context]) -> None:
        for number, context in enumerate(contexts):
            context.progress(number / 10, f"no. {number}")
        assert opened.wait(LIMIT)

    jobs = queue.add_many([1, 2, 3])
    queue.process_many(handler, batch=3)

    assert comes_true(lambda: [_seen(job) for job in jobs] == [(0.0, "no. 0"), (0.1, "no. 1"), (0.2, "no. 2")])
    opened.set()


def test_an_async_handler_reports_without_waiting(queue: Queue[Any]) -> None:
    opened = threading.Event()

    async def handler(_: Any, context: Any) -> None:
        context.progress(0.25, "awaiting")
        await asyncio.to_thread(opened.wait, LIMIT)

    job = queue.add(1)
    queue.process(handler)

    assert comes_true(lambda: _seen(job) == (0.25, "awaiting"))
    opened.set()


@pytest.mark.parametrize(
    ("fraction", "note", "error"),
    [
        (-0.01, "", ValueError),
        (1.01, "", ValueError),
        (float("nan"), "", ValueError),
        (40, "per cent", ValueError),
        (True, "", TypeError),
        ("0.4", "", TypeError),
        (None, "", TypeError),
        (0.4, 7, TypeError),
    ],
    ids=repr,
)
def test_progress_that_is_none_is_refused(
    queue: Queue[Any], told: Told, fraction: Any, note: Any, error: type[Exception]
) -> None:
    job = queue.add(1, attempts=1)
    queue.process(lambda _, context: context.progress(fraction, note))

    with pytest.raises(JobFailedError) as raised:
        job.result(LIMIT)

    assert raised.value.type == error.__name__
    assert repr(fraction if note == "" or fraction == 40 else note) in raised.value.message


def test_a_long_note_is_cut(queue: Queue[Any], stepwise: Stepwise) -> None:
    stepwise.reports = [(0, "x" * 1000)]
    job = queue.add(1)
    queue.process(stepwise)

    assert comes_true(lambda: _seen(job) == (0.0, "x" * 499 + "…"))


def test_an_odd_note_comes_whole(queue: Queue[Any], stepwise: Stepwise) -> None:
    stepwise.reports = [(1, "ä\0\n\ud800 \U0001f418")]
    job = queue.add(1)
    queue.process(stepwise)

    assert comes_true(lambda: _seen(job) == (1.0, "ä\0\n\ud800 \U0001f418"))


def test_only_a_running_job_of_the_queue_has_progress(queue: Queue[Any], storage: SQLiteStorage) -> None:
    other: Queue[Any] = Queue("other", storage)
    opened = threading.Event()

    def handler(_: Any, context: Context) -> None:
        context.progress(0.5)
        opened.wait(LIMIT)

    job = other.add(1)
    other.process(handler)
    assert comes_true(lambda: other.progress(job.id) is not None)

    assert [queue.progress(job.id), queue.progress(12345)] == [None, None]
    opened.set()
    other.close()


def test_what_was_reported_is_deleted_in_the_end(queue: Queue[Any], stepwise: Stepwise, tmp_path: Path) -> None:
    job = queue.add(1, keep_result=0)
    queue.process(stepwise)
    assert comes_true(lambda: job.progress() is not None)

    stepwise.opened.set()

    assert comes_true(lambda: values_in(tmp_path / "jobs.db") == 0)
    assert queue.storage.size(PROGRESS) == 0

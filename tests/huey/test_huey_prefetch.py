"""What a consumer claims ahead, and ends together: less work for the storage, and nothing else that one could see."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import logging
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.huey.conftest import WORKER_TYPES, Application, wait_until

from litebroker import DatabaseBusyError, JobRecord, State
from litebroker_huey import SQLiteHuey
from litebroker_huey.prefetch import Prefetch

Make = Callable[..., Application]


@pytest.fixture
def huey(huey: SQLiteHuey) -> Iterator[SQLiteHuey]:
    """A huey with a consumer whose workers this process plays, and whose tasks have taken no time so far."""
    huey.create_consumer(workers=2)
    shared = prefetch(huey)
    for _ in range(200):
        shared.ran(0.0)
    yield huey
    shared.settle()  # as a consumer that stops; else its chores would open the file again


def prefetch(huey: SQLiteHuey) -> Prefetch:
    shared = huey._prefetch  # noqa: SLF001 - nobody else needs it
    assert shared is not None
    return shared


def run_next(huey: SQLiteHuey) -> bool:
    task = huey.dequeue()
    if task is not None:
        huey.execute(task)
    return task is not None


def run_all(huey: SQLiteHuey) -> None:
    while run_next(huey):
        pass


def enqueue(huey: SQLiteHuey, tasks: int) -> None:
    """So many that do nothing."""

    @huey.task()
    def nothing() -> None:
        pass

    for _ in range(tasks):
        nothing()


def claim_ahead(huey: SQLiteHuey, tasks: int) -> None:
    """Run tasks until so many others are claimed and have not begun."""
    while ahead(huey) < tasks:
        assert run_next(huey), "there were too few tasks"


def ahead(huey: SQLiteHuey) -> int:
    return len(prefetch(huey)._buffer)  # noqa: SLF001 - it cannot be told from what runs


def active(huey: SQLiteHuey) -> list[JobRecord]:
    return list(huey.storage.jobs(huey.storage.queue, State.ACTIVE))


def test_short_tasks_are_claimed_and_ended_many_in_a_transaction(huey: SQLiteHuey) -> None:
    enqueue(huey, 400)
    before, started = huey.storage.engine.transactions, time.monotonic()
    run_all(huey)

    # What slows this process down makes some more: the heartbeat's thread looks every 5 ms.
    assert huey.storage.engine.transactions - before <= 25 + 400 * (time.monotonic() - started)
    assert (huey.pending_count(), huey.inflight_count()) == (0, 0)


def test_a_short_task_is_no_statement_of_its_own(huey: SQLiteHuey, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    connect = sqlite3.connect

    def spied(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", spied)

    enqueue(huey, 200)
    huey.storage.close()  # It is opened again by the connection that is watched.
    statements.clear()
    started = time.monotonic()
    run_all(huey)

    # Two looks into the file for each task, whether it is revoked, would be 400.
    looks = [statement for statement in statements if "litebroker_value" in statement]
    assert len(looks) <= 8 + 200 * (time.monotonic() - started)


def test_a_task_that_takes_long_is_claimed_alone(huey: SQLiteHuey) -> None:
    @huey.task()
    def task() -> None:
        pass

    for _ in range(50):
        prefetch(huey).ran(1.0)
    for _ in range(10):
        task()
    most = 0
    while run_next(huey):
        most = max(most, ahead(huey))

    assert most == 0


def test_what_is_claimed_ahead_counts_as_being_with_workers(huey: SQLiteHuey) -> None:
    enqueue(huey, 100)
    with prefetch(huey)._tidying:  # noqa: SLF001 - so that nothing is given back meanwhile
        claim_ahead(huey, 3)
        pending, in_flight = huey.pending(), huey.inflight_count()
        done = 100 - len(pending) - in_flight

        assert len(pending) == huey.pending_count()
        assert 0 <= done < 100 - len(pending)
        assert in_flight >= 3


def test_what_is_revoked_elsewhere_does_not_begin_though_it_is_claimed(huey: SQLiteHuey) -> None:
    other = SQLiteHuey("app", filename=huey.storage.engine.path)
    ran = []

    @huey.task()
    def task(number: int) -> None:
        ran.append(number)

    results = [task(number) for number in range(40)]
    claim_ahead(huey, 3)
    next_one = len(ran)
    other.revoke_by_id(results[next_one].id)
    run_all(huey)

    assert ran == [number for number in range(40) if number != next_one]
    other.storage.close()


def test_what_is_flushed_does_not_begin_though_it_is_claimed(huey: SQLiteHuey) -> None:
    other = SQLiteHuey("app", filename=huey.storage.engine.path)
    ran = []

    @huey.task()
    def task(number: int) -> None:
        ran.append(number)

    for number in range(40):
        task(number)
    claim_ahead(huey, 3)
    before = list(ran)
    other.flush()
    run_all(huey)

    assert ran == before
    assert huey.inflight_count() == 0
    other.storage.close()


def test_a_flush_leaves_nothing_though_consumers_claim_and_give_back_meanwhile(huey: SQLiteHuey) -> None:
    engine, queue = huey.storage.engine, huey.storage.queue
    stop = threading.Event()

    @huey.task()
    def task() -> None:
        pass

    def claim_and_give_back() -> None:
        while not stop.is_set():
            engine.release([job.lease for job in engine.claim([queue], limit=5, lease_ms=30_000)])

    other = threading.Thread(target=claim_and_give_back, daemon=True)
    other.start()
    left = []
    for _ in range(200):
        for _ in range(5):
            task()
        huey.storage.flush_queue()
        left.append((huey.pending_count(), huey.inflight_count()))
    stop.set()
    other.join(20)

    assert set(left) == {(0, 0)}


def test_what_does_not_begin_soon_is_given_back(huey: SQLiteHuey) -> None:
    enqueue(huey, 40)
    claim_ahead(huey, 3)
    running = huey.dequeue()

    wait_until(lambda: huey.inflight_count() == 1)

    assert [job.ref for job in active(huey)] == [running.id]
    assert all(job.attempts == 0 for job in huey.storage.jobs(huey.storage.queue, State.PENDING))


def test_what_is_done_is_ended_though_the_worker_does_not_come_back(huey: SQLiteHuey) -> None:
    @huey.task()
    def task() -> int:
        return 1

    result = task()
    run_next(huey)

    wait_until(lambda: huey.inflight_count() == 0)

    assert result.get() == 1


def test_a_task_of_higher_priority_goes_before_what_was_given_back(huey: SQLiteHuey) -> None:
    ran = []

    @huey.task()
    def task(name: str) -> None:
        ran.append(name)

    for _ in range(40):
        task("low")
    claim_ahead(huey, 3)
    wait_until(lambda: huey.inflight_count() == 0)
    task("high", priority=1)
    before = len(ran)

    run_next(huey)

    assert ran[before:] == ["high"]


def test_a_task_on_its_last_attempt_is_not_claimed_ahead(huey: SQLiteHuey) -> None:
    seen: list[tuple[str, list[str | None]]] = []

    @huey.task(max_receives=1)
    def once() -> None:
        seen.append(("once", [job.task for job in active(huey) if job.max_attempts == 1]))

    @huey.task()
    def task() -> None:
        seen.append(("task", [job.task for job in active(huey) if job.max_attempts == 1]))

    for number in range(60):
        once() if number % 3 == 0 else task()
    run_all(huey)

    assert Counter(name for name, _ in seen) == {"once": 20, "task": 40}
    # It is seen while it runs itself; or when it has run, until its lease is ended.
    held = [len(names) for name, names in seen if name == "once"]
    assert set(held) == {1}


def test_a_key_is_free_as_soon_as_its_task_is_done(huey: SQLiteHuey) -> None:
    @huey.task(dedupe_key="key")
    def task() -> None:
        pass

    first = task()
    run_next(huey)

    assert task().id != first.id


def test_what_a_stopping_consumer_has_claimed_is_given_back_at_once(huey: SQLiteHuey) -> None:
    consumer = huey.create_consumer(workers=1)

    enqueue(huey, 40)
    claim_ahead(huey, 3)
    consumer.stop_flag.set()
    task = huey.dequeue()

    assert task is None
    assert huey.inflight_count() == 0
    assert all(job.attempts == 0 for job in huey.storage.jobs(huey.storage.queue, State.PENDING))


def test_the_end_of_a_worker_ends_what_it_has_done(huey: SQLiteHuey) -> None:
    consumer = huey.create_consumer(workers=1)
    [(worker, _)] = consumer.worker_threads

    @huey.task()
    def task() -> None:
        pass

    task()
    run_next(huey)
    worker.shutdown()

    assert huey.inflight_count() == 0


def test_leases_are_ended_and_tasks_given_back_when_the_storage_can_do_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", read_timeout=0.01, timeout=0.1)
    huey.create_consumer(workers=1)

    enqueue(huey, 40)
    for _ in range(200):
        prefetch(huey).ran(0.0)
    claim_ahead(huey, 3)
    running = huey.dequeue()
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    other.execute("begin immediate")
    huey.execute(running)
    with caplog.at_level(logging.CRITICAL):
        prefetch(huey).settle()
        before = huey.inflight_count()
        with pytest.raises(DatabaseBusyError):
            huey.dequeue()
    other.execute("rollback")
    other.close()

    prefetch(huey).settle()

    assert before > 0
    assert huey.inflight_count() == 0
    assert not huey.dead_tasks()
    assert all(job.attempts == 0 for job in huey.storage.jobs(huey.storage.queue, State.PENDING))
    huey.storage.close()


def test_while_workers_stop_others_begin_each_task_once(huey: SQLiteHuey) -> None:
    ran: list[int] = []
    errors: list[Exception] = []

    @huey.task()
    def task(number: int) -> None:
        ran.append(number)

    def act(what: Callable[[], object]) -> None:
        try:
            while len(ran) < 1500:
                what()
        except Exception as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    for number in range(1500):
        task(number)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet wherever they can
    try:
        acts = [partial(run_next, huey)] * 3 + [prefetch(huey).settle] * 2
        threads = [threading.Thread(target=act, args=(what,), daemon=True) for what in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)

    assert not errors
    prefetch(huey).settle()
    assert sorted(ran) == list(range(1500))
    assert huey.inflight_count() == 0


def test_a_forked_child_leaves_alone_what_its_parent_has_claimed(tmp_path: Path) -> None:
    script = tmp_path / "fork.py"
    script.write_text(
        """
import os, sys
from litebroker_huey import SQLiteHuey

huey = SQLiteHuey("app", filename=sys.argv[1], read_timeout=0.01)
ran = []

@huey.task()
def task(number):
    ran.append(number)

huey.create_consumer(workers=1)
prefetch = huey._prefetch
for _ in range(200):
    prefetch.ran(0.0)
for number in range(30):
    task(number)
while not prefetch._buffer:
    huey.execute(huey.dequeue())
child = os.fork()
if child == 0:
    before = huey.storage.engine.transactions
    prefetch.settle()
    os._exit(0 if huey.storage.engine.transactions == before else 1)
assert os.waitpid(child, 0)[1] == 0
while (found := huey.dequeue()) is not None:
    huey.execute(found)
assert ran == list(range(30)), ran
assert (huey.pending_count(), huey.inflight_count()) == (0, 0)
"""
    )

    done = subprocess.run(
        [sys.executable, script, tmp_path / "jobs.db"], capture_output=True, text=True, timeout=30, check=False
    )

    assert done.returncode == 0, done.stderr


def test_greenlets_share_a_huey_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("gevent")
    script = tmp_path / "green.py"
    script.write_text(
        """
from gevent import monkey; monkey.patch_all()
import time
from litebroker_huey import SQLiteHuey

huey = SQLiteHuey("app", filename=":memory:")
ran = []

@huey.task()
def task(number, seconds):
    ran.append(number)
    time.sleep(seconds)

for number in range(300):
    task(number, 0.02 if number % 50 == 49 else 0)
huey.create_consumer(workers=2, worker_type="greenlet").start()
deadline = time.monotonic() + 20
while (huey.pending_count() or huey.inflight_count()) and time.monotonic() < deadline:
    time.sleep(0.01)
assert sorted(ran) == list(range(300)), ran
assert huey.inflight_count() == 0
"""
    )

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode == 0, done.stderr
    assert "was lost" not in done.stderr


def test_without_a_consumer_each_task_is_claimed_and_ended_by_itself(tmp_path: Path) -> None:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", read_timeout=0.01)

    enqueue(huey, 5)
    left = []
    while run_next(huey):
        left.append((huey.pending_count(), huey.inflight_count()))

    assert left == [(4, 0), (3, 0), (2, 0), (1, 0), (0, 0)]
    huey.storage.close()


# With real consumers


@pytest.fixture
def busy(new_application: Make) -> Application:
    """An application with a thousand tasks that take no time."""
    application = new_application()
    work = application.task("work")
    for number in range(1000):
        work(number)
    return application


@pytest.mark.parametrize("kind", WORKER_TYPES)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGHUP])
def test_a_consumer_that_stops_or_restarts_repeats_nothing_of_what_it_has_claimed_ahead(
    busy: Application, kind: str, stop: signal.Signals
) -> None:
    consumer = busy.start(kind)
    wait_until(lambda: len(busy.notes("done")) > 100)
    consumer.send_signal(stop)
    if stop is signal.SIGINT:
        assert consumer.wait(20) == 0
        assert busy.huey.inflight_count() == 0
        busy.start(kind)

    wait_until(busy.is_drained)

    assert busy.done() == {str(number): 1 for number in range(1000)}


@pytest.mark.timeout(90)
def test_a_task_that_kills_its_consumer_takes_no_task_with_it_that_was_claimed_beside_it(new_application: Make) -> None:
    application = new_application(max_receives=2)
    work, deadly = application.task("work"), application.task("deadly")
    for number in range(400):
        work(number)
        if number in {150, 300}:
            deadly()
    application.start("process", 2, "--health-check-interval", "1")

    wait_until(application.is_drained, seconds=60)

    assert {dead.name for dead in application.huey.dead_tasks()} == {"tests.huey.huey_app.deadly"}
    assert len(application.huey.dead_tasks()) == 2
    assert set(application.done()) == {str(number) for number in range(400)}


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_tasks_that_take_long_behind_short_ones_run_side_by_side(application: Application, kind: str) -> None:
    work = application.task("work")
    for number in range(300):
        work(number)
    for number in range(300, 304):
        work(number, 300)

    application.start(kind, 4)

    # Though one worker has claimed all of them, taking them for short.
    wait_until(lambda: len(application.notes("start")) == 304, seconds=50)
    assert len(application.done()) == 300


@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_a_result_is_there_and_its_lease_ended_while_the_only_worker_is_busy(
    application: Application, kind: str
) -> None:
    work = application.task("work")
    for number in range(200):
        work(number)
    last = work(200)
    work(201, 30)

    application.start(kind, 1)

    assert last.get(blocking=True, timeout=20) == 200
    wait_until(lambda: application.notes("start", "201"))
    wait_until(lambda: application.huey.inflight_count() == 1)
    assert application.done() == {str(number): 1 for number in range(201)}

"""The real ``dramatiq`` command, killed, stopped, forked and starved."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import dramatiq
import pytest
from dramatiq import Message
from tests.dramatiq.conftest import App, Await

from litebroker import State, open_storage
from litebroker_dramatiq import SQLiteBroker

QUEUE = "dramatiq:default"

PLAIN = """
    broker = SQLiteBroker("jobs.db", durability="relaxed")
    dramatiq.set_broker(broker)

    @dramatiq.actor(max_retries=0)
    def work(n):
        note(n)

    @dramatiq.actor(max_retries=0)
    def sleep(n, seconds):
        note(f"start {n} {os.getpid()}")
        time.sleep(seconds)
        note(f"end {n}")
"""


def client(app: App) -> SQLiteBroker:
    """A broker in this process that knows no actor."""
    broker = SQLiteBroker(app.database, durability="relaxed")
    broker.declare_queue("default")
    return broker


def message(actor: str, *args: object) -> Message[None]:
    return Message(queue_name="default", actor_name=actor, args=args, kwargs={}, options={})


def test_the_command_runs_what_was_sent_and_stops(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    broker.send_many([message("work", n) for n in range(50)])

    worker = app.worker("--processes", "2", "--threads", "2")
    wait_for(lambda: len(app.notes()) == 50)
    worker.signal(signal.SIGTERM)

    assert worker.wait() == 0
    assert sorted(map(int, app.notes())) == list(range(50))
    assert "ERROR" not in worker.output
    assert "CRITICAL" not in worker.output
    broker.close()


def test_a_hangup_restarts_the_workers(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    worker = app.worker("--processes", "1", "--threads", "1")
    broker.enqueue(message("sleep", 0, 0))
    wait_for(lambda: "end 0" in app.notes())
    sent = 1

    def runs_elsewhere() -> bool:
        nonlocal sent
        broker.enqueue(message("sleep", sent, 0))
        wait_for(lambda: f"end {sent}" in app.notes())
        sent += 1
        return len({line.split()[-1] for line in app.notes() if line.startswith("start")}) == 2

    worker.signal(signal.SIGHUP)
    wait_for(runs_elsewhere)

    assert [line for line in app.notes() if line.startswith("end")] == [f"end {n}" for n in range(sent)]
    broker.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_messages_whose_workers_are_killed_at_any_moment_none_is_lost(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    count = 2000
    broker.send_many([message("work", n) for n in range(count)])
    rng = random.Random(11)
    killed = 0

    while broker.storage.counts(QUEUE).pending + broker.storage.counts(QUEUE).active:
        worker = app.worker("--processes", "1", "--threads", "4")
        done = len(app.notes())
        while len(app.notes()) == done and broker.storage.counts(QUEUE).pending:
            time.sleep(0.005)
        if killed < 15:
            time.sleep(rng.uniform(0.0, 0.03))
            worker.signal_all(signal.SIGKILL)
            worker.wait()
            killed += 1
        else:
            broker.join("default", timeout=60_000)
            worker.signal(signal.SIGTERM)
            worker.wait()

    runs = collections.Counter(int(line) for line in app.notes() if line)
    extra = sum(runs.values()) - len(runs)
    assert set(runs) == set(range(count))
    assert broker.dead_letters() == []
    assert killed >= 5
    # Of each worker that was killed: those that ran, and those whose acknowledgement was not written yet.
    assert extra <= killed * 16
    broker.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_pipelines_and_retries_of_killed_workers_reach_their_end(app: App) -> None:
    app.write("""
        broker = SQLiteBroker("jobs.db", durability="relaxed", max_deliveries=None)
        dramatiq.set_broker(broker)

        @dramatiq.actor(min_backoff=1, max_backoff=20)
        def first(n):
            if not os.path.exists(f"seen-{n}"):
                open(f"seen-{n}", "w").close()
                raise RuntimeError("the first time")
            return n

        @dramatiq.actor
        def second(n):
            return n

        @dramatiq.actor
        def last(n):
            note(n)
    """)
    count = 2000
    sender = app.python(f"""
        for n in range({count}):
            (first.message(n) | second.message() | last.message()).run()
        broker.close()
    """)
    assert sender.wait(60) == 0
    broker = client(app)
    rng = random.Random(3)
    killed = 0

    while broker.storage.counts(QUEUE).pending + broker.storage.counts(QUEUE).active:
        worker = app.worker("--processes", "1", "--threads", "4")
        done = len(app.notes())
        while len(app.notes()) == done and broker.storage.counts(QUEUE).pending:
            time.sleep(0.005)
        if killed < 8:
            time.sleep(rng.uniform(0.0, 0.02))
            killed += 1
        else:
            broker.join("default", timeout=60_000)
        worker.signal_all(signal.SIGKILL)
        worker.wait()

    assert set(map(int, filter(None, app.notes()))) == set(range(count))
    assert broker.dead_letters() == []
    assert killed >= 3
    broker.close()


@pytest.mark.parametrize("lease", [2_000, 120_000])
def test_a_killed_workers_messages_run_again_within_two_seconds(app: App, wait_for: Await, lease: int) -> None:
    app.write(PLAIN.replace('durability="relaxed"', f'durability="relaxed", lease={lease}'))
    broker = client(app)
    first = app.worker("--processes", "1", "--threads", "1")
    broker.enqueue(message("sleep", 1, 30))
    wait_for(lambda: any(line.startswith("start 1") for line in app.notes()))
    second = app.worker("--processes", "1", "--threads", "1")
    wait_for(lambda: "ready for action" in second.output)

    first.signal_all(signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for(lambda: sum(line.startswith("start 1") for line in app.notes()) == 2)

    assert time.monotonic() - killed_at < 2
    broker.close()


def test_a_message_that_kills_its_worker_again_and_again_becomes_a_dead_letter(app: App, wait_for: Await) -> None:
    app.write("""
        broker = SQLiteBroker("jobs.db")
        dramatiq.set_broker(broker)

        @dramatiq.actor
        def poison(n):
            note("poison")
            time.sleep(0.5)  # A worker that dies before it has reported itself is waited for by the command.
            os.kill(os.getpid(), 9)

        @dramatiq.actor
        def work(n):
            note("work")
    """)
    broker = SQLiteBroker(app.database, max_deliveries=3)
    broker.enqueue(message("poison", 1))

    for _ in range(3):
        worker = app.worker("--processes", "1", "--threads", "1")
        worker.wait()
    app.worker("--processes", "1", "--threads", "1")
    (letter,) = wait_for(broker.dead_letters)
    broker.enqueue(message("work", 1))
    wait_for(lambda: "work" in app.notes())

    assert app.notes().count("poison") == 3
    assert (letter.reason, letter.attempts) == ("lapsed", 3)
    assert letter.message is not None
    assert letter.message.actor_name == "poison"
    broker.close()


def test_a_stop_gives_back_at_once_what_has_not_started(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    broker.send_many([message("sleep", n, 4) for n in range(6)])
    worker = app.worker("--processes", "1", "--threads", "2", dramatiq_queue_prefetch="6")
    wait_for(lambda: broker.storage.counts(QUEUE).active == 6)

    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0

    waiting = broker.storage.page(QUEUE, State.PENDING)
    assert {job.attempts for job in waiting} == {0}
    assert len(waiting) == 6 - sum(line.startswith("end") for line in app.notes())
    assert len(waiting) == 4
    broker.close()


@pytest.mark.slow
def test_code_that_holds_the_interpreters_lock_keeps_its_messages(app: App, wait_for: Await) -> None:
    app.write("""
        import ctypes

        broker = SQLiteBroker("jobs.db", lease=12_000)
        dramatiq.set_broker(broker)

        @dramatiq.actor
        def hold(n):
            note(f"start {n}")
            ctypes.PyDLL(None).usleep(3_500_000)
            note(f"end {n}")
    """)
    broker = client(app)
    broker.send_many([message("hold", n) for n in range(2)])

    app.worker("--processes", "2", "--threads", "2")
    broker.join("default", timeout=30_000)

    assert sorted(app.notes()) == ["end 0", "end 1", "start 0", "start 1"]
    broker.close()


@pytest.mark.slow
def test_a_worker_that_was_stopped_for_longer_than_its_lease_cannot_settle_what_others_have(
    app: App, wait_for: Await
) -> None:
    app.write(PLAIN.replace('durability="relaxed"', "lease=3000"))
    broker = client(app)
    broker.enqueue(message("sleep", 1, 1))
    first = app.worker("--processes", "1", "--threads", "1")
    wait_for(lambda: any(line.startswith("start 1") for line in app.notes()))
    first.signal_all(signal.SIGSTOP)
    second = app.worker("--processes", "1", "--threads", "1")

    broker.join("default", timeout=30_000)
    first.signal_all(signal.SIGCONT)
    wait_for(lambda: "its lease" in first.output)
    wait_for(lambda: app.notes().count("end 1") == 2)

    assert broker.dead_letters() == []
    assert "its lease" not in second.output
    broker.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_hundred_processes_that_send_at_once_lose_nothing(app: App) -> None:
    app.write(PLAIN)
    started = time.time() + 8
    senders = [
        app.python(f"""
            time.sleep(max(0, {started} - time.time()))
            for n in range(5):
                work.send({sender} * 5 + n)
        """)
        for sender in range(200)
    ]

    assert [sender.wait(100) for sender in senders] == [0] * 200

    broker = client(app)
    jobs = broker.storage.page(QUEUE, State.PENDING, limit=2000)
    assert sorted(json.loads(job.payload)["args"][0] for job in jobs) == list(range(1000))
    broker.close()


def test_a_process_may_fork_after_the_broker_was_used(app: App) -> None:
    app.write(PLAIN)

    parent = app.python("""
        work.send(0)
        consumer = broker.consume("default", timeout=1000)
        mine = next(consumer)
        pids = []
        for n in range(1, 9):
            if not (pid := os.fork()):
                try:
                    work.send(n)
                    theirs = next(broker.consume("default", timeout=5000))
                    assert theirs.args != mine.args
                    broker.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            pids.append(pid)
        work.send(100)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
        consumer.ack(mine)
        consumer.close()
        broker.close()
    """)

    assert parent.wait() == 0, parent.output
    broker = client(app)
    jobs = broker.storage.page(QUEUE, State.PENDING)
    assert sorted(json.loads(job.payload)["args"][0] for job in jobs) == [*range(1, 9), 100]
    broker.close()


def test_the_file_is_deleted_under_a_worker(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    worker = app.worker("--processes", "1", "--threads", "1")
    broker.enqueue(message("work", 1))
    wait_for(lambda: "1" in app.notes())
    broker.close()

    for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
        (app.folder / name).unlink(missing_ok=True)
    wait_for(lambda: "was deleted" in worker.output)
    # It goes on with a new file, and says so once.
    broker = client(app)
    broker.enqueue(message("work", 2))
    wait_for(lambda: "2" in app.notes())

    assert worker.output.count("was deleted") <= 4
    assert worker.popen.poll() is None
    broker.close()


def test_a_disk_that_is_gone_is_said_and_does_no_harm(app: App, wait_for: Await) -> None:
    app.write(PLAIN.replace('"jobs.db"', '"disk/jobs.db"'))

    worker = app.worker("--processes", "1", "--threads", "1", dramatiq_restart_delay="200")
    wait_for(lambda: worker.output.count("disk") >= 3)
    (app.folder / "disk").mkdir()
    broker = SQLiteBroker(app.folder / "disk" / "jobs.db")
    broker.enqueue(message("work", 1))

    wait_for(lambda: app.notes() == ["1"])
    broker.close()


def test_a_file_of_some_other_application_is_refused_at_once(app: App) -> None:
    app.write(PLAIN)
    with sqlite3.connect(app.database) as db:
        db.execute("create table theirs (x)")
    db.close()

    worker = app.worker("--processes", "1", "--threads", "1")

    assert worker.wait() == 3
    assert "Broker connection failed" in worker.output
    assert "ForeignDatabaseError" in worker.output


@pytest.mark.slow
def test_a_writer_that_holds_the_file_for_seconds_costs_no_message(app: App, wait_for: Await) -> None:
    app.write(PLAIN)
    broker = client(app)
    worker = app.worker("--processes", "2", "--threads", "4")
    wait_for(lambda: "ready for action" in worker.output)
    broker.send_many([message("work", n) for n in range(200)])
    stranger = sqlite3.connect(app.database, isolation_level=None, timeout=10)

    stranger.execute("begin immediate")
    time.sleep(3)
    stranger.execute("commit")
    broker.join("default", timeout=30_000)

    assert sorted(map(int, app.notes())) == list(range(200))
    assert "locked" not in worker.output
    stranger.close()
    broker.close()


@pytest.mark.slow
def test_an_idle_worker_costs_next_to_nothing_and_starts_an_actor_at_once(app: App, wait_for: Await) -> None:
    app.write("""
        broker = SQLiteBroker("jobs.db", durability="relaxed")
        dramatiq.set_broker(broker)

        @dramatiq.actor
        def late(since):
            note(1000 * (time.time() - since))
    """)
    broker = client(app)
    worker = app.worker("--processes", "2", "--threads", "8")
    wait_for(lambda: "ready for action" in worker.output)
    time.sleep(1)
    before = cpu_seconds(worker.children())
    time.sleep(5)
    used = cpu_seconds(worker.children()) - before

    for n in range(40):
        broker.enqueue(message("late", time.time()))
        while len(app.notes()) <= n:
            time.sleep(0.002)
        time.sleep(0.02)

    latencies = sorted(map(float, app.notes()))
    assert used / 5 < 0.02
    assert latencies[20] < 10
    broker.close()


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_delayed_messages_come_on_time_and_cost_a_worker_nothing(app: App, wait_for: Await) -> None:
    app.write("""
        broker = SQLiteBroker("jobs.db", durability="relaxed")
        dramatiq.set_broker(broker)

        @dramatiq.actor
        def late(due):
            note(1000 * (time.time() - due))
    """)
    broker = client(app)
    broker.send_many([message("late", 0) for _ in range(20_000)], delay=10**9)
    worker = app.worker("--processes", "1", "--threads", "2")
    wait_for(lambda: "ready for action" in worker.output)

    for n in range(10):
        broker.enqueue(message("late", time.time() + 0.3), delay=300)
        while len(app.notes()) <= n:
            time.sleep(0.002)

    lateness = sorted(map(float, app.notes()))
    assert lateness[0] > -2
    assert lateness[5] < 40
    wait_for(lambda: not broker.storage.counts(QUEUE).active)
    broker.close()


def test_a_worker_started_from_another_folder_keeps_to_the_file(app: App, tmp_path: Path) -> None:
    storage = open_storage(app.database)
    app.write(PLAIN)

    assert app.python("work.send(1); os.chdir('/'); work.send(2); broker.close()").wait() == 0

    assert storage.counts(QUEUE).ready == 2
    storage.close()


def test_dramatiq_has_the_broker_that_was_set(app: App) -> None:
    app.write(PLAIN)

    process = app.python("assert dramatiq.get_broker() is broker; print(dramatiq.__version__)")

    assert process.wait() == 0
    assert process.output.strip() == dramatiq.__version__

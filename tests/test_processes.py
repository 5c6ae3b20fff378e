"""Many processes on one file, some of which are stopped or killed."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from litebroker.jobs import JobSpec, State
from litebroker.sqlite import SQLiteStorage

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")

LIMIT = 30

BEGINNING = """
import os, sys, time
from litebroker.errors import *
from litebroker.jobs import *
from litebroker.sqlite import SQLiteStorage

storage = SQLiteStorage(sys.argv[1], durability="relaxed")
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

"""

# Claims in small batches until nothing is left.
DRAIN = (
    BEGINNING
    + """
while records := storage.claim(["work"], limit=7, lease_ms=60_000):
    settled = storage.complete([record.lease for record in records])
    tell("\\n".join(f"did {record.id} {done}" for record, done in zip(records, settled)))
"""
)

# Starts workers that add, claim, complete and fail without end, and kills them.
KILL = (
    BEGINNING
    + """
import random, signal
chance = random.Random(int(sys.argv[3]))

def work():
    while True:
        tell("added", storage.add([JobSpec(queue="work", payload=b"{}", max_attempts=None)])[0].id)
        for record in storage.claim(["work"], limit=3, lease_ms=300_000):
            if random.random() < 0.3:
                if storage.fail(record.lease, JobError("handler"), retry_in_ms=0) is not None:
                    tell("failed", record.id)
            elif storage.complete([record.lease], keep=True) == [True]:
                tell("completed", record.id)

def start():
    pid = os.fork()
    if pid == 0:
        work()
    return pid

running = [start() for _ in range(4)]
for kill in range(int(sys.argv[4])):
    time.sleep(0.01 + chance.random() * 0.05)
    victim = running.pop(chance.randrange(4))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    running.append(start())
for victim in running:
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
"""
)

HOLD = (
    BEGINNING
    + """
began = time.monotonic()
(record,) = storage.claim(["work"], limit=1, lease_ms=int(sys.argv[3]))
tell("claimed", record.id, began)
sys.stdin.readline()
tell("settled", storage.complete([record.lease])[0])
"""
)

IN_A_TRANSACTION = (
    BEGINNING
    + """
with storage.transaction():
    storage.add([JobSpec(queue="work", payload=b"never")])
    tell("inside")
    sys.stdin.readline()
"""
)


class Processes:
    """Processes on one file, and what they have written to their log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jobs.db"
        self.log = folder / "log"
        self.log.touch()
        self._running: list[subprocess.Popen[str]] = []

    def start(self, script: str, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(self.path), str(self.log), *map(str, args)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self._running.append(process)
        return process

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def wait_for(self, word: str, count: int = 1) -> list[list[str]]:
        deadline = time.monotonic() + LIMIT
        while len(found := [line for line in self.lines() if line[0] == word]) < count:
            assert time.monotonic() < deadline, f"no {word!r} came"
            time.sleep(0.002)
        return found

    def kill(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.kill()


@pytest.fixture
def storage(processes: Processes) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(processes.path)
    storage.open()
    yield storage
    storage.close()


def jobs(count: int, *, max_attempts: int | None = 3) -> list[JobSpec]:
    return [JobSpec(queue="work", payload=b"{}", max_attempts=max_attempts)] * count


def eventually(look: Callable[[], list[object]], limit: float = 10) -> list[object]:
    deadline = time.monotonic() + limit
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_processes_that_drain_one_file_get_each_job_once(processes: Processes, storage: SQLiteStorage) -> None:
    added = {one.id for one in storage.add(jobs(5000))}

    drainers = [processes.start(DRAIN) for _ in range(4)]
    assert [drainer.wait(LIMIT) for drainer in drainers] == [0] * 4

    done = [(int(id), settled) for _word, id, settled in processes.lines()]
    assert Counter(id for id, _settled in done) == Counter(added)
    assert {settled for _id, settled in done} == {"True"}
    assert storage.counts("work").active == storage.counts("work").ready == 0


def test_workers_killed_at_random_moments_lose_no_job(processes: Processes, storage: SQLiteStorage) -> None:
    first = {one.id for one in storage.add(jobs(300, max_attempts=None))}

    assert processes.start(KILL, 3, 30).wait(LIMIT) == 0
    deadline = time.monotonic() + 10
    while storage.counts("work").active and time.monotonic() < deadline:  # their leases are of five minutes
        storage.recover()
        time.sleep(0.01)
    counts = storage.counts("work")

    told: dict[str, list[int]] = {}
    for word, id in processes.lines():
        told.setdefault(word, []).append(int(id))
    states: dict[int, int] = dict(storage.execute("select id, state from litebroker_job"))
    assert first | set(told["added"]) <= set(states)
    assert len(told["completed"]) == len(set(told["completed"])) > 50
    assert {states[id] for id in told["completed"]} == {3}
    assert counts.active == 0
    assert counts.ready + counts.completed == len(states)
    assert storage.execute("pragma integrity_check") == [("ok",)]


def test_a_killed_processes_job_is_taken_back_at_once(processes: Processes, storage: SQLiteStorage) -> None:
    (added,) = storage.add(jobs(1))
    holder = processes.start(HOLD, 300_000)
    processes.wait_for("claimed")
    for _ in range(5):
        assert storage.claim(["work"], limit=1, lease_ms=1000) == []  # it lives

    holder.kill()
    taken = eventually(lambda: list(storage.claim(["work"], limit=1, lease_ms=1000)))

    assert [record.id for record in taken] == [added.id]  # type: ignore[attr-defined]
    (attempt,) = taken[0].history  # type: ignore[attr-defined]
    assert attempt.outcome == "lapsed"
    assert "died" in attempt.error


def test_a_waiting_worker_is_told_of_a_killed_processes_job(processes: Processes, storage: SQLiteStorage) -> None:
    storage.add(jobs(1))
    holder = processes.start(HOLD, 300_000)
    processes.wait_for("claimed")
    with contextlib.closing(storage.listener(["work"])) as listener:
        while listener.wait(0):
            pass
        holder.kill()

        assert listener.wait(10)

    assert len(storage.claim(["work"], limit=1, lease_ms=1000)) == 1


def test_the_last_attempt_of_a_killed_process_makes_a_dead_letter_that_is_told_of(
    processes: Processes, storage: SQLiteStorage
) -> None:
    (added,) = storage.add(jobs(1, max_attempts=1))
    lapsed: list[int] = []
    storage.on_lapsed(lambda record: lapsed.append(record.id))
    holder = processes.start(HOLD, 300_000)
    processes.wait_for("claimed")

    holder.kill()
    holder.wait()
    eventually(lambda: [*storage.recover(), *lapsed])

    assert lapsed == [added.id]
    (record,) = storage.page("work", State.FAILED)
    assert record.error is not None
    assert record.error.reason == "lapsed"


def test_the_holder_of_a_job_is_known_to_live_and_then_to_be_dead(processes: Processes, storage: SQLiteStorage) -> None:
    (added,) = storage.add(jobs(1))
    process = processes.start(HOLD, 300_000)
    processes.wait_for("claimed")

    living = storage.holders([added.id])[added.id]
    process.kill()
    process.wait()
    dead = storage.holders([added.id])[added.id]

    assert living.worker == f"{socket.gethostname()}:{process.pid}"
    assert (living.alive, dead.alive) == (True, False)
    assert dead.worker == living.worker


def test_a_stopped_process_is_not_robbed_before_its_lease_ends(processes: Processes, storage: SQLiteStorage) -> None:
    storage.add(jobs(1))
    holder = processes.start(HOLD, 1500)
    ((_word, id, began),) = processes.wait_for("claimed")

    holder.send_signal(signal.SIGSTOP)
    taken = eventually(lambda: list(storage.claim(["work"], limit=1, lease_ms=60_000)))
    took_at = time.monotonic()
    holder.send_signal(signal.SIGCONT)
    assert holder.stdin
    holder.stdin.write("\n")
    holder.stdin.flush()
    ((_word, settled),) = processes.wait_for("settled")

    assert [str(record.id) for record in taken] == [id]  # type: ignore[attr-defined]
    assert took_at - float(began) >= 1.5
    assert settled == "False"
    assert storage.complete([record.lease for record in taken]) == [True]  # type: ignore[attr-defined]


def test_a_process_that_ends_in_order_gives_its_leases_back_at_once(
    processes: Processes, storage: SQLiteStorage
) -> None:
    storage.add(jobs(1))
    script = BEGINNING + 'storage.claim(["work"], limit=1, lease_ms=300_000); storage.close()'

    assert processes.start(script).wait(LIMIT) == 0

    assert len(storage.claim(["work"], limit=1, lease_ms=1000)) == 1


def test_a_process_killed_inside_a_transaction_leaves_nothing_of_it_and_holds_nobody_up(
    processes: Processes, storage: SQLiteStorage
) -> None:
    storage.add(jobs(1))
    inside = processes.start(IN_A_TRANSACTION)
    processes.wait_for("inside")

    inside.kill()
    inside.wait()
    began = time.monotonic()
    storage.add(jobs(1))

    assert time.monotonic() - began < 5
    assert {record.payload for record in storage.page("work", State.PENDING)} == {b"{}"}


@pytest.mark.parametrize("end", ["storage.close()", "pass", "os._exit(1)"])
def test_nothing_of_a_process_that_has_ended_is_left_in_the_folder_of_locks(
    processes: Processes, storage: SQLiteStorage, end: str
) -> None:
    script = BEGINNING + f'storage.claim(["work"], limit=1, lease_ms=300_000)\n{end}'
    storage.add(jobs(1))
    assert processes.start(script).wait(LIMIT) in {0, 1}
    live = Path(f"{processes.path}-litebroker") / "live"

    taken = eventually(lambda: list(storage.claim(["work"], limit=1, lease_ms=1000)))

    assert len(taken) == 1
    assert len(list(live.iterdir())) == 1  # our own
    assert len(storage.execute("select * from litebroker_process")) == 1

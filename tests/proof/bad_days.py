"""Days on which more goes wrong than a process: crowds, files cut short, readers that pin the WAL, large backlogs.

Each is a scenario that takes about so many seconds as it is given. What it needs many processes for it starts as
scripts, which are killed at its end.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.proof.figures import Figures

from litebroker import JobSpec, SQLiteStorage, State

_LIMIT_S = 60

_BEGINNING = """
import os, random, signal, sys, threading, time
from litebroker import JobSpec, SQLiteStorage
from tests.proof.processes import die_with_parent
die_with_parent()
storage = SQLiteStorage(sys.argv[1], durability="relaxed", busy_timeout=60)
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

def one(queue="work"):
    id = storage.add([JobSpec(queue, b"{}", max_attempts=None)])[0].id
    tell("added", id)
    records = storage.claim([queue], limit=1, lease_ms=60_000)
    for record, done in zip(records, storage.complete([record.lease for record in records])):
        tell("done" if done else "lost", record.id)

def until(seconds, work):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()
"""

# argv[3]: how many seconds.
_THREADS = """
threads = [threading.Thread(target=until, args=(float(sys.argv[3]), one)) for _ in range(200)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
_PROCESS = """
until(float(sys.argv[3]), one)
"""
# Children are forked by several threads while the others write; each does one job.
_FORKS = """
def fork():
    pid = os.fork()
    if pid == 0:
        one()
        os._exit(0)
    os.waitpid(pid, 0)
threads = [threading.Thread(target=until, args=(float(sys.argv[3]), work)) for work in (fork, fork, fork, one, one)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
# Most of the time no descriptor is to be had; errors are told of, and what was acknowledged is there.
_DESCRIPTORS = """
import resource
from litebroker import LitebrokerError
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
taken = []
chance = random.Random(1)
def exhausted():
    try:
        while True: taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(chance.randrange(4)):
        os.close(taken.pop())
    fresh = SQLiteStorage(sys.argv[1], durability="durable", busy_timeout=5)
    for used in (fresh, storage):
        try:
            tell("added", used.add([JobSpec("work", b"{}")])[0].id)
        except LitebrokerError as error:
            tell("refused", type(error).__name__)
    while taken: os.close(taken.pop())
    fresh.close()
    one()
until(float(sys.argv[3]), exhausted)
"""
_HOLD = """
import sqlite3
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
db.execute("begin immediate")
tell("holds")
time.sleep(float(sys.argv[3]))
db.execute("rollback")
"""
# Stands still for longer than its lease, by SIGSTOP from outside, and goes on.
_STALLS = """
tell("up", os.getpid())
while True:
    storage.add([JobSpec("work", b"{}", max_attempts=None)])
    for record in storage.claim(["work"], limit=1, lease_ms=250):
        tell("claimed", record.id, os.getpid())
        time.sleep(0.01)
        if storage.complete([record.lease])[0]:
            tell("done", record.id)
"""


@contextmanager
def scripts(path: Path, *sources: str, seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that run these; killed at the end if they have not ended."""
    log = path.with_name("log")
    log.touch()
    started = [
        subprocess.Popen([sys.executable, "-c", _BEGINNING + source, str(path), str(log), str(seconds)])
        for source in sources
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _told(path: Path, word: str) -> list[int]:
    lines = (line.split() for line in path.with_name("log").read_text().splitlines())
    return [int(line[1]) for line in lines if line[0] == word]


def _account(figures: Figures, path: Path) -> None:
    """Each job that was acknowledged was done once, or is still there."""
    with closing(SQLiteStorage(path)) as storage:
        there = {int(row[0]) for row in storage.execute("select id from litebroker_job")}
        if storage.execute("pragma integrity_check") != [("ok",)]:
            figures.wrong("unexplained", "integrity_check found the file damaged")
    done = Counter(_told(path, "done"))
    added = _told(path, "added")
    figures.jobs += len(added)
    figures.runs += sum(done.values())
    figures.wrong("lost", *(f"job {id}" for id in added if id not in there and id not in done))
    figures.wrong(
        "doubly_leased", *(f"job {id} was completed {times} times" for id, times in done.items() if times > 1)
    )
    figures.wrong("unexplained", *(f"job {id} was completed, and is there" for id in done if id in there))


def _crowd(*sources: str, what: str) -> Callable[[Figures, Path, float], None]:
    def run(figures: Figures, path: Path, seconds: float) -> None:
        with scripts(path, *sources, seconds=seconds) as started:
            ends = [process.wait(seconds + _LIMIT_S) for process in started]
        figures.wrong("unexplained", *(f"{what}: a process ended with {end}" for end in ends if end))
        figures.fault(what)
        refused = path.with_name("log").read_text().count("refused")
        if refused:
            figures.fault("calls refused for want of descriptors", refused)
        _account(figures, path)

    return run


def held(figures: Figures, path: Path, seconds: float) -> None:
    """A stranger holds the write lock, for twenty seconds if there is the time, while others want to work."""
    with (
        scripts(path, *[_PROCESS] * 3, seconds=seconds) as workers,
        scripts(path, _HOLD, seconds=min(20, seconds)) as [it],
    ):
        it.wait(seconds + _LIMIT_S)
        ends = [process.wait(seconds + _LIMIT_S) for process in workers]
    figures.wrong("unexplained", *(f"a worker ended with {end}" for end in ends if end))
    figures.fault("write locks held by a stranger")
    _account(figures, path)


def stopped(figures: Figures, path: Path, seconds: float) -> None:
    """Processes are stopped for longer than their leases, and go on: what they settle late is refused."""
    chance = random.Random(figures.seed)
    with scripts(path, *[_STALLS] * 3, seconds=seconds) as started:
        deadline = time.monotonic() + _LIMIT_S
        while len(set(_told(path, "up"))) < len(started) and time.monotonic() < deadline:
            time.sleep(0.01)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            process = chance.choice(started)
            process.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 0.6))
            process.send_signal(signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.1))
            figures.fault("processes stopped")
    _account(figures, path)
    figures.jobs += len(set(_told(path, "claimed")))


def cut_wal(figures: Figures, path: Path, seconds: float) -> None:
    """The WAL is cut at a random place while nobody has the file: what is left is whole, and opens."""
    chance = random.Random(figures.seed)
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        here = path.with_name(f"cut-{number}.db")
        program = (
            "import os, sys; from litebroker import JobSpec, SQLiteStorage\n"
            "storage = SQLiteStorage(sys.argv[1], durability='relaxed')\n"
            "for n in range(60): storage.add([JobSpec('work', b'%d' % n + b'.' * 3000)])\n"
            "os._exit(0)\n"  # no connection is closed: the WAL stays
        )
        subprocess.run([sys.executable, "-c", program, str(here)], check=True)
        wal = here.with_name(f"{here.name}-wal")
        os.truncate(wal, chance.randrange(wal.stat().st_size))
        figures.fault("WALs cut short")
        with closing(SQLiteStorage(here)) as storage:
            storage.add([JobSpec("work", b"after")])
            rows = storage.execute("select payload from litebroker_job order by id")
            found = [int(bytes(payload).split(b".")[0]) for (payload,) in rows if payload != b"after"]
            if found != list(range(len(found))):
                figures.wrong("unexplained", f"after the cut there are {found}")
            if storage.execute("pragma integrity_check") != [("ok",)]:
                figures.wrong("unexplained", "integrity_check found the file damaged")
        figures.jobs += 60
        here.unlink()


def pinned(figures: Figures, path: Path, seconds: float, *, jobs: int = 200_000) -> None:
    """A reader pins the WAL while many jobs pass. Afterwards the WAL is small again."""
    with closing(SQLiteStorage(path, durability="relaxed")) as storage:
        storage.add([JobSpec("work", b"first")])
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("begin")
        reader.execute("select count(*) from litebroker_job").fetchall()
        end, passed = time.monotonic() + seconds, 0
        while passed < jobs and time.monotonic() < end:
            _pass(storage, 100, b"{}")
            passed += 100
        reader.close()
        figures.fault("readers that pin the WAL")
        for _ in range(60):  # as many as bring two checkpoints
            _pass(storage, 100, b"{}")
        figures.jobs += passed + 6000
        size = _size(f"{path}-wal")
        if size > 2**25:  # 16 MB are left of a larger one, and 8,000 pages may gather between two checkpoints
            figures.wrong("unexplained", f"the WAL has {size:,} bytes after the reader has gone")


def large(figures: Figures, path: Path, seconds: float, *, jobs: int = 10_000) -> None:
    """Payloads of 200 kB pass, a few at a time: the file does not grow with them."""
    end, passed = time.monotonic() + seconds, 0
    with closing(SQLiteStorage(path, durability="relaxed")) as storage:
        while passed < jobs and time.monotonic() < end:
            _pass(storage, 10, b"x" * 200_000)
            passed += 10
        figures.jobs += passed
        figures.fault("payloads of 200 kB", passed)
        size = _size(path) + _size(f"{path}-wal")
        if size > 2**26:  # ten payloads are 2 MB, and the WAL is 4 MB and a transaction
            figures.wrong("unexplained", f"the file and its WAL have {size:,} bytes after {passed} payloads")


def backlog(figures: Figures, path: Path, seconds: float, *, jobs: int = 1_000_000) -> None:
    """Many jobs wait: a claim costs as much as ever, and none is lost."""
    with closing(SQLiteStorage(path, durability="relaxed")) as storage:
        few = _claim_s(storage, prefill=100)
        end, added = time.monotonic() + seconds, 0
        while added < jobs and time.monotonic() < end:
            storage.add([JobSpec("work", b"{}")] * 5000)
            added += 5000
        many = _claim_s(storage, prefill=0)
        figures.fault("pending jobs", added)
        figures.jobs += added
        left = storage.counts("work").pending
        if left != added:
            figures.wrong("lost", *[f"of {added:,} jobs {left:,} are there"])
        if many > 20 * few + 0.02:
            figures.wrong(
                "unexplained", f"a claim takes {many * 1000:.1f} ms with {added:,} jobs, {few * 1000:.1f} with few"
            )


def _claim_s(storage: SQLiteStorage, *, prefill: int) -> float:
    """The time of a claim, the median of fifty; what was claimed, and what was filled in for it, is gone or back."""
    if prefill:
        storage.add([JobSpec("work", b"{}")] * prefill)
    times, records = [], []
    for _ in range(50):
        began = time.perf_counter()
        records += storage.claim(["work"], limit=1, lease_ms=60_000)
        times.append(time.perf_counter() - began)
    storage.release([record.lease for record in records])
    if prefill:
        storage.purge("work", [State.PENDING])
    return sorted(times)[25]


def _pass(storage: SQLiteStorage, jobs: int, payload: bytes) -> None:
    storage.add([JobSpec("work", payload)] * jobs)
    records = storage.claim(["work"], limit=jobs, lease_ms=60_000)
    storage.complete([record.lease for record in records])


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - os.stat is what may be done to a database in use
    except FileNotFoundError:
        return 0


SCENARIOS: dict[str, Callable[[Figures, Path, float], None]] = {
    "200 threads": _crowd(_THREADS, what="crowds of 200 threads"),
    "50 processes": _crowd(*[_PROCESS] * 50, what="crowds of 50 processes"),
    "forks": _crowd(_FORKS, _FORKS, what="fork storms"),
    "no descriptors": _crowd(_DESCRIPTORS, what="times without descriptors"),
    "held": held,
    "stopped": stopped,
    "cut WAL": cut_wal,
    "pinned": pinned,
    "large": large,
    "backlog": backlog,
}


def bad_days(folder: Path, seconds: float, seed: int) -> Figures:
    """All scenarios, one after the other."""
    figures = Figures("bad days", seed)
    with figures.timed():
        for name, scenario in SCENARIOS.items():
            here = folder / name.replace(" ", "-")
            here.mkdir()
            found = len(figures.found)
            scenario(figures, here / "jobs.db", seconds / len(SCENARIOS))
            figures.found[found:] = [f"{name}: {what}" for what in figures.found[found:]]
            if figures.good:
                shutil.rmtree(here)
    return figures


__all__ = ["SCENARIOS", "bad_days"]

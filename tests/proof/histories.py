"""Histories of claims, renewals and settlements by many processes at once, and whether one order explains each.

Every call is written down before it begins and after it has answered. For each job there has to be an order of its
calls in which each takes effect at one moment between the two, and in which one lease follows another: that is
linearizability. As each claim has a token of its own, the order need not be searched for: no call may be too early or
too late. Leases are a few dozen milliseconds long, so that they end at all moments; processes are stopped and killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.proof.figures import Figures

from litebroker import SQLiteStorage

_PROGRAM = """
import os, random, sys, threading, time
from litebroker import JobError, JobSpec, SQLiteStorage
from tests.proof.processes import die_with_parent

die_with_parent()
path, log, driver, seed, seconds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
storage = SQLiteStorage(path, durability="relaxed", driver=driver, busy_timeout=60)
file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
pid = os.getpid()

def tell(*words):
    os.write(file, (" ".join(map(str, words)) + "\\n").encode())

def call(kind, lease, lease_ms, ask):
    tell("begin", time.monotonic_ns(), kind, lease.job_id, lease.token, pid)
    answer = ask()
    tell("end", time.monotonic_ns(), kind, lease.job_id, lease.token, pid, lease_ms, int(bool(answer)))

def work(chance):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if chance.random() < 0.3:
            tell("added", storage.add([JobSpec("work", b"{}", max_attempts=None)])[0].id)
        lease_ms = chance.choice([15, 40, 80])
        began = time.monotonic_ns()
        records = storage.claim(["work"], limit=chance.choice([1, 1, 2]), lease_ms=lease_ms)
        ended = time.monotonic_ns()
        for record in records:
            tell("begin", began, "claim", record.id, record.token, pid)
            tell("end", ended, "claim", record.id, record.token, pid, lease_ms, 1)
        for record in records:
            lease = record.lease
            for _ in range(chance.choice([0, 0, 1, 3])):
                time.sleep(chance.random() * lease_ms / 1000)
                again_ms = chance.choice([15, 40])
                call("extend", lease, again_ms, lambda: storage.extend([lease], again_ms)[0])
            time.sleep(chance.random() * 1.3 * lease_ms / 1000)
            how = chance.random()
            if how < 0.5:
                call("complete", lease, 0, lambda: storage.complete([lease])[0])
            elif how < 0.7:
                call("release", lease, 0, lambda: storage.release([lease])[0])
            elif how < 0.85:
                call("fail", lease, 0, lambda: storage.fail(lease, JobError("handler"), retry_in_ms=0))
        if not records:
            time.sleep(0.002)

threads = [threading.Thread(target=work, args=(random.Random(seed * 10 + n),)) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell("killed", time.monotonic_ns(), pid)
os._exit(0)
"""

_SLACK_NS = 2_000_000  # times inside are whole milliseconds
_SETTLES = frozenset({"complete", "release", "fail"})


@dataclass(frozen=True)
class Call:
    """A call that names a lease. ``ended_ns`` is None, and the answer unknown, when its process was killed in it."""

    kind: str
    job: int
    token: int
    pid: int
    began_ns: int
    ended_ns: int | None = None
    lease_ms: int = 0
    true: bool = False


@dataclass
class History:
    """What was written down."""

    calls: list[Call] = field(default_factory=list)
    added: set[int] = field(default_factory=set)
    killed_ns: dict[int, int] = field(default_factory=dict)


def read(lines: Iterable[str]) -> History:
    history = History()
    begun: dict[tuple[str, ...], int] = {}
    for line in lines:
        word, *rest = line.split()
        if word == "added":
            history.added.add(int(rest[0]))
        elif word == "killed":
            history.killed_ns[int(rest[1])] = int(rest[0])
        elif word == "begin":
            begun[tuple(rest[1:5])] = int(rest[0])
        else:
            kind, job, token, pid = rest[1:5]
            began = begun.pop((kind, job, token, pid))
            call = Call(kind, int(job), int(token), int(pid), began, int(rest[0]), int(rest[5]), rest[6] == "1")
            history.calls.append(call)
    for (kind, job, token, pid), began in begun.items():
        history.calls.append(Call(kind, int(job), int(token), int(pid), began))
    return history


class _Lease:
    """One claim, and the calls that named it."""

    def __init__(self, claim: Call) -> None:
        self.claim = claim
        self.calls: list[Call] = []

    def ends_ns(self, *, by: Call | None = None) -> tuple[float, float]:
        """From when, and until when, it may have ended by itself, with the renewals that were before a call."""
        renewals = [self.claim, *(call for call in self.calls if call.kind == "extend" and call is not by)]
        unknown = [call for call in renewals if call.ended_ns is None]
        known = [call for call in renewals if call.ended_ns is not None and call.true]
        if by is not None:
            # A renewal that began after the call had ended cannot matter to it.
            known = [call for call in known if by.ended_ns is None or call.began_ns <= by.ended_ns]
        last = max(known, key=lambda call: call.began_ns)
        first_ns = last.began_ns + last.lease_ms * 1_000_000 - _SLACK_NS
        # Of one claim nothing overlaps but what a killed process left open, whose effect is not known.
        last_ns = float("inf") if unknown else (last.ended_ns or 0) + last.lease_ms * 1_000_000 + _SLACK_NS
        return first_ns, last_ns


def faults(history: History) -> tuple[list[str], list[str]]:
    """Two leases at once, and answers that no order explains."""
    doubly: list[str] = []
    unexplained: list[str] = []
    leases: dict[tuple[int, int], _Lease] = {}
    jobs: dict[int, list[_Lease]] = defaultdict(list)
    for call in history.calls:
        if call.kind == "claim":
            leases[call.job, call.token] = _Lease(call)
            jobs[call.job].append(leases[call.job, call.token])
    for call in history.calls:
        if call.kind != "claim":
            leases[call.job, call.token].calls.append(call)
    for line in jobs.values():
        line.sort(key=lambda lease: lease.claim.began_ns)
        for lease in line:
            lease.calls.sort(key=lambda call: call.began_ns)
            unexplained += _wrong_answers(lease, history)
        latest, *rest = line
        for lease in rest:
            wrong = _overlap(latest, lease, history)
            at_once = lease.claim.began_ns < (latest.claim.ended_ns or float("inf"))
            if wrong and at_once and not _overlap(lease, latest, history):
                continue  # One waited to write while the other claimed, and gave the job back or lost it.
            doubly += wrong
            latest = lease
    return doubly, unexplained


def _wrong_answers(lease: _Lease, history: History) -> list[str]:
    wrong = []
    settled: Call | None = None
    for call in lease.calls:
        if call.ended_ns is None:
            continue
        first_ns, last_ns = lease.ends_ns(by=call)
        if call.true:
            if settled is not None:
                wrong.append(f"{call} was accepted, and {settled} before it")
            if call.began_ns > last_ns:
                wrong.append(f"{call} was accepted after the lease had ended, at the latest {last_ns}")
            settled = call if call.kind in _SETTLES else settled
        elif settled is None and call.ended_ns < first_ns and not _dead_by(history, lease.claim.pid, call.ended_ns):
            wrong.append(f"{call} was refused, and the lease could not have ended before {first_ns}")
    return wrong


def _overlap(one: _Lease, other: _Lease, history: History) -> list[str]:
    """What is wrong with ``other`` following ``one``."""
    taken_ns = other.claim.ended_ns or 0
    wrong = [
        f"{call} was accepted, and {other.claim} had the job"
        for call in one.calls
        if call.true and call.began_ns > taken_ns
    ]
    settled = [call for call in one.calls if call.kind in _SETTLES and (call.true or call.ended_ns is None)]
    if any(call.kind == "complete" and call.true for call in settled):
        return [*wrong, f"{other.claim} got a job that was completed"]
    if any(call.began_ns <= taken_ns for call in settled) or _dead_by(history, one.claim.pid, taken_ns):
        return wrong
    first_ns, _ = one.ends_ns(by=other.claim)
    if taken_ns < first_ns:
        wrong.append(f"{other.claim} got a job whose lease of {one.claim} could not have ended before {first_ns}")
    return wrong


def _dead_by(history: History, pid: int, moment_ns: float) -> bool:
    return history.killed_ns.get(pid, float("inf")) <= moment_ns


def histories(folder: Path, seconds: float, seed: int) -> Figures:
    """Rounds of a few seconds: a file, three processes that are stopped and killed, and the check of what they say."""
    figures = Figures("histories", seed)
    with figures.timed():
        deadline = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < deadline:
            number += 1
            here = folder / f"{number}"
            here.mkdir()
            record(figures, here, min(4.0, seconds), seed + number)
    return figures


def record(figures: Figures, folder: Path, seconds: float, seed: int) -> None:
    """One round."""
    chance = random.Random(seed)
    path, log = folder / "jobs.db", folder / "log"
    log.touch()
    drivers = ["sqlite3", "apsw"] if "apsw" in sys.modules or _has_apsw() else ["sqlite3"]
    running: list[subprocess.Popen[bytes]] = []
    started = 0

    def start() -> subprocess.Popen[bytes]:
        nonlocal started
        started += 1
        arguments = [path, log, chance.choice(drivers), seed * 100 + started, seconds]
        return subprocess.Popen([sys.executable, "-c", _PROGRAM, *map(str, arguments)])

    try:
        running += [start() for _ in range(3)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.05, 0.4))
            victim = chance.randrange(len(running))
            if chance.random() < 0.6:
                running[victim].send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0, 0.15))
                running[victim].send_signal(signal.SIGCONT)
                figures.fault("processes stopped")
            else:
                with log.open("a") as file:  # noted before: from here on its leases may be taken back
                    file.write(f"killed {time.monotonic_ns()} {running[victim].pid}\n")
                running[victim].kill()
                running[victim].wait()
                running[victim] = start()
                figures.fault("kills")
        for process in running:
            process.wait(60)
    finally:
        for process in running:
            process.kill()
            process.wait()
    _judge(figures, path, read(log.read_text().splitlines()))


def _has_apsw() -> bool:
    from importlib.util import find_spec

    return find_spec("apsw") is not None


def _judge(figures: Figures, path: Path, history: History) -> None:
    doubly, unexplained = faults(history)
    figures.wrong("doubly_leased", *doubly)
    figures.wrong("unexplained", *unexplained)
    with closing(SQLiteStorage(path)) as storage:
        there = {int(row[0]) for row in storage.execute("select id from litebroker_job")}
        if storage.execute("pragma integrity_check") != [("ok",)]:
            figures.wrong("unexplained", "integrity_check found the file damaged")
    ended = {call.job for call in history.calls if call.kind == "complete" and (call.true or call.ended_ns is None)}
    figures.wrong("lost", *(f"job {job}" for job in history.added - there - ended))
    figures.jobs += len(history.added)
    figures.runs += sum(call.kind == "claim" for call in history.calls)
    figures.fault("calls compared", len(history.calls))

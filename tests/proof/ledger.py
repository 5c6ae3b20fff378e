"""What happened, written down outside of the database: a line each, appended by every process to one file."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# What becomes of a job, by its key: so many of a hundred always raise, and so many the first time.
_ALWAYS_RAISE, _RAISE_ONCE, _SLOW = 3, 12, 20
_runs = itertools.count()


class PlannedError(Exception):
    """What a job raises that is meant to."""


class Ledger:
    """The file. A short line that is appended comes there whole, and outlives its writer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        os.close(self._file)

    def tell(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def run(self, key: str) -> None:
        """Do the job of this key: note its begin, take some time, raise if it is one that does, note its end."""
        pid, kind = os.getpid(), zlib.crc32(key.encode()) % 100
        run = f"{pid}.{next(_runs)}"
        self.tell("start", key, run, time.monotonic_ns(), pid, os.getppid())
        time.sleep(0.05 if _RAISE_ONCE <= kind < _SLOW else (kind % 4) / 1000)
        if kind < _ALWAYS_RAISE or (kind < _RAISE_ONCE and self._is_first(key)):
            self.tell("raise", key, run, time.monotonic_ns())
            raise PlannedError(key)
        self.tell("end", key, run, time.monotonic_ns())

    def _is_first(self, key: str) -> bool:
        try:
            os.close(os.open(self.folder / f"raised-{key}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


@dataclass
class Run:
    """One run of a job. ``how`` is "end", "raise", "kill", or "" when nothing tells of its end."""

    key: str
    started_ns: int
    processes: tuple[int, int]
    ended_ns: int = 0
    how: str = ""


@dataclass
class Verdict:
    """What a ledger, and the dead letters in the file, say of each job."""

    jobs: int = 0
    runs: int = 0
    dead: int = 0
    lost: list[str] = field(default_factory=list)
    doubly_leased: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DeadLetter:
    """A job that failed for good: why, and the processes whose vanishing it names."""

    reason: str
    lapsed: tuple[int, ...] = ()


class Account:
    """A ledger that was read to its end."""

    def __init__(self, folder: Path) -> None:
        self.tried: set[str] = set()
        self.added: set[str] = set()
        self.kills: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by process: noted, and gone
        self.runs: dict[str, list[Run]] = defaultdict(list)
        known: dict[str, Run] = {}
        for line in (folder / "ledger").read_text().splitlines():
            word, *rest = line.split()
            if word == "try":
                self.tried.add(rest[0])
            elif word == "add":
                self.added.add(rest[0])
            elif word == "kill":
                self.kills[int(rest[0])].append((int(rest[1]), int(rest[1])))
            elif word == "gone":
                noted_ns, _ = self.kills[int(rest[0])].pop()
                self.kills[int(rest[0])].append((noted_ns, int(rest[1])))
            elif word == "start":
                known[rest[1]] = Run(rest[0], int(rest[2]), (int(rest[3]), int(rest[4])))
                self.runs[rest[0]].append(known[rest[1]])
            else:
                known[rest[1]].how, known[rest[1]].ended_ns = word, int(rest[2])
        for runs in self.runs.values():
            runs.sort(key=lambda run: run.started_ns)
            for run in runs:
                if not run.how and (killed_ns := self._killed_ns(run, run.processes[:1])):
                    run.how, run.ended_ns = "kill", killed_ns

    def _killed_ns(self, run: Run, processes: tuple[int, ...]) -> int | None:
        """When one of the processes was killed during the run or after it. It lived until then at least."""
        kills = [kill for pid in processes for kill in self.kills[pid] if kill[1] >= run.started_ns]
        return min((max(noted_ns, run.started_ns) for noted_ns, _ in kills), default=None)

    def judge(self, dead: dict[str, DeadLetter], left: set[str]) -> Verdict:
        """Compare with the file: its dead letters, and what is still in it that should have come to an end."""
        verdict = Verdict(jobs=len(self.added | set(self.runs)), runs=sum(map(len, self.runs.values())), dead=len(dead))
        for key in sorted(self.added | set(self.runs) | set(dead)):
            runs = self.runs[key]
            if key not in self.tried:
                verdict.unexplained.append(f"{key} ran, and nobody added it")
            if key in left:
                verdict.unexplained.append(f"{key} is still in the file")
            elif key not in dead and not any(run.how == "end" for run in runs):
                verdict.lost.append(f"{key}: runs {runs}")
            if key in dead:
                verdict.unexplained += self._doubts(key, runs, dead[key])
            for run, following in itertools.pairwise(runs):
                if run.how and following.started_ns < run.ended_ns:
                    verdict.doubly_leased.append(f"{run} and {following}")
                elif run.how == "end" and self._killed_ns(run, run.processes) is None:
                    verdict.unexplained.append(f"{run} ended, its process lived, and it ran again: {following}")
                elif not run.how:
                    verdict.unexplained.append(f"{run} vanished, and its process was not killed")
        return verdict

    def _doubts(self, key: str, runs: list[Run], letter: DeadLetter) -> list[str]:
        if letter.reason == "planned":
            return [] if any(run.how == "raise" for run in runs) else [f"{key} failed, and never raised"]
        if letter.reason == "lapsed":
            alive = [pid for pid in letter.lapsed if not self.kills[pid]]
            return [f"{key} lapsed, and process {pid} was never killed" for pid in alive]
        return [f"{key} failed for reason {letter.reason!r}"]

"""Where the time goes: ``python -m tests.benchmarks profile [--functions N] [--jobs N]``.

Each operation runs alone, at ``relaxed``, and the calls of Python's driver are timed. A statement in autocommit is
also its commit, so each operation runs twice: as it is, and with all of it in one transaction, where a statement is a
statement only. What is not inside the driver is Python: litebroker's own, and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import itertools
import pstats
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import Ours

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one job takes, in µs, on one thread.

    Attributes:
        statements: Inside SQLite, without what follows.
        commits: Writing to the log at the end of each transaction, its locks included.
        checkpoints: Carrying the log over into the file.
    """

    total: float
    statements: float
    commits: float
    checkpoints: float

    @property
    def python(self) -> float:
        return max(self.total - self.statements - self.commits - self.checkpoints, 0)


class _Timed(sqlite3.Connection):
    """Python's driver, its calls timed, by what they are."""

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        began = time.perf_counter()
        try:
            return super().execute(sql, *arguments)
        finally:
            _spend(sql, time.perf_counter() - began)

    def executemany(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        began = time.perf_counter()
        try:
            return super().executemany(sql, *arguments)
        finally:
            _spend(sql, time.perf_counter() - began)


_spent = {"statements": 0.0, "commits": 0.0, "checkpoints": 0.0}


def _spend(sql: str, seconds: float) -> None:
    word = sql.split(maxsplit=1)[0].lower()
    kind = "checkpoints" if "wal_checkpoint" in sql else "commits" if word in {"begin", "commit"} else "statements"
    _spent[kind] += seconds


@contextmanager
def timed() -> Iterator[None]:
    """Connections that are opened meanwhile are timed."""
    connect = sqlite3.connect
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sqlite3, "connect", connect)
        sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=_Timed, **options)  # type: ignore[assignment]
        yield


def add(it: Ours, count: int) -> None:
    for _ in range(count):
        it.add()


def claim_and_complete(it: Ours, count: int) -> None:
    for _ in range(count):
        it.complete(it.claim())


def process(it: Ours, count: int, profile: cProfile.Profile | None = None) -> None:
    """With a profile, of the thread that runs the handler: it also settles and claims."""
    ended, left = threading.Event(), itertools.count(count, -1)

    def handler(_data: object) -> None:
        number = next(left)
        if number == count and profile is not None:
            profile.enable()
        if number == 1:
            if profile is not None:
                profile.disable()
            ended.set()

    worker = it.queue.process(handler)
    ended.wait()
    worker.close()


WORKS: dict[str, Callable[[Ours, int], None]] = {
    "add": add,
    "claim + complete": claim_and_complete,
    "process": process,
}


def shares(work: str, jobs: int) -> Shares:
    """The medians of a few rounds."""
    whole = [_measured(work, jobs, in_one=False) for _ in range(ROUNDS)]
    total, statements, commits, checkpoints = (statistics.median(column) for column in zip(*whole, strict=True))
    if work != "process":  # Its transactions are several statements each, and say when they begin and end.
        bare = statistics.median(_measured(work, jobs, in_one=True)[1] for _ in range(ROUNDS))
        statements, commits = bare, commits + max(statements - bare, 0)
    return Shares(total=total, statements=statements, commits=commits, checkpoints=checkpoints)


def _measured(work: str, jobs: int, *, in_one: bool) -> tuple[float, float, float, float]:
    """What a job takes, in µs: in all, and in the driver."""
    with tempfile.TemporaryDirectory(prefix=".benchmarks-", dir=Path.cwd()) as folder, timed():
        it = Ours(Path(folder) / "jobs.db", "relaxed")
        try:
            it.fill(0 if work == "add" else jobs + 1000)
            it.add()  # Warm.
            it.complete(it.claim())
            with it.queue.transaction() if in_one else contextlib.nullcontext():
                _spent.update(dict.fromkeys(_spent, 0.0))
                began = time.perf_counter()
                WORKS[work](it, jobs)
                took = time.perf_counter() - began
                figures = (took, *_spent.values())
        finally:
            it.close()
    total, statements, commits, checkpoints = (seconds / jobs * 1e6 for seconds in figures)
    return total, statements, commits, checkpoints


def functions(work: str, jobs: int, number: int) -> list[tuple[float, str]]:
    """The functions that take most by themselves, each with its share of what cProfile has seen."""
    with tempfile.TemporaryDirectory(prefix=".benchmarks-", dir=Path.cwd()) as folder:
        it = Ours(Path(folder) / "jobs.db", "relaxed")
        try:
            it.fill(jobs + 1000)
            profile = cProfile.Profile()
            if work == "process":
                process(it, jobs, profile)
            else:
                profile.runcall(WORKS[work], it, jobs)
        finally:
            it.close()
    rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    total = sum(own for _where, (_calls, _all_calls, own, *_) in rows)
    found = sorted(((own / total, _named(where)) for where, (_calls, _all_calls, own, *_) in rows), reverse=True)
    return found[:number]


def _named(where: tuple[str, int, str]) -> str:
    file, line, name = where
    return name if file == "~" else f"{name} ({Path(file).parent.name}/{Path(file).name}:{line})"


def table(found: dict[str, Shares]) -> str:
    """In Markdown."""
    lines = [
        "| work, µs a job | in all | SQLite's statements | commits | checkpoints | Python |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for work, it in found.items():
        parts = (it.statements, it.commits, it.checkpoints, it.python)
        cells = [f"{part:.1f} ({part / it.total:.0%})" for part in parts]
        lines.append(f"| {work} | {it.total:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks profile", description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"{', '.join(WORKS)}; all when none is named")
    parser.add_argument("--jobs", type=int, default=5000, help="in each round (5000)")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="also the N functions that take most")
    options = parser.parse_args(arguments)
    unknown = [work for work in options.works if work not in WORKS]
    if unknown:
        parser.error(f"there is no work {unknown[0]!r}; there are {', '.join(WORKS)}")
    works = options.works or list(WORKS)
    print(table({work: shares(work, options.jobs) for work in works}))
    if options.functions:
        for work in works:
            print(f"\n{work}, with cProfile: the share of each function's own time")
            for share, name in functions(work, options.jobs, options.functions):
                print(f"  {share:6.1%}  {name}")
    return 0

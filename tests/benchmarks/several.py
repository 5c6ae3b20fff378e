"""Work shared by several processes."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from tests.benchmarks import ROOT, SOURCES
from tests.benchmarks.contestants import Level, Ours
from tests.benchmarks.measuring import Bench, Row, Sample, Series, versus
from tests.benchmarks.single import NAMES, OF_RAW

from litebroker import Queue

# What is wanted.
WAKE_P50_MS, WAKE_P99_MS, IDLE_CPU = 1.5, 10, 0.005
WAIT_MS, FAIRNESS, WAL_MB = 250, 0.4, 64
WORKER_MB, GROWTH_MB = 100, 20


class Child:
    """A process in one of the roles of `child`, ready to go."""

    def __init__(self, role: str, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.child", role, json.dumps(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def say(self, line: str = "go") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"a process of the benchmark ended with status {self._process.wait()}")
        return line

    def ask(self) -> dict[str, float]:
        self.say()
        found: dict[str, float] = json.loads(self.answer())
        return found

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.answer())
        self._process.wait()
        return found

    def __enter__(self) -> Child:  # noqa: PYI034 (Self came with Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def processes(bench: Bench) -> Iterator[Row]:
    """Two add and two claim and complete, one at a time; from the start to the last acknowledgement."""
    levels: tuple[Level, ...] = ("relaxed", "durable")
    for level in levels:
        count = bench.count(4000 if level == "relaxed" else 800)
        series = {name: Series() for name in ("raw", "litebroker", "worker")}
        for number in range(bench.rounds):
            names = list(series)
            for name in names[number % 3 :] + names[: number % 3]:
                with bench.place() as folder:
                    series[name].append(_two_and_two(name, str(folder / "jobs.db"), level, count))
        work = "2 processes add, 2 claim + complete"
        yield versus(work, NAMES[level], series["raw"], series["litebroker"], at_least=OF_RAW)
        yield versus("... 2 process() instead", NAMES[level], series["raw"], series["worker"])


def _two_and_two(name: str, path: str, level: Level, count: int) -> Sample:
    with ExitStack() as stack:
        kind = "raw" if name == "raw" else "litebroker"
        producers = [
            stack.enter_context(Child("produce", kind=kind, path=path, level=level, count=count)) for _ in range(2)
        ]
        consumers = [
            stack.enter_context(
                Child("work", path=path, level=level, concurrency=1)
                if name == "worker"
                else Child("consume", kind=kind, path=path, level=level)
            )
            for _ in range(2)
        ]
        began = time.monotonic()
        for child in (*consumers, *producers):
            child.say()
        added = [child.result() for child in producers]
        if name == "worker":
            _wait_until_empty(path)
        for child in consumers:
            child.end_input()
        done = [child.result() for child in consumers]
    total = sum(found["done"] for found in done)
    if total != 2 * count:
        raise AssertionError(f"{2 * count} were added, and {total} done")
    seconds = max(found["last"] for found in done) - began
    return Sample(total / seconds, sum(found["cpu"] for found in (*added, *done)) / total * 1e6)


def _wait_until_empty(path: str) -> None:
    with Queue("q", path) as queue:
        while any((counts := queue.stats())[:3]):
            time.sleep(0.01 if counts.ready < 1000 else 0.1)


def wakeup(bench: Bench) -> Iterator[Row]:
    """How soon an idle worker in another process has a job, from before its `add`; and what idling costs."""
    levels: tuple[Level, ...] = ("relaxed", "durable")
    for level in levels:
        with (
            bench.place() as folder,
            Queue("q", folder / "jobs.db", durability=level) as queue,
            Child("work", path=str(folder / "jobs.db"), level=level, concurrency=4) as child,
        ):
            child.say()
            time.sleep(1)  # It becomes idle.
            before = child.ask()
            time.sleep(3 if bench.quick else 10)
            after = child.ask()
            idle = (after["cpu"] - before["cpu"]) / (after["now"] - before["now"])
            for _ in range(bench.count(400)):
                time.sleep(random.uniform(0.005, 0.03))
                queue.add({"added_at": time.monotonic()})
            _wait_until_empty(str(folder / "jobs.db"))
            child.end_input()
            delays = sorted(delay * 1000 for delay in child.result()["delays"])
        p50, p99 = statistics.median(delays), delays[len(delays) * 99 // 100]
        yield Row(
            work="idle worker in another process, add to handler",
            level=level,
            ours=f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
            wanted=f"p50 {WAKE_P50_MS:g} ms, p99 {WAKE_P99_MS:g} ms",
            reached=p50 < WAKE_P50_MS and p99 < WAKE_P99_MS,
            figures={"delays_ms": delays},
        )
        yield Row(
            work="... its CPU while idle",
            level=level,
            ours=f"{idle:.2%}",
            wanted=f"{IDLE_CPU:.1%}",
            reached=idle < IDLE_CPU,
            figures={"idle": idle},
        )


def writers(bench: Bench) -> Iterator[Row]:
    """8 processes that add, claim and complete without a pause, for 10 seconds."""
    seconds = 3.0 if bench.quick else 10.0
    found = {}
    for name in ("raw", "litebroker"):
        with bench.place() as folder, ExitStack() as stack:
            path = folder / "jobs.db"
            children = [
                stack.enter_context(Child("write", kind=name, path=str(path), level="relaxed", seconds=seconds))
                for _ in range(8)
            ]
            for child in children:
                child.say()
            wal, until, log = 0, time.monotonic() + seconds, folder / "jobs.db-wal"
            while time.monotonic() < until:
                wal = max(wal, log.stat().st_size)
                time.sleep(0.02)
            results = [child.result() for child in children]
        rates = [result["done"] / seconds for result in results]
        found[name] = {
            "rate": sum(rates),
            "longest_ms": max(result["longest"] for result in results) * 1000,
            "p99_ms": max(result["p99"] for result in results) * 1000,
            "fairness": min(rates) / max(rates),
            "wal_mb": wal / 1e6,
        }
    raw, ours = found["raw"], found["litebroker"]
    for work, key, form, wanted, reached in (
        (f"8 processes write for {seconds:g} s, operations", "rate", "{:,.0f}/s", "", None),
        ("... longest single wait", "longest_ms", "{:,.0f} ms", f"{WAIT_MS} ms", ours["longest_ms"] < WAIT_MS),
        ("... p99 of the worst process", "p99_ms", "{:,.1f} ms", "", None),
        ("... slowest of fastest", "fairness", "{:.2f}", f"{FAIRNESS:g}", ours["fairness"] >= FAIRNESS),
        ("... largest WAL", "wal_mb", "{:,.0f} MB", f"{WAL_MB} MB", ours["wal_mb"] < WAL_MB),
    ):
        yield Row(
            work=work,
            level=NAMES["relaxed"],
            raw=form.format(raw[key]),
            ours=form.format(ours[key]),
            wanted=wanted,
            reached=reached,
            figures={"raw": raw[key], "litebroker": ours[key]},
        )


def memory(bench: Bench) -> Iterator[Row]:
    """A worker that drains a million jobs: its memory early on, and at its highest."""
    count = bench.rows(1_000_000)
    with bench.place() as folder:
        contestant = Ours(folder / "jobs.db", "relaxed")
        contestant.fill(count)
        contestant.close()
        with Child("drain", path=str(folder / "jobs.db"), count=count, concurrency=8) as child:
            child.say()
            found = child.result()
    early = next((mb for _at, mb, done in found["curve"] if done > count / 10), found["highest"])
    yield Row(
        work=f"memory of a worker that drains {count:,}",
        level="relaxed",
        ours=f"{early:.0f} MB at a tenth, {found['highest']:.0f} MB at most",
        wanted=f"{WORKER_MB} MB, {GROWTH_MB} MB more",
        reached=found["highest"] < WORKER_MB and found["highest"] - early < GROWTH_MB,
        figures=found,
    )

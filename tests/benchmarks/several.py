"""Work shared by several processes."""

from __future__ import annotations

import json
import os
import random
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from tests.benchmarks import ROOT, SOURCES
from tests.benchmarks.contestants import ALL, LEVELS, PEERS, Contestant, Level, Ours, OursBelow, RawWoken
from tests.benchmarks.measuring import OURS, RAW, Bench, Entry, Line, Sample, Series, compared, figure, told, turned

from litebroker import Queue

# What is wanted.
OF_RAW = 0.7
WAKE_P50_MS, WAKE_P99_MS, IDLE_CPU = 0.6, 3, 0.001
WAIT_MS, FAIRNESS, WAL_MB = 250, 0.4, 64
WORKER_MB, GROWTH_MB = 100, 20

# A process that says nothing for so long hangs.
LONGEST_S = 120
WORKER = f"{OURS}, process()"


class Child:
    """A process in one of the roles of `child`, ready to go."""

    def __init__(self, role: str, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.child", role, json.dumps(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read = b""
        try:
            self.answer()
        except BaseException:
            self._end()
            raise

    def say(self, line: str = "go") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        until = time.monotonic() + LONGEST_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(until - time.monotonic()):
                    raise TimeoutError(f"a process of the benchmark said nothing for {LONGEST_S} s")
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    raise ChildProcessError(f"a process of the benchmark ended with status {self._process.wait()}")
                self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

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
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def processes(bench: Bench) -> Iterator[Line]:
    """Some add while as many claim and complete, one at a time; from the start to the last acknowledgement."""
    cases: tuple[tuple[int, Level, int], ...] = (
        (2, "relaxed", 4000),
        (2, "durable", 800),
        (2, "full", 800),
        (8, "relaxed", 1000),
    )
    for number, level, each in cases:
        kinds = _sharing(level)
        series = {name: Series() for name in (*[kind.name for kind in kinds], WORKER)}
        for turn in range(bench.rounds):
            for name in turned([name for name in series if not series[name].failure], turn):
                try:
                    with bench.place() as folder:
                        path = str(folder / "jobs.db")
                        figures, series[name].settings = _share(name, path, level, number, bench.count(each))
                        series[name].append(figures)
                except Exception as error:  # noqa: BLE001 (a peer may raise anything)
                    series[name].failure = told(error)
        title = f"{number} processes add, {number} claim + complete"
        wanted = OF_RAW if number == 2 and level != "full" else None
        worker = series.pop(WORKER)
        yield compared("processes", title, LEVELS[level], series, at_least=wanted)
        pair = {RAW: series[RAW], WORKER: worker}
        yield compared("processes", f"... {number} process() instead", LEVELS[level], pair, ours=WORKER)


def _sharing(level: Level) -> list[type[Contestant]]:
    """Those of whom several processes can use one file."""
    return [it for it in ALL if it.shared and it is not OursBelow and level in it.levels and not it.missing()]


def _share(name: str, path: str, level: Level, number: int, count: int) -> tuple[Sample, str]:
    """What they did together, and the settings found."""
    with ExitStack() as stack:
        kind = OURS if name == WORKER else name
        producers = [
            stack.enter_context(Child("produce", kind=kind, path=path, level=level, count=count)) for _ in range(number)
        ]
        consumers = [
            stack.enter_context(
                Child("work", path=path, level=level, concurrency=1)
                if name == WORKER
                else Child("consume", kind=kind, path=path, level=level)
            )
            for _ in range(number)
        ]
        began = time.monotonic()
        for child in (*consumers, *producers):
            child.say()
        added = [child.result() for child in producers]
        if name == WORKER:
            _wait_until_empty(path)
        for child in consumers:
            child.end_input()
        done = [child.result() for child in consumers]
    total = sum(found["done"] for found in done)
    if total != number * count:
        raise AssertionError(f"{number * count} were added, and {total} done")
    seconds = max(found["last"] for found in done) - began
    cpu_us = sum(found["cpu"] for found in (*added, *done)) / total * 1e6
    return Sample(total / seconds, cpu_us), added[0]["settings"]


def _wait_until_empty(path: str) -> None:
    until = time.monotonic() + LONGEST_S
    with Queue("q", path) as queue:
        while any((counts := queue.stats())[:3]):
            if time.monotonic() > until:
                raise TimeoutError(f"jobs are left after {LONGEST_S} s: {counts}")
            time.sleep(0.01 if counts.ready < 1000 else 0.1)


def wakeup(bench: Bench) -> Iterator[Line]:
    """How soon an idle worker in another process has a job, from before its `add`; and what idling costs."""
    levels: tuple[Level, ...] = ("relaxed", "durable")
    for level in levels:
        kinds: list[type[Contestant]] = [Ours, RawWoken]
        kinds += [it for it in PEERS if hasattr(it, "listen") and level in it.levels and not it.missing()]
        woken, idling = {}, {}
        for kind in kinds:
            try:
                woken[kind.name], idling[kind.name] = _woken(bench, kind, level)
            except Exception as error:  # noqa: BLE001 (a peer may raise anything)
                woken[kind.name] = idling[kind.name] = Entry(failure=told(error))
        delays, idle = woken[OURS], idling[OURS].value
        yield Line(
            work="wakeup",
            title="idle worker in another process, add to handler",
            level=LEVELS[level],
            entries=woken,
            wanted=f"p50 {WAKE_P50_MS:g} ms, p99 {WAKE_P99_MS:g} ms",
            reached=None if delays.failure else _p50(delays) <= WAKE_P50_MS and _p99(delays) <= WAKE_P99_MS,
        )
        yield Line(
            work="wakeup",
            title="... its CPU while idle",
            level=LEVELS[level],
            entries=idling,
            wanted=f"{IDLE_CPU:.1%}",
            reached=None if idle is None else idle < IDLE_CPU,
        )


def _woken(bench: Bench, kind: type[Contestant], level: Level) -> tuple[Entry, Entry]:
    """How soon, and what idling costs."""
    with bench.place() as folder, ExitStack() as stack:
        path = folder / "jobs.db"
        it = kind(path, level)
        stack.callback(it.close)
        role = {"role": "work", "concurrency": 4} if kind is Ours else {"role": "listen", "kind": kind.name}
        child = stack.enter_context(Child(**role, path=str(path), level=level))
        child.say()
        time.sleep(1)  # It becomes idle.
        before = child.ask()
        time.sleep(10 * max(bench.scale, 0.1))
        after = child.ask()
        idle = (after["cpu"] - before["cpu"]) / (after["now"] - before["now"])
        count = bench.count(400)
        for _ in range(count):
            time.sleep(random.uniform(0.005, 0.03))
            it.payload = {"added_at": time.monotonic()}
            it.add()
        until = time.monotonic() + LONGEST_S
        while child.ask()["delays"] < count:
            if time.monotonic() > until:
                raise TimeoutError(f"jobs are left after {LONGEST_S} s")
            time.sleep(0.01)
        child.end_input()
        delays = Entry(samples=sorted(delay * 1000 for delay in child.result()["delays"]), settings=it.settings())
    text = f"p50 {_p50(delays):.2f} ms, p99 {_p99(delays):.2f} ms"
    return replace(delays, text=text, value=_p50(delays)), Entry(text=f"{idle:.2%}", value=idle)


def _p50(entry: Entry) -> float:
    return statistics.median(entry.samples)


def _p99(entry: Entry) -> float:
    return entry.samples[len(entry.samples) * 99 // 100]


def writers(bench: Bench) -> Iterator[Line]:
    """8 processes that add, claim and complete without a pause, for 10 seconds."""
    seconds = max(10.0 * bench.scale, 0.5)
    kinds = _sharing("relaxed")
    found: dict[str, dict[str, float]] = {}
    failures: dict[str, Entry] = {}
    settings: dict[str, str] = {}
    for kind in kinds:
        try:
            found[kind.name], settings[kind.name] = _written(bench, kind, seconds)
        except Exception as error:  # noqa: BLE001 (a peer may raise anything)
            failures[kind.name] = Entry(failure=told(error))
    ours = found.get(OURS, dict.fromkeys(("rate", "longest_ms", "p99_ms", "fairness", "wal_mb"), float("nan")))
    for title, key, form, wanted, reached in (
        (f"8 processes write for {seconds:g} s, operations", "rate", "{:,.0f}/s", "", None),
        ("... longest single wait", "longest_ms", "{:,.0f} ms", f"{WAIT_MS} ms", ours["longest_ms"] < WAIT_MS),
        ("... p99 of the worst process", "p99_ms", "{:,.1f} ms", "", None),
        ("... slowest of fastest", "fairness", "{:.2f}", f"{FAIRNESS:g}", ours["fairness"] >= FAIRNESS),
        ("... largest WAL", "wal_mb", "{:,.1f} MB", f"{WAL_MB} MB", ours["wal_mb"] < WAL_MB),
    ):
        entries = {
            name: Entry(text=form.format(it[key]), value=it[key], settings=settings[name]) for name, it in found.items()
        }
        yield Line(
            work="writers",
            title=title,
            level=LEVELS["relaxed"],
            base=RAW if RAW in entries else "",
            entries={**entries, **failures},
            wanted=wanted,
            reached=reached,
        )


def _written(bench: Bench, kind: type[Contestant], seconds: float) -> tuple[dict[str, float], str]:
    with bench.place() as folder, ExitStack() as stack:
        path, log = folder / "jobs.db", folder / "jobs.db-wal"
        children = [
            stack.enter_context(Child("write", kind=kind.name, path=str(path), level="relaxed", seconds=seconds))
            for _ in range(8)
        ]
        for child in children:
            child.say()
        wal, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            wal = max(wal, log.stat().st_size)
            time.sleep(0.02)
        results = [child.result() for child in children]
    rates = [result["done"] / seconds for result in results]
    found = {
        "rate": sum(rates),
        "longest_ms": max(result["longest"] for result in results) * 1000,
        "p99_ms": max(result["p99"] for result in results) * 1000,
        "fairness": min(rates) / max(rates),
        "wal_mb": wal / 1e6,
    }
    return found, results[0]["settings"]


def memory(bench: Bench) -> Iterator[Line]:
    """A worker that drains a million jobs: its memory early on, and at its highest."""
    count = bench.count(1_000_000)
    with bench.place() as folder:
        contestant = Ours(folder / "jobs.db", "relaxed")
        contestant.fill(count)
        contestant.close()
        with Child("drain", path=str(folder / "jobs.db"), count=count, concurrency=8) as child:
            child.say()
            found = child.result()
    early = next((mb for _at, mb, done in found["curve"] if done > count / 10), found["highest"])
    yield figure(
        "memory",
        f"memory of a worker that drains {count:,}",
        f"{early:.0f} MB at a tenth, {found['highest']:.0f} MB at most",
        found["highest"],
        level=LEVELS["relaxed"],
        wanted=f"{WORKER_MB} MB, {GROWTH_MB} MB more",
        reached=found["highest"] < WORKER_MB and found["highest"] - early < GROWTH_MB,
    )

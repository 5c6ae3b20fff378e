"""Work within one process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import (
    ALL,
    LEVELS,
    Contestant,
    Honker,
    HueyStorage,
    Level,
    LiteQueue,
    Ours,
    PersistQueue,
    Raw,
    fill_delayed,
    payload,
)
from tests.benchmarks.measuring import OURS, RAW, Bench, Entry, Line, Series, Turn, compared, told

from litebroker import JobSpec, Queue, Retention
from litebroker.aio import AsyncQueue

Kinds = Sequence[type[Contestant]]
BOTH: Kinds = (Raw, Ours)

# What is wanted.
OF_RAW, OF_COMMIT_EACH, FULL_RATE, PROCESSED, AT_DEPTH, WITH_GROUPS = 0.7, 4, 10_000, 25_000, 1.2, 2


def add(bench: Bench) -> Iterator[Line]:
    """Jobs of 100 bytes, 2 kB and 200 kB, one at a time."""
    for size, text in ((100, "100 B"), (2000, "2 kB"), (200_000, "200 kB")):
        for level in LEVELS if size == 100 else ("relaxed", "durable"):
            yield compare(
                bench,
                "add",
                f"add, {text}",
                level,
                lambda it: Turn(functools.partial(_one, it.add), calls=4000 if size < 10_000 else 50),  # noqa: B023
                kinds=ALL if size == 100 else BOTH,
                size=size,
                at_least=None if level == "full" else OF_RAW,
            )


def add_many(bench: Bench) -> Iterator[Line]:
    """Batches of 100; the rate is of jobs."""

    def turn(it: Any) -> Turn:
        def once() -> int:
            it.add_many(100)
            return 100

        return Turn(once, calls=200)

    for level in ("relaxed", "durable"):
        yield compare(bench, "add_many", "add_many of 100, jobs", level, turn, needs="add_many", at_least=OF_RAW)


def claim(bench: Bench) -> Iterator[Line]:
    """Claim and complete, one at a time, over what is pending."""
    for pending in (1000, bench.count(100_000), bench.count(1_000_000)):
        # A peer takes minutes to be filled with a million.
        largest = pending > bench.count(100_000)
        for level in ("relaxed",) if largest else ("relaxed", "full"):
            yield compare(
                bench,
                "claim",
                f"claim + complete over {pending:,}",
                level,
                _claims,
                kinds=BOTH if largest else ALL,
                pending=pending,
                at_least=OF_RAW if pending == bench.count(100_000) and level == "relaxed" else None,
            )


def loop(bench: Bench) -> Iterator[Line]:
    """Add, claim, complete, one job after the other, with nothing else pending."""

    def turn(it: Contestant) -> Turn:
        def once() -> int:
            it.add()
            _settle(it)
            return 1

        return Turn(once, calls=2000)

    for level in LEVELS:
        # At the default level ours waits for the disk in the add only; the reference has one level for all.
        yield compare(
            bench, "loop", "add + claim + complete", level, turn, at_least=None if level == "full" else OF_RAW
        )
    yield compare(
        bench, "loop", "... of 200 kB", "relaxed", turn, kinds=(*BOTH, LiteQueue), size=200_000, at_least=OF_RAW
    )


def depth(bench: Bench) -> Iterator[Line]:
    """What a claim and its completion cost beside a thousand pending jobs, and beside what may make them dear."""
    large, groups = bench.count(1_000_000), bench.count(10_000)

    def pending(it: Ours) -> None:
        it.fill(large)

    def delayed(it: Ours) -> None:
        it.fill(1000)
        fill_delayed(it.queue.storage, large)

    def one_group(it: Ours) -> None:
        it.queue.storage.add([_grouped("only")] * 1000)

    def many_groups(it: Ours) -> None:
        it.queue.storage.add([_grouped(f"g{number}") for number in range(groups)])

    def saturated(it: Ours) -> None:
        storage = it.queue.storage
        storage.add([_grouped(f"g{number}") for number in range(groups - 1) for _ in range(2)])
        held = storage.claim(("q",), limit=groups - 1, lease_ms=HELD_MS)
        if len(held) != groups - 1:
            raise AssertionError(f"{len(held)} of {groups - 1} groups have an active job")
        storage.add([_grouped("free")] * 1000)

    cases: dict[str, tuple[str, Callable[[Ours], None], str | None, float | None]] = {
        "at 1,000": ("", lambda it: it.fill(1000), None, None),
        "pending": (f"claim + complete beside {large:,} pending", pending, None, AT_DEPTH),
        "delayed": (f"... beside {large:,} of the future", delayed, None, AT_DEPTH),
        "one group": ("... all of one group", one_group, "only", WITH_GROUPS),
        "groups": (f"... of {groups:,} groups", many_groups, "", WITH_GROUPS),
        "saturated": (f"... with {groups - 1:,} of {groups:,} groups saturated", saturated, "free", WITH_GROUPS),
    }
    with bench.place() as folder, ExitStack() as stack:
        turns = {}
        for name, (_title, fill, group, _most) in cases.items():
            it = Ours(folder / f"{name}.db", "relaxed")
            stack.callback(it.close)
            fill(it)
            refill = None if group is None else functools.partial(_add_to_group, it, group, itertools.count())
            turns[name] = _claims(it, refill)
        series = bench.take_turns(turns)
    for name, (title, _fill, _group, most) in cases.items():
        if title:
            pair = {"at 1,000": series["at 1,000"], name: series[name]}
            yield compared("depth", title, LEVELS["relaxed"], pair, base="at 1,000", ours=name, at_most=most)


# The groups stay saturated while it is measured.
HELD_MS = 3_600_000


def _grouped(group: str) -> JobSpec:
    return JobSpec(queue="q", payload=b"{}", group=group)


def _add_to_group(it: Ours, group: str, numbers: Iterator[int], count: int) -> None:
    """In the group, or each in a group of its own, with numbers from the start."""
    it.queue.storage.add([_grouped(group or f"g{next(numbers)}") for _ in range(count)])


def dedupe(bench: Bench) -> Iterator[Line]:
    """Adds with a key that is new, and with one that is held."""
    numbers = itertools.count()

    def add_with(key: Callable[[], str], it: Ours) -> int:
        it.queue.add(data, dedupe_key=key())
        return 1

    data = payload(100)
    with bench.place() as folder, ExitStack() as stack:
        ours = {name: Ours(folder / f"{name}.db", "relaxed") for name in ("without a key", "new", "held")}
        for it in ours.values():
            stack.callback(it.close)
        series = bench.take_turns(
            {
                "without a key": Turn(functools.partial(_one, ours["without a key"].add), calls=4000),
                "new": Turn(functools.partial(add_with, lambda: f"key:{next(numbers)}", ours["new"]), calls=4000),
                "held": Turn(functools.partial(add_with, lambda: "key", ours["held"]), calls=4000),
            }
        )
    for name, title in (("new", "add with a new dedupe key"), ("held", "... with one that is held")):
        pair = {"without a key": series["without a key"], name: series[name]}
        yield compared("dedupe", title, LEVELS["relaxed"], pair, base="without a key", ours=name)


def retention(bench: Bench) -> Iterator[Line]:
    """Claim and complete where the latest thousand that were completed are kept."""
    with bench.place() as folder, ExitStack() as stack:
        ours = {
            "nothing kept": Ours(folder / "none.db", "relaxed"),
            "kept": Ours(folder / "kept.db", "relaxed", retention=Retention(completed=1000)),
        }
        turns = {}
        for name, it in ours.items():
            stack.callback(it.close)
            it.fill(1000)
            turns[name] = _claims(it)
        series = bench.take_turns(turns)
    yield compared(
        "retention",
        "claim + complete, 1,000 completed kept",
        LEVELS["relaxed"],
        series,
        base="nothing kept",
        ours="kept",
    )


def threads(bench: Bench) -> Iterator[Line]:
    """16 threads that add, each add on disk before it returns.

    Each thread has the same to do, and all are waited for: SQLite's busy handler lets one go on and the others starve,
    and in a given time that one alone would make the figure. It is there too, as one thread that adds as many.
    """
    number, each = 16, bench.count(60)

    levels: tuple[Level, ...] = ("full", "durable")
    with bench.place() as folder, ExitStack() as stack:

        def opened(kind: type[Contestant], name: str, level: Level = "full") -> Contestant:
            it = kind(folder / f"{name}.db", level)
            stack.callback(it.close)
            return it

        raws = [opened(Raw, "raw") for _ in range(number)]
        adders = {RAW: raws, f"{RAW}, one thread": raws[:1]}
        adders |= {level: [opened(Ours, level, level)] * number for level in levels}
        peers = [peer for peer in (PersistQueue, HueyStorage) if not peer.missing()]
        adders |= {peer.name: [opened(peer, peer.module)] * number for peer in peers}
        series = bench.take_turns(
            {
                name: Turn(functools.partial(_together, [it.add for it in them], each), calls=1)
                for name, them in adders.items()
            }
        )
        for name, them in adders.items():
            series[name].settings = them[0].settings()
    for level in levels:
        others = {name: it for name, it in series.items() if name not in levels}
        yield compared(
            "threads",
            f"{number} threads add",
            LEVELS[level],
            {**others, level: series[level]},
            ours=level,
            at_least=OF_COMMIT_EACH if level == "full" else None,
            rate=FULL_RATE if level == "full" else None,
        )


def tasks(bench: Bench) -> Iterator[Line]:
    """The same adds from 100 threads, and from 100 tasks of asyncio."""
    number, each = 100, bench.count(20)
    for level in ("relaxed", "durable"):
        with bench.place() as folder, ExitStack() as stack:
            turns = {}
            for name, work in (("100 threads", _add_from_threads), ("tasks", _add_from_tasks)):
                it = Ours(folder / f"{name}.db", level)
                stack.callback(it.close)
                turns[name] = Turn(functools.partial(work, it.queue, number, each), calls=1)
            series = bench.take_turns(turns)
        yield compared(
            "tasks", f"{number} tasks of asyncio add", LEVELS[level], series, base="100 threads", ours="tasks"
        )


def process(bench: Bench) -> Iterator[Line]:
    """No-op jobs through a worker, until all are settled; others in a loop of one thread, by batches where they can."""
    count = bench.count(10_000)

    workers: dict[str, Callable[[Queue[Any]], int]] = {
        "8": lambda queue: _work(queue, count, 8),
        "1": lambda queue: _work(queue, count, 1),
        "32": lambda queue: _work(queue, count, 32),
        "many": lambda queue: _work(queue, count, 1, batch=100),
    }
    with bench.place() as folder, ExitStack() as stack:
        raw = Raw(folder / "raw.db", "relaxed")
        stack.callback(raw.close)
        turns = {RAW: _by_batches(raw, count)}
        for name, work in workers.items():
            it = Ours(folder / f"{name}.db", "relaxed")
            stack.callback(it.close)
            turns[name] = Turn(functools.partial(work, it.queue), before=functools.partial(it.fill, count), calls=1)
        settings = {RAW: raw.settings()}
        for peer in (LiteQueue, Honker):
            if not peer.missing():
                loop = peer(folder / f"{peer.module}.db", "relaxed")
                stack.callback(loop.close)
                loop.fill(1000)
                batches = hasattr(loop, "claim_and_complete_many")
                turns[peer.name] = _by_batches(loop, count) if batches else _claims(loop)
                settings[peer.name] = loop.settings()
        series = bench.take_turns(turns, turns=bench.rounds * 3)
    for name, text in settings.items():
        series[name].settings = text
    peers = {name: it for name, it in series.items() if name not in workers}
    for name in workers:
        title = "process_many, no-ops, batches of 100" if name == "many" else f"process, no-ops, concurrency {name}"
        pair = {**peers, name: series[name]}
        if name != "8":
            yield compared("process", title, LEVELS["relaxed"], pair, base=RAW, ours=name)
            continue
        line = compared("process", title, LEVELS["relaxed"], pair, base=RAW, ours=name, rate=PROCESSED)
        slower = [entry.times > 1 for peer, entry in line.entries.items() if peer != RAW and entry.times is not None]
        yield replace(line, wanted=f"{line.wanted} and above every peer", reached=line.reached and all(slower))


def coroutines(bench: Bench) -> Iterator[Line]:
    """No-op jobs through a worker with an async handler, beside one with threads."""
    count, concurrency = bench.count(10_000), 100
    base = f"{concurrency} threads"
    with bench.place() as folder, ExitStack() as stack:
        turns = {}
        for name in (base, "async"):
            it = Ours(folder / f"{name}.db", "relaxed")
            stack.callback(it.close)
            turns[name] = Turn(
                functools.partial(_work, it.queue, count, concurrency, is_async=name == "async"),
                before=functools.partial(it.fill, count),
                calls=1,
            )
        series = bench.take_turns(turns)
    title = f"process, async no-ops, concurrency {concurrency}"
    yield compared("coroutines", title, LEVELS["relaxed"], series, base=base, ours="async")


def children(bench: Bench) -> Iterator[Line]:
    """Handlers in child processes beside handlers in threads: what the way there costs, and what it gets."""
    for title, rounds, count in (("no-ops", 0, 2000), ("10 ms of computing", 200_000, 100)):
        with bench.place() as folder, ExitStack() as stack:
            turns = {}
            for workers in ("threads", "processes"):
                it: Ours = Ours(folder / f"{workers}.db", "relaxed")
                stack.callback(it.close)  # And its worker.
                it.queue.process(compute, workers=workers, concurrency=2)  # type: ignore[arg-type]
                turns[workers] = Turn(functools.partial(_done, it.queue, [rounds] * bench.count(count)), calls=1)
            series = bench.take_turns(turns, turns=bench.rounds)
        yield compared(
            "children",
            f"process in 2 processes, {title}",
            LEVELS["relaxed"],
            series,
            base="threads",
            ours="processes",
        )


def compute(rounds: int) -> int:
    """A handler that child processes import."""
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def _done(queue: Queue[Any], jobs: list[int]) -> int:
    """Add them for a worker that runs already, and see them settled."""
    queue.add_many(jobs)
    while any(queue.stats()[:3]):
        time.sleep(0.002)
    return len(jobs)


def growth(bench: Bench) -> Iterator[Line]:
    """The file after many jobs have gone through it, a thousand pending at any time; and the largest log."""
    count = bench.count(30_000)
    kinds = [kind for kind in (Raw, Ours, LiteQueue, Honker) if not kind.missing()]
    sizes: dict[str, dict[str, float]] = {}
    settings, failures = {}, {}
    for kind in kinds:
        try:
            with bench.place() as folder:
                sizes[kind.name], settings[kind.name] = _grown(kind, folder / "jobs.db", count)
        except Exception as error:  # noqa: BLE001 (a peer may raise anything)
            failures[kind.name] = Entry(failure=told(error))
    for key, title in (("file", f"file after {count:,} jobs, 1,000 pending"), ("wal", "... its largest log")):
        mine = sizes.get(OURS, {}).get(key)
        entries = {
            name: Entry(
                text=f"{found[key]:.1f} MB",
                value=found[key],
                times=found[key] / mine if mine else None,
                settings=settings[name],
            )
            for name, found in sizes.items()
        }
        yield Line(work="growth", title=title, level=LEVELS["relaxed"], base=RAW, entries={**entries, **failures})


def _grown(kind: type[Contestant], path: Path, count: int) -> tuple[dict[str, float], str]:
    """The sizes, in MB, and the settings found."""
    it = kind(path, "relaxed")
    it.fill(1000)
    log = Path(f"{path}-wal")
    largest = 0
    for number in range(count):
        it.add()
        _settle(it)
        if number % 100 == 0 and log.exists():
            largest = max(largest, log.stat().st_size)
    settings = it.settings()
    it.close()
    return {"file": path.stat().st_size / 1e6, "wal": largest / 1e6}, settings


def compare(
    bench: Bench,
    work: str,
    title: str,
    level: str,
    turn: Callable[[Any], Turn],
    *,
    kinds: Kinds = ALL,
    needs: str = "add",
    size: int = 100,
    pending: int = 0,
    at_least: float | None = None,
) -> Line:
    """Have every contestant take turns that is there, has the verb, and can be compared at this level.

    Each has a file of its own, in which so many jobs are pending.
    """
    settings, failures = {}, {}
    with bench.place() as folder, ExitStack() as stack:
        turns: dict[str, Turn] = {}
        for number, kind in enumerate(kinds):
            if kind.missing() or level not in kind.levels or not hasattr(kind, needs):
                continue
            try:
                (folder / str(number)).mkdir()
                it = kind(folder / str(number) / "jobs.db", level, size=size)  # type: ignore[arg-type]
                stack.callback(it.close)
                it.fill(pending)
                turns[kind.name] = turn(it)
                settings[kind.name] = it.settings()
            except Exception as error:  # noqa: BLE001 (a peer may raise anything)
                failures[kind.name] = told(error)
        series = bench.take_turns(turns)
    for name, found in settings.items():
        if name in series:
            series[name].settings = found
    for name, failure in failures.items():
        series[name] = Series()
        series[name].failure = failure
    return compared(work, title, LEVELS[level], series, at_least=at_least)


def _one(operation: Callable[[], object]) -> int:
    operation()
    return 1


def _settle(it: Contestant) -> int:
    if not it.complete(it.claim()):
        raise AssertionError("a lease was lost")
    return 1


def _claims(it: Contestant, refill: Callable[[int], object] | None = None) -> Turn:
    """Claims and completions, half of a thousand at most; what they took is filled up again before the next turn."""
    taken = 0
    refill = it.fill if refill is None else refill

    def before() -> None:
        nonlocal taken
        if taken:
            refill(taken)
            taken = 0

    def once() -> int:
        nonlocal taken
        taken += 1
        return _settle(it)

    return Turn(once, before=before, calls=500)


def _by_batches(it: Any, count: int) -> Turn:
    """Claims and completions of 32 jobs each, of so many jobs that are added before."""

    def work() -> int:
        done = 0
        while done < count:
            done += it.claim_and_complete_many(32)
        return done

    return Turn(work, before=lambda: it.fill(count), calls=1)


def _work(queue: Queue[Any], count: int, concurrency: int, *, is_async: bool = False, batch: int | None = None) -> int:
    """Run a worker until so many no-ops are settled."""
    ended = threading.Event()
    left = itertools.count(count - 1, -1)

    def called(_data: object) -> None:
        if next(left) == 0:
            ended.set()

    async def awaited(_data: object) -> None:
        called(_data)

    def together(data: list[object]) -> None:
        for it in data:
            called(it)

    if batch is not None:
        worker = queue.process_many(together, batch=batch, concurrency=concurrency)
    else:
        worker = queue.process(awaited if is_async else called, concurrency=concurrency)
    if not ended.wait(60):
        raise TimeoutError(f"the worker has not done {count} jobs in a minute")
    worker.close()
    return count


def _together(operations: Sequence[Callable[[], object]], each: int) -> int:
    """Every operation so often, each in a thread of its own."""

    def work(operation: Callable[[], object]) -> None:
        for _ in range(each):
            operation()

    workers = [threading.Thread(target=work, args=(operation,)) for operation in operations]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return each * len(operations)


def _add_from_threads(queue: Queue[Any], number: int, each: int) -> int:
    return _together([functools.partial(queue.add, payload(100))] * number, each)


def _add_from_tasks(queue: Queue[Any], number: int, each: int) -> int:
    data = payload(100)

    async def work(queue: AsyncQueue[Any]) -> None:
        for _ in range(each):
            await queue.add(data)

    async def main() -> None:
        async with AsyncQueue(queue) as awaited:
            await asyncio.gather(*[work(awaited) for _ in range(number)])

    asyncio.run(main())
    return number * each

"""Work within one process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.contestants import CONTESTANTS, PAYLOAD, Contestant, Level, Ours, Raw, fill_delayed
from tests.benchmarks.measuring import Bench, Row, Series, versus

from litebroker import Queue
from litebroker.aio import AsyncQueue

# Ours and the reference's. At the default, an add is on disk when it returns; claims and acknowledgements need not be.
LEVELS: tuple[Level, ...] = ("relaxed", "durable")
NAMES = {"relaxed": "relaxed / NORMAL", "durable": "default / FULL", "full": "full / FULL"}

# What is wanted.
OF_RAW, OF_RAW_THREADS, MOST_AT_DEPTH, PROCESSED, OF_THREADS = 0.5, 4, 1.5, 15_000, 0.5


def add(bench: Bench) -> Iterator[Row]:
    """Jobs of 100 bytes, one at a time."""
    for level in LEVELS:
        count = bench.count(1600 if level == "relaxed" else 160)

        def run(contestant: Contestant, count: int = count) -> int:
            for _ in range(count):
                contestant.add()
            return count

        series = _compare(bench, level, run)
        yield versus("add, one at a time", NAMES[level], series["raw"], series["litebroker"], at_least=OF_RAW)
        yield versus("... by the storage's verb", NAMES[level], series["raw"], series["storage"])


def add_many(bench: Bench) -> Iterator[Row]:
    """Batches of 100; the rate is of jobs."""
    for level in LEVELS:
        count = bench.count(40)

        def run(contestant: Contestant, count: int = count) -> int:
            for _ in range(count):
                contestant.add_many(100)
            return count * 100

        series = _compare(bench, level, run)
        yield versus("add_many of 100, jobs", NAMES[level], series["raw"], series["litebroker"], at_least=OF_RAW)
        yield versus("... by the storage's verb", NAMES[level], series["raw"], series["storage"])


def claim(bench: Bench) -> Iterator[Row]:
    """Claim and complete, one at a time, over many that are pending."""
    count, pending = bench.count(800), bench.rows(100_000)

    def run(contestant: Contestant) -> int:
        return _drain(contestant, count)

    series = _compare(bench, "relaxed", run, pending=pending, refill=count)
    work = f"claim + complete over {pending:,}"
    yield versus(work, NAMES["relaxed"], series["raw"], series["litebroker"], at_least=OF_RAW)
    yield versus("... by the storage's verbs", NAMES["relaxed"], series["raw"], series["storage"])


def loop(bench: Bench) -> Iterator[Row]:
    """Add, claim, complete, one job after the other."""
    for level in LEVELS:
        count = bench.count(600 if level == "relaxed" else 80)

        def run(contestant: Contestant, count: int = count) -> int:
            for _ in range(count):
                contestant.add()
                if not contestant.complete(contestant.claim()):
                    raise AssertionError("a lease was lost")
            return count

        series = _compare(bench, level, run)
        # At the default level ours syncs the add only; the reference has one level for all, and syncs three times.
        yield versus("add + claim + complete", NAMES[level], series["raw"], series["litebroker"])


def depth(bench: Bench) -> Iterator[Row]:
    """What a claim and its completion cost with a large backlog, against a small one."""
    count, large = bench.count(500), bench.rows(1_000_000)
    with bench.place() as folder:
        ours = {name: Ours(folder / f"{name}.db", "relaxed") for name in ("small", "pending", "delayed")}
        for contestant in ours.values():
            contestant.fill(1000)
        ours["pending"].fill(large - 1000)
        fill_delayed(ours["delayed"].queue.storage, large)
        series = bench.take_turns(
            {name: functools.partial(_drain, contestant, count) for name, contestant in ours.items()},
            before=lambda name: ours[name].fill(count),
        )
        for contestant in ours.values():
            contestant.close()
    for name, work in (
        ("pending", f"claim + complete over {large:,}"),
        ("delayed", f"... with {large:,} in the future"),
    ):
        cost = series["small"].ratio_to(series[name])
        yield Row(
            work=work,
            level="relaxed",
            ours=f"{series[name].rate:,.0f}/s",
            ratio=f"{cost:.2f} x cost",
            cpu=f"- / {series[name].cpu_us:.0f}",
            wanted="1.5 x cost at 1,000",
            reached=cost <= MOST_AT_DEPTH,
            figures={"at 1,000": series["small"], "here": series[name], "cost": cost},
        )


def threads(bench: Bench) -> Iterator[Row]:
    """16 threads that add, each add on disk before it returns.

    Each thread has the same to do, and all are waited for: SQLite's busy handler lets one go on and the others starve,
    and in a given time that one alone would make the figure.
    """
    number, each = 16, 20 if bench.quick else 60

    def together(add_one: list[Callable[[], object]]) -> int:
        def work(add: Callable[[], object]) -> None:
            for _ in range(each):
                add()

        workers = [threading.Thread(target=work, args=(add,)) for add in add_one]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return number * each

    with bench.place() as folder:
        raws = [Raw(folder / "raw.db", "full") for _ in range(number)]
        levels: tuple[Level, ...] = ("full", "durable")
        ours = {level: Ours(folder / f"{level}.db", level) for level in levels}
        runs: dict[str, Callable[[], int]] = {"raw": functools.partial(together, [raw.add for raw in raws])}
        runs |= {level: functools.partial(together, [mine.add] * number) for level, mine in ours.items()}
        series = bench.take_turns(runs)
        everyone: list[Contestant] = [*raws, *ours.values()]
        for contestant in everyone:
            contestant.close()
    for level in levels:
        ratio = series[level].ratio_to(series["raw"])
        yield Row(
            work=f"{number} threads add",
            level=NAMES[level],
            raw=f"{series['raw'].rate:,.0f}/s",
            ours=f"{series[level].rate:,.0f}/s",
            ratio=f"{ratio:.2f}",
            cpu=f"{series['raw'].cpu_us:.0f} / {series[level].cpu_us:.0f}",
            wanted=f"{OF_RAW_THREADS} of raw" if level == "full" else "",
            reached=ratio >= OF_RAW_THREADS if level == "full" else None,
            figures={"raw": series["raw"], "litebroker": series[level], "ratio": ratio},
        )


def tasks(bench: Bench) -> Iterator[Row]:
    """The same adds from 100 threads, and from 100 tasks of asyncio."""
    number, each = 100, 10 if bench.quick else 30

    for level in LEVELS:
        with bench.place() as folder:
            ours = {name: Ours(folder / f"{name}.db", level) for name in ("threads", "tasks")}
            series = bench.take_turns(
                {
                    "threads": functools.partial(_add_from_threads, ours["threads"].queue, number, each),
                    "tasks": functools.partial(_add_from_tasks, ours["tasks"].queue, number, each),
                }
            )
            for contestant in ours.values():
                contestant.close()
        ratio = series["tasks"].ratio_to(series["threads"])
        yield Row(
            work=f"{number} tasks add",
            level=level,
            ours=f"{series['tasks'].rate:,.0f}/s",
            ratio=f"{ratio:.2f} of {number} threads",
            cpu=f"- / {series['tasks'].cpu_us:.0f}",
            wanted=f"{OF_THREADS} of threads",
            reached=ratio >= OF_THREADS,
            figures={"threads": series["threads"], "tasks": series["tasks"], "ratio": ratio},
        )


def coroutines(bench: Bench) -> Iterator[Row]:
    """No-op jobs through a worker with an async handler, beside one with threads."""
    count, concurrency = bench.count(10_000), 100

    def work(queue: Queue[Any], *, is_async: bool) -> int:
        ended = threading.Event()
        left = itertools.count(count - 1, -1)

        def called(_data: object) -> None:
            if next(left) == 0:
                ended.set()

        async def awaited(_data: object) -> None:
            called(_data)

        worker = queue.process(awaited if is_async else called, concurrency=concurrency)
        ended.wait()
        worker.close()
        return count

    with bench.place() as folder:
        ours = {name: Ours(folder / f"{name}.db", "relaxed") for name in ("threads", "async")}
        series = bench.take_turns(
            {name: functools.partial(work, it.queue, is_async=name == "async") for name, it in ours.items()},
            before=lambda name: ours[name].fill(count),
        )
        for contestant in ours.values():
            contestant.close()
    yield Row(
        work=f"process, async no-op, concurrency {concurrency}",
        level=NAMES["relaxed"],
        ours=f"{series['async'].rate:,.0f}/s",
        ratio=f"{series['async'].ratio_to(series['threads']):.2f} of {concurrency} threads",
        cpu=f"- / {series['async'].cpu_us:.0f}",
        figures={"threads": series["threads"], "async": series["async"]},
    )


def process(bench: Bench) -> Iterator[Row]:
    """No-op jobs through a worker, until all are settled."""
    count = bench.count(10_000)

    def work(queue: Queue[Any], concurrency: int) -> int:
        ended = threading.Event()
        left = itertools.count(count - 1, -1)

        def handler(_data: object) -> None:
            if next(left) == 0:
                ended.set()

        worker = queue.process(handler, concurrency=concurrency)
        ended.wait()
        worker.close()
        return count

    def work_bare(raw: Raw) -> int:
        done = 0
        while done < count:
            done += raw.claim_and_complete_many(32)
        return done

    with bench.place() as folder:
        raw = Raw(folder / "raw.db", "relaxed")
        ours = {number: Ours(folder / f"{number}.db", "relaxed") for number in (8, 1, 32)}
        everyone: dict[str, Raw | Ours] = {
            "raw": raw,
            **{str(number): contestant for number, contestant in ours.items()},
        }
        series = bench.take_turns(
            {
                "raw": functools.partial(work_bare, raw),
                **{
                    str(number): functools.partial(work, contestant.queue, number)
                    for number, contestant in ours.items()
                },
            },
            before=lambda name: everyone[name].fill(count),
        )
        for contestant in everyone.values():
            contestant.close()
    for number in ours:
        mine = series[str(number)]
        yield Row(
            work=f"process, no-op, concurrency {number}",
            level=NAMES["relaxed"],
            raw=f"{series['raw'].rate:,.0f}/s by 32",
            ours=f"{mine.rate:,.0f}/s",
            ratio=f"{mine.ratio_to(series['raw']):.2f}",
            cpu=f"{series['raw'].cpu_us:.0f} / {mine.cpu_us:.0f}",
            wanted=f"{PROCESSED:,}/s" if number == 8 else "",
            reached=mine.rate >= PROCESSED if number == 8 else None,
            figures={"raw": series["raw"], "litebroker": mine},
        )


def _compare(
    bench: Bench, level: Level, run: Callable[[Contestant], int], *, pending: int = 0, refill: int = 0
) -> dict[str, Series]:
    """Run it on every contestant, each with a file of its own, in which so many jobs are pending."""
    with bench.place() as folder:
        contestants = {name: kind(folder / f"{name}.db", level) for name, kind in CONTESTANTS.items()}
        for contestant in contestants.values():
            contestant.fill(pending)
        series = bench.take_turns(
            {name: functools.partial(run, contestant) for name, contestant in contestants.items()},
            before=lambda name: contestants[name].fill(refill),
        )
        for contestant in contestants.values():
            contestant.close()
    return series


def _drain(contestant: Contestant, count: int) -> int:
    for _ in range(count):
        if not contestant.complete(contestant.claim()):
            raise AssertionError("a lease was lost")
    return count


def _add_from_threads(queue: Queue[Any], number: int, each: int) -> int:
    def work() -> None:
        for _ in range(each):
            queue.add(PAYLOAD)

    workers = [threading.Thread(target=work) for _ in range(number)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return number * each


def _add_from_tasks(queue: Queue[Any], number: int, each: int) -> int:
    async def work(queue: AsyncQueue[Any]) -> None:
        for _ in range(each):
            await queue.add(PAYLOAD)

    async def main() -> None:
        async with AsyncQueue(queue) as awaited:
            await asyncio.gather(*[work(awaited) for _ in range(number)])

    asyncio.run(main())
    return number * each

"""Handlers in child processes beside handlers in threads: ``python -m tests.benchmarks.bench_children``.

What a job pays for the way to a child process and back, and what it gets for that where it computes. All at "relaxed",
each line the best of three rounds: the others had company.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from litebroker import Queue

ROUNDS = 3
PLACES: tuple[tuple[Literal["threads", "processes"], int], ...] = (
    ("threads", 1),
    ("threads", 2),
    ("processes", 1),
    ("processes", 2),
)


def nothing(_: object) -> None:
    pass


def compute(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def main() -> None:
    lines: tuple[tuple[str, Callable[[Any], object], int, int], ...] = (
        ("nothing", nothing, 0, 5000),
        ("about 10 ms of computing", compute, 200_000, 100),
    )
    for what, handler, data, count in lines:
        for workers, concurrency in PLACES:
            rate = max(measure(handler, data, count, workers, concurrency) for _ in range(ROUNDS))
            print(f"{what}: {concurrency} {workers:<10} {rate:>10,.0f} jobs/s", flush=True)


def measure(
    handler: Callable[[Any], object], data: int, count: int, workers: Literal["threads", "processes"], concurrency: int
) -> float:
    """Jobs per second, from their being added until all are settled."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Queue("work", Path(folder) / "jobs.db", durability="relaxed") as queue,
    ):
        worker = queue.process(handler, workers=workers, concurrency=concurrency)
        began = time.perf_counter()
        queue.add_many([data] * count)
        while (counts := queue.stats()).pending or counts.active:
            time.sleep(0.001)
        took = time.perf_counter() - began
        worker.close()
    return count / took


if __name__ == "__main__":
    main()

"""What an operator waits for, on a file of a million jobs: the commands themselves, without Python's own start."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.benchmarks.measuring import Bench, Line, figure

from litebroker import JobSpec
from litebroker.cli.app import run
from litebroker.sqlite import SQLiteStorage

QUEUES = 10
# What is wanted.
STATS_MS, PAGE_MS, WHY_MS, CARRIED = 200, 50, 100, 50_000


def tools(bench: Bench) -> Iterator[Line]:
    """Looks at a million jobs in ten queues; and all of them exported, and imported elsewhere."""
    count = bench.count(1_000_000)
    with bench.place() as folder:
        file = folder / "jobs.db"
        job_id = _fill(file, count)
        for work, arguments, most_ms in (
            ("stats", ["stats"], STATS_MS),
            ("queues", ["queues"], STATS_MS),
            ("jobs list, the first page", ["jobs", "list"], PAGE_MS),
            ("jobs list --queue --state", ["jobs", "list", "--queue", "q3", "--state", "pending"], PAGE_MS),
            ("why, of the job behind all others", ["why", str(job_id)], WHY_MS),
        ):
            times = [_timed(file, arguments) for _ in range(5 * bench.rounds)]
            yield _row(f"{work}, {count:,} jobs", statistics.median(times), max(times), most_ms)
        lines = folder / "jobs.ndjson"
        export_s = _timed(file, ["export", "--output", str(lines)]) / 1000
        yield _rate(f"export of {count:,} jobs", count / export_s)
        import_s = _timed(folder / "other.db", ["import", str(lines)]) / 1000
        yield _rate(f"import of {count:,} jobs", count / import_s)


def _fill(file: Path, count: int) -> int:
    """Jobs in ten queues, a tenth of them delayed; the id of the last that is due."""
    with contextlib.closing(SQLiteStorage(str(file), durability="relaxed")) as storage:
        last = 0
        payload = b'{"to": "a@example.com", "text": "' + b"x" * 60 + b'"}'
        for start in range(0, count, 1000):
            specs = [
                JobSpec(
                    f"q{number % QUEUES}",
                    payload,
                    task="send",
                    priority=number % 3,
                    delay_ms=3_600_000 if number % 10 == number // 10 % 10 else None,
                )
                for number in range(start, start + 1000)
            ]
            added = storage.add(specs)
            last = max(it.id for it, spec in zip(added, specs, strict=True) if spec.delay_ms is None)
        return last


def _timed(file: Path, arguments: Sequence[str]) -> float:
    """Milliseconds that the command takes."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        took, status = _call(lambda: run([*arguments, "--db", str(file)]))
    if status != 0:
        raise AssertionError(f"litebroker {' '.join(arguments)} ended with {status}: {printed.getvalue()}")
    return took


def _call(function: Callable[[], int]) -> tuple[float, int]:
    began = time.perf_counter()
    status = function()
    return (time.perf_counter() - began) * 1000, status


def _row(work: str, median_ms: float, most_ms: float, wanted_ms: float) -> Line:
    return figure(
        "tools",
        work,
        f"{median_ms:.0f} ms, {most_ms:.0f} at most",
        median_ms,
        wanted=f"{wanted_ms:g} ms",
        reached=median_ms <= wanted_ms,
    )


def _rate(work: str, rate: float) -> Line:
    return figure("tools", work, f"{rate:,.0f}/s", rate, wanted=f"{CARRIED:,}/s", reached=rate >= CARRIED)

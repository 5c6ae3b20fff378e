"""Rounds, medians and ratios, and a line of the table.

Contestants take short turns, each time in another order, so that what else the machine does falls on all of them
alike. A ratio is the median of the ratios of turns that followed each other.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Turns are short, and many: what disturbs one of them does not tell in the median.
TURNS = 5


class Sample(NamedTuple):
    """What one contestant did in one turn."""

    rate: float  # operations a second
    cpu_us: float  # of this process, for an operation


class Series(list[Sample]):
    """One contestant's turns."""

    @property
    def rate(self) -> float:
        return statistics.median(sample.rate for sample in self)

    @property
    def cpu_us(self) -> float:
        return statistics.median(sample.cpu_us for sample in self)

    def ratio_to(self, other: Series) -> float:
        return statistics.median(mine.rate / its.rate for mine, its in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        reached: None where nothing is wanted of it.
        figures: For `--json`: all that was measured.
    """

    work: str
    level: str
    raw: str = ""
    ours: str = ""
    ratio: str = ""
    cpu: str = ""
    wanted: str = ""
    reached: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How a run is done."""

    folder: Path
    rounds: int
    quick: bool

    def count(self, count: int) -> int:
        """So many operations, or a quarter in a quick run."""
        return max(count // 4, 1) if self.quick else count

    def rows(self, count: int) -> int:
        """So many rows of backlog, or a tenth in a quick run."""
        return count // 10 if self.quick else count

    @contextmanager
    def place(self) -> Iterator[Path]:
        """A folder for database files, which goes away."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def take_turns(
        self, contestants: Mapping[str, Callable[[], int]], *, before: Callable[[str], object] = lambda _name: None
    ) -> dict[str, Series]:
        """Run each five times a round, and once before them to warm up.

        Args:
            contestants: Each answers how many operations it has done.
            before: Called with the name of who is next; its time does not count.
        """
        series = {name: Series() for name in contestants}
        names = list(contestants)
        for number in range(-1, self.rounds * TURNS):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                before(name)
                figures = sample(contestants[name])
                if number >= 0:
                    series[name].append(figures)
        return series


def sample(run: Callable[[], int]) -> Sample:
    began, cpu = time.perf_counter(), time.process_time()
    done = run()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return Sample(done / seconds, cpu_seconds / done * 1e6)


def versus(work: str, level: str, raw: Series, ours: Series, *, at_least: float | None = None) -> Row:
    """A line in which the rate has to be at least so much of the reference's."""
    ratio = ours.ratio_to(raw)
    return Row(
        work=work,
        level=level,
        raw=f"{raw.rate:,.0f}/s",
        ours=f"{ours.rate:,.0f}/s",
        ratio=f"{ratio:.2f}",
        cpu=f"{raw.cpu_us:.0f} / {ours.cpu_us:.0f}",
        wanted="" if at_least is None else f"{at_least:g} of raw",
        reached=None if at_least is None else ratio >= at_least,
        figures={"raw": raw, "litebroker": ours, "ratio": ratio},
    )


def table(rows: list[Row]) -> str:
    """The rows in Markdown, as wide as they are."""
    heads = ("work", "level", "raw sqlite3", "litebroker", "ratio", "CPU µs", "wanted", "")
    verdicts = {None: "", True: "reached", False: "NOT REACHED"}
    lines = [heads] + [
        (row.work, row.level, row.raw, row.ours, row.ratio, row.cpu, row.wanted, verdicts[row.reached]) for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )

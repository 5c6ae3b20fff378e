"""Turns, medians and ratios, and what a line of the tables is made of.

Contestants take short turns, each time in another order, so that what else the machine does falls on all of them
alike. A ratio is the median of the ratios of turns that followed each other. A contestant that fails is reported, and
the others go on.
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
OURS, RAW = "litebroker", "raw sqlite3"


class Sample(NamedTuple):
    """What one contestant did in one turn."""

    rate: float  # operations a second
    cpu_us: float | None = None  # of this process, for an operation


class Series(list[Sample]):
    """One contestant's turns.

    Attributes:
        settings: Its journal mode and level of synchronization, as found in its connection.
        failure: Why it has no figures.
    """

    settings: str = ""
    failure: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(sample.rate for sample in self)

    @property
    def cpu_us(self) -> float | None:
        times = [sample.cpu_us for sample in self if sample.cpu_us is not None]
        return statistics.median(times) if times else None

    def ratio_to(self, other: Series) -> float:
        return statistics.median(mine.rate / its.rate for mine, its in zip(self, other, strict=True))


@dataclass(frozen=True)
class Turn:
    """What a contestant does in a turn.

    Attributes:
        once: Called over and over until the turn's time is up; it answers how many operations it has done.
        before: Called before each turn; its time does not count.
        calls: So many calls, and no more; None is as many as there is time for.
    """

    once: Callable[[], int]
    before: Callable[[], object] = lambda: None
    calls: int | None = None

    def take(self, seconds: float) -> Sample:
        self.before()
        done, calls = 0, 0
        cpu, began = time.process_time(), time.perf_counter()
        while True:
            done += self.once()
            calls += 1
            took = time.perf_counter() - began
            if took >= seconds or calls == self.calls:
                return Sample(done / took, (time.process_time() - cpu) / done * 1e6)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contestant in a line.

    Attributes:
        text: The figure, as tables show it; "" where it failed.
        value: The same as a number, in the unit that the text names.
        times: How many times as fast as this one litebroker is.
        settings: As in `Series`.
        failure: As in `Series`.
        samples: All that was measured.
    """

    text: str = ""
    value: float | None = None
    times: float | None = None
    cpu_us: float | None = None
    settings: str = ""
    failure: str = ""
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the tables: one piece of work at one level of durability, and all who did it.

    Attributes:
        work: Its name on the command line.
        base: Whom litebroker's figure is set beside, by name in ``entries``; "" is nobody.
        entries: By contestant.
        wanted: What is to be reached.
        reached: None where nothing is wanted, or it could not be measured.
        load: Of the machine when the work began.
    """

    work: str
    title: str
    level: str = ""
    base: str = ""
    entries: dict[str, Entry]
    wanted: str = ""
    reached: bool | None = None
    load: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Line:
        return cls(**{**found, "entries": {name: Entry(**entry) for name, entry in found["entries"].items()}})

    def failures(self) -> Iterator[tuple[str, str]]:
        for name, entry in self.entries.items():
            if entry.failure:
                yield name, entry.failure


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How a run is done.

    Attributes:
        rounds: How often each contestant gets five turns; of what takes seconds by itself, how often it is run.
        turn_s: How long a turn is.
        scale: How much of the backlogs, and of what is done in one piece: 1 is all of it.
    """

    folder: Path
    rounds: int = 3
    turn_s: float = 0.1
    scale: float = 1.0

    def count(self, count: int) -> int:
        return max(int(count * self.scale), 1)

    @contextmanager
    def place(self) -> Iterator[Path]:
        """A folder for database files, which goes away."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def take_turns(self, contestants: Mapping[str, Turn], *, turns: int | None = None) -> dict[str, Series]:
        """Each takes as many turns (None is five a round), and one before them to warm up."""
        series = {name: Series() for name in contestants}
        running = list(contestants)
        for number in range(-1, self.rounds * TURNS if turns is None else turns):
            for name in turned(running, number):
                try:
                    figures = contestants[name].take(self.turn_s)
                except Exception as error:  # noqa: BLE001 (a peer may raise anything)
                    series[name].failure = told(error)
                    running.remove(name)
                else:
                    if number >= 0:
                        series[name].append(figures)
        return series


def turned(names: list[str], number: int) -> list[str]:
    """The names, begun with another one at each number."""
    first = number % len(names) if names else 0
    return names[first:] + names[:first]


def told(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def compared(
    work: str,
    title: str,
    level: str,
    series: Mapping[str, Series],
    *,
    base: str = RAW,
    ours: str = OURS,
    at_least: float | None = None,
    rate: float | None = None,
    at_most: float | None = None,
) -> Line:
    """A line of rates.

    Args:
        ours: Which of the series is shown as litebroker's.
        at_least: What is wanted of the ratio to the base,
        rate: of the rate,
        at_most: or of the cost, in times that of the base.
    """
    names = {OURS if name == ours else name: name for name in series}
    mine = series.get(ours, Series())
    entries = {name: _entry(series[key], mine if name != OURS else None) for name, key in names.items()}
    wanted = [
        *([f"{at_least:g} of {base}"] if at_least is not None else []),
        *([f"{rate:,.0f}/s"] if rate is not None else []),
        *([f"at most {at_most:g} x the cost"] if at_most is not None else []),
    ]
    times = entries[base].times if base in entries else None
    verdicts = []
    if at_least is not None:
        verdicts.append(None if times is None else times >= at_least)
    if at_most is not None:
        verdicts.append(None if times is None else 1 / times <= at_most)
    if rate is not None:
        verdicts.append(mine.rate >= rate if mine and not mine.failure else None)
    return Line(
        work=work,
        title=title,
        level=level,
        base=base if base in entries else "",
        entries=entries,
        wanted=" and ".join(wanted),
        reached=None if None in verdicts or not verdicts else all(verdicts),
    )


def _entry(series: Series, ours: Series | None) -> Entry:
    if series.failure or not series:
        return Entry(failure=series.failure or "it did nothing", settings=series.settings)
    comparable = ours is not None and ours and not ours.failure and len(ours) == len(series)
    return Entry(
        text=f"{series.rate:,.0f}/s",
        value=series.rate,
        times=ours.ratio_to(series) if comparable and ours is not None else None,
        cpu_us=series.cpu_us,
        settings=series.settings,
        samples=[sample.rate for sample in series],
    )


def figure(
    work: str, title: str, text: str, value: float, *, level: str = "", wanted: str = "", reached: bool | None = None
) -> Line:
    """A line with a figure of litebroker's alone."""
    entry = Entry(text=text, value=value)
    return Line(work=work, title=title, level=level, entries={OURS: entry}, wanted=wanted, reached=reached)

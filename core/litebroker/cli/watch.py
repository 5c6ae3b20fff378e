"""Looking again and again: a live table on a terminal, lines in a pipe, and rates between two looks."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console, Group
from rich.text import Text

from litebroker.cli.options import duration
from litebroker.cli.output import Rows, iso, laid_out, print_json, printable
from litebroker.jobs import Counts, State
from litebroker.storage import Storage

_F = TypeVar("_F", bound=Callable[..., Any])

# Between two looks, new jobs are counted this often, which takes 1.5 % of a core. One that comes and goes in between
# is not seen.
_SAMPLE_S = 0.005
_PAGE = 2000
_SHORTEST_S = 0.1
_NAME_WIDTH, _CELL_WIDTH = 20, 9

RATES = ("added/s", "done/s", "failed/s")


class Rates(NamedTuple):
    """Jobs a second of a queue, between two looks."""

    added: float
    completed: float
    failed: float


class Look(NamedTuple):
    """What one look shows: rows for people, and the same for programs."""

    rows: Rows
    plain: dict[str, Any]
    head: Sequence[str] | None = None  # where not all columns have room


class Flow:
    """What comes and goes, told from ids and counts, since nothing in the file counts what is gone.

    Added are the jobs with new ids, as `Storage.arrivals` sees them between two looks. Failed and cancelled are those
    that came to that end since. What is missing in the balance of the unfinished ones, was completed.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._latest = storage.arrivals(None).latest
        self._added: Counter[str] = Counter()
        self._unfinished: dict[str, int] = {}
        self._owed: Counter[str] = Counter()
        self._seen: Counter[tuple[str, State]] = Counter()  # within the millisecond of the last look
        self._looked_at = 0.0
        self._looked_at_ms = 0

    def wait(self, seconds: float) -> None:
        """Sleep so long, and see meanwhile what is added."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(left, _SAMPLE_S))
            self.note()

    def rates(self, counts: Mapping[str, Counts]) -> dict[str, Rates]:
        """Since the last call, of each queue that was there then. Call it after `note` and counting, in that order.

        What is added or fails in the moments between them makes it look as if fewer had been completed, never more, and
        the next look makes up for it.
        """
        now, now_ms = time.monotonic(), self._storage.clock.now_ms()
        seconds = max(now - self._looked_at, 0.001)
        found = {}
        for queue, count in counts.items():
            unfinished = count.pending + count.active
            if queue in self._unfinished:
                failed = self._ended(queue, State.FAILED, now_ms)
                ended = failed + self._ended(queue, State.CANCELLED, now_ms)
                gone = self._unfinished[queue] + self._added[queue] - unfinished - ended + self._owed[queue]
                self._owed[queue] = min(gone, 0)
                found[queue] = Rates(self._added[queue] / seconds, max(gone, 0) / seconds, failed / seconds)
            else:
                for state in (State.FAILED, State.CANCELLED):
                    self._seen[queue, state] = self._storage.ended_since(queue, state, now_ms)
            self._unfinished[queue] = unfinished
        self._added.clear()
        self._looked_at, self._looked_at_ms = now, now_ms
        return found

    def _ended(self, queue: str, state: State, now_ms: int) -> int:
        """How many came to this end that no look before has seen."""
        seen = self._seen[queue, state]
        self._seen[queue, state] = self._storage.ended_since(queue, state, now_ms)
        return max(self._storage.ended_since(queue, state, self._looked_at_ms) - seen, 0)

    def note(self) -> None:
        """See what has been added."""
        while True:
            seen = self._storage.arrivals(self._latest, limit=_PAGE)
            self._latest = seen.latest
            self._added.update(seen.counts)
            if sum(seen.counts.values()) < _PAGE:
                break


def watch_options(command: _F) -> _F:
    """Add ``--watch``, ``--interval`` and ``--count``."""
    for option in (
        click.option("--count", metavar="N", type=click.IntRange(1), help="End after so many looks."),
        click.option("--interval", type=duration, help="Look again after this time; 2s."),
        click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C."),
    ):
        command = option(command)
    return command


def check(ctx: click.Context, *, watch: bool, interval: float | None, count: int | None) -> float:
    """The seconds between two looks. Raises ``click.UsageError`` where the options do not go together."""
    if not watch and (interval is not None or count is not None):
        raise click.UsageError("--interval and --count need --watch", ctx)
    if interval is not None and interval < _SHORTEST_S:
        raise click.UsageError(f"--interval: {_SHORTEST_S}s is the shortest, since each look costs a count", ctx)
    return 2.0 if interval is None else interval


def repeat(
    look: Callable[[], Look],
    head: Sequence[str],
    *,
    interval: float,
    count: int | None,
    as_json: bool,
    flow: Flow | None = None,
) -> None:
    """Show what ``look`` sees, ``count`` times, or until it is interrupted; the ``flow`` sees what comes in between."""
    console = Console(highlight=False)
    if as_json or not console.is_terminal:
        if not as_json:
            click.echo(_line("time", head))
        for number in _numbers(flow, interval, count):
            _print_lines(look(), as_json=as_json, number=number)
            sys.stdout.flush()
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=False) as live:
        for _ in _numbers(flow, interval, count):
            seen = look()
            foot = Text(f"{_clock()}, every {interval:g}s; Ctrl-C ends it", style="dim")
            live.update(Group(laid_out(console, seen.head or head, seen.rows), foot), refresh=True)


def _numbers(flow: Flow | None, interval: float, count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        if number:
            (time.sleep if flow is None else flow.wait)(interval)
        if flow is not None:
            flow.note()
        yield number
        number += 1


def _print_lines(seen: Look, *, as_json: bool, number: int) -> None:
    if as_json:
        print_json({"look": number, **seen.plain})
        return
    for row in seen.rows:
        click.echo(_line(_clock(), row))


def _line(time_of_day: str, cells: Sequence[str]) -> str:
    name, *others = cells
    line = f"{time_of_day:<8}  {printable(name):<{_NAME_WIDTH}}" + "".join(f"  {it:>{_CELL_WIDTH}}" for it in others)
    return line.rstrip()


def _clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")


def rate_cells(rates: Rates | None) -> tuple[str, ...]:
    """The cells of `RATES`; empty at the first look."""
    return ("",) * len(RATES) if rates is None else tuple(f"{rate:,.1f}" for rate in rates)


def plain_rates(rates: Rates | None) -> dict[str, float | None]:
    """The same for programs."""
    names = ("added_per_second", "completed_per_second", "failed_per_second")
    return dict.fromkeys(names) if rates is None else dict(zip(names, (round(rate, 3) for rate in rates), strict=True))


def now_of(storage: Storage) -> str | None:
    """When a look was, as JSON has it."""
    return iso(storage.clock.now_ms())

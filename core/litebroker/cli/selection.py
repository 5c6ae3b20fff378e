"""Which jobs a command means - by their ids, or all of a filter - and doing something to them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from litebroker.cli.options import duration, usage_errors
from litebroker.cli.output import confirm, print_json, printable
from litebroker.cli.progress import progress
from litebroker.errors import LitebrokerError
from litebroker.inspection import Filter, Inspection, Mended
from litebroker.inspectors import JobRow, TooLate
from litebroker.jobs import State

_F = TypeVar("_F", bound=Callable[..., Any])
Mend = Callable[[Sequence[JobRow]], list[Mended]]

# One transaction mends so many jobs at most: others wait meanwhile.
_BITE = 200
_BITES_A_SECOND = 10
# So many that could not be done are named one by one, when all of a filter were meant.
_NAMED = 20


def filter_options(*, state: bool = False) -> Callable[[_F], _F]:
    """Add the options by which jobs are filtered, as ``queues``, ``framework`` and so on."""
    options = [
        click.option(
            "--queue", "queues", metavar="NAME", multiple=True, help="Only of this queue. May be given several times."
        ),
        click.option("--framework", metavar="NAME", help="Only of direct, dramatiq, huey or rq."),
        click.option("--task", metavar="NAME", help="Only this task; * stands for any letters."),
        click.option(
            "--older-than",
            type=duration,
            help="Ended, or added and not ended, so long ago: 90, 5m, 7d.",
        ),
        click.option("--newer-than", type=duration, help="Not so long ago."),
    ]
    if state:
        names = click.Choice([str(it) for it in State])
        options.insert(
            1,
            click.option(
                "--state", "states", type=names, multiple=True, help="Only in this state. May be given several times."
            ),
        )

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def make_filter(
    states: Sequence[State],
    *,
    queues: Sequence[str],
    framework: str | None,
    task: str | None,
    older_than: float | None,
    newer_than: float | None,
) -> Filter:
    """The filter of these options."""
    if older_than is not None and newer_than is not None and older_than >= newer_than:
        raise click.UsageError(
            f"nothing is older than {older_than:g} s and newer than {newer_than:g} s: --older-than takes the smaller"
        )
    return Filter(
        queues=queues,
        states=states,
        framework=framework,
        task=task,
        older_than_ms=None if older_than is None else round(older_than * 1000),
        newer_than_ms=None if newer_than is None else round(newer_than * 1000),
    )


def many_options(command: _F) -> _F:
    """Add the ids, ``--all``, ``--yes`` and ``--json`` of a command that changes jobs."""
    command = click.option("--json", "as_json", is_flag=True, help="A line of JSON for each job.")(command)
    command = click.option("--yes", is_flag=True, help="Do not ask before all of them are changed.")(command)
    command = click.option("--all", "all_", is_flag=True, help="All that the other options leave.")(command)
    return click.argument("ids", metavar="[ID]...", nargs=-1)(command)


def rate(text: str) -> float:
    """The type of an option: how many a second, such as 100/s, 30/m, 5/h or 100."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(?:/([smh]))?", text)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is no rate: write how many in which time, such as 100/s, 30/m or 5/h")
    return float(match[1]) / {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]


def found(inspection: Inspection, ids: Sequence[str]) -> Iterator[JobRow | str]:
    """The job of each id; or, in words, why there is none."""
    for text in ids:
        rows = inspection.find(text)
        if not rows:
            yield f"there is no job {printable(text)}"
        elif len(rows) > 1:
            numbers = ", ".join(row.id for row in rows[:10])
            yield f"{len(rows)} jobs are called {printable(text)}: give one of {numbers}"
        else:
            yield rows[0]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a command does to jobs.

    Attributes:
        done: What has become of a job: "cancelled".
        question: What to do to them: "Cancel".
        target: What is said behind how many: " to 'slow-emails'".
        per_second: How many at most; None is as fast as it goes.
        keeps: Whether a job is left out, since it already is as it should be.
    """

    mend: Mend
    done: str
    question: str
    target: str = ""
    kind: str = "job"
    per_second: float | None = None
    keeps: Callable[[JobRow], bool] = lambda _: False


def run(
    ctx: click.Context,
    inspection: Inspection,
    change: Change,
    where: Filter,
    *,
    ids: Sequence[str],
    all_: bool,
    yes: bool,
    as_json: bool,
    filtered: bool,
) -> None:
    """Do it to the jobs of these ids, or to all of the filter. Ends with 1 where one could not be done."""
    if ids and (all_ or filtered):
        raise click.UsageError("give ids, or --all with what to filter by, and not both", ctx)
    if not ids and not all_:
        raise click.UsageError("which? Give ids of jobs, or --all, with what to filter by: --queue, --task, ...", ctx)
    if all_:
        with usage_errors(ctx):
            inspection.check(where)
        _ask(inspection, change, where, yes=yes)
    report = _Report(change, as_json=as_json, sweeping=all_)
    try:
        if ids:
            _run_ids(inspection, change, ids, report)
        else:
            _run_all(inspection, change, where, report)
    except (KeyboardInterrupt, click.Abort, LitebrokerError):
        report.finish()
        raise
    ctx.exit(report.finish())


def _run_ids(inspection: Inspection, change: Change, ids: Sequence[str], report: _Report) -> None:
    rows: list[JobRow] = []
    pace = _Pace(change.per_second)
    for each in found(inspection, list(dict.fromkeys(ids))):
        if isinstance(each, str):
            report.problem(each)
            continue
        rows.append(each)
        if len(rows) >= pace.bite:
            report.add(change.mend(rows))
            pace.wait(len(rows))
            rows = []
    if rows:
        report.add(change.mend(rows))


def _run_all(inspection: Inspection, change: Change, where: Filter, report: _Report) -> None:
    pace = _Pace(change.per_second)
    done, total = 0, inspection.count(where)
    with progress(change.done, total) as show:
        for page in inspection.walk(where):
            rows = [row for row in page if not change.keeps(row)]
            for start in range(0, len(rows), pace.bite):
                bite = rows[start : start + pace.bite]
                report.add(change.mend(bite))
                done += len(bite)
                show(done, total)
                pace.wait(len(bite))


def _ask(inspection: Inspection, change: Change, where: Filter, *, yes: bool) -> None:
    if yes:
        return
    count = inspection.count(where)
    many = f"all {change.kind}s that match" if count is None else f"{count:,} {change.kind}{'' if count == 1 else 's'}"
    confirm(f"{change.question} {many}{change.target}?", yes=yes)


class _Pace:
    """How many at a time, and how long to wait then."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._next = time.monotonic()
        self.bite = _BITE if per_second is None else max(1, min(_BITE, math.ceil(per_second / _BITES_A_SECOND)))

    def wait(self, done: int) -> None:
        if self._per_second is not None:
            self._next = max(self._next + done / self._per_second, time.monotonic() - 1)
            time.sleep(max(0.0, self._next - time.monotonic()))


class _Report:
    """Counts what was done, and says what was not."""

    def __init__(self, change: Change, *, as_json: bool, sweeping: bool) -> None:
        self._change = change
        self._as_json = as_json
        self._sweeping = sweeping
        self._done = 0
        self._late = 0
        self._problems = 0
        self._broken: BrokenPipeError | None = None

    def add(self, outcomes: Sequence[Mended]) -> None:
        for row, why_not in outcomes:
            if why_not is None:
                self._done += 1
            elif self._sweeping and isinstance(why_not, TooLate):
                self._late += 1
            else:
                self.problem(f"job {printable(row.id)}: {why_not}")
            if self._as_json:
                self._print({"id": row.id, "queue": row.queue, "done": why_not is None, "why_not": why_not})

    def problem(self, text: str) -> None:
        self._problems += 1
        if not self._sweeping or self._problems <= _NAMED:
            click.echo(text, err=True)

    def _print(self, line: dict[str, object]) -> None:
        # That nobody reads it any more does not keep the rest from being done.
        if self._broken is None:
            try:
                print_json(line)
            except BrokenPipeError as error:
                self._broken = error

    def finish(self) -> int:
        """Tell how many; the exit status."""
        if self._problems > _NAMED and self._sweeping:
            click.echo(f"and {self._problems - _NAMED:,} more", err=True)
        late = f"; {self._late:,} had gone on meanwhile" if self._late else ""
        if self._broken is not None:
            raise self._broken
        if not self._as_json:
            click.echo(f"{self._done:,} {self._change.kind}{'' if self._done == 1 else 's'} {self._change.done}{late}")
        return 1 if self._problems else 0

"""``litebroker jobs ...``: jobs of every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

import click

from litebroker.arguments import queue_name as checked_name
from litebroker.cli.listing import HEAD, look_at, print_job, print_job_as_json, print_page, print_page_as_json
from litebroker.cli.options import Commands, database_option, duration, instant, opened, usage_errors
from litebroker.cli.selection import Change, filter_options, found, make_filter, many_options, rate, run
from litebroker.cli.watch import Look, check, repeat, watch_options
from litebroker.inspection import Filter, Inspection
from litebroker.jobs import State

_F = TypeVar("_F", bound=Callable[..., Any])

_PENDING, _FAILED = (State.PENDING,), (State.FAILED,)
_IDLE = tuple(state for state in State if state is not State.ACTIVE)


@click.group(cls=Commands)
@database_option
def jobs() -> None:
    """Look at jobs, and mend them, whoever put them there.

    A job is named by its id; jobs of Dramatiq, Huey and RQ also by the id that these gave them.
    """


def listing_options(command: _F) -> _F:
    """Add those of a listing."""
    command = click.option("--json", "as_json", is_flag=True, help="One line of JSON.")(command)
    command = click.option("--after", metavar="CURSOR", help="Go on there, as the page before said.")(command)
    return click.option(
        "--limit", metavar="N", type=click.IntRange(1, 10_000), default=100, help="So many at most; 100."
    )(command)


@jobs.command("list")
@filter_options(state=True)
@listing_options
@watch_options
@database_option
@click.pass_context
def list_(
    ctx: click.Context,
    /,
    states: tuple[str, ...],
    *,
    limit: int,
    after: str | None,
    watch: bool,
    interval: float | None,
    count: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """List jobs: queue by queue, first those that run, then those that wait, then what has ended."""
    where = make_filter([State(state) for state in states], **options)
    seconds = check(ctx, watch=watch, interval=interval, count=count)
    if not watch:
        list_jobs(ctx, where, limit=limit, after=after, as_json=as_json)
        return
    with opened(ctx, must_exist=True) as storage, usage_errors(ctx):
        inspection = Inspection(storage)

        def look() -> Look:
            page = inspection.jobs(where, limit=limit, after=after)
            return look_at(page, storage.clock.now_ms(), storage.location)

        repeat(look, HEAD, interval=seconds, count=count, as_json=as_json)


def list_jobs(
    ctx: click.Context, where: Filter, *, limit: int, after: str | None, as_json: bool, dead: bool = False
) -> None:
    """List a page of them; as dead letters, if they are meant."""
    with opened(ctx, must_exist=True) as storage:
        with usage_errors(ctx):
            page = Inspection(storage).jobs(where, limit=limit, after=after)
        now_ms, location = storage.clock.now_ms(), storage.location
    if as_json:
        print_page_as_json(page, location)
    elif page.rows:
        print_page(page, now_ms, dead=dead)
    else:
        click.echo(f"no {'dead letter' if dead else 'job'} matches", err=True)


def show_jobs(
    ctx: click.Context, ids: tuple[str, ...], *, unpickle: bool, as_json: bool, only: State | None = None
) -> None:
    """Show each of these. Ends with 1 where one is not there, or not in the state that it has to be in."""
    if unpickle:
        click.echo("a pickle runs what it holds when it is read: this trusts whoever could add jobs", err=True)
    missing = False
    with opened(ctx, must_exist=True) as storage:
        inspection = Inspection(storage)
        now_ms = storage.clock.now_ms()
        for number, each in enumerate(found(inspection, ids)):
            if isinstance(each, str):
                click.echo(each, err=True)
                missing = True
                continue
            if only is not None and each.state is not only:
                click.echo(f"job {each.id} is no dead letter: it is {each.state}", err=True)
                missing = True
                continue
            if as_json:
                print_job_as_json(inspection, each, unpickle=unpickle)
            else:
                if number:
                    click.echo()
                print_job(inspection, each, now_ms, unpickle=unpickle)
    if missing:
        ctx.exit(1)


def show_options(command: _F) -> _F:
    """Add those of showing single jobs."""
    command = click.option("--json", "as_json", is_flag=True, help="A line of JSON for each job.")(command)
    command = click.option(
        "--unpickle", is_flag=True, help="Read payloads that are pickles: this runs what they hold."
    )(command)
    return click.argument("ids", metavar="ID...", nargs=-1, required=True)(command)


@jobs.command()
@show_options
@database_option
@click.pass_context
def show(ctx: click.Context, ids: tuple[str, ...], *, unpickle: bool, as_json: bool) -> None:
    """Show all that is known of a job: payload, headers, who holds it, each attempt, its error."""
    show_jobs(ctx, ids, unpickle=unpickle, as_json=as_json)


def change(
    ctx: click.Context,
    make: Callable[[Inspection], Change],
    states: tuple[State, ...],
    *,
    ids: tuple[str, ...],
    all_: bool,
    yes: bool,
    as_json: bool,
    not_in: str | None = None,
    **options: Any,
) -> None:
    """Do to jobs what ``make(inspection)`` says.

    Args:
        not_in: A queue whose jobs are not meant.
    """
    where = replace(make_filter(states, **options), but_queue=not_in)
    filtered = any(value not in {None, ()} for value in options.values())
    with opened(ctx, must_exist=True) as storage:
        inspection = Inspection(storage)
        run(
            ctx,
            inspection,
            make(inspection),
            where,
            ids=ids,
            all_=all_,
            yes=yes,
            as_json=as_json,
            filtered=filtered,
        )


@jobs.command()
@many_options
@filter_options()
@click.option("--to", "target", metavar="QUEUE", help="The queue that they go to, as `stats` names it.")
@click.option("--rate", "per_second", metavar="N/s", type=rate, help="No faster than this: 100/s, 30/m.")
@database_option
@click.pass_context
def retry(ctx: click.Context, /, *, target: str | None, per_second: float | None, **options: Any) -> None:
    """Let failed jobs run again at once, each by its framework's rules.

    `jobs retry` and `dead requeue` are one command.

    \b
    litebroker jobs retry --all --queue emails --older-than 1h --rate 50/s
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if target is not None:
        with usage_errors(ctx):
            checked_name(target)

    def make(inspection: Inspection) -> Change:
        return Change(
            mend=lambda rows: inspection.retry(rows, queue=target),
            done="queued again" if target is None else f"queued again in {target}",
            question="Retry",
            target="" if target is None else f" in {target!r}",
            per_second=per_second,
        )

    change(ctx, make, _FAILED, **options)


@jobs.command()
@many_options
@filter_options()
@database_option
@click.pass_context
def cancel(ctx: click.Context, /, **options: Any) -> None:
    """End pending jobs as cancelled."""

    def make(inspection: Inspection) -> Change:
        return Change(mend=inspection.cancel, done="cancelled", question="Cancel")

    change(ctx, make, _PENDING, **options)


@jobs.command()
@many_options
@filter_options(state=True)
@database_option
@click.pass_context
def remove(ctx: click.Context, /, states: tuple[str, ...], **options: Any) -> None:
    """Delete jobs that are not active, with all that is known of them."""
    if "active" in states:
        raise click.UsageError("active jobs are not removed: their workers would go on with them", ctx)
    if states and options["ids"]:
        raise click.UsageError("give ids, or --all with what to filter by, and not both", ctx)

    def make(inspection: Inspection) -> Change:
        return Change(mend=inspection.remove, done="removed", question="Remove")

    change(ctx, make, tuple(State(state) for state in states) or _IDLE, **options)


@jobs.command()
@many_options
@filter_options()
@click.option("--delay", type=duration, help="Due so much later than now: seconds, or 200ms, 5m, 2h, 7d; 0 is at once.")
@click.option("--run-at", type=instant, help="Due then: an ISO 8601 date and time with its time zone.")
@database_option
@click.pass_context
def reschedule(ctx: click.Context, /, *, delay: float | None, run_at: datetime | None, **options: Any) -> None:
    """Let pending jobs be due at another time."""
    if (delay is None) == (run_at is None):
        raise click.UsageError("when? Give --delay or --run-at, and not both", ctx)

    def make(inspection: Inspection) -> Change:
        if run_at is not None:
            due_at_ms = round(run_at.timestamp() * 1000)
        else:
            due_at_ms = inspection.now_ms() + round((delay or 0) * 1000)
        return Change(
            mend=lambda rows: inspection.reschedule(rows, due_at_ms),
            done="rescheduled",
            question="Reschedule",
            # The walk through what waits comes once more to those that were put off. Some frameworks count in seconds.
            keeps=lambda row: row.due_at_ms is not None and row.due_at_ms // 1000 == due_at_ms // 1000,
        )

    change(ctx, make, _PENDING, **options)


@jobs.command()
@many_options
@filter_options()
@click.option("--to", "target", metavar="QUEUE", required=True, help="The queue that they go to, as `stats` names it.")
@click.option("--rate", "per_second", metavar="N/s", type=rate, help="No faster than this: 100/s, 30/m.")
@database_option
@click.pass_context
def move(
    ctx: click.Context, /, *, target: str, per_second: float | None, queues: tuple[str, ...], **options: Any
) -> None:
    """Let pending jobs wait in another queue of their framework, in their order.

    \b
    litebroker jobs move --queue emails --all --to slow-emails
    """  # noqa: D301 (\b is click's own)
    with usage_errors(ctx):
        checked_name(target)
    if target in queues:
        raise click.UsageError(f"--queue and --to are both {target!r}", ctx)

    def make(inspection: Inspection) -> Change:
        return Change(
            mend=lambda rows: inspection.move(rows, target),
            done=f"moved to {target}",
            question="Move",
            target=f" to {target!r}",
            per_second=per_second,
        )

    change(ctx, make, _PENDING, not_in=target, queues=queues, **options)

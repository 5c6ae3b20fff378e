"""``litebroker dead ...``: the dead letters of every framework."""

from __future__ import annotations

from typing import Any

import click

from litebroker.cli.jobs import change, list_jobs, listing_options, retry, show_jobs, show_options
from litebroker.cli.options import Commands, database_option
from litebroker.cli.selection import Change, filter_options, make_filter, many_options
from litebroker.inspection import Inspection
from litebroker.jobs import State

_FAILED = (State.FAILED,)


@click.group(cls=Commands)
@database_option
def dead() -> None:
    """Look at dead letters, run them again, or delete them.

    A dead letter is a job that has failed for good: its attempts are spent, or it was rejected.
    """


@dead.command("list")
@filter_options()
@listing_options
@database_option
@click.pass_context
def list_(ctx: click.Context, /, *, limit: int, after: str | None, as_json: bool, **options: Any) -> None:
    """List dead letters: queue by queue, the latest first."""
    list_jobs(ctx, make_filter(_FAILED, **options), limit=limit, after=after, as_json=as_json, dead=True)


@dead.command()
@show_options
@database_option
@click.pass_context
def show(ctx: click.Context, ids: tuple[str, ...], *, unpickle: bool, as_json: bool) -> None:
    """Show all that is known of a dead letter."""
    show_jobs(ctx, ids, unpickle=unpickle, as_json=as_json, only=State.FAILED)


# As RQ calls it; a dead letter is a job that has failed.
dead.add_command(retry, "requeue")


@dead.command()
@many_options
@filter_options()
@database_option
@click.pass_context
def purge(ctx: click.Context, /, **options: Any) -> None:
    """Delete dead letters, with all that is known of them."""

    def make(inspection: Inspection) -> Change:
        return Change(mend=inspection.remove_dead, done="deleted", question="Delete", kind="dead letter")

    change(ctx, make, _FAILED, **options)

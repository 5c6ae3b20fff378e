"""``litebroker stats``."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple

import click

from litebroker.cli.options import database_option, opened
from litebroker.cli.output import duration, print_json, print_table, printable
from litebroker.jobs import Counts
from litebroker.storage import Storage

_HEAD = ("queue", *Counts._fields, "oldest")


class _Queue(NamedTuple):
    """What is shown of a queue.

    Attributes:
        oldest_ms: How long the job that is due the longest has been so; None when none is.
    """

    name: str
    paused_at_ms: int | None
    counts: Counts
    oldest_ms: int | None


@click.command()
@click.option("--queue", "names", metavar="NAME", multiple=True, help="Only this queue. May be given several times.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def stats(ctx: click.Context, names: tuple[str, ...], *, as_json: bool) -> None:
    """Show how many jobs each queue has in each state."""
    with opened(ctx, must_exist=True) as storage:
        now_ms = storage.clock.now_ms()
        known = storage.queues()
        for name in names:
            if all(it.name != name for it in known):
                there = ", ".join(repr(it.name) for it in known[:10]) or "none"
                raise click.ClickException(f"{storage.location}: there is no queue {name!r}; there are: {there}")
        queues = [
            _Queue(it.name, it.paused_at_ms, storage.counts(it.name), _oldest_ms(storage, it.name, now_ms))
            for it in known
            if not names or it.name in names
        ]
        location = storage.location
    if as_json:
        print_json({"database": location, "queues": [_as_json(it) for it in queues]})
    elif not queues:
        click.echo(f"{location} has no queues yet")
    else:
        print_table(_HEAD, [_row(it, now_ms) for it in queues])


def _oldest_ms(storage: Storage, queue: str, now_ms: int) -> int | None:
    due_at_ms = storage.oldest_due_at_ms(queue)
    return None if due_at_ms is None else max(now_ms - due_at_ms, 0)


def _as_json(queue: _Queue) -> dict[str, object]:
    counts, paused_at_ms = queue.counts, queue.paused_at_ms
    return {
        "name": queue.name,
        "pending": counts.pending,
        **counts._asdict(),
        "oldest_due_for_seconds": None if queue.oldest_ms is None else queue.oldest_ms / 1000,
        "paused_at": None
        if paused_at_ms is None
        else datetime.fromtimestamp(paused_at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds"),
    }


def _row(queue: _Queue, now_ms: int) -> tuple[str, ...]:
    name = printable(queue.name)
    if queue.paused_at_ms is not None:
        name += f" (paused {duration((now_ms - queue.paused_at_ms) / 1000)})"
    oldest = "" if queue.oldest_ms is None else duration(queue.oldest_ms / 1000)
    return (name, *map(str, queue.counts), oldest)

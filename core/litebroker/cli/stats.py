"""``litebroker stats``."""

from __future__ import annotations

from typing import NamedTuple

import click

from litebroker.cli.options import database_option, named_queues, opened, queues_option
from litebroker.cli.output import duration, iso, print_json, print_table, printable
from litebroker.cli.watch import RATES, Flow, Look, check, now_of, plain_rates, rate_cells, repeat, watch_options
from litebroker.jobs import Counts, QueueInfo
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
@queues_option
@watch_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON; with --watch, one for each look.")
@database_option
@click.pass_context
def stats(
    ctx: click.Context, names: tuple[str, ...], *, watch: bool, interval: float | None, count: int | None, as_json: bool
) -> None:
    """Show how many jobs each queue has in each state."""
    interval = check(ctx, watch=watch, interval=interval, count=count)
    with opened(ctx, must_exist=True) as storage:
        known = named_queues(storage, names)
        if watch:
            head = (*_HEAD, *RATES)
            flow = Flow(storage)
            repeat(
                lambda: _look_for_rates(storage, names, flow),
                head,
                interval=interval,
                count=count,
                as_json=as_json,
                flow=flow,
            )
            return
        queues = [_read(storage, info) for info in known]
        location, now_ms = storage.location, storage.clock.now_ms()
    if as_json:
        print_json({"database": location, "queues": [_as_json(it) for it in queues]})
    elif not queues:
        click.echo(f"{location} has no queues yet")
    else:
        print_table(_HEAD, [_row(it, now_ms) for it in queues])


def _look_for_rates(storage: Storage, names: tuple[str, ...], flow: Flow) -> Look:
    # Named ones are checked at the start only; others may come into being.
    queues = [_read(storage, info) for info in storage.queues() if not names or info.name in names]
    rates = flow.rates({it.name: it.counts for it in queues})
    now_ms = storage.clock.now_ms()
    return Look(
        [(*_row(it, now_ms), *rate_cells(rates.get(it.name))) for it in queues],
        {
            "at": now_of(storage),
            "database": storage.location,
            "queues": [{**_as_json(it), **plain_rates(rates.get(it.name))} for it in queues],
        },
    )


def _read(storage: Storage, info: QueueInfo) -> _Queue:
    counts = storage.counts(info.name)
    due_at_ms = storage.oldest_due_at_ms(info.name)
    oldest_ms = None if due_at_ms is None else max(storage.clock.now_ms() - due_at_ms, 0)
    return _Queue(info.name, info.paused_at_ms, counts, oldest_ms)


def _as_json(queue: _Queue) -> dict[str, object]:
    return {
        "name": queue.name,
        "pending": queue.counts.pending,
        **queue.counts._asdict(),
        "oldest_due_for_seconds": None if queue.oldest_ms is None else queue.oldest_ms / 1000,
        "paused_at": iso(queue.paused_at_ms),
    }


def _row(queue: _Queue, now_ms: int) -> tuple[str, ...]:
    name = printable(queue.name)
    if queue.paused_at_ms is not None:
        name += f" (paused {duration((now_ms - queue.paused_at_ms) / 1000)})"
    oldest = "" if queue.oldest_ms is None else duration(queue.oldest_ms / 1000)
    return (name, *map(str, queue.counts), oldest)

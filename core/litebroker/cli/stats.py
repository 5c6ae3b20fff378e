"""``litebroker stats``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from litebroker.cli.output import duration, iso, printable
from litebroker.cli.overview import Overview, overview_options
from litebroker.inspection import oldest_age_ms
from litebroker.jobs import Counts, QueueInfo
from litebroker.storage import Storage


class _Queue(NamedTuple):
    """What is shown of a queue."""

    info: QueueInfo
    counts: Counts
    oldest_ms: int | None


@click.command()
@overview_options
@click.pass_context
def stats(ctx: click.Context, /, names: tuple[str, ...], **options: Any) -> None:
    """Show how many jobs each queue has in each state."""
    _OVERVIEW.show(ctx, names, **options)


def _read(storage: Storage, known: Sequence[QueueInfo]) -> list[_Queue]:
    return [_Queue(info, storage.counts(info.name), oldest_age_ms(storage, info.name)) for info in known]


def _as_json(queue: _Queue) -> dict[str, object]:
    return {
        "name": queue.info.name,
        "pending": queue.counts.pending,
        **queue.counts._asdict(),
        "oldest_due_for_seconds": None if queue.oldest_ms is None else queue.oldest_ms / 1000,
        "paused_at": iso(queue.info.paused_at_ms),
    }


def _row(queue: _Queue, now_ms: int) -> tuple[str, ...]:
    name = printable(queue.info.name)
    if queue.info.paused_at_ms is not None:
        name += f" (paused {duration((now_ms - queue.info.paused_at_ms) / 1000)})"
    oldest = "" if queue.oldest_ms is None else duration(queue.oldest_ms / 1000)
    return (name, *map(str, queue.counts), oldest)


_OVERVIEW = Overview(head=("queue", *Counts._fields, "oldest"), read=_read, row=_row, as_json=_as_json)

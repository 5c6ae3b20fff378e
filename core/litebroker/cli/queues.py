"""``litebroker queues``, ``pause``, ``resume`` and ``purge``: see queues, and steer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from litebroker.cli.options import database_option, named_queues, opened
from litebroker.cli.output import confirm, duration, iso, print_json, tell
from litebroker.cli.overview import Overview, overview_options
from litebroker.cli.progress import progress
from litebroker.inspection import Inspection, oldest_age_ms
from litebroker.jobs import Counts, QueueInfo, State
from litebroker.storage import ScheduleRecord, Storage

_PURGEABLE = tuple(str(state) for state in State if state is not State.ACTIVE)
# So many are deleted between two looks at the progress, in bites of their own.
_SLICE = 5000
# Workers are told from the jobs that they have: of so many at most.
_MOST_ACTIVE = 200


class _Queue(NamedTuple):
    """What is shown of a queue.

    Attributes:
        listening: Whether anybody listens for its jobs; None where that cannot be told.
        processes: Those that have jobs of it, as ``host:pid``.
        gone: Those of them that are known to be dead.
    """

    info: QueueInfo
    counts: Counts
    oldest_ms: int | None
    listening: bool | None
    processes: Sequence[str]
    gone: Sequence[str]
    schedules: Sequence[ScheduleRecord]


@click.command()
@overview_options
@click.pass_context
def queues(ctx: click.Context, /, names: tuple[str, ...], **options: Any) -> None:
    """Show which queues there are, whether they run, and who works on them."""
    _OVERVIEW.show(ctx, names, **options)


def _read(storage: Storage, known: Sequence[QueueInfo]) -> list[_Queue]:
    schedules: dict[str, list[ScheduleRecord]] = {}
    for record in storage.list_schedules():
        schedules.setdefault(record.queue, []).append(record)
    found = []
    for info in known:
        counts = storage.counts(info.name)
        oldest_ms = oldest_age_ms(storage, info.name)
        active = storage.page(info.name, State.ACTIVE, limit=_MOST_ACTIVE, payloads=False) if counts.active else []
        holders = storage.holders([record.id for record in active]).values()
        processes = sorted({it.worker for it in holders if it.alive is not False and it.worker})
        gone = sorted({it.worker for it in holders if it.alive is False})
        listening = storage.is_awaited(info.name)
        found.append(_Queue(info, counts, oldest_ms, listening, processes, gone, schedules.get(info.name, [])))
    return found


def _as_json(queue: _Queue) -> dict[str, object]:
    return {
        "name": queue.info.name,
        "state": "running" if queue.info.paused_at_ms is None else "paused",
        "paused_at": iso(queue.info.paused_at_ms),
        "pending": queue.counts.pending,
        **queue.counts._asdict(),
        "oldest_due_for_seconds": None if queue.oldest_ms is None else queue.oldest_ms / 1000,
        "listening": queue.listening,
        "processes": list(queue.processes),
        "processes_gone": list(queue.gone),
        "schedules": len(queue.schedules),
        "next_schedule_at": iso(min((it.next_at_ms for it in queue.schedules), default=None)),
    }


def _row(queue: _Queue, now_ms: int) -> tuple[str, ...]:
    paused_at_ms = queue.info.paused_at_ms
    return (
        queue.info.name,
        str(queue.counts.pending),
        str(queue.counts.active),
        str(queue.counts.failed),
        "" if queue.oldest_ms is None else duration(queue.oldest_ms / 1000),
        str(len(queue.schedules) or ""),
        "running" if paused_at_ms is None else f"paused {duration((now_ms - paused_at_ms) / 1000)}",
        _workers(queue),
    )


def _workers(queue: _Queue) -> str:
    """Who is seen to work on it, in a few words."""
    parts = []
    if queue.processes:
        parts.append(f"{len(queue.processes)} at work")
    if queue.gone:
        parts.append(f"{len(queue.gone)} gone")
    if not queue.processes:
        parts.append({True: "listening", False: "none seen", None: "not known"}[queue.listening])
    return ", ".join(parts)


_OVERVIEW = Overview(
    head=("queue", "pending", "active", "failed", "oldest", "schedules", "state", "workers"),
    read=_read,
    row=_row,
    as_json=_as_json,
)


@click.command()
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each queue.")
@database_option
@click.pass_context
def pause(ctx: click.Context, names: tuple[str, ...], *, as_json: bool) -> None:
    """Stop new claims and schedules of queues, in all processes, until they are resumed. What runs goes on."""
    _set_paused(ctx, names, paused=True, as_json=as_json)


@click.command()
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each queue.")
@database_option
@click.pass_context
def resume(ctx: click.Context, names: tuple[str, ...], *, as_json: bool) -> None:
    """Let paused queues go on."""
    _set_paused(ctx, names, paused=False, as_json=as_json)


def _set_paused(ctx: click.Context, names: tuple[str, ...], *, paused: bool, as_json: bool) -> None:
    with opened(ctx, must_exist=True) as storage:
        named_queues(storage, names)
        for name in dict.fromkeys(names):
            before_ms = next(it.paused_at_ms for it in storage.queues() if it.name == name)
            changed = storage.pause(name, paused=paused)
            now_ms = storage.clock.now_ms()
            since_ms = next(it.paused_at_ms for it in storage.queues() if it.name == name)
            if as_json:
                state = {"queue": name, "paused": since_ms is not None, "changed": changed, "paused_at": iso(since_ms)}
                print_json(state)
            elif changed and before_ms is not None:
                click.echo(f"queue {name!r} goes on, after {duration((now_ms - before_ms) / 1000)}")
            elif changed:
                click.echo(f"queue {name!r} is paused: what runs goes on, and nothing new is claimed")
            elif since_ms is not None:
                click.echo(f"queue {name!r} was paused already, for {duration((now_ms - since_ms) / 1000)}")
            else:
                click.echo(f"queue {name!r} was not paused")


@click.command()
@click.option("--queue", "names", metavar="NAME", multiple=True, required=True, help="May be given several times.")
@click.option(
    "--state",
    "states",
    multiple=True,
    required=True,
    type=click.Choice([*_PURGEABLE, "all"]),
    help="What to delete: jobs in this state, or all that are not active. May be given several times.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each queue.")
@database_option
@click.pass_context
def purge(ctx: click.Context, names: tuple[str, ...], states: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Delete jobs of a queue by their state, in bites that let workers go on in between.

    \b
    litebroker purge --queue emails --state failed --state cancelled
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    wanted = [State(state) for state in _PURGEABLE if state in states or "all" in states]
    with opened(ctx, must_exist=True) as storage:
        known = [info.name for info in named_queues(storage, names)]
        inspection = Inspection(storage)
        for name in known:
            why_not = inspection.why_not_alone(name, wanted)
            if why_not is not None:
                raise click.ClickException(why_not)
        sizes = {name: _size(storage.counts(name), wanted) for name in known}
        what = ", ".join(map(str, wanted))
        for name, size in sizes.items():
            if not size:
                tell(f"queue {name!r} has no jobs that are {what}: nothing to delete")
        if any(sizes.values()):
            where = ", ".join(f"{size:,} of queue {name!r}" for name, size in sizes.items() if size)
            confirm(f"Delete the jobs that are {what}: {where}?", yes=yes)
        for name, size in sizes.items():
            gone = _purge(storage, name, wanted, size) if size else 0
            if as_json:
                print_json({"queue": name, "deleted": gone})
            elif size:
                click.echo(f"{gone:,} jobs of queue {name!r} deleted")


def _purge(storage: Storage, queue: str, states: Sequence[State], expected: int) -> int:
    gone = 0
    try:
        with progress(f"deleting from {queue!r}", expected) as show:
            while True:
                count = storage.purge(queue, states, limit=_SLICE)
                gone += count
                show(gone, expected)
                if count < _SLICE:
                    return gone
    except BaseException:
        tell(f"{gone:,} jobs of queue {queue!r} were deleted before that")
        raise


def _size(counts: Counts, states: Sequence[State]) -> int:
    return sum(int(getattr(counts, state.value)) for state in states)

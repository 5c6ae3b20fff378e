"""``litebroker schedules``: list, show, run-now and remove."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import click

from litebroker.cli.options import Commands, database_option, named_queues, opened, queues_option
from litebroker.cli.output import confirm, duration, iso, print_json, print_table, printable, tell
from litebroker.inspection import Inspection
from litebroker.inspectors import DIRECT
from litebroker.storage import ScheduleRecord, Storage

_F = TypeVar("_F", bound=Callable[..., Any])

_HEAD = ("schedule", "queue", "when", "next", "last", "task", "framework")
_LONGEST_SHOWN = 2000
# Where each of Huey's names has its queue; its periodic tasks are in its code, and so not among the schedules.
_HUEY = "huey:"


def _one_schedule(command: _F) -> _F:
    """Add what names one, as ``schedule_id`` and ``name``, for `_one`."""
    named = click.option("--queue", "name", metavar="NAME", help="Its queue, where several have a schedule of this id.")
    return click.argument("schedule_id", metavar="ID")(named(command))


@click.group(cls=Commands)
@database_option
def schedules() -> None:
    """See schedules, run one now, remove one."""


@schedules.command("list")
@queues_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each schedule.")
@database_option
@click.pass_context
def list_(ctx: click.Context, names: tuple[str, ...], *, as_json: bool) -> None:
    """List schedules by queue and id."""
    with opened(ctx, must_exist=True) as storage:
        known = named_queues(storage, names)
        paused = {info.name for info in known if info.paused_at_ms is not None}
        found = [it for it in storage.list_schedules() if any(it.queue == info.name for info in known)]
        now_ms, location = storage.clock.now_ms(), storage.location
        frameworks = _frameworks(storage, found)
    if as_json:
        for record in found:
            print_json(_as_json(record, frameworks[record.job.encoding], now_ms, paused=record.queue in paused))
    elif found:
        rows = [
            _row(record, frameworks[record.job.encoding], now_ms, paused=record.queue in paused) for record in found
        ]
        shown = [number for number in range(len(_HEAD)) if any(row[number] for row in rows)]
        print_table([_HEAD[number] for number in shown], [[row[number] for number in shown] for row in rows])
    else:
        click.echo(f"{location} has no schedules{' in these queues' if names else ''}")
    huey = [info.name for info in known if info.name.startswith(_HUEY)]
    if huey:
        tell(f"not listed: the periodic tasks of {', '.join(huey)}, which are in Huey's own code and not in the file")


@schedules.command()
@_one_schedule
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def show(ctx: click.Context, schedule_id: str, name: str | None, *, as_json: bool) -> None:
    """Show all of one schedule, and the job that each tick adds."""
    with opened(ctx, must_exist=True) as storage:
        record = _one(storage, schedule_id, name)
        paused = any(it.name == record.queue and it.paused_at_ms is not None for it in storage.queues())
        now_ms = storage.clock.now_ms()
        framework = _frameworks(storage, [record])[record.job.encoding]
    plain = _as_json(record, framework, now_ms, paused=paused)
    if as_json:
        print_json({**plain, "job": _job_as_json(record)})
        return
    lines = {
        "schedule": record.id,
        "queue": record.queue + (" (paused)" if paused else ""),
        "when": _when(record),
        "next": f"{iso(record.next_at_ms)} ({_next(record, now_ms, paused=paused)})",
        "last": "never" if record.last_at_ms is None else f"{iso(record.last_at_ms)} ({_last(record, now_ms)} ago)",
        **{key: value if isinstance(value, str) else json.dumps(value) for key, value in _job_as_json(record).items()},
    }
    widest = max(map(len, lines))
    for key, value in lines.items():
        shown = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
        click.echo(f"{key:<{widest}}  {printable(shown)}")


@schedules.command("run-now")
@_one_schedule
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def run_now(ctx: click.Context, schedule_id: str, name: str | None, *, as_json: bool) -> None:
    """Add the schedule's job at once. Its next tick stays as it is.

    A schedule whose job has a dedupe key adds nothing while another job holds the key; that job's id is printed.
    """
    with opened(ctx, must_exist=True) as storage:
        queue = _one(storage, schedule_id, name).queue
        # In one transaction with a fresh look: no job comes of a schedule that was changed or removed meanwhile.
        with storage.transaction() as transaction:
            record = transaction.get_schedule(queue, schedule_id)
            added = None if record is None else transaction.add([record.job])[0]
        if added is None:
            raise click.ClickException(f"schedule {schedule_id!r} of queue {queue!r} was removed this moment")
        paused = any(it.name == queue and it.paused_at_ms is not None for it in storage.queues())
    if as_json:
        print_json({"id": str(added.id), "queue": queue, "added": added.created})
    else:
        click.echo(added.id)
    if not added.created:
        tell(f"job {added.id} holds the schedule's dedupe key: nothing was added")
    elif paused:
        tell(f"queue {queue!r} is paused: the job waits until it is resumed")


@schedules.command()
@_one_schedule
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def remove(ctx: click.Context, schedule_id: str, name: str | None, *, yes: bool, as_json: bool) -> None:
    """Remove a schedule. The jobs that it has added stay."""
    with opened(ctx, must_exist=True) as storage:
        record = _one(storage, schedule_id, name)
        confirm(f"Remove schedule {record.id!r} of queue {record.queue!r} ({_when(record)})?", yes=yes)
        if not storage.remove_schedule(record.queue, record.id):
            raise click.ClickException(f"schedule {record.id!r} of queue {record.queue!r} was removed this moment")
    if as_json:
        print_json({"queue": record.queue, "id": record.id, "removed": True})
    else:
        click.echo(f"schedule {record.id!r} of queue {record.queue!r} removed")
    if record.job.encoding is not None and record.job.encoding == "dramatiq":
        tell("it is an actor's: a worker that starts while the actor still has every= or cron= puts it back")


def _one(storage: Storage, schedule_id: str, queue: str | None) -> ScheduleRecord:
    """The schedule of this id. Raises ``click.ClickException`` where there is none, or there are several."""
    if queue is not None:
        named_queues(storage, [queue])
    every = storage.list_schedules(queue)
    found = [record for record in every if record.id == schedule_id]
    where = storage.location if queue is None else f"queue {queue!r}"
    if not found:
        there = ", ".join(repr(record.id) for record in every[:10]) or "none"
        raise click.ClickException(f"{where} has no schedule {schedule_id!r}; there are: {there}")
    if len(found) > 1:
        names = ", ".join(repr(record.queue) for record in found)
        raise click.ClickException(f"several queues have a schedule {schedule_id!r}: {names}; say which: --queue NAME")
    return found[0]


def _frameworks(storage: Storage, records: Sequence[ScheduleRecord]) -> dict[str | None, str]:
    """Whose their jobs are, by encoding."""
    inspection = Inspection(storage)
    return {record.job.encoding: inspection.framework_of(record.job.encoding) for record in records}


def _row(record: ScheduleRecord, framework: str, now_ms: int, *, paused: bool) -> tuple[str, ...]:
    return (
        record.id,
        record.queue,
        _when(record),
        _next(record, now_ms, paused=paused),
        "never" if record.last_at_ms is None else f"{_last(record, now_ms)} ago",
        record.job.task or "",
        "" if framework == DIRECT else framework,
    )


def _when(record: ScheduleRecord) -> str:
    spec = record.spec
    if spec.every_ms is not None:
        return f"every {timedelta(milliseconds=spec.every_ms)}"
    return f"cron {spec.cron} {spec.tz or 'UTC'}"


def _next(record: ScheduleRecord, now_ms: int, *, paused: bool) -> str:
    """When it fires next; one that is late waits for a worker, or for its queue to go on."""
    if record.next_at_ms > now_ms:
        return f"in {duration((record.next_at_ms - now_ms) / 1000)}"
    late = duration((now_ms - record.next_at_ms) / 1000)
    return f"due for {late}{', paused' if paused else ''}"


def _last(record: ScheduleRecord, now_ms: int) -> str:
    return duration((now_ms - (record.last_at_ms or 0)) / 1000)


def _as_json(record: ScheduleRecord, framework: str, now_ms: int, *, paused: bool) -> dict[str, Any]:
    spec = record.spec
    return {
        "id": record.id,
        "queue": record.queue,
        "every_seconds": None if spec.every_ms is None else spec.every_ms / 1000,
        "cron": spec.cron,
        "tz": spec.tz,
        "next_at": iso(record.next_at_ms),
        "next_in_seconds": (record.next_at_ms - now_ms) / 1000,
        "last_at": iso(record.last_at_ms),
        "paused": paused,
        "task": record.job.task,
        "framework": framework,
    }


def _job_as_json(record: ScheduleRecord) -> dict[str, Any]:
    """The job that a tick adds: the options that are set, and the payload where it is text."""
    job = record.job
    fields = {
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "dedupe_key": job.dedupe_key,
        "dedupe_until": job.dedupe_until if job.dedupe_key is not None else None,
        "group": job.group,
        "headers": dict(job.headers) if job.headers else None,
        "ref": job.ref,
        "task": job.task,
        "encoding": job.encoding or "json",
        "payload_bytes": len(job.payload),
    }
    found = {key: value for key, value in fields.items() if value is not None}
    with contextlib.suppress(ValueError):  # Bytes are their framework's: only their number is shown.
        found["payload"] = json.loads(job.payload)
    return found

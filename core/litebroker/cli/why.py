"""``litebroker why``: why a job is where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from litebroker.arguments import job_id_of
from litebroker.cli.options import database_option, named_queues, opened
from litebroker.cli.output import duration, iso, print_json, printable
from litebroker.explanation import Explanation, Reason
from litebroker.explanation import why as explanation_of
from litebroker.inspection import Inspection
from litebroker.inspectors import JobRow
from litebroker.jobs import JobRecord, State
from litebroker.storage import Storage

# Several jobs may have one framework's id: of so many at most each is explained.
_MOST = 20


@click.command()
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--queue", "names", metavar="NAME", multiple=True, help="Look for a framework's id in this queue only.")
@click.option("--dedupe-key", metavar="KEY", help="Instead of JOB: the one that holds this key; needs --queue.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each job.")
@database_option
@click.pass_context
def why(ctx: click.Context, job: str | None, names: tuple[str, ...], dedupe_key: str | None, *, as_json: bool) -> None:
    """Say why a job is where it is, with the evidence.

    JOB is a job's id, or the name that its framework or you gave it: a message id of Dramatiq, a task id of Huey, a
    job id of RQ, a ref of your own.

    \b
    litebroker why 118045865273141561
    litebroker why --queue emails --dedupe-key welcome:42
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if (job is None) == (dedupe_key is None):
        raise click.UsageError("give a job's id, or --dedupe-key KEY with --queue NAME", ctx)
    if dedupe_key is not None and not names:
        raise click.UsageError("--dedupe-key needs --queue: a key is held within a queue", ctx)
    with opened(ctx, must_exist=True) as storage:
        queues = [info.name for info in named_queues(storage, names)]
        now_ms = storage.clock.now_ms()
        if dedupe_key is None:
            found, elsewhere = _jobs(storage, queues, job or "")
        else:
            found, elsewhere = _holders(storage, queues, dedupe_key), []
        answers = [explanation_of(storage, job_id) for job_id in found]
    is_there = bool(elsewhere) or any(answer.job is not None for answer in answers)
    texts = [*map(str, answers), *(_told(row, now_ms) for row in elsewhere)]
    plain = [*map(_as_json, answers), *(_row_as_json(row, now_ms) for row in elsewhere)]
    if as_json:
        for each in plain:
            print_json(each)
    else:
        _print(texts, err=not is_there)
    if not is_there:
        ctx.exit(1)


def _print(texts: Sequence[str], *, err: bool) -> None:
    for number, text in enumerate(texts):
        if number:
            click.echo()
        for line in text.splitlines():
            click.echo(printable(line), err=err)


def _holders(storage: Storage, queues: Sequence[str], dedupe_key: str) -> list[int]:
    found = [record.id for queue in queues for record in storage.find(queue, dedupe_key=dedupe_key)]
    if not found:
        where = ", ".join(map(repr, queues))
        raise click.ClickException(f"no job of {where} holds the dedupe key {dedupe_key!r}: it is free")
    return found


def _jobs(storage: Storage, queues: Sequence[str], job: str) -> tuple[list[int], list[JobRow]]:
    """The ids of the jobs that are meant, and those that a framework keeps elsewhere than in the queues.

    Raises:
        click.ClickException: There are none of that name.
    """
    job_id = job_id_of(job)
    if job_id is not None and storage.get(job_id) is not None:
        return [job_id], []
    found: list[JobRecord] = []
    for queue in queues:
        found += storage.find(queue, ref=job)
    elsewhere = [row for row in Inspection(storage).find(job) if row.record is None and row.queue in queues]
    if found or elsewhere:
        return [record.id for record in found[:_MOST]], elsewhere
    if job_id is not None:
        return [job_id], []  # When it was added, its id still tells.
    raise click.ClickException(
        f"{storage.location}: no job is named {job!r} here: it was completed or removed, or never added"
    )


def _told(row: JobRow, now_ms: int) -> str:
    """A job that its framework keeps elsewhere, such as RQ's that are scheduled, run, or have ended."""
    head = f"job {row.id} of queue {row.queue!r} is {row.stage or row.state}: {_why_of_row(row, now_ms)}"
    return f"{head}\n  to change that: litebroker jobs retry {row.id}" if row.state is State.FAILED else head


def _why_of_row(row: JobRow, now_ms: int) -> str:
    if row.state is State.ACTIVE:
        worker = row.worker or "a worker that is not known any more"
        gone = "; that process is gone, and the job is taken back from it" if row.alive is False else ""
        return f"{worker} has it{_for(row.claimed_at_ms, now_ms)}{gone}"
    if row.state is not State.PENDING:
        ended = "" if row.ended_at_ms is None else f" {duration((now_ms - row.ended_at_ms) / 1000)} ago"
        error = "" if row.error is None else f": {row.error.type}: {row.error.message}".splitlines()[0]
        return f"it ended{ended}{error}"
    if row.stage == "deferred":
        return "it waits for the jobs that it depends on"
    if row.due_at_ms is None or row.stage != "scheduled":
        return f"{row.framework} has not put it into its queue"
    if row.due_at_ms > now_ms:
        return f"{row.framework}'s scheduler puts it into its queue in {duration((row.due_at_ms - now_ms) / 1000)}"
    late = duration((now_ms - row.due_at_ms) / 1000)
    return f"its time came {late} ago, and no scheduler of {row.framework}'s has put it into its queue since"


def _for(since_ms: int | None, now_ms: int) -> str:
    return "" if since_ms is None else f" for {duration((now_ms - since_ms) / 1000)} now"


def _row_as_json(row: JobRow, now_ms: int) -> dict[str, Any]:
    """As of the others, with the framework's own word for where it stands as the code."""
    code = row.stage or str(row.state)
    reason = {
        "code": code,
        "text": _why_of_row(row, now_ms),
        "due_at": iso(row.due_at_ms) if row.state is State.PENDING else None,
        "worker": row.worker,
        "alive": row.alive,
        "claimed_at": iso(row.claimed_at_ms),
        "ended_at": iso(row.ended_at_ms),
        "error": None if row.error is None else row.error.message,
    }
    return {
        "id": row.id,
        "queue": row.queue,
        "state": str(row.state),
        "ref": row.ref,
        "task": row.task,
        "why": code,
        "reasons": [{key: value for key, value in reason.items() if value is not None}],
        "notes": [],
    }


def _as_json(answer: Explanation) -> dict[str, Any]:
    record = answer.job
    return {
        "id": str(answer.job_id),
        "queue": None if record is None else record.queue,
        "state": None if record is None else str(record.state),
        "ref": None if record is None else record.ref,
        "task": None if record is None else record.task,
        "why": answer.reasons[0].code,
        "reasons": [_reason_as_json(it) for it in answer.reasons],
        "notes": [_reason_as_json(it) for it in answer.notes],
    }


def _reason_as_json(reason: Reason) -> dict[str, Any]:
    plain = {"code": reason.code, "text": reason.text, **_plain(reason.facts)}
    return plain if reason.remedy is None else {**plain, "remedy": reason.remedy}


def _plain(value: Any, key: str = "") -> Any:
    """As JSON can have it: instants as texts, and ids too, which many readers of JSON would round."""
    if isinstance(value, Mapping):
        return {name: _plain(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return str(value) if key == "job" else value

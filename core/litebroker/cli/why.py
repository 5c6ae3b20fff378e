"""``litebroker why``: why a job is where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from litebroker.cli.options import database_option, named_queues, opened
from litebroker.cli.output import print_json, printable
from litebroker.explanation import Explanation, Reason
from litebroker.explanation import why as explanation_of
from litebroker.jobs import JobRecord
from litebroker.storage import Storage

# Several jobs may have one framework's id: of so many at most each is explained.
_MOST = 20
_LARGEST_ID = 2**63 - 1


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
        found = _jobs(storage, queues, job or "") if dedupe_key is None else _holders(storage, queues, dedupe_key)
        answers = [explanation_of(storage, job_id) for job_id in found]
    is_there = any(answer.job is not None for answer in answers)
    for number, answer in enumerate(answers):
        if as_json:
            print_json(_as_json(answer))
            continue
        if number:
            click.echo()
        for line in str(answer).splitlines():
            click.echo(printable(line), err=not is_there)
    if not is_there:
        ctx.exit(1)


def _holders(storage: Storage, queues: Sequence[str], dedupe_key: str) -> list[int]:
    found = [record.id for queue in queues for record in storage.find(queue, dedupe_key=dedupe_key)]
    if not found:
        where = ", ".join(map(repr, queues))
        raise click.ClickException(f"no job of {where} holds the dedupe key {dedupe_key!r}: it is free")
    return found


def _jobs(storage: Storage, queues: Sequence[str], job: str) -> list[int]:
    """The ids of the jobs that are meant. Raises ``click.ClickException`` where there are none of that name."""
    is_id = job.isascii() and job.isdigit() and int(job) <= _LARGEST_ID
    if is_id and storage.get(int(job)) is not None:
        return [int(job)]
    found: list[JobRecord] = []
    for queue in queues:
        found += storage.find(queue, ref=job)
    if found:
        return [record.id for record in found[:_MOST]]
    if is_id:
        return [int(job)]  # When it was added, its id still tells.
    raise click.ClickException(
        f"{storage.location}: no job is named {job!r} here: it was completed or removed, or never added"
    )


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

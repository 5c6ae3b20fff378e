"""``litebroker add``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, Literal

import click

from litebroker.arguments import Group, NewJob
from litebroker.cli.options import database_option, duration, instant, opened, usage_errors
from litebroker.cli.output import print_json
from litebroker.errors import LitebrokerError, PayloadError, PayloadTooLargeError
from litebroker.queue import Job, Queue
from litebroker.serializer import JSON
from litebroker.sqlite.backup import refuse_parts

# One transaction adds so many lines at most: others wait meanwhile.
_BATCH = 1000
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 30
_SHOWN = 60

_Line = tuple[int, bytes]


@click.command()
@click.argument("queue_name", metavar="QUEUE")
@click.argument("payload", metavar="[JSON]", required=False)
@click.option(
    "--file",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Add a job for each line of this file (ndjson); - is the standard input.",
)
@click.option("--delay", type=duration, help="Due so much later: seconds, or 200ms, 5m, 2h, 7d.")
@click.option("--run-at", type=instant, help="Due then: an ISO 8601 date and time with its time zone.")
@click.option(
    "--priority", metavar="N", type=click.IntRange(-(2**63), 2**63 - 1), default=0, help="Higher goes first; 0."
)
@click.option(
    "--dedupe-key",
    metavar="KEY",
    help="Add nothing when a job of the queue holds this key, and print that job's id.",
)
@click.option(
    "--dedupe-until",
    type=click.Choice(["removed", "ended"]),
    help="How long the job holds its key: until its row is gone (the default), or only until it has ended.",
)
@click.option("--group", metavar="ID", help="A stream of its own in the queue.")
@click.option(
    "--group-concurrency", metavar="N", type=click.IntRange(1, 2**31 - 1), help="How many of the group run at once; 1."
)
@click.option("--attempts", metavar="N", type=click.IntRange(1, 2**31 - 1), help="How often it may be claimed; 3.")
@click.option("--keep-result", type=duration, help="Keep what the handler returns for so long: 60, 1h, 7d.")
@click.option("--header", "headers", metavar="NAME=VALUE", multiple=True, help="Travels with the job.")
@click.option("--task", metavar="NAME", help="What the job does, as listings show it.")
@click.option("--ref", metavar="NAME", help="Your own name of the job.")
@click.option(
    "--max-payload-bytes",
    metavar="N",
    type=click.IntRange(1, 2**30),
    default=2**20,
    help="A larger payload is refused; 1 MiB.",
)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each job, instead of its id.")
@database_option
@click.pass_context
def add(
    ctx: click.Context,
    queue_name: str,
    payload: str | None,
    *,
    source: str | None,
    delay: float | None,
    run_at: datetime | None,
    priority: int,
    dedupe_key: str | None,
    dedupe_until: Literal["removed", "ended"] | None,
    group: str | None,
    group_concurrency: int | None,
    attempts: int | None,
    keep_result: float | None,
    headers: tuple[str, ...],
    task: str | None,
    ref: str | None,
    max_payload_bytes: int,
    as_json: bool,
) -> None:
    """Add a job to a queue, or one for each line of a file, and print the ids.

    \b
    litebroker add emails '{"to": "a@example.com"}' --delay 5m
    litebroker add emails - < emails.ndjson
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if payload == "-" and source is None:
        payload, source = None, "-"
    if (payload is None) == (source is None):
        raise click.UsageError("give the payload as JSON, or a file with one payload a line: --file FILE, or -", ctx)
    if source is not None and dedupe_key is not None:
        raise click.UsageError("--dedupe-key is one job's; the lines of a file would all be the same job", ctx)
    if dedupe_key is None and dedupe_until is not None:
        raise click.UsageError("--dedupe-until needs --dedupe-key", ctx)
    if group is None and group_concurrency is not None:
        raise click.UsageError("--group-concurrency needs --group", ctx)
    if delay is not None and run_at is not None:
        raise click.UsageError("--delay and --run-at exclude each other: give one", ctx)
    options: dict[str, Any] = {
        "delay": delay,
        "run_at": run_at,
        "priority": priority,
        "dedupe_key": dedupe_key,
        "dedupe_until": dedupe_until or "removed",
        "group": group if group is None or group_concurrency is None else Group(group, group_concurrency),
        "attempts": attempts,
        "keep_result": keep_result,
        "headers": dict(map(_header, headers)) or None,
        "task": task,
        "ref": ref,
    }
    value = None if payload is None else _argument(payload)
    printer = _Printer(as_json=as_json)
    with opened(ctx) as storage:
        with usage_errors(ctx):
            queue: Queue[Any] = Queue(queue_name, storage, max_payload_bytes=max_payload_bytes)
        if source is None:
            with usage_errors(ctx):
                job = queue.add(value, **options)
            printer.print([job])
        else:
            if source != "-":
                refuse_parts(source, str(storage.path))  # To close one of them again would drop SQLite's locks.
            with nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file:  # noqa: PTH123
                for lines in _batches(file.fileno()):
                    with usage_errors(ctx):
                        printer.print(_add_lines(queue, lines, options, max_payload_bytes))
    printer.finish()


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--header {text!r}: write NAME=VALUE")
    return name, value


def _argument(text: str) -> Any:
    try:
        return _parsed(text.encode())
    except ValueError as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise click.UsageError(f"{shown!r} is not JSON ({error}); a string is written '\"so\"'") from None


def _parsed(text: bytes) -> Any:
    """Raises ``ValueError`` where it is not JSON."""
    try:
        return JSON.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _batches(file: int) -> Iterator[list[_Line]]:
    """The lines of a file that are not blank, with their numbers: what there is, without waiting for more."""
    number = 0
    rest: list[bytes] = []
    size = 0
    while chunk := os.read(file, _CHUNK):
        if b"\n" not in chunk:
            rest.append(chunk)
            size += len(chunk)
            if size > _LONGEST_LINE:
                raise click.ClickException(f"line {number + 1}: over 1 GiB, and no end")
            continue
        *whole, last = b"".join((*rest, chunk)).split(b"\n")
        rest, size = [last], len(last)
        for start in range(0, len(whole), _BATCH):
            lines = list(enumerate(whole[start : start + _BATCH], number + 1))
            number += len(lines)
            yield [line for line in lines if line[1].strip()]
    last = b"".join(rest)
    if last.strip():
        yield [(number + 1, last)]


def _add_lines(
    queue: Queue[Any], lines: Sequence[_Line], options: dict[str, Any], max_payload_bytes: int
) -> list[Job[Any]]:
    """Add them in one transaction. An error names the line, and says where to go on."""
    number = lines[0][0] if lines else 0
    first = number
    jobs = []
    try:
        for number, line in lines:  # noqa: B007 (the error tells it)
            jobs.append(NewJob(_parsed(line.removeprefix(b"\xef\xbb\xbf")), **options))
        try:
            return queue.add_many(jobs)
        except PayloadError as error:
            number, refused = _refused(lines, jobs, max_payload_bytes) or (first, error)
            raise refused from None
    except LitebrokerError as error:
        why = str(error)
    except ValueError as error:
        if len(jobs) == len(lines):
            raise  # An option is at fault, not a line.
        why = f"not JSON ({error})"
    rest = "nothing was added" if first == 1 else f"the lines before {first} were added, and nothing from there on"
    raise click.ClickException(f"line {number}: {why}; {rest}") from None


def _refused(lines: Sequence[_Line], jobs: Sequence[NewJob[Any]], limit: int) -> tuple[int, PayloadError] | None:
    """The first line that a queue would not take, and why."""
    for (number, _), job in zip(lines, jobs, strict=True):
        try:
            size = len(JSON.dumps(job.data))
            if size > limit:
                raise PayloadTooLargeError(size, limit)
        except PayloadError as error:
            return number, error
    return None


class _Printer:
    """Prints what was added. That nobody reads it any more does not keep the rest from being added."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._broken: BrokenPipeError | None = None

    def print(self, jobs: Sequence[Job[Any]]) -> None:
        if self._broken is not None:
            return
        try:
            for job in jobs:
                if self._as_json:
                    print_json({"id": str(job.id), "queue": job.queue, "added": not job.duplicate})
                else:
                    print(job.id)  # noqa: T201
                    if job.duplicate:
                        click.echo(f"job {job.id} holds this key: nothing was added", err=True)
            sys.stdout.flush()
        except BrokenPipeError as error:
            self._broken = error

    def finish(self) -> None:
        """Raises ``BrokenPipeError`` if there was one."""
        if self._broken is not None:
            raise self._broken

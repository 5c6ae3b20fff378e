"""``litebroker doctor`` and ``litebroker check``: is the file well, and is the work done?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

import click

from litebroker.cli.options import database_option, duration, file_of, named_queues, opened, queues_option
from litebroker.cli.output import duration as shown_duration
from litebroker.cli.output import print_json, printable
from litebroker.inspection import oldest_age_ms
from litebroker.jobs import Counts, QueueInfo
from litebroker.sqlite.doctor import Finding, examine
from litebroker.storage import Storage


@click.command()
@click.option("--full", is_flag=True, help="Read the whole file: a long read transaction on a large one.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def doctor(ctx: click.Context, *, full: bool, as_json: bool) -> None:
    """Look at the file, its surroundings and who uses it, and say what to do.

    It ends with 0 when nothing needs action, and with 1 otherwise.
    """
    path, options = file_of(ctx)
    findings: list[Finding] = []
    for finding in examine(path, options, full=full):
        findings.append(finding)
        if not as_json:
            _print(finding)
    wrong = [finding for finding in findings if finding.needs_action]
    if as_json:
        print_json({"database": path, "ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    if wrong:
        ctx.exit(1)


def _print(finding: Finding) -> None:
    severity = finding.severity
    colour = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}[severity]
    label = f"{severity:<8}" if os.environ.get("NO_COLOR") else click.style(f"{severity:<8}", fg=colour)
    click.echo(f"{label} {finding.check:<12} {printable(finding.found)}")
    if finding.advice:
        click.echo(f"{'':<8} {'':<12} -> {printable(finding.advice)}")


@click.command()
@click.option("--max-age", type=duration, help="The longest that a due job may wait: seconds, or 500ms, 5m, 2h.")
@click.option("--max-failed", metavar="N", type=click.IntRange(0), help="How many dead letters there may be.")
@click.option("--max-ready", metavar="N", type=click.IntRange(0), help="How many jobs may be due.")
@queues_option
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def check(
    ctx: click.Context,
    *,
    max_age: float | None,
    max_failed: int | None,
    max_ready: int | None,
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tell in one line whether the queues are within limits, for monitoring: litebroker check --max-age 60.

    It ends with 0 when each queue is, and with 1 otherwise. A queue that is paused is not asked for its age.
    """
    if max_age is None and max_failed is None and max_ready is None:
        raise click.UsageError("which limits? Give --max-age, --max-failed or --max-ready", ctx)
    limits = _Limits(max_age, max_failed, max_ready)
    with opened(ctx, must_exist=True) as storage:
        location = storage.location
        queues = [_load(storage, info) for info in named_queues(storage, names)]
    wrong = [line for queue in queues for line in limits.broken_by(queue)]
    ready, failed = sum(queue.counts.ready for queue in queues), sum(queue.counts.failed for queue in queues)
    oldest = max((queue.age for queue in queues), default=0.0)
    if as_json:
        print_json(
            {
                "database": location,
                "ok": not wrong,
                "ready": ready,
                "failed": failed,
                "oldest_due_for_seconds": oldest,
                "wrong": wrong,
            }
        )
    elif wrong:
        click.echo(f"not ok: {'; '.join(wrong)}")
    else:
        click.echo(f"ok: {ready} ready, the oldest for {shown_duration(oldest)}; {failed} failed")
    if wrong:
        ctx.exit(1)


class _Load(NamedTuple):
    """What waits in a queue. ``age`` is how long the first of it does, in seconds; 0 while the queue is paused."""

    name: str
    counts: Counts
    age: float


class _Limits(NamedTuple):
    max_age: float | None
    max_failed: int | None
    max_ready: int | None

    def broken_by(self, queue: _Load) -> Iterator[str]:
        if self.max_age is not None and queue.age > self.max_age:
            yield f"{queue.name!r}: a job waits for {shown_duration(queue.age)}"
        if self.max_failed is not None and queue.counts.failed > self.max_failed:
            yield f"{queue.name!r}: {queue.counts.failed} failed"
        if self.max_ready is not None and queue.counts.ready > self.max_ready:
            yield f"{queue.name!r}: {queue.counts.ready} ready"


def _load(storage: Storage, info: QueueInfo) -> _Load:
    age_ms = oldest_age_ms(storage, info.name) if info.paused_at_ms is None else None
    return _Load(info.name, storage.counts(info.name), (age_ms or 0) / 1000)

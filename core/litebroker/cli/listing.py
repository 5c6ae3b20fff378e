"""Jobs as people and programs read them: rows, pages, and all of one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from litebroker.cli.output import duration, iso, print_json, print_table, printable
from litebroker.cli.watch import Look
from litebroker.inspection import Inspection, JobPage
from litebroker.inspectors import Content, JobRow
from litebroker.jobs import Attempt, JobError, State

HEAD = ("id", "queue", "state", "task", "framework", "attempts", "age", "note")
_DEAD_HEAD = ("id", "queue", "task", "framework", "reason", "attempts", "age", "error")
_RIGHT = ("attempts", "age")
# A note is cut where that keeps a row on one line of the terminal, but not to less than this.
_SHORTEST_NOTE = 16
# What is left out first where a terminal is narrow: the queue's name, and the state, say nearly the same.
_SPARED = ("framework", "attempts")
_LONGEST_SHOWN = 20_000


def print_page(page: JobPage, now_ms: int, *, dead: bool = False) -> None:
    """A page as a table. Where to go on is told on stderr, so that it gets in the way of no pipe."""
    print_table(*_fitting(*_columns(page, now_ms, dead=dead)), right=_RIGHT)
    if page.cursor is not None:
        click.echo(f"there may be more: --after {page.cursor}", err=True)


def _columns(page: JobPage, now_ms: int, *, dead: bool = False) -> tuple[Sequence[str], list[list[str]]]:
    """The names of a page's columns, and its cells."""
    cells = _dead_cells if dead else _cells
    return _DEAD_HEAD if dead else HEAD, [cells(row, now_ms) for row in page.rows]


def look_at(page: JobPage, now_ms: int, location: str) -> Look:
    """A page as one look of a watch."""
    head, rows = _fitting(*_columns(page, now_ms))
    return Look(rows, {"at": iso(now_ms), **_page_as_json(page, location)}, head)


def print_page_as_json(page: JobPage, location: str) -> None:
    """A page as one line."""
    print_json(_page_as_json(page, location))


def _page_as_json(page: JobPage, location: str) -> dict[str, Any]:
    return {"database": location, "jobs": [as_json(row) for row in page.rows], "next": page.cursor}


def _cells(row: JobRow, now_ms: int) -> list[str]:
    state = str(row.state) if row.stage in {None, str(row.state)} else f"{row.state} ({row.stage})"
    return [
        row.id, row.queue, state, row.task or "", row.framework, _attempts(row), _age(row, now_ms), _note(row, now_ms),
    ]  # fmt: skip


def _dead_cells(row: JobRow, now_ms: int) -> list[str]:
    reason = "" if row.error is None else row.error.reason
    return [
        row.id, row.queue, row.task or "", row.framework, reason, _attempts(row), _age(row, now_ms), _line(row.error),
    ]  # fmt: skip


def _attempts(row: JobRow) -> str:
    return str(row.attempts) if row.max_attempts is None else f"{row.attempts}/{row.max_attempts}"


def _age(row: JobRow, now_ms: int) -> str:
    return duration((now_ms - row.since_ms) / 1000) if row.since_ms else ""


def _note(row: JobRow, now_ms: int) -> str:
    """What there is to know about a job in its state."""
    parts = []
    if row.state is State.PENDING and row.due_at_ms is not None and row.due_at_ms > now_ms:
        parts.append(f"due in {duration((row.due_at_ms - now_ms) / 1000)}")
    if row.state is State.ACTIVE:
        if row.worker:
            parts.append(f"{row.worker} (dead)" if row.alive is False else row.worker)
        if row.progress is not None:
            parts.append(f"{row.progress.fraction:.0%} {row.progress.note}".strip())
        if row.claimed_at_ms is not None:
            parts.append(f"for {duration((now_ms - row.claimed_at_ms) / 1000)}")
    elif row.error is not None:
        parts.append(_line(row.error))
    return ", ".join(parts)


def _line(error: JobError | None) -> str:
    """The first line of an error."""
    if error is None:
        return ""
    first = (error.message.splitlines() or [""])[0]
    return f"{error.type}: {first}" if error.type else first or error.reason


def _fitting(head: Sequence[str], rows: list[list[str]]) -> tuple[Sequence[str], list[list[str]]]:
    """What fits the terminal: the last column is cut, and where that is not enough, columns are left out.

    Where that is not enough either, all is there, to stand below each other.
    """
    console = Console()
    if not rows or not (console.is_terminal or "COLUMNS" in os.environ):
        return head, rows
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[column]) for row in cells)) for column, name in enumerate(head)]
    for left_out in ((), *(_SPARED[:count] for count in range(1, len(_SPARED) + 1))):
        kept = [column for column, name in enumerate(head) if name not in left_out]
        room = console.width - sum(widths[column] + 2 for column in kept[:-1])
        if room >= min(widths[-1], _SHORTEST_NOTE):
            shown = [[row[column] for column in kept] for row in cells]
            return [head[column] for column in kept], [
                [*row[:-1], row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 1]}…"] for row in shown
            ]
    return head, rows


def as_json(row: JobRow) -> dict[str, Any]:
    """A row for programs. The id is text, since many readers of JSON round large numbers."""
    return {
        "id": row.id,
        "framework": row.framework,
        "queue": row.queue,
        "state": str(row.state),
        "stage": row.stage,
        "task": row.task,
        "ref": row.ref,
        "priority": row.priority,
        "attempts": row.attempts,
        "max_attempts": row.max_attempts,
        "created_at": iso(row.created_at_ms),
        "due_at": iso(row.due_at_ms),
        "claimed_at": iso(row.claimed_at_ms),
        "lease_until": iso(row.lease_until_ms),
        "ended_at": iso(row.ended_at_ms),
        "group": row.group,
        "dedupe_key": row.dedupe_key,
        "worker": row.worker,
        "worker_alive": row.alive,
        "progress": None if row.progress is None else {"fraction": row.progress.fraction, "note": row.progress.note},
        "error": None
        if row.error is None
        else {"reason": row.error.reason, "type": row.error.type, "message": row.error.message},
    }


def print_job_as_json(inspection: Inspection, row: JobRow, *, unpickle: bool) -> None:
    """All of a job as one line."""
    error = row.error
    print_json(
        {
            **as_json(row),
            "error": None if error is None else {**error._asdict(), "causes": list(error.causes)},
            "headers": inspection.facts(row),
            "history": [
                {
                    "number": attempt.number,
                    "started_at": iso(attempt.started_at_ms),
                    "ended_at": iso(attempt.ended_at_ms),
                    "worker": attempt.worker,
                    "outcome": attempt.outcome,
                    "error": attempt.error,
                }
                for attempt in inspection.attempts(row)
            ],
            "payload": inspection.content(row, unpickle=unpickle)._asdict(),
        }
    )


def print_job(inspection: Inspection, row: JobRow, now_ms: int, *, unpickle: bool) -> None:
    """All of a job, for people."""
    state = str(row.state) if row.stage is None else f"{row.state} ({row.stage})"
    lines = {
        "queue": row.queue,
        "framework": row.framework,
        "task": row.task,
        "ref": None if row.ref == row.id else row.ref,
        "state": state,
        "added": _when(row.created_at_ms, now_ms),
        "due": _when(row.due_at_ms, now_ms),
        "priority": str(row.priority),
        "attempts": f"{row.attempts} of {row.max_attempts}" if row.max_attempts is not None else str(row.attempts),
        "group": row.group,
        "dedupe key": row.dedupe_key,
        "worker": _worker(row),
        "claimed": _when(row.claimed_at_ms, now_ms) if row.state is State.ACTIVE else None,
        "lease ends": _when(row.lease_until_ms, now_ms),
        "progress": None if row.progress is None else f"{row.progress.fraction:.0%} {row.progress.note}".strip(),
        "ended": _when(row.ended_at_ms, now_ms),
    }
    _echo(f"job {row.id}")
    _echo_named(lines)
    if facts := inspection.facts(row):
        _echo("headers")
        _echo_named(facts)
    _echo_payload(inspection.content(row, unpickle=unpickle))
    if attempts := inspection.attempts(row):
        _echo("attempts that have ended")
        for attempt in attempts:
            _echo(f"  {_attempt(attempt, now_ms)}")
    if row.error is not None:
        _echo(f"error ({row.error.reason})")
        _echo_lines(row.error.stack or _line(row.error))
        for cause in row.error.causes:
            _echo_lines(f"caused by {cause}")


def _worker(row: JobRow) -> str | None:
    if row.worker is None:
        return None
    if row.alive is None:
        return row.worker
    return f"{row.worker}, alive" if row.alive else f"{row.worker}, dead: the job is taken back at the next claim"


def _when(at_ms: int | None, now_ms: int) -> str | None:
    if at_ms is None:
        return None
    seconds = (at_ms - now_ms) / 1000
    return f"{iso(at_ms)} ({f'in {duration(seconds)}' if seconds > 0 else f'{duration(-seconds)} ago'})"


def _attempt(attempt: Attempt, now_ms: int) -> str:
    took = duration((attempt.ended_at_ms - attempt.started_at_ms) / 1000)
    by = f" by {attempt.worker}" if attempt.worker else ""
    why = "" if attempt.error is None else f": {(attempt.error.splitlines() or [''])[0]}"
    return f"{attempt.number}. {attempt.outcome} {_when(attempt.ended_at_ms, now_ms)} after {took}{by}{why}"


def _echo_payload(content: Content) -> None:
    note = "" if content.note is None else f": {content.note}"
    _echo(f"payload ({content.kind}, {content.size} bytes{note})")
    if content.note is None and content.kind == "json":
        text = json.dumps(content.value, indent=2, ensure_ascii=False)
        _echo_lines(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN])
    elif content.value is not None:
        text = str(content.value)
        _echo_lines(text[:_LONGEST_SHOWN])
    else:
        return
    if len(text) > _LONGEST_SHOWN:
        _echo(f"  ... and {len(text) - _LONGEST_SHOWN} more characters; --json shows all")


def _echo_named(values: Mapping[str, str | None]) -> None:
    widest = max(map(len, values), default=0)
    for name, value in values.items():
        if value:
            _echo(f"  {printable(name):<{widest}}  {printable(value)}")


def _echo_lines(text: str) -> None:
    for line in text.splitlines():
        _echo(f"  {printable(line.expandtabs(4))}")


def _echo(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")

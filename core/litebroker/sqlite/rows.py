"""Between rows and records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from litebroker.errors import DatabaseCorruptError
from litebroker.jobs import Attempt, JobError, JobRecord, State
from litebroker.sqlite.connection import Row

READY, ACTIVE, DELAYED, COMPLETED, FAILED, CANCELLED = range(6)

STATES = (State.PENDING, State.ACTIVE, State.PENDING, State.COMPLETED, State.FAILED, State.CANCELLED)
ENDED = {State.COMPLETED: COMPLETED, State.FAILED: FAILED, State.CANCELLED: CANCELLED}

_NO_HEADERS: dict[str, str] = {}
_LINE = 500  # characters of an error in the history


def record(row: Row, queue: str, *, steady_to_wall_ms: int) -> JobRecord:
    """The record of a row of `statements.RECORD`.

    Args:
        steady_to_wall_ms: What to add to a lease's end to have it on the wall clock as it goes now.
    """
    (
        job_id, _queue, state, priority, due_at_ms, attempts, max_attempts, created_at_ms, token, lease_until_ms,
        claimed_at_ms, ended_at_ms, group, dedupe_key, ref, task, encoding, headers, error, history, payload,
    ) = row  # fmt: skip
    active = state == ACTIVE
    return JobRecord(
        job_id,
        queue,
        STATES[state],
        priority,
        due_at_ms,
        attempts,
        max_attempts or None,
        created_at_ms,
        token if active else None,
        lease_until_ms + steady_to_wall_ms if active else None,
        # The column holds created_at_ms until the first claim, so that a claim does not change the row's size.
        claimed_at_ms if active or attempts or claimed_at_ms != created_at_ms else None,
        ended_at_ms,
        group,
        dedupe_key,
        ref,
        task,
        encoding,
        from_json(headers) if headers is not None else _NO_HEADERS,
        error_from(error) if error is not None else None,
        [Attempt(*entry) for entry in from_json(history)] if history is not None else (),
        payload,
    )


def error_text(error: JobError) -> str:
    """The error as it is stored."""
    return json.dumps([error.reason, error.type, _sound(error.message), _sound(error.stack), list(error.causes)])


def error_from(text: str) -> JobError:
    """What `error_text` stored."""
    reason, kind, message, stack, causes = from_json(text)
    return JobError(reason, kind, message, stack, tuple(causes))


def error_line(error: JobError) -> str:
    """The error in the history: ``Type: message``, bounded."""
    line = f"{error.type}: {error.message}" if error.type else error.message or error.reason
    return _sound(line if len(line) <= _LINE else f"{line[:_LINE]}…")


def from_json(text: str) -> Any:
    """What was stored as JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatabaseCorruptError(
            f"a row is damaged ({error}): restore a backup, or salvage the file with the sqlite3 shell's .recover;"
            " it was left as it is"
        ) from error


def ids(job_ids: Sequence[int]) -> str:
    """Ids as the one parameter that a statement's ``json_each`` takes apart."""
    return f"[{','.join(map(str, job_ids))}]"


def texts(keys: Sequence[str]) -> str:
    """The same for texts."""
    return json.dumps(list(keys))


def _sound(value: str) -> str:
    """Without lone surrogates, which SQLite cannot store: an error must be stored whatever it says."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")

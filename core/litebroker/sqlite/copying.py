"""The verbs for tools that carry jobs and values from one storage to another, on SQLite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from litebroker.jobs import JobCopy, State
from litebroker.sqlite import rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection
from litebroker.sqlite.engine import Tx
from litebroker.sqlite.jobs import JobVerbs
from litebroker.sqlite.recovery import steady_to_wall_ms
from litebroker.storage import Value

_BEFORE_ALL = -(1 << 63)


class CopyVerbs(JobVerbs):
    """Whole jobs and values, in and out."""

    def walk_jobs(self, *, after: int | None = None, limit: int = 1000) -> list[JobCopy]:
        params = {"after": _BEFORE_ALL if after is None else after, "limit": limit}
        names: dict[int, str] = {}

        def look(db: Connection) -> list[JobCopy]:
            shift = steady_to_wall_ms(self._engine)
            found = []
            for *row, dedupe_ends, concurrency in db.rows(sql.WALK_JOBS, params):
                queue = row[1]
                if queue not in names:
                    names[queue] = self._name(db, queue)
                record = rows.record(tuple(row), names[queue], steady_to_wall_ms=shift)
                found.append(JobCopy(record, "ended" if dedupe_ends else "removed", concurrency))
            return found

        return self._read(look) if limit > 0 else []

    def put_jobs(self, copies: Sequence[JobCopy]) -> list[bool]:
        if not copies:
            return []
        for record, _until, _concurrency in copies:
            if record.state is State.ACTIVE:
                raise ValueError(f"job {record.id} is active: make it pending first, since its lease is not valid here")
        queues = {name: self._made_queue(name) for name in dict.fromkeys(copy.record.queue for copy in copies)}
        now = self._engine.clock.now_ms()
        every = [copy.record.id for copy in copies]
        clashing = len(set(every)) < len(every) or any(copy.record.dedupe_key is not None for copy in copies)

        def op(tx: Tx) -> list[bool]:
            (latest,) = tx.db.rows(sql.LATEST)[0]
            later = latest is None or min(every) > latest
            there = set() if later else _known(tx, every)
            groups = self._groups(tx, copies, queues)
            tx.db.many(sql.PUT_JOB, [_values(copy, queues, groups, now) for copy in copies])
            # Those of a large import come in the order of their ids, and need no second look.
            new = set(every) if later and not clashing else _known(tx, every) - there
            tx.pages += len(copies) >> 1
            stored = []
            for record, _until, _concurrency in copies:
                stored.append(record.id in new)
                if record.id in new:
                    new.discard(record.id)  # of the same one twice, the first was stored
                    tx.carries(len(record.payload))
                    if record.state is State.PENDING:
                        tx.wake(record.queue, 1)
            return stored

        return self._write(op)

    def _groups(self, tx: Tx, copies: Sequence[JobCopy], queues: Mapping[str, int]) -> dict[tuple[str, str], int]:
        """The ids of the jobs' groups, by queue and name; made when they are new."""
        groups: dict[tuple[str, str], int] = {}
        for record, _until, concurrency in copies:
            queue, group = record.queue, record.group
            if group is not None and (queue, group) not in groups:
                groups[queue, group] = self._group(tx, queues[queue], group, concurrency, conflict=False)
        return groups

    def walk_values(self, *, after: tuple[str, str] | None = None, limit: int = 1000) -> list[tuple[str, str, Value]]:
        steady = self._engine.steady_ms()
        space, key = after or ("", "")
        params = {"space": space, "key": key, "limit": limit, "steady": steady}
        found = self._read(lambda db: db.rows(sql.WALK_VALUES, params)) if limit > 0 else []
        return [
            (space, key, Value(data, number, None if expires is None else expires - steady))
            for space, key, data, number, expires in found
        ]


def _known(tx: Tx, job_ids: Sequence[int]) -> set[int]:
    """Those of the ids that are there."""
    return {job_id for (job_id,) in tx.db.rows(sql.KNOWN_IDS, {"ids": rows.ids(job_ids)})}


def _values(
    copy: JobCopy, queues: Mapping[str, int], groups: Mapping[tuple[str, str], int], now: int
) -> tuple[object, ...]:
    """The row of a job, in the order of PUT_JOB's parameters."""
    record = copy.record
    if record.state is State.PENDING:
        state = rows.READY if record.due_at_ms <= now else rows.DELAYED
    else:
        state = rows.ENDED[record.state]
    return (
        record.id,
        queues[record.queue],
        state,
        record.priority,
        record.due_at_ms,
        record.attempts,
        record.max_attempts or 0,
        now,
        record.created_at_ms if record.claimed_at_ms is None else record.claimed_at_ms,
        record.created_at_ms,
        # What has ended is found by when; what is pending has not.
        None if state in {rows.READY, rows.DELAYED} else record.ended_at_ms or now,
        None if record.group is None else groups[record.queue, record.group],
        record.dedupe_key,
        1 if copy.dedupe_until == "ended" else 0,
        record.ref,
        record.task,
        record.encoding,
        json.dumps(dict(record.headers)) if record.headers else None,
        None if record.error is None else rows.error_text(record.error),
        json.dumps([list(attempt) for attempt in record.history]) if record.history else None,
        record.payload,
    )

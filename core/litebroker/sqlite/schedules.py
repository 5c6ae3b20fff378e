"""The verbs of `litebroker.storage.Schedules` on SQLite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from litebroker.jobs import Added, JobSpec
from litebroker.schedules import ScheduleSpec
from litebroker.sqlite import rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Row
from litebroker.sqlite.engine import Tx
from litebroker.sqlite.jobs import JobVerbs
from litebroker.storage import ScheduleRecord

# The options of a job, which are kept as JSON where they are not the default: queue and payload have columns.
_OPTIONS = JobSpec._field_defaults


class ScheduleVerbs(JobVerbs):
    """Durable schedules."""

    def put_schedule(self, record: ScheduleRecord) -> None:
        queue = self._made_queue(record.queue)

        def op(tx: Tx) -> None:
            tx.db.rows(sql.PUT_SCHEDULE, {"queue": queue, **_columns(record)})
            tx.wake(record.queue, 1)

        self._write(op, single=True)

    def get_schedule(self, queue: str, schedule_id: str) -> ScheduleRecord | None:
        params = {"queue": self._queue(queue), "name": schedule_id}
        found = self._read(lambda db: db.rows(sql.GET_SCHEDULE, params))
        return _record(found[0]) if found else None

    def list_schedules(self, queue: str | None = None) -> list[ScheduleRecord]:
        names = [info.name for info in self.queues()] if queue is None else [queue]
        found: list[ScheduleRecord] = []
        for name in names:
            params = {"queue": self._queue(name)}
            found += [_record(row) for row in self._read(lambda db, p=params: db.rows(sql.SCHEDULES_OF_QUEUE, p))]  # type: ignore[misc]
        return found

    def remove_schedule(self, queue: str, schedule_id: str) -> bool:
        params = {"queue": self._queue(queue), "name": schedule_id}
        return self._write(lambda tx: tx.db.change(sql.REMOVE_SCHEDULE, params) == 1, single=True)

    def due_schedules(self, queues: Sequence[str], *, limit: int = 100) -> list[ScheduleRecord]:
        found: list[ScheduleRecord] = []
        now = self._engine.clock.now_ms()
        for name in queues:
            params = {"queue": self._queue(name), "now": now, "limit": limit}
            found += [_record(row) for row in self._read(lambda db, p=params: db.rows(sql.DUE_SCHEDULES, p))]  # type: ignore[misc]
        found.sort(key=lambda record: record.next_at_ms)
        return found[:limit]

    def fire_schedule(self, record: ScheduleRecord, *, next_at_ms: int, add: bool = True) -> Added | None:
        queue = self._queue(record.queue)
        params = {
            "queue": queue,
            **_columns(record),
            "expected": record.next_at_ms,
            "last": record.last_at_ms,
            "next_at_ms": next_at_ms,
            "last_at_ms": record.next_at_ms if add else record.last_at_ms,
        }

        def op(tx: Tx) -> Added | None:
            if tx.db.change(sql.ADVANCE_SCHEDULE, params) != 1:
                return None
            return self.add([record.job])[0] if add else Added(0, False)

        return self._write(op)


def _columns(record: ScheduleRecord) -> dict[str, object]:
    options = {name: getattr(record.job, name) for name in _OPTIONS}
    return {
        "name": record.id,
        "every_ms": record.spec.every_ms,
        "cron": record.spec.cron,
        "tz": record.spec.tz,
        "next_at_ms": record.next_at_ms,
        "last_at_ms": record.last_at_ms,
        "options": json.dumps(
            {name: _plain(value) for name, value in options.items() if value != _OPTIONS[name]}, sort_keys=True
        ),
        "payload": record.job.payload,
    }


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _record(row: Row) -> ScheduleRecord:
    queue, name, every_ms, cron, tz, next_at_ms, last_at_ms, options, payload = row
    return ScheduleRecord(
        queue=queue,
        id=name,
        spec=ScheduleSpec(every_ms=every_ms, cron=cron, tz=tz),
        job=JobSpec(queue=queue, payload=payload, **rows.from_json(options)),
        next_at_ms=next_at_ms,
        last_at_ms=last_at_ms,
    )

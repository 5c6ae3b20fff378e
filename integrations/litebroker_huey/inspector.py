"""Huey's tasks, as tools show and mend them. Huey need not be installed, and no task is unpickled unasked."""

from __future__ import annotations

from collections.abc import Sequence

from litebroker import Content, Inspector, JobRow

_QUEUE, _SCHEDULE = "huey:", "huey-schedule:"
_ITS_OWN_TIME = "huey keeps its time with the task: it can be put off, but not be brought forward"


class HueyInspector(Inspector):
    """What waits is in "huey:<name>", and what waits for its time in "huey-schedule:<name>"."""

    framework = "huey"

    def owns(self, queue: str) -> bool:
        return queue.startswith((_QUEUE, _SCHEDULE))

    def why_not_in(self, row: JobRow, queue: str) -> str | None:
        # From a schedule to a queue a task would run too early, and the other way round never.
        kind = _SCHEDULE if row.queue.startswith(_SCHEDULE) else _QUEUE
        return None if queue.startswith(kind) else f"it waits in {row.queue!r}, and can go to another {kind}NAME only"

    def read(self, payload: bytes, encoding: str | None, *, unpickle: bool) -> Content:
        if not unpickle:
            return Content("pickle", len(payload), note="a pickle, which runs what it likes when it is read")
        return super().read(payload, encoding, unpickle=True)

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[str | None]:
        # The time is in the pickle, too, and the consumer would only put the task back until then.
        refused = [
            row.queue.startswith(_SCHEDULE) and row.due_at_ms is not None and due_at_ms < row.due_at_ms for row in rows
        ]
        later = [row for row, is_refused in zip(rows, refused, strict=True) if not is_refused]
        answers = iter(super().reschedule(later, due_at_ms))
        return [_ITS_OWN_TIME if is_refused else next(answers) for is_refused in refused]

"""Huey's tasks, as tools show and mend them. Huey need not be installed, and no task is unpickled unasked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from litebroker import Content, Inspector, JobRow

_QUEUE, _SCHEDULE = "huey:", "huey-schedule:"


class HueyInspector(Inspector):
    """What waits is in "huey:<name>", and what waits for its time in "huey-schedule:<name>"."""

    framework = "huey"
    keeps_to_itself = True

    def owns(self, queue: str) -> bool:
        return queue.startswith((_QUEUE, _SCHEDULE))

    def read(self, payload: bytes, encoding: str | None, *, unpickle: bool) -> Content:
        if not unpickle:
            return Content("pickle", len(payload), note="a pickle, which runs what it likes when it is read")
        return super().read(payload, encoding, unpickle=True)

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[str | None]:
        def refusal(row: JobRow) -> str | None:
            # The time is in the pickle, too, and the consumer would only put the task back until then.
            if not row.queue.startswith(_SCHEDULE) or row.due_at_ms is None or due_at_ms >= row.due_at_ms:
                return None
            return "huey keeps its time with the task: it can be put off, but not be brought forward"

        return _unless(refusal, rows, lambda some: super(HueyInspector, self).reschedule(some, due_at_ms))

    def move(self, rows: Sequence[JobRow], queue: str) -> list[str | None]:
        def refusal(row: JobRow) -> str | None:
            # From a schedule to a queue a task would run too early, and the other way round never.
            kind = _SCHEDULE if row.queue.startswith(_SCHEDULE) else _QUEUE
            if queue.startswith(kind):
                return None
            return f"it waits in {row.queue!r}, and can go to another {kind}NAME only"

        return _unless(refusal, rows, lambda some: super(HueyInspector, self).move(some, queue))


def _unless(
    refusal: Callable[[JobRow], str | None],
    rows: Sequence[JobRow],
    act: Callable[[Sequence[JobRow]], list[str | None]],
) -> list[str | None]:
    """What acting on those that are not refused answers, and why the others are."""
    refused = [refusal(row) for row in rows]
    answers = iter(act([row for row, why_not in zip(rows, refused, strict=True) if why_not is None]))
    return [next(answers) if why_not is None else why_not for why_not in refused]

"""Huey's tasks, as tools show and mend them. Huey need not be installed, and no task is unpickled unasked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

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
        # The application's own classes are found from its folder, as by huey_consumer.
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return super().read(payload, encoding, unpickle=True)

    def reschedule(self, rows: Sequence[JobRow], due_at_ms: int) -> list[str | None]:
        # The time is in the pickle, too, and the consumer would only put the task back until then.
        early = {row.id for row in rows if row.queue.startswith(_SCHEDULE) and due_at_ms < (row.due_at_ms or due_at_ms)}
        later = [row for row in rows if row.id not in early]
        answers = dict(zip((row.id for row in later), super().reschedule(later, due_at_ms), strict=True))
        return [
            "huey keeps its time with the task: it can be put off, but not be brought forward"
            if row.id in early
            else answers[row.id]
            for row in rows
        ]

    def move(self, rows: Sequence[JobRow], queue: str) -> list[str | None]:
        # From a schedule to a queue a task would run too early, and the other way round never.
        answers: list[str | None] = []
        for row in rows:
            if row.queue.startswith(_SCHEDULE) != queue.startswith(_SCHEDULE):
                kind = _SCHEDULE if row.queue.startswith(_SCHEDULE) else _QUEUE
                answers.append(f"it waits in {row.queue!r}, and can go to another {kind}NAME only")
            else:
                answers += super().move([row], queue)
        return answers

"""Dramatiq's messages, as tools show and mend them. Dramatiq need not be installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from litebroker import Content, Inspector, JobRow

# What Dramatiq's Retries middleware leaves in a message that has failed. With them, it would be a dead letter again at
# its first failure.
_OF_PAST_ATTEMPTS = frozenset({"retries", "traceback", "requeue_timestamp"})


class DramatiqInspector(Inspector):
    """A dead letter runs again with all of its retries before it."""

    framework = "dramatiq"

    def owns(self, queue: str) -> bool:
        # The default namespace; another one cannot be told from a queue of Queue's.
        return queue.startswith("dramatiq:")

    def why_not_in(self, row: JobRow, queue: str) -> str | None:
        namespace = row.queue.rpartition(":")[0]
        if queue.rpartition(":")[0] == namespace:
            return None
        return f"dramatiq has no queue {queue!r}; its queues are called like {row.queue!r}"

    def read(self, payload: bytes, encoding: str | None, *, unpickle: bool) -> Content:
        message = _message(payload)
        if message is None:
            return Content("dramatiq", len(payload), note="not by Dramatiq's JSON encoder, but by another one")
        return Content("json", len(payload), message)

    def fresh_payloads(self, rows: Sequence[JobRow]) -> Mapping[int, bytes]:
        fresh = {}
        for row in rows:
            record = self.stored(row)
            message = None if record is None else _message(record.payload)
            if record is None or message is None:
                continue  # By an encoder of the application's own: it runs again as it is.
            options = {name: value for name, value in message["options"].items() if name not in _OF_PAST_ATTEMPTS}
            if options != message["options"]:
                text = json.dumps({**message, "options": options}, separators=(",", ":"))
                fresh[record.id] = text.encode()
        return fresh


def _message(payload: bytes) -> dict[str, Any] | None:
    """The message, where it was encoded as JSON."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("options"), dict) else None

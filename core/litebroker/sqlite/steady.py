"""The file's steady clock: what leases and the ages of values are measured by, alike in all processes."""

from __future__ import annotations

import time

from litebroker.clock import Clock, SystemClock
from litebroker.sqlite import machine
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection

# How often the file is told the time, for the next start of the machine.
_SEEN_S = 60.0


class SteadyClock:
    """The machine's steady clock, moved to read about as the wall clock did when the machine first used the file.

    By how much it is moved is the anchor. It lies in the file, one for each start of the machine.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._anchor_ms: int | None = None
        self._name = ""
        self._seen_at = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the anchor has been read."""
        return self._anchor_ms is not None

    def now_ms(self) -> int:
        """The time. Read the anchor first."""
        assert self._anchor_ms is not None  # noqa: S101 - for the type checker
        return self._anchor_ms + self._clock.steady_ms()

    def find(self, db: Connection) -> None:
        """Read the anchor; made when this start of the machine is new to the file."""
        system = isinstance(self._clock, SystemClock)
        name = machine.steady_clock_id() if system else f"a {type(self._clock).__name__}"
        steady = self._clock.steady_ms()
        if not name:
            self._anchor_ms = self._clock.now_ms() - steady
            return
        self._name = name
        rows = db.rows(sql.ANCHOR, {"id": name})
        if not rows:
            # A machine that started with its wall clock set back must not see leases of the time before as far ahead.
            (latest,) = db.rows(sql.LATEST_SEEN)[0]
            now = max(self._clock.now_ms(), latest or 0)
            db.rows(sql.ADD_BOOT, {"id": name, "anchor": now - steady, "seen": now})
            rows = db.rows(sql.ANCHOR, {"id": name})
        self._anchor_ms = int(rows[0][0])

    def mark(self, db: Connection) -> None:
        """Write the time down, now and then, so that the next start of the machine does not begin before it."""
        now = time.monotonic()
        if self._name and now - self._seen_at > _SEEN_S:
            self._seen_at = now
            db.rows(sql.SEEN, {"id": self._name, "seen": self.now_ms()})

"""Waiting for jobs: a wake-up when there is one, and a slow look beneath it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from litebroker.sqlite import recovery
from litebroker.sqlite.connection import Row
from litebroker.sqlite.engine import Engine

# A wake-up that was lost costs no more than this; so does the look for leases and dead processes.
_SLOW_POLL_S = 0.5
# Where there are no FIFOs: the look's interval, from the first to the last.
_POLL_S, _POLL_MOST_S = 0.001, 0.05


class SQLiteListener:
    """See `litebroker.storage.Listener`."""

    def __init__(
        self, engine: Engine, waiting: Callable[[str], list[Row]], queues: Sequence[str], topics: Sequence[str]
    ) -> None:
        self._engine = engine
        self._waiting = waiting
        self._queues = tuple(queues)
        self._waiter = engine.wakeups.listener(queues, topics)

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _POLL_S
        while True:
            left = _SLOW_POLL_S if deadline is None else deadline - time.monotonic()
            ready_in = self._ready_in()
            if ready_in is not None and ready_in <= 0:
                return self._heard()
            slice_s = max(0.0, min(left, _SLOW_POLL_S, _SLOW_POLL_S if ready_in is None else ready_in))
            if self._waiter.polling:
                slice_s = min(slice_s, pause)
                pause = min(pause * 2, _POLL_MOST_S)
            if self._waiter.wait(slice_s):
                return self._heard()
            if self._waiter.closed:
                return False
            # Of what came meanwhile it would have been woken. What became due meanwhile takes one more look.
            if deadline is not None and time.monotonic() >= deadline and (ready_in is None or ready_in > slice_s):
                return False

    def _heard(self) -> bool:
        """The next claim need not look first whether there is anything."""
        self._engine.heard.update(self._queues)
        return True

    def _ready_in(self) -> float | None:
        """Seconds until a job may be claimable; None while nothing is in sight."""
        if not self._queues:
            return None
        engine = self._engine
        recovery.recover_dead(engine)
        now, steady = engine.clock.now_ms(), engine.steady_ms()
        soonest: int | None = None
        for name in self._queues:
            for ready, due, lease_end, paused in self._waiting(name):
                if ready:
                    return 0.0
                waits = [] if lease_end is None else [lease_end - steady]
                if due is not None and not paused:
                    waits.append(due - now)
                if waits:
                    soonest = min(waits) if soonest is None else min(soonest, *waits)
        return None if soonest is None else soonest / 1000

    def wake(self) -> None:
        self._waiter.wake()

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` would return; for asyncio, beside a slow poll."""
        return int(self._waiter.fileno())

    def close(self) -> None:
        self._waiter.close()

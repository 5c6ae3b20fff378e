"""A clock that goes only when it is told to."""

from __future__ import annotations

import threading

_AN_ORDINARY_DAY_MS = 1_800_000_000_000  # 2027-01-15 08:00 UTC
_UP_FOR_A_WHILE_MS = 100_000_000


class ManualClock:
    """Both clocks of a machine in which time stands still until a test moves it. Any thread may use it.

    The two start at unlike values, so that code which mixes them up does not pass by chance.
    """

    __slots__ = ("_lock", "_now_ms", "_steady_ms")

    def __init__(self, now_ms: int = _AN_ORDINARY_DAY_MS, steady_ms: int = _UP_FOR_A_WHILE_MS) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._steady_ms = steady_ms

    def now_ms(self) -> int:
        return self._now_ms

    def steady_ms(self) -> int:
        return self._steady_ms

    def advance(self, seconds: float) -> None:
        """Let time pass: both clocks go on. Raises ``ValueError`` for a negative time; `step` is for that."""
        if seconds < 0:
            msg = f"time does not run backwards: advance({seconds!r}); step() moves the wall clock alone"
            raise ValueError(msg)
        elapsed_ms = round(seconds * 1000)
        with self._lock:
            self._now_ms += elapsed_ms
            self._steady_ms += elapsed_ms

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or, with a negative number, back. The steady one does not notice."""
        with self._lock:
            self._now_ms += round(seconds * 1000)

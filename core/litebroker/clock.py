"""Two clocks: one that tells the date, and one that nobody can turn back."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

_CENTURY_S = 3_155_760_000


class Clock(Protocol):
    """What the engine asks of time."""

    def now_ms(self) -> int:
        """The wall clock: milliseconds since the epoch, UTC. It may jump. Due times and schedules use it."""

    def steady_ms(self) -> int:
        """Milliseconds since this machine started, the same in all its processes.

        It never jumps, and stands still while the machine is suspended. Leases and expiries use it, so
        that neither a clock step nor a closed lid takes a job from a living worker.
        """


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        # CLOCK_MONOTONIC and mach_absolute_time count from the machine's start, for all processes alike.
        return time.monotonic_ns() // 1_000_000


def duration_ms(value: float | timedelta, name: str) -> int:
    """Seconds, or a timedelta, as whole milliseconds, rounded to the nearest. Raises ``ValueError``, naming it."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # A bool is an int, and True seconds are a mistake. NaN fails both comparisons.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= _CENTURY_S:
        msg = f"{name} must be a timedelta or a number of seconds from 0 to a hundred years, not {value!r}"
        raise ValueError(msg)
    return round(seconds * 1000)

"""Two clocks: one that tells the date, and one that nobody can turn back."""

from __future__ import annotations

import time
from typing import Protocol


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

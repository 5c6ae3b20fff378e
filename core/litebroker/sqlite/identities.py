"""Numbers that nobody else draws: of jobs, of this process, and of its claims. None costs a look at the file."""

from __future__ import annotations

import itertools
import threading
import time
from random import SystemRandom

# A token is the process's number and the claim's: 24 and 38 bits, so that every token takes eight bytes.
PROCESS_SHIFT = 38
_PROCESS_BITS = 23
_CLAIM_MASK = (1 << PROCESS_SHIFT) - 1

# An id is microseconds since 2026 (51 bits, which last until 2097) and 12 bits of the process's own, its lane.
ID_STEP = 1 << 12
_EPOCH_US = 1_767_225_600_000_000
# Of the first day nobody has any: a smaller number is something else, mistaken for an id.
SMALLEST_ID = 86_400_000_000 << 12

_random = SystemRandom()


class Identities:
    """What one process draws its numbers from. A forked child needs another.

    Attributes:
        process: The number of this process among those that claim from the file.
    """

    def __init__(self) -> None:
        self.process = _new_process()
        self._claims = itertools.count(_random.getrandbits(32))
        self._lane = _random.getrandbits(12)
        self._last_id = 0
        # Re-entrant, since a signal handler may add a job in the middle of this.
        self._lock = threading.RLock()

    def token(self) -> int:
        """A token that no other claim has."""
        return self.process << PROCESS_SHIFT | next(self._claims) & _CLAIM_MASK

    def first_id(self, count: int) -> int:
        """The first of ``count`` new ids, `ID_STEP` apart, in the order of time."""
        now = (time.time_ns() // 1000 - _EPOCH_US) << 12
        with self._lock:
            first = max(now | self._lane, self._last_id + ID_STEP)
            self._last_id = first + (count - 1) * ID_STEP
        return first

    def change_lane(self) -> None:
        """Two processes drew the same ids: go another way."""
        self._lane = _random.getrandbits(12)

    def change_process(self) -> None:
        """Another process drew the same number."""
        self.process = _new_process()


def issued_at_ms(job_id: int) -> int:
    """When an id was drawn, by the wall clock of the process that drew it."""
    return ((job_id >> 12) + _EPOCH_US) // 1000


def _new_process() -> int:
    return (1 << _PROCESS_BITS) | _random.getrandbits(_PROCESS_BITS)

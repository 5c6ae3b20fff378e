"""Counters, locks and barriers in the file that holds the messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from dramatiq.rate_limits import RateLimiterBackend

from litebroker import Durability
from litebroker_dramatiq.delivery import hooks_of
from litebroker_dramatiq.source import Source, Where

# A notification may be lost with the process that sends it: a waiter looks for itself this often.
_LOOK_S = 0.5


class SQLiteRateLimiterBackend(RateLimiterBackend):
    """All of Dramatiq's limiters, and barriers for its groups.

    A key that has expired, or was never there, counts as 0. Each success starts the key's time anew, as on Redis.

    Args:
        where: As for `SQLiteBroker`: best the same.
        namespace: Keys of different namespaces do not meet.
    """

    def __init__(
        self, where: Where, *, namespace: str = "dramatiq-limits", durability: Durability | None = None
    ) -> None:
        self._source = Source(where, durability)
        self._space = namespace

    def add(self, key: str, value: int, ttl: int) -> bool:
        return self._source().put(self._space, key, number=value, ttl_ms=ttl, if_absent=True)

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        return self._source().increment(self._space, key, amount, high=maximum, ttl_ms=ttl) is not None

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        delivery = hooks_of.delivery
        if delivery is None:
            return self._source().increment(self._space, key, -amount, low=minimum, ttl_ms=ttl) is not None
        # A message of a group has run. Should its worker be killed before it is acknowledged, it comes again, and must
        # not count twice: the group's callback would run too early.
        mark = f"{key}:{delivery.lease.job_id}"
        with self._source().transaction() as storage:
            before = storage.peek(self._space, [mark]).get(mark)
            if before is not None:
                return bool(before.number)
            done = storage.increment(self._space, key, -amount, low=minimum, ttl_ms=ttl) is not None
            storage.put(self._space, mark, number=int(done), ttl_ms=ttl)
        return done

    def incr_and_sum(
        self, key: str, keys: Callable[[], Iterable[str]] | Sequence[str], amount: int, maximum: int, ttl: int
    ) -> bool:
        with self._source().transaction() as storage:
            summed = list(keys() if callable(keys) else keys)
            total = sum(value.number for value in storage.peek(self._space, summed).values())
            if total + amount > maximum:
                return False
            return storage.increment(self._space, key, amount, high=maximum, ttl_ms=ttl) is not None

    def wait(self, key: str, timeout: int | None) -> bool:
        """True once the key was notified, also when that was before; False after ``timeout`` ms, None being without."""
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        storage = self._source()
        listener = storage.listener(topics=[self._topic(key)])
        try:
            while not storage.peek(self._space, [key]):
                left = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                listener.wait(min(left, _LOOK_S))
        finally:
            listener.close()
        return True

    def wait_notify(self, key: str, ttl: int) -> None:
        storage = self._source()
        storage.put(self._space, key, ttl_ms=ttl)
        storage.notify(self._topic(key))

    def clear(self) -> int:
        """Forget every key of the namespace; how many there were."""
        return self._source().clear(self._space)

    def close(self) -> None:
        """Let go of the file. The next use opens it again."""
        self._source.close()

    def _topic(self, key: str) -> str:
        return f"{self._space}:{key}"

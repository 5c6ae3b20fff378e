"""An event backend for dramatiq-abort: stop messages that run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from litebroker import Durability
from litebroker_dramatiq.source import Source, Where

_LOOK_S = 0.5


class Event(NamedTuple):
    """What dramatiq-abort signals: its own class has these fields, and it asks for no other."""

    key: str
    params: dict[str, Any]


class SQLiteEventBackend:
    """For ``dramatiq_abort.Abortable(backend=SQLiteEventBackend("jobs.db"))``.

    An event is taken by the one that finds it first, as on Redis.

    Args:
        where: As for `SQLiteBroker`: best the same.
        namespace: Events of different namespaces do not meet.
    """

    def __init__(
        self, where: Where, *, namespace: str = "dramatiq-aborts", durability: Durability | None = None
    ) -> None:
        self._source = Source(where, durability)
        self._space = namespace

    def wait_many(self, keys: Iterable[str], timeout: int) -> Event | None:
        wanted = list(keys)
        deadline = time.monotonic() + timeout / 1000
        # One topic for all keys: those who wait are few, and they wait for many keys each.
        listener = self._source().listener(topics=[self._space])
        try:
            while True:
                for key in self._source().peek(self._space, wanted):
                    if (event := self.poll(key)) is not None:
                        return event
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                listener.wait(min(left, _LOOK_S))
        finally:
            listener.close()

    def poll(self, key: str) -> Event | None:
        # Asked before each message, where there hardly ever is one: a look costs no transaction.
        if not self._source().peek(self._space, [key]):
            return None
        value = self._source().pop(self._space, key)
        return None if value is None else Event(key, json.loads(value.data))

    def notify(self, events: Iterable[tuple[str, dict[str, Any]]], ttl: int) -> None:
        with self._source().transaction() as storage:
            for key, params in events:
                storage.put(self._space, key, json.dumps(params).encode(), ttl_ms=ttl)
            storage.notify(self._space)

    def close(self) -> None:
        """Let go of the file. The next use opens it again."""
        self._source.close()

"""Results in the file that holds the messages."""

from __future__ import annotations

import time
from typing import Any

from dramatiq.encoder import Encoder
from dramatiq.results import ResultBackend, ResultMissing, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT, Missing

from litebroker import Durability, StorageError
from litebroker_dramatiq.delivery import hooks_of
from litebroker_dramatiq.source import Source, Where

# A notification may be lost with the process that sends it: a waiter looks for itself this often.
_LOOK_S = 0.5


class SQLiteResultBackend(ResultBackend):
    """Keeps what actors return, or raised, until its time is over.

    Whoever waits for a result is woken by its arrival, in whatever process.

    Args:
        where: As for `SQLiteBroker`: best the same.
        namespace: Results of different namespaces do not meet.
        encoder: Dramatiq's global encoder unless given.
    """

    def __init__(
        self,
        where: Where,
        *,
        namespace: str = "dramatiq-results",
        encoder: Encoder | None = None,
        durability: Durability | None = None,
        **options: Any,
    ) -> None:
        super().__init__(namespace=namespace, encoder=encoder, **options)
        self._source = Source(where, durability)
        self._space = namespace

    def get_result(self, message: Any, *, block: bool = False, timeout: int | None = None) -> Any:
        key = self.build_message_key(message)
        result = self._get(key)
        if result is Missing:
            if not block:
                raise ResultMissing(message)
            result = self._wait(key, DEFAULT_TIMEOUT if timeout is None else timeout)
            if result is Missing:
                raise ResultTimeout(message)
        return self.unwrap_result(result)  # type: ignore[no-untyped-call]

    def forget(self, message: Any) -> bool:
        """Drop a message's result before its time. False when there is none."""
        return bool(self._source().delete(self._space, [self.build_message_key(message)]))

    def close(self) -> None:
        """Let go of the file. The next use opens it again."""
        self._source.close()

    def _wait(self, key: str, timeout_ms: int) -> Any:
        deadline = time.monotonic() + timeout_ms / 1000
        listener = self._source().listener(topics=[self._topic(key)])
        try:
            while (result := self._get(key)) is Missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                listener.wait(min(left, _LOOK_S))
        finally:
            listener.close()
        return result

    def _topic(self, key: str) -> str:
        return f"{self._space}:{key}"

    def _get(self, message_key: str) -> Any:
        value = self._source().peek(self._space, [message_key]).get(message_key)
        return Missing if value is None else self.encoder.decode(value.data)

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        data = self.encoder.encode(result)
        try:
            storage = self._source()
            storage.put(self._space, message_key, data, ttl_ms=ttl)
            storage.notify(self._topic(message_key))
        except StorageError as error:
            # Dramatiq logs what a hook raises, and acknowledges the message: its result would never come.
            hooks_of.spoil(error)
            raise

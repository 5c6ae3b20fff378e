"""litebroker's broker behind the handles that Dramatiq's tests use to look into Redis, RabbitMQ or the StubBroker.

Only looking is done here: sending, consuming, retrying, acknowledging are the broker's own.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import queue
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import dramatiq.brokers.stub
from dramatiq import Broker, Consumer, Message, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware

from litebroker import JobSpec, State, Storage
from litebroker_dramatiq import SQLiteBroker

STUB_HAS_PREFETCH = tuple(map(int, dramatiq.__version__.split(".")[:2])) >= (2, 2)
NAMESPACE = "dramatiq:"
FAIL_FAST = inspect.signature(StubBroker.join).parameters["fail_fast"].default is not False


def database() -> Path:
    """One file for a test process and the processes that it starts, as there would be one Redis."""
    return Path(os.environ["COMPAT_FOLDER"]) / "jobs.db"


class RedisShape(SQLiteBroker):
    """As the tests use ``RedisBroker()``."""

    def __init__(self, *, middleware: list[Middleware] | None = None) -> None:
        super().__init__(database(), middleware=middleware)
        self.client = _RedisLook(self)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        sent = super().enqueue(message, delay=delay)
        return sent.copy(options={"redis_message_id": sent.message_id})


class _RedisLook:
    def __init__(self, broker: SQLiteBroker) -> None:
        self._broker = broker

    def lrange(self, key: str, start: int, stop: int) -> list[bytes]:
        waiting = _all(self._broker.storage, key.removesuffix(".DQ"), State.PENDING)
        return waiting[start : stop + 1]

    def zrangebyscore(self, key: str, _low: object, _high: object) -> list[bytes]:
        return _all(self._broker.storage, key.removesuffix(".XQ"), State.FAILED)


def _all(storage: Storage, name: str, state: State) -> list[bytes]:
    return [(job.ref or "").encode() for job in storage.page(name, state, limit=100_000)]


class RabbitShape(SQLiteBroker):
    """As the tests use ``RabbitmqBroker``."""

    def __init__(self) -> None:
        super().__init__(database())

    def join(self, queue_name: str, *, timeout: int | None = None, min_successes: int = 1, idle_time: int = 0) -> None:  # type: ignore[override]
        super().join(queue_name, timeout=timeout)

    def get_queue_message_counts(self, queue_name: str) -> tuple[int, int, int]:
        counts = self.storage.counts(NAMESPACE + queue_name)
        return counts.ready + counts.active, counts.delayed, counts.failed


class StubShape(SQLiteBroker):
    """As the tests use ``StubBroker()``."""

    def __init__(self) -> None:
        self._dead: defaultdict[str, list[Any]] = defaultdict(list)
        super().__init__(database())
        self.queues = _Queues(self)
        self.middleware.append(_Undertaker(self._dead))

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 100) -> Consumer:
        # Before 2.2 the StubBroker hands out whatever there is, and a test counts on it.
        return super().consume(queue_name, prefetch if STUB_HAS_PREFETCH else 65_535, timeout)

    @property
    def dead_letters_by_queue(self) -> defaultdict[str, list[Any]]:
        return self._dead

    @property
    def dead_letters(self) -> list[Any]:  # type: ignore[override]
        return [message for messages in self._dead.values() for message in messages]

    def flush_all(self) -> None:
        super().flush_all()
        for messages in self._dead.values():
            messages.clear()

    def join(self, queue_name: str, *, timeout: int | None = None, fail_fast: bool | None = None) -> None:  # type: ignore[override]
        super().join(queue_name, timeout=timeout)
        if FAIL_FAST if fail_fast is None else fail_fast:
            # Hooks run after the rejection is written, which ended the join.
            deadline = time.monotonic() + 1
            while len(self._dead[queue_name]) < self._count_dead(queue_name) and time.monotonic() < deadline:
                time.sleep(0.001)
            for message in self._dead[queue_name]:
                raise message._exception or RuntimeError("failed with an unknown error")  # noqa: SLF001

    def _count_dead(self, queue_name: str) -> int:
        return self.storage.counts(NAMESPACE + queue_name).failed


class _Undertaker(Middleware):
    def __init__(self, dead: defaultdict[str, list[Any]]) -> None:
        self._dead = dead

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        # The StubBroker's proxies keep their exception, for join() to raise; some tests patch that out.
        with contextlib.suppress(AttributeError):
            keep = dramatiq.brokers.stub._StubMessageProxy  # noqa: SLF001
            message.clear_exception = lambda: keep.clear_exception(message)  # type: ignore[method-assign,arg-type]
        self._dead[message.queue_name].append(message)


class _Queues(set[str]):
    """The declared names, and by name a look at the queue in the file as if it were a ``queue.Queue``."""

    def __init__(self, broker: SQLiteBroker) -> None:
        super().__init__()
        self._broker = broker

    def __getitem__(self, name: str) -> _QueueLook:
        return _QueueLook(self._broker.storage, NAMESPACE + name)


class _QueueLook:
    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name

    def put(self, data: bytes) -> None:
        self._storage.add([JobSpec(queue=self._name, payload=data)])

    def get(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for job in self._storage.claim([self._name], limit=1, lease_ms=60_000):
                self._storage.complete([job.lease])
                return job.payload
            time.sleep(0.01)
        raise queue.Empty

    def qsize(self) -> int:
        return self._storage.counts(self._name).pending

    @property
    def unfinished_tasks(self) -> int:
        counts = self._storage.counts(self._name)
        return counts.pending + counts.active

"""`Queue`: rq's own, with two more arguments for what the engine adds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import rq
from redis.exceptions import ConnectionError as RedisConnectionError

from litebroker import StorageError
from litebroker_rq.client import ConnectionPool
from litebroker_rq.database import Database, opened
from litebroker_rq.queue_list import PRIORITY_FIELD, QueueList

if TYPE_CHECKING:
    from rq.job import Job

    from litebroker_rq.keyspace import Session

# A job in one of these still holds its dedupe key.
_LIVE = {"created", "queued", "deferred", "scheduled", "started", "rate_limited"}

_MOST, _LEAST = (1 << 63) - 1, -(1 << 63)


class Queue(rq.Queue):
    """rq's Queue, whose `enqueue`, `enqueue_at` and `enqueue_in` take two more arguments.

    priority: Higher goes first within the queue; 0 is usual, negative is allowed. The job keeps it when it is retried,
        requeued or scheduled. ``at_front=True`` goes before all priorities.
    dedupe_key: While a job of this queue with the same key has not ended, that job is answered, and no new one made.
    """

    def enqueue(
        self, f: Any, *args: Any, priority: int | None = None, dedupe_key: str | None = None, **kwargs: Any
    ) -> Job:
        return self._enqueue(lambda: super(Queue, self).enqueue(f, *args, **kwargs), priority, dedupe_key, kwargs)

    def enqueue_at(
        self,
        datetime: datetime,
        f: Any,
        *args: Any,
        priority: int | None = None,
        dedupe_key: str | None = None,
        **kwargs: Any,
    ) -> Job:
        return self._enqueue(
            lambda: super(Queue, self).enqueue_at(datetime, f, *args, **kwargs), priority, dedupe_key, kwargs
        )

    def enqueue_in(
        self,
        time_delta: timedelta,
        func: Any,
        *args: Any,
        priority: int | None = None,
        dedupe_key: str | None = None,
        **kwargs: Any,
    ) -> Job:
        return self._enqueue(
            lambda: super(Queue, self).enqueue_in(time_delta, func, *args, **kwargs), priority, dedupe_key, kwargs
        )

    def _enqueue(
        self, enqueue: Callable[[], Job], priority: int | None, dedupe_key: str | None, kwargs: dict[str, Any]
    ) -> Job:
        if priority is None and dedupe_key is None:
            return enqueue()
        if kwargs.get("pipeline") is not None:
            raise ValueError("priority and dedupe_key need a transaction of their own: leave out pipeline=")
        if not self._is_async:
            raise ValueError("with is_async=False a job runs at once: it has no use for priority or dedupe_key")
        if priority is not None and not (isinstance(priority, int) and _LEAST <= priority <= _MOST):
            raise ValueError(f"priority={priority!r}: a whole number that fits into 64 bits")
        try:
            with self._database().writing(lasting=True) as session:
                held = None if dedupe_key is None else self._holder(session, dedupe_key)
                if held is not None:
                    return held
                job = enqueue()
                if dedupe_key is not None:
                    session.write(
                        "insert or replace into litebroker_rq_dedupe_keys (queue, key, job_key) values (?, ?, ?)",
                        self.key,
                        dedupe_key,
                        _bytes(job.key),
                    )
                if priority:
                    _prioritize(session, self.key.encode(), job, priority)
                return job
        except StorageError as error:
            raise RedisConnectionError(str(error)) from error

    def _database(self) -> Database:
        pool = self.connection.connection_pool
        if not isinstance(pool, ConnectionPool):
            raise TypeError(
                "litebroker_rq.Queue needs a connection of litebroker_rq: Queue(connection=connect('jobs.db'))"
            )
        return opened(pool.database_url)

    def _holder(self, session: Session, key: str) -> Job | None:
        """The job that holds the dedupe key."""
        found = session.select(
            "select job_key from litebroker_rq_dedupe_keys where queue = ? and key = ?", self.key, key
        )
        if not found:
            return None
        row = session.find(found[0][0])
        if row is None or row.kind != "hash" or row.data.get("status") not in _LIVE:
            return None
        job_id = bytes(row.key).decode().removeprefix(self.job_class.redis_job_namespace_prefix)
        held: Job | None = self.fetch_job(job_id)
        return held


def _prioritize(session: Session, queue: bytes, job: Job, priority: int) -> None:
    row = session.find(_bytes(job.key))
    if row is not None and row.kind == "hash":
        session.set_field(row, PRIORITY_FIELD, b"%d" % priority)
        QueueList(session, queue).prioritize(job.id.encode(), priority)


def _bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key

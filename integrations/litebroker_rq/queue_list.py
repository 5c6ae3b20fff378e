"""A list that is an RQ queue, and therefore a queue of the engine: a push adds, and a pop is a claim under a lease."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from litebroker import JobSpec, State
from litebroker_rq.keyspace import Session
from litebroker_rq.naming import job_key

PRIORITY_FIELD = "litebroker_priority"

_TASK_CHARS = 200


class QueueList:
    """The engine's queue of the same name as the key."""

    def __init__(self, session: Session, key: bytes) -> None:
        self._session = session
        self._key = key
        self._name = queue_name(key)

    def __len__(self) -> int:
        self._session.push_all()
        return self._session.storage.counts(self._name).pending

    def push(self, values: list[bytes], *, front: bool) -> None:
        session = self._session
        session.must_write()
        session.database.know_queue(session, self._name)
        for value in values:
            key = job_key(self._key, value)
            row = session.find(key)
            if row is None or row.stored:
                # The job is safe in a queue again, so that a claim of before protects nothing any more.
                session.database.leases.settle(session, key)
            data = row.data if row is not None and row.kind == "hash" else {}
            session.push(job_spec(self._name, value, data, front=front))

    def pop(self, *, front: bool, to: bytes | None = None) -> bytes | None:
        if front:
            return self.claim(to)[0]
        if not self._may_take():
            return None
        session = self._session
        last = session.storage.page(self._name, State.PENDING, limit=1, offset=max(len(self) - 1, 0))
        if not last:
            return None
        session.storage.remove([last[0].id])
        return _ref(last[0].ref)

    def claim(self, to: bytes | None) -> tuple[bytes | None, bool]:
        """The next one, and whether a claim protects it, which then says that it stands in the list ``to``."""
        if not self._may_take():
            return None, False
        claimed = self._session.database.leases.claim(self._session, [self._key], to)
        return (None, False) if claimed is None else (claimed.ref, claimed.protected)

    def _may_take(self) -> bool:
        """False in a session that reads, when nothing is there. When something is, it has to write."""
        session = self._session
        session.push_all()
        if not session.writing and self.is_busy():
            session.must_write()
        return session.writing

    def is_busy(self) -> bool:
        """Whether there is something to hand out, or a claim that may have lapsed."""
        return bool(
            self._session.storage.page(self._name, State.PENDING, limit=1)
            or self._session.select("select 1 from litebroker_rq_claims where queue = ? limit 1", self._name)
        )

    def slice(self, offset: int, limit: int) -> list[bytes]:
        self._session.push_all()
        if limit < 0:
            limit = len(self)
        page = self._session.storage.page(self._name, State.PENDING, limit=max(limit, 1), offset=offset)
        return [_ref(job.ref) for job in page]

    def remove(self, value: bytes, *, limit: int, from_end: bool) -> int:
        ids = [job_id for _, job_id in self._ranked(value)]
        if not ids:
            return 0
        self._session.must_write()
        if from_end:
            ids.reverse()
        return sum(self._session.storage.remove(ids if limit < 0 else ids[:limit]))

    def find(self, value: bytes, limit: int) -> list[int]:
        ranks = [rank for rank, _ in self._ranked(value)]
        return ranks if limit < 0 else ranks[:limit]

    def _ranked(self, value: bytes) -> list[tuple[int, int]]:
        """Rank and id of the jobs of this name that wait."""
        self._session.push_all()
        storage = self._session.storage
        jobs = storage.find(self._name, ref=_text(value))
        ranked = [(storage.rank(job.id), job.id) for job in jobs if job.state is State.PENDING]
        return sorted((rank, job_id) for rank, job_id in ranked if rank is not None)

    def prioritize(self, value: bytes, priority: int) -> None:
        """Give the job of this name, which waits, another priority; unless it was put at the front."""
        if self._session.prioritize(self._name, _text(value), priority):
            return
        ids = [job_id for _, job_id in self._ranked(value)]
        if ids and all(self._session.storage.remove(ids)):
            self.push([value] * len(ids), front=False)

    def clear(self) -> int:
        """Delete all that wait."""
        self._session.push_all()
        if not len(self):
            return 0
        self._session.must_write()
        return self._session.storage.purge(self._name, [State.PENDING])

    def move_to(self, key: bytes) -> None:
        """Move all that wait to another queue, in their order."""
        self._session.push_all()
        target = queue_name(key)
        self._session.database.know_queue(self._session, target)
        self._session.storage.move(self._name, target)


def job_spec(queue: str, ref: bytes, fields: dict[str, Any], *, front: bool) -> JobSpec:
    """The engine's job that stands for RQ's in a queue. Its own fields are what is known of them."""
    task = fields.get("description")
    return JobSpec(
        queue=queue,
        payload=b"",
        encoding="rq",
        priority=_priority(fields.get(PRIORITY_FIELD)),
        max_attempts=None,
        ref=_text(ref),
        task=task[:_TASK_CHARS] if isinstance(task, str) else None,
        front=front,
    )


def queue_name(key: bytes) -> str:
    """The engine's name of the queue: the key itself, so that no other framework's queue of a file is meant."""
    return _text(key)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        message = f"{value!r} is not UTF-8: litebroker_rq needs queue names and job ids to be text"
        raise ResponseError(message) from None


def _ref(ref: str | None) -> bytes:
    return b"" if ref is None else ref.encode()


def _priority(value: object) -> int:
    return int(value) if isinstance(value, str) else 0

"""Two schedulers of one queue: each job that is due is queued once.

RQ's scheduler reads the ids that are due, and then queues those jobs and removes them from the registry in one
transaction. Another scheduler that read them too would queue them again. But what it removes is gone by then, which the
transaction can see: the commands for such a job do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from litebroker_rq.keyspace import OK, Reply
from litebroker_rq.naming import is_queue

if TYPE_CHECKING:
    from litebroker_rq.keyspace import Session

_SCHEDULED = b":scheduled:"
_PUSHES = {b"RPUSH", b"LPUSH"}


def late(session: Session, batch: list[list[bytes]]) -> dict[int, Reply]:
    """The positions of the commands that come too late, with their replies."""
    removed = [
        (args[1], args[2])
        for args in batch
        if args[0] == b"ZREM" and len(args) == 3 and _SCHEDULED in args[1]  # noqa: PLR2004
    ]
    if not removed:
        return {}
    replies: dict[int, Reply] = {}
    for key, job_id in removed:
        job_key = key.partition(_SCHEDULED)[0] + b":job:" + job_id
        if _queues(batch, job_id) and not _is_scheduled(session, key, job_id, job_key):
            for position, args in enumerate(batch):
                if job_id in args or job_key in args:
                    replies[position] = OK if args[0] in {b"SET", b"HMSET"} else 0
    return replies


def _queues(batch: list[list[bytes]], job_id: bytes) -> bool:
    return any(
        (args[0] in _PUSHES and is_queue(args[1]) and job_id in args[2:]) or (args[0] == b"EVALSHA" and job_id in args)
        for args in batch
    )


def _is_scheduled(session: Session, key: bytes, job_id: bytes, job_key: bytes) -> bool:
    registry = session.find(key, "zset")
    if registry is not None and session.select(
        "select 1 from litebroker_rq_members where key_id = ? and member = ?", registry.id, job_id
    ):
        return True
    job = session.find(job_key)
    return job is None or job.kind != "hash" or job.data.get("status") == "scheduled"

"""The pipeline that is sent most: a job that is new is saved, and pushed to its queue.

Its commands do together here what they do one by one: no key has to be looked for, changed and written by itself, and
that takes a tenth off an enqueue. What is anything else, or meets anything else in the file, is left to the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from litebroker_rq.keyspace import INLINE_CHARS, INSERT_KEY, IS_IN_AND_LOAD, encode, new_version
from litebroker_rq.naming import is_worker, job_key
from litebroker_rq.queue_list import job_spec, queue_name

if TYPE_CHECKING:
    from litebroker import JobSpec
    from litebroker_rq.database import Database
    from litebroker_rq.keyspace import Reply

# A queue that is made known, a job that is saved by one command or two, and pushed.
_MOST = 4
_PUSHES = {b"RPUSH": False, b"LPUSH": True}


class _NewJob(NamedTuple):
    """What such a pipeline says.

    Attributes:
        key: Of the job's hash.
        value: The hash.
        queues: Sets of queues, and what belongs to them.
        replies: To the commands.
    """

    key: bytes
    value: str
    spec: JobSpec
    queues: dict[tuple[bytes, bytes], None]
    replies: list[Reply]


def add(database: Database, batch: list[list[bytes]]) -> list[Reply] | None:
    """Run the commands as one transaction. None when they have not run."""
    if database.line is not None or database.in_transaction():
        return None
    new = _new_job(database, batch)
    now_ms = database.now_ms()
    if new is None or database.is_purge_due(now_ms):
        return None
    kept = database.heartbeats.take()
    added = False
    try:
        queues = {**kept.queues, **new.queues}
        if kept.has_others or len(queues) != 1:
            return None
        ((known, queue),) = queues
        with database.storage.transaction() as transaction:
            ((is_in, row_id, *_),) = transaction.execute(IS_IN_AND_LOAD, (queue, known, now_ms, new.key))
            if is_in is None or row_id is not None:
                return None
            transaction.execute(INSERT_KEY, (None, new.key, "hash", new_version(), None, new.value))
            transaction.add([new.spec])
        added = True
    finally:
        if not added:
            database.heartbeats.give_back(kept)
    return new.replies


def _new_job(database: Database, batch: list[list[bytes]]) -> _NewJob | None:
    """What the commands say, when they save a job and push it, and do nothing else."""
    if not 0 < len(batch) <= _MOST:
        return None
    *others, push = batch
    if push[0] not in _PUSHES or len(push) != 3:  # noqa: PLR2004
        return None
    queue, ref = push[1:]
    key = job_key(queue, ref)
    if not database.knows_queue(queue) or not ref.isascii() or is_worker(key):
        return None
    fields: dict[str, str] = {}
    queues: dict[tuple[bytes, bytes], None] = {}
    replies: list[Reply] = []
    for args in others:
        if args[0] == b"HSET" and args[1] == key and len(args) % 2 == 0:
            replies.append(_set(fields, args[2:]))
        elif (known := database.heartbeats.known_queue(args)) is not None:
            queues[known] = None
            replies.append(0)
        else:
            return None
    value = encode(fields)
    if fields.get("status") != "queued" or len(value) > INLINE_CHARS:
        return None
    spec = job_spec(queue_name(queue), ref, fields, front=_PUSHES[push[0]])
    return _NewJob(key, value, spec, queues, [*replies, 1])


def _set(fields: dict[str, str], pairs: list[bytes]) -> int:
    """Set fields of a hash. How many were not there."""
    before = len(fields)
    for field, value in zip(pairs[::2], pairs[1::2], strict=True):
        fields[field.decode("latin-1")] = value.decode("latin-1")
    return len(fields) - before

"""How RQ names its keys: ``<prefix>:queue:<name>``, ``<prefix>:job:<id>``, and so on, with "rq" as the usual prefix."""

from __future__ import annotations

from typing import NamedTuple

_QUEUE = b":queue:"
_JOB = b":job:"
_WORKER = b":worker:"
_STARTED = b":wip:"
INTERMEDIATE = b":intermediate"
_EXECUTIONS = (b":execution:", b":executions:")


def is_queue(key: bytes) -> bool:
    """Whether a list of this name is an RQ queue.

    The intermediate lists are not, nor is the one through which `Queue.compact` passes a queue's jobs.
    """
    if _QUEUE not in key or is_intermediate(key):
        return False
    name = key.partition(_QUEUE)[2]
    return bool(name) and not name.startswith(b"_compact:")


def is_intermediate(key: bytes) -> bool:
    """Whether a list of this name is the one that a queue's jobs pass until they start."""
    return key.endswith(INTERMEDIATE)


def prefix_of(key: bytes) -> bytes:
    """What stands before the kind of key: ``rq`` of ``rq:queue:default``."""
    for kind in (_QUEUE, _JOB, _WORKER, _STARTED):
        before, found, _ = key.partition(kind)
        if found:
            return before
    return b""


def job_key(queue_key: bytes, ref: bytes) -> bytes:
    """The key of the hash of a job that is in this queue."""
    return queue_key.partition(_QUEUE)[0] + _JOB + ref


def started_key(queue_key: bytes) -> bytes:
    """The key of the queue's StartedJobRegistry."""
    prefix, _, name = queue_key.partition(_QUEUE)
    return prefix + _STARTED + name


def is_job(key: bytes) -> bool:
    """Whether a hash of this name is an RQ job."""
    return _JOB in key


def is_worker(key: bytes) -> bool:
    """Whether a hash of this name is an RQ worker."""
    return _WORKER in key


def is_queues(key: bytes) -> bool:
    """Whether a set of this name holds the keys of all queues."""
    return key.endswith(b":queues")


def is_started(key: bytes) -> bool:
    """Whether a sorted set of this name is a StartedJobRegistry."""
    return _STARTED in key


def is_execution(key: bytes) -> bool:
    """Whether it is the hash of an execution, or the sorted set of a job's executions."""
    return any(word in key for word in _EXECUTIONS)


class StartedEntry(NamedTuple):
    """What an entry of a StartedJobRegistry may mean: RQ 2 wrote ``<job id>:<execution id>``, RQ 1 ``<job id>``."""

    job_key: bytes
    other_job_key: bytes


def started_entry(key: bytes, member: bytes) -> StartedEntry | None:
    """The job that an entry of this sorted set stands for; None when the set is no StartedJobRegistry."""
    prefix, found, _ = key.partition(_STARTED)
    if not found:
        return None
    return StartedEntry(prefix + _JOB + member.rpartition(b":")[0], prefix + _JOB + member)

"""Lists: RQ's queues, which are queues of the engine, and all others."""

from __future__ import annotations

from typing import Protocol

from redis.exceptions import ResponseError

from litebroker_rq.intermediate_list import IntermediateList
from litebroker_rq.keyspace import OK, Reply, Session, command, syntax_error, to_int
from litebroker_rq.naming import is_intermediate, is_queue
from litebroker_rq.plain_list import PlainList
from litebroker_rq.queue_list import QueueList


class List(Protocol):
    """What the commands below need of either kind of list."""

    def __len__(self) -> int: ...

    def push(self, values: list[bytes], *, front: bool) -> None:
        """Put them at an end, one by one."""

    def pop(self, *, front: bool, to: bytes | None = None) -> bytes | None:
        """Take one out; ``to`` is the list that it goes to."""

    def slice(self, offset: int, limit: int) -> list[bytes]:
        """So many values, from a position on."""

    def remove(self, value: bytes, *, limit: int, from_end: bool) -> int:
        """Remove so many of those that are equal, -1 for all."""

    def find(self, value: bytes, limit: int) -> list[int]:
        """Where the first of those that are equal stand."""


def list_at(session: Session, key: bytes) -> List:
    if session.database.knows_queue(key):
        return QueueList(session, key)
    session.find(key, "list")  # raises for another kind
    if is_queue(key):
        return QueueList(session, key)
    return IntermediateList(session, key) if is_intermediate(key) else PlainList(session, key)


@command("LPUSH", least=2, writes=True)
def lpush(session: Session, args: list[bytes]) -> Reply:
    return _push(session, args, front=True)


@command("RPUSH", least=2, writes=True)
def rpush(session: Session, args: list[bytes]) -> Reply:
    return _push(session, args, front=False)


def _push(session: Session, args: list[bytes], *, front: bool) -> Reply:
    key, *values = args
    target = list_at(session, key)
    target.push(values, front=front)
    # To count takes as long as the queue is long, and nobody reads this answer of a pipeline.
    return len(values) if session.batch and isinstance(target, QueueList) else len(target)


@command("LPUSHX", least=2, writes=True)
def lpushx(session: Session, args: list[bytes]) -> Reply:
    return lpush(session, args) if len(list_at(session, args[0])) else 0


@command("RPUSHX", least=2, writes=True)
def rpushx(session: Session, args: list[bytes]) -> Reply:
    return rpush(session, args) if len(list_at(session, args[0])) else 0


def _pop(session: Session, args: list[bytes], *, front: bool) -> Reply:
    target = list_at(session, args[0])
    if len(args) == 1:
        return target.pop(front=front)
    popped: list[Reply] = []
    for _ in range(to_int(args[1])):
        value = target.pop(front=front)
        if value is None:
            break
        popped.append(value)
    return popped or None


@command("LPOP", least=1, writes=True, often_idle=True)
def lpop(session: Session, args: list[bytes]) -> Reply:
    return _pop(session, args, front=True)


@command("RPOP", least=1, writes=True, often_idle=True)
def rpop(session: Session, args: list[bytes]) -> Reply:
    return _pop(session, args, front=False)


@command("BLPOP", least=2, writes=True, often_idle=True)
def blpop(session: Session, args: list[bytes]) -> Reply:
    """One look; the connection repeats it until the time is over."""
    keys = args[:-1]
    if session.writing and all(is_queue(key) for key in keys):
        session.push_all()
        claimed = session.database.leases.claim(session, keys, None)
        return None if claimed is None else [claimed.queue, claimed.ref]
    for key in keys:
        value = list_at(session, key).pop(front=True)
        if value is not None:
            return [key, value]
    return None


@command("BRPOP", least=2, writes=True, often_idle=True)
def brpop(session: Session, args: list[bytes]) -> Reply:
    for key in args[:-1]:
        value = list_at(session, key).pop(front=False)
        if value is not None:
            return [key, value]
    return None


@command("LMOVE", least=4, writes=True, often_idle=True)
def lmove(session: Session, args: list[bytes]) -> Reply:
    source, target, from_end, to_end = args[:4]
    ends = {b"LEFT": True, b"RIGHT": False}
    try:
        pop_front, push_front = ends[from_end.upper()], ends[to_end.upper()]
    except KeyError:
        raise syntax_error() from None
    origin = list_at(session, source)
    try:
        destination = list_at(session, target)
    except ResponseError:
        if not origin.slice(0, 1):  # Redis looks at the source first
            return None
        raise
    if pop_front and isinstance(origin, QueueList) and isinstance(destination, IntermediateList):
        value, stands_there = origin.claim(target)
        if stands_there:
            return value
    else:
        value = origin.pop(front=pop_front, to=target)
    if value is not None:
        destination.push([value], front=push_front)
    return value


@command("BLMOVE", least=5, writes=True, often_idle=True)
def blmove(session: Session, args: list[bytes]) -> Reply:
    return lmove(session, args)


@command("RPOPLPUSH", least=2, writes=True, often_idle=True)
def rpoplpush(session: Session, args: list[bytes]) -> Reply:
    return lmove(session, [*args[:2], b"RIGHT", b"LEFT"])


@command("BRPOPLPUSH", least=3, writes=True, often_idle=True)
def brpoplpush(session: Session, args: list[bytes]) -> Reply:
    return rpoplpush(session, args)


@command("LLEN", least=1)
def llen(session: Session, args: list[bytes]) -> Reply:
    return len(list_at(session, args[0]))


@command("LRANGE", least=3)
def lrange(session: Session, args: list[bytes]) -> Reply:
    target = list_at(session, args[0])
    start, stop = to_int(args[1]), to_int(args[2])
    if start >= 0 and stop == -1:
        return list(target.slice(start, -1))
    if start < 0 or stop < 0:
        length = len(target)
        start = max(start + length, 0) if start < 0 else start
        stop = stop + length if stop < 0 else stop
    return list(target.slice(start, stop - start + 1)) if stop >= start else []


@command("LINDEX", least=2)
def lindex(session: Session, args: list[bytes]) -> Reply:
    target = list_at(session, args[0])
    index = to_int(args[1])
    if index < 0:
        index += len(target)
    found = target.slice(index, 1) if index >= 0 else []
    return found[0] if found else None


@command("LREM", least=3, writes=True, often_idle=True)
def lrem(session: Session, args: list[bytes]) -> Reply:
    key, count, value = args[0], to_int(args[1]), args[2]
    removed = list_at(session, key).remove(value, limit=abs(count) or -1, from_end=count < 0)
    if removed:
        session.database.leases.on_removed(session, key, value)
    return removed


@command("LPOS", least=2)
def lpos(session: Session, args: list[bytes]) -> Reply:
    rank, count = 1, None
    rest = args[2:]
    while rest:
        word, number = rest[0].upper(), to_int(rest[1])
        if word == b"RANK":
            rank = number
        elif word == b"COUNT":
            count = number
        elif word != b"MAXLEN":
            raise syntax_error()
        rest = rest[2:]
    found = list_at(session, args[0]).find(args[1], -1)
    if rank < 0:
        found.reverse()
    found = found[abs(rank) - 1 :]
    if count is None:
        return found[0] if found else None
    return list(found[:count] if count else found)


@command("LTRIM", least=3, writes=True)
def ltrim(session: Session, args: list[bytes]) -> Reply:
    target = list_at(session, args[0])
    length = len(target)
    start, stop = to_int(args[1]), to_int(args[2])
    start = max(start + length, 0) if start < 0 else start
    stop = stop + length if stop < 0 else stop
    for _ in range(min(start, length) if stop >= start else length):
        target.pop(front=True)
    for _ in range(len(target) - (stop - start + 1)):
        target.pop(front=False)
    return OK

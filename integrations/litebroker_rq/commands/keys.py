"""Keys of whatever kind: existence, expiry, names."""

from __future__ import annotations

import fnmatch
import re
from typing import cast

from redis.exceptions import ResponseError

from litebroker import State
from litebroker_rq.intermediate_list import IntermediateList
from litebroker_rq.keyspace import OK, Reply, Session, command, syntax_error, to_int
from litebroker_rq.naming import is_intermediate, is_queue
from litebroker_rq.plain_list import PlainList
from litebroker_rq.queue_list import QueueList


def _exists(session: Session, key: bytes) -> bool:
    if session.find(key) is not None:
        return True
    if is_queue(key):
        return len(QueueList(session, key)) > 0
    return is_intermediate(key) and len(IntermediateList(session, key)) > 0


@command("EXISTS", "TOUCH", least=1, brief=True)
def exists(session: Session, args: list[bytes]) -> Reply:
    return sum(_exists(session, key) for key in args)


@command("DEL", "UNLINK", least=1, writes=True, often_idle=True)
def delete(session: Session, args: list[bytes]) -> Reply:
    gone = 0
    for key in args:
        row = session.find(key)
        if is_intermediate(key) and _exists(session, key):
            IntermediateList(session, key).clear()
            if row is not None:
                session.delete(row)
            gone += 1
        elif row is not None:
            session.delete(row)
            gone += 1
        elif is_queue(key):
            gone += bool(QueueList(session, key).clear())
    return gone


@command("TYPE", least=1)
def type_(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0])
    if row is not None:
        return row.kind.encode()
    return b"list" if _exists(session, args[0]) else b"none"


# Expiry


def _expire(session: Session, key: bytes, at_ms: int, options: list[bytes]) -> Reply:
    row = session.find(key)
    if row is None:
        return 0
    old = row.expires_at_ms
    for option in options:
        word = option.upper()
        if word not in {b"NX", b"XX", b"GT", b"LT"}:
            raise syntax_error()
        if (
            (word == b"NX" and old is not None)
            or (word == b"XX" and old is None)
            or (word == b"GT" and (old is None or at_ms <= old))
            or (word == b"LT" and old is not None and at_ms >= old)
        ):
            return 0
    session.expire(row, at_ms)
    return 1


@command("EXPIRE", least=2, writes=True, often_idle=True)
def expire(session: Session, args: list[bytes]) -> Reply:
    return _expire(session, args[0], session.now_ms + to_int(args[1]) * 1000, args[2:])


@command("PEXPIRE", least=2, writes=True, often_idle=True)
def pexpire(session: Session, args: list[bytes]) -> Reply:
    return _expire(session, args[0], session.now_ms + to_int(args[1]), args[2:])


@command("EXPIREAT", least=2, writes=True, often_idle=True)
def expireat(session: Session, args: list[bytes]) -> Reply:
    return _expire(session, args[0], to_int(args[1]) * 1000, args[2:])


@command("PEXPIREAT", least=2, writes=True, often_idle=True)
def pexpireat(session: Session, args: list[bytes]) -> Reply:
    return _expire(session, args[0], to_int(args[1]), args[2:])


@command("PERSIST", least=1, writes=True, often_idle=True)
def persist(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0])
    if row is None or row.expires_at_ms is None:
        return 0
    session.expire(row, None)
    return 1


@command("PTTL", least=1)
def pttl(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0])
    if row is None:
        return -1 if _exists(session, args[0]) else -2
    return -1 if row.expires_at_ms is None else row.expires_at_ms - session.now_ms


@command("TTL", least=1)
def ttl(session: Session, args: list[bytes]) -> Reply:
    ms = cast("int", pttl(session, args))
    return ms if ms < 0 else (ms + 500) // 1000


# Names


@command("RENAME", least=2, writes=True)
def rename(session: Session, args: list[bytes]) -> Reply:
    source, target = args
    if not _exists(session, source):
        message = "no such key"
        raise ResponseError(message)
    if source == target:
        return OK
    delete(session, [target])
    row = session.find(source)
    if row is not None and (row.kind != "list" or not is_queue(target)):
        session.rename(row, target)
    elif row is not None:
        values = PlainList(session, source).slice(0, -1)
        session.delete(row)
        QueueList(session, target).push(values, front=False)
    elif is_queue(target):
        QueueList(session, source).move_to(target)
    else:
        queue = QueueList(session, source)
        PlainList(session, target).push(queue.slice(0, -1), front=False)
        queue.clear()
    return OK


def _names(session: Session) -> list[bytes]:
    session.flush()
    found = session.select(
        "select key from litebroker_rq_keys where expires_at_ms is null or expires_at_ms > ? order by key",
        session.now_ms,
    )
    queues = [name.encode() for (name,) in session.select("select name from litebroker_rq_queues order by name")]
    claimed = session.select("select intermediate from litebroker_rq_claims where intermediate is not null")
    names = dict.fromkeys(key for (key,) in [*found, *claimed])
    return [*names, *(key for key in queues if len(QueueList(session, key)))]


def _matching(session: Session, pattern: bytes) -> list[Reply]:
    matches = re.compile(fnmatch.translate(pattern.decode("latin-1").replace("[^", "[!"))).match
    return [key for key in _names(session) if matches(key.decode("latin-1"))]


@command("KEYS", least=1)
def keys(session: Session, args: list[bytes]) -> Reply:
    return _matching(session, args[0])


@command("SCAN", least=1)
def scan(session: Session, args: list[bytes]) -> Reply:
    """All at once: the cursor that it answers is always the end."""
    pattern = b"*"
    kind: bytes | None = None
    for word, value in zip(args[1::2], args[2::2], strict=True):
        if word.upper() == b"MATCH":
            pattern = value
        elif word.upper() == b"TYPE":
            kind = value.lower()
    found = [key for key in _matching(session, pattern) if isinstance(key, bytes)]
    return [b"0", [key for key in found if kind is None or type_(session, [key]) == kind]]


@command("DBSIZE")
def dbsize(session: Session, args: list[bytes]) -> Reply:
    del args
    return len(_names(session))


@command("FLUSHDB", "FLUSHALL", writes=True)
def flushdb(session: Session, args: list[bytes]) -> Reply:
    """Delete what RQ has in this file, and nothing of any other framework."""
    del args
    session.forget()
    session.database.leases.settle_all(session)
    for (name,) in session.select("select name from litebroker_rq_queues"):
        session.storage.purge(name, list(State))
    for table in ("keys", "fields", "members", "items", "entries", "workers", "runs", "answers", "dedupe_keys"):
        session.write(f"delete from litebroker_rq_{table}")
    return OK

"""Streams: the results of each job, newest last."""

from __future__ import annotations

import json

from redis.exceptions import ResponseError

from litebroker_rq.keyspace import Reply, Row, Session, command, syntax_error, to_int

_LAST = (1 << 63) - 1


def topic(key: bytes) -> str:
    """What is notified when the stream gets an entry."""
    return "litebroker_rq:stream:" + key.decode("latin-1")


@command("XADD", least=4, writes=True)
def xadd(session: Session, args: list[bytes]) -> Reply:
    key, *rest = args
    limit: int | None = None
    make = True
    while rest:
        word = rest[0].upper()
        if word == b"NOMKSTREAM":
            make = False
            rest.pop(0)
        elif word == b"MAXLEN":
            rest.pop(0)
            if rest[0] in {b"~", b"="}:
                rest.pop(0)
            limit = to_int(rest.pop(0))
        else:
            break
    if len(rest) < 3 or len(rest) % 2 == 0:  # noqa: PLR2004 - an id, and fields with a value each
        raise syntax_error()
    entry_id, *fields = rest
    new = session.find(key, "stream") is None
    if new and not make:
        return None
    row = session.need(key, "stream")
    ms, seq = _next_id((0, 0) if new else last_id(session, key), session.now_ms, entry_id)
    session.write(
        "insert into litebroker_rq_entries (key_id, ms, seq, fields) values (?, ?, ?, ?)",
        row.id,
        ms,
        seq,
        json.dumps([item.decode("latin-1") for item in fields], ensure_ascii=False).encode(),
    )
    if limit is not None and not (new and limit):
        session.write(
            "delete from litebroker_rq_entries where key_id = ? and (ms, seq) in ("
            " select ms, seq from litebroker_rq_entries where key_id = ?"
            " order by ms desc, seq desc limit -1 offset +?)",
            row.id,
            row.id,
            limit,
        )
    session.topics.append(topic(key))
    return b"%d-%d" % (ms, seq)


def _next_id(last: tuple[int, int], now_ms: int, asked: bytes) -> tuple[int, int]:
    if asked == b"*":
        ms = max(now_ms, last[0])
        return ms, last[1] + 1 if ms == last[0] else 0
    given = _id(asked, 0)
    if given <= last:
        message = "The ID specified in XADD is equal or smaller than the target stream top item"
        raise ResponseError(message)
    return given


def _id(data: bytes, seq: int) -> tuple[int, int]:
    ms, dash, rest = data.partition(b"-")
    try:
        return int(ms), int(rest) if dash else seq
    except ValueError:
        message = "Invalid stream ID specified as stream command argument"
        raise ResponseError(message) from None


def _bound(data: bytes, *, low: bool) -> tuple[int, int]:
    if data == b"-":
        return 0, 0
    if data == b"+":
        return _LAST, _LAST
    exclusive = data.startswith(b"(")
    ms, seq = _id(data.removeprefix(b"("), 0 if low else _LAST)
    if exclusive:
        return (ms, seq + 1) if low else (ms, seq - 1)
    return ms, seq


@command("XLEN", least=1)
def xlen(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "stream")
    if row is None:
        return 0
    ((count,),) = session.select("select count(*) from litebroker_rq_entries where key_id = ?", row.id)
    return int(count)


def _entries(session: Session, args: list[bytes], order: str) -> Reply:
    key, first, last, *rest = args
    row = session.find(key, "stream")
    count = -1
    if rest:
        if rest[0].upper() != b"COUNT" or len(rest) != 2:  # noqa: PLR2004
            raise syntax_error()
        count = to_int(rest[1])
    if row is None:
        return []
    low, high = (first, last) if order == "asc" else (last, first)
    return _read(session, row, (_bound(low, low=True), _bound(high, low=False)), order, count)


def _read(
    session: Session, row: Row, bounds: tuple[tuple[int, int], tuple[int, int]], order: str, count: int
) -> list[Reply]:
    found = session.select(
        "select ms, seq, fields from litebroker_rq_entries where key_id = ? and (ms, seq) >= (?, ?)"
        f" and (ms, seq) <= (?, ?) order by ms {order}, seq {order} limit +?",
        row.id,
        *bounds[0],
        *bounds[1],
        count,
    )
    return [[b"%d-%d" % (ms, seq), [item.encode("latin-1") for item in json.loads(data)]] for ms, seq, data in found]


@command("XRANGE", least=3)
def xrange(session: Session, args: list[bytes]) -> Reply:
    return _entries(session, args, "asc")


@command("XREVRANGE", least=3)
def xrevrange(session: Session, args: list[bytes]) -> Reply:
    return _entries(session, args, "desc")


@command("XDEL", least=2, writes=True, often_idle=True)
def xdel(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "stream")
    if row is None:
        return 0
    session.change(row)
    return sum(
        len(
            session.write(
                "delete from litebroker_rq_entries where key_id = ? and ms = ? and seq = ? returning 1",
                row.id,
                *_id(entry_id, 0),
            )
        )
        for entry_id in args[1:]
    )


def read_arguments(args: list[bytes]) -> tuple[int | None, int, list[bytes], list[bytes]]:
    """Of XREAD: how long to block in ms (None: not), how many entries, which streams, and after which ids."""
    block_ms: int | None = None
    count = -1
    rest = list(args)
    while rest:
        word = rest.pop(0).upper()
        if word == b"BLOCK" and rest:
            block_ms = to_int(rest.pop(0))
        elif word == b"COUNT" and rest:
            count = to_int(rest.pop(0))
        elif word == b"STREAMS" and rest and len(rest) % 2 == 0:
            half = len(rest) // 2
            return block_ms, count, rest[:half], rest[half:]
        else:
            break
    raise syntax_error()


@command("XREAD", least=3)
def xread(session: Session, args: list[bytes]) -> Reply:
    _, count, keys, after = read_arguments(args)
    replies: list[Reply] = []
    for key, entry_id in zip(keys, after, strict=True):
        row = session.find(key, "stream")
        if row is None:
            continue
        ms, seq = last_id(session, key) if entry_id == b"$" else _id(entry_id, 0)
        found = _read(session, row, ((ms, seq + 1), (_LAST, _LAST)), "asc", count)
        if found:
            replies.append([key, found])
    return replies or None


def last_id(session: Session, key: bytes) -> tuple[int, int]:
    """The newest entry's id."""
    row = session.find(key, "stream")
    if row is None:
        return 0, 0
    found = session.select(
        "select ms, seq from litebroker_rq_entries where key_id = ? order by ms desc, seq desc limit 1", row.id
    )
    return found[0] if found else (0, 0)

"""Sorted sets: RQ's registries, by the time at which an entry ends."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import ResponseError

from litebroker_rq.commands.sets import delete_if_empty, remove_members
from litebroker_rq.keyspace import Reply, Row, Session, command, from_float, syntax_error, to_float, to_int

# Changes


@command("ZADD", least=3, writes=True)
def zadd(session: Session, args: list[bytes]) -> Reply:
    key, *rest = args
    options = set()
    while rest and rest[0].upper() in {b"NX", b"XX", b"GT", b"LT", b"CH"}:
        options.add(rest.pop(0).upper())
    if not rest or len(rest) % 2:
        raise syntax_error()
    pairs = [(to_float(score), member) for score, member in zip(rest[::2], rest[1::2], strict=True)]
    row = session.find(key, "zset")
    if row is None and b"XX" in options:
        return 0
    may_be_there = row is not None or len(pairs) > 1
    row = session.need(key, "zset")
    added = updated = 0
    for score, member in pairs:
        old = _score(session, row, member) if may_be_there else None
        if not _may_put(options, old, score):
            continue
        _put(session, row, member, score)
        added += old is None
        updated += old is not None and old != score
    session.database.leases.on_sorted_set(session, key, pairs)
    return added + updated if b"CH" in options else added


def _may_put(options: set[bytes], old: float | None, score: float) -> bool:
    if old is None:
        return b"XX" not in options
    return not (b"NX" in options or (b"GT" in options and score <= old) or (b"LT" in options and score >= old))


def _put(session: Session, row: Row, member: bytes, score: float) -> None:
    session.write(
        "insert into litebroker_rq_members (key_id, member, score) values (?, ?, ?)"
        " on conflict (key_id, member) do update set score = excluded.score",
        row.id,
        member,
        score,
    )


def _score(session: Session, row: Row, member: bytes) -> float | None:
    found = session.select("select score from litebroker_rq_members where key_id = ? and member = ?", row.id, member)
    return float(found[0][0]) if found else None


@command("ZINCRBY", least=3, writes=True)
def zincrby(session: Session, args: list[bytes]) -> Reply:
    amount = to_float(args[1])
    row = session.find(args[0], "zset")
    old = None if row is None else _score(session, row, args[2])
    score = from_float(amount if old is None else old + amount)
    zadd(session, [args[0], score, args[2]])
    return score


@command("ZREM", least=2, writes=True, often_idle=True)
def zrem(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    return 0 if row is None else remove_members(session, row, args[1:])


def _pop(session: Session, args: list[bytes], order: str) -> Reply:
    row = session.find(args[0], "zset")
    if row is None:
        return []
    session.must_write()
    popped = session.select(
        "select member, score from litebroker_rq_members where key_id = ? and score is not null"
        f" order by score {order}, member {order} limit +?",
        row.id,
        to_int(args[1]) if len(args) > 1 else 1,
    )
    remove_members(session, row, [member for member, _ in popped])
    return _with_scores(popped)


@command("ZPOPMIN", least=1, writes=True, often_idle=True)
def zpopmin(session: Session, args: list[bytes]) -> Reply:
    return _pop(session, args, "asc")


@command("ZPOPMAX", least=1, writes=True, often_idle=True)
def zpopmax(session: Session, args: list[bytes]) -> Reply:
    return _pop(session, args, "desc")


@command("ZREMRANGEBYSCORE", least=3, writes=True, often_idle=True)
def zremrangebyscore(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    if row is None:
        return 0
    where, params = _score_range(args[1], args[2])
    if not session.writing:
        if session.select(f"select 1 from litebroker_rq_members where {where} limit 1", row.id, *params):
            session.must_write()
        return 0
    gone = len(session.write(f"delete from litebroker_rq_members where {where} returning 1", row.id, *params))
    return _removed(session, row, gone)


@command("ZREMRANGEBYRANK", least=3, writes=True, often_idle=True)
def zremrangebyrank(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    if row is None:
        return 0
    offset, limit = _ranks(session, row, to_int(args[1]), to_int(args[2]))
    if limit <= 0:
        return 0
    session.must_write()
    gone = len(
        session.write(
            "delete from litebroker_rq_members where key_id = ? and member in ("
            " select member from litebroker_rq_members where key_id = ? and score is not null"
            " order by score, member limit +? offset +?) returning 1",
            row.id,
            row.id,
            limit,
            offset,
        )
    )
    return _removed(session, row, gone)


def _removed(session: Session, row: Row, gone: int) -> int:
    if gone:
        session.change(row)
        delete_if_empty(session, row)
    return gone


# Reads


@command("ZCARD", least=1)
def zcard(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    return 0 if row is None else _card(session, row)


def _card(session: Session, row: Row) -> int:
    ((count,),) = session.select("select count(*) from litebroker_rq_members where key_id = ?", row.id)
    return int(count)


@command("ZSCORE", least=2)
def zscore(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    score = None if row is None else _score(session, row, args[1])
    return None if score is None else from_float(score)


@command("ZMSCORE", least=2)
def zmscore(session: Session, args: list[bytes]) -> Reply:
    return [zscore(session, [args[0], member]) for member in args[1:]]


@command("ZCOUNT", least=3)
def zcount(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    if row is None:
        return 0
    where, params = _score_range(args[1], args[2])
    ((count,),) = session.select(f"select count(*) from litebroker_rq_members where {where}", row.id, *params)
    return int(count)


@command("ZRANK", least=2)
def zrank(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "zset")
    score = None if row is None else _score(session, row, args[1])
    if row is None or score is None:
        return None
    ((rank,),) = session.select(
        "select count(*) from litebroker_rq_members where key_id = ? and score is not null"
        " and (score, member) < (?, ?)",
        row.id,
        score,
        args[1],
    )
    return int(rank)


@command("ZREVRANK", least=2)
def zrevrank(session: Session, args: list[bytes]) -> Reply:
    rank = zrank(session, args)
    row = session.find(args[0], "zset")
    if row is None or not isinstance(rank, int):
        return None
    return _card(session, row) - 1 - rank


@dataclass
class _Options:
    by_score: bool = False
    reverse: bool = False
    scores: bool = False
    offset: int = 0
    count: int = -1


def _parse(words: list[bytes], options: _Options) -> _Options:
    rest = list(words)
    while rest:
        word = rest.pop(0).upper()
        if word == b"WITHSCORES":
            options.scores = True
        elif word == b"REV":
            options.reverse = True
        elif word == b"BYSCORE":
            options.by_score = True
        elif word == b"LIMIT" and len(rest) > 1:
            options.offset, options.count = to_int(rest.pop(0)), to_int(rest.pop(0))
        else:
            raise syntax_error()
    return options


def _range(session: Session, args: list[bytes], options: _Options) -> Reply:
    row = session.find(args[0], "zset")
    if row is None:
        return []
    order = "desc" if options.reverse else "asc"
    if options.by_score:
        low, high = (args[2], args[1]) if options.reverse else (args[1], args[2])
        where, params = _score_range(low, high)
        offset, limit = options.offset, options.count
    else:
        where, params = "key_id = ? and score is not null", []
        offset, limit = _ranks(session, row, to_int(args[1]), to_int(args[2]))
        if limit == 0:
            return []
    found = session.select(
        f"select member, score from litebroker_rq_members where {where}"
        f" order by score {order}, member {order} limit +? offset +?",
        row.id,
        *params,
        limit,
        offset,
    )
    return _with_scores(found) if options.scores else [member for member, _ in found]


def _with_scores(pairs: list[tuple[bytes, float]]) -> list[Reply]:
    return [item for member, score in pairs for item in (member, from_float(score))]


@command("ZRANGE", least=3)
def zrange(session: Session, args: list[bytes]) -> Reply:
    return _range(session, args, _parse(args[3:], _Options()))


@command("ZREVRANGE", least=3)
def zrevrange(session: Session, args: list[bytes]) -> Reply:
    return _range(session, args, _parse(args[3:], _Options(reverse=True)))


@command("ZRANGEBYSCORE", least=3)
def zrangebyscore(session: Session, args: list[bytes]) -> Reply:
    return _range(session, args, _parse(args[3:], _Options(by_score=True)))


@command("ZREVRANGEBYSCORE", least=3)
def zrevrangebyscore(session: Session, args: list[bytes]) -> Reply:
    return _range(session, args, _parse(args[3:], _Options(by_score=True, reverse=True)))


def _score_range(low: bytes, high: bytes) -> tuple[str, list[float]]:
    terms = ["key_id = ?", "score is not null"]
    params = []
    for word, operator in ((low, ">"), (high, "<")):
        exclusive = word.startswith(b"(")
        try:
            number = to_float(word[1:] if exclusive else word)
        except ResponseError:
            message = "min or max is not a float"
            raise ResponseError(message) from None
        terms.append(f"score {operator}{'' if exclusive else '='} ?")
        params.append(number)
    return " and ".join(terms), params


def _ranks(session: Session, row: Row, start: int, stop: int) -> tuple[int, int]:
    """Offset and limit of a range of ranks, where negative ones count from the end. A limit of -1 is without limit."""
    if start >= 0 and stop == -1:
        return start, -1
    if start < 0 or stop < 0:
        count = _card(session, row)
        start = max(start + count, 0) if start < 0 else start
        stop = stop + count if stop < 0 else stop
    return start, max(stop - start + 1, 0)

"""Hashes: RQ's jobs, workers and executions."""

from __future__ import annotations

from redis.exceptions import ResponseError

from litebroker_rq.keyspace import OK, Reply, Session, command, flat, from_float, to_float, to_int


def _name(field: bytes) -> str:
    return field.decode("latin-1")


@command("HGET", least=2, brief=True)
def hget(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return None if row is None else session.get_field(row, _name(args[1]))


@command("HMGET", least=2, brief=True)
def hmget(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return [None if row is None else session.get_field(row, _name(field)) for field in args[1:]]


@command("HGETALL", least=1, brief=True)
def hgetall(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return [] if row is None else flat(session.fields(row))


@command("HKEYS", least=1)
def hkeys(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return [] if row is None else [field.encode("latin-1") for field in row.data]


@command("HVALS", least=1)
def hvals(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return [] if row is None else [value for _, value in session.fields(row)]


@command("HLEN", least=1)
def hlen(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return 0 if row is None else len(row.data)


@command("HEXISTS", least=2, brief=True)
def hexists(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    return int(row is not None and _name(args[1]) in row.data)


@command("HSET", least=3, writes=True)
def hset(session: Session, args: list[bytes]) -> Reply:
    if not len(args) % 2:
        message = "wrong number of arguments for 'hset' command"
        raise ResponseError(message)
    row = session.need(args[0], "hash")
    fields = args[1::2]
    added = session.set_fields(row, fields, args[2::2])
    if b"status" in fields or b"birth" in fields:
        session.database.leases.on_hash(session, row, fields)
    return added


@command("HMSET", least=3, writes=True)
def hmset(session: Session, args: list[bytes]) -> Reply:
    hset(session, args)
    return OK


@command("HSETNX", least=3, writes=True)
def hsetnx(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    if row is not None and _name(args[1]) in row.data:
        return 0
    return hset(session, args)


@command("HDEL", least=2, writes=True, often_idle=True)
def hdel(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "hash")
    if row is None:
        return 0
    gone = sum(session.delete_field(row, _name(field)) for field in args[1:])
    if not row.data:
        session.delete(row)
    return gone


@command("HINCRBY", least=3, writes=True)
def hincrby(session: Session, args: list[bytes]) -> Reply:
    amount = to_int(args[2])
    number = to_int(_number(session, args[0], args[1])) + amount
    session.set_field(session.need(args[0], "hash"), _name(args[1]), b"%d" % number)
    return number


@command("HINCRBYFLOAT", least=3, writes=True)
def hincrbyfloat(session: Session, args: list[bytes]) -> Reply:
    amount = to_float(args[2])
    number = from_float(to_float(_number(session, args[0], args[1])) + amount)
    session.set_field(session.need(args[0], "hash"), _name(args[1]), number)
    return number


def _number(session: Session, key: bytes, field: bytes) -> bytes:
    """What is to be added to: 0 where nothing is."""
    row = session.find(key, "hash")
    value = None if row is None else session.get_field(row, _name(field))
    return b"0" if value is None else value

"""Strings and counters."""

from __future__ import annotations

from redis.exceptions import ResponseError

from litebroker_rq.keyspace import OK, Reply, Session, command, from_float, syntax_error, to_float, to_int


@command("GET", least=1, brief=True)
def get(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "string")
    return None if row is None else bytes(row.data)


@command("MGET", least=1)
def mget(session: Session, args: list[bytes]) -> Reply:
    rows = [session.find(key) for key in args]
    return [bytes(row.data) if row is not None and row.kind == "string" else None for row in rows]


@command("STRLEN", least=1)
def strlen(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "string")
    return 0 if row is None else len(row.data)


@command("SET", least=2, writes=True)
def set_(session: Session, args: list[bytes]) -> Reply:
    key, value, *options = args
    expires_at_ms: int | None = None
    keep_ttl = only_new = only_old = give_old = False
    words = iter(options)
    for word in words:
        option = word.upper()
        if option in {b"EX", b"PX", b"EXAT", b"PXAT"}:
            expires_at_ms = _deadline(session, option, next(words, b""))
        elif option == b"KEEPTTL":
            keep_ttl = True
        elif option == b"NX":
            only_new = True
        elif option == b"XX":
            only_old = True
        elif option == b"GET":
            give_old = True
        else:
            raise syntax_error()
    row = session.find(key)
    if give_old and row is not None and row.kind != "string":
        session.find(key, "string")  # raises
    old = bytes(row.data) if give_old and row is not None else None
    if (only_new and row is not None) or (only_old and row is None):
        return old
    _store(session, key, value, expires_at_ms, keep_ttl=keep_ttl)
    return old if give_old else OK


def _deadline(session: Session, option: bytes, amount: bytes) -> int:
    number = to_int(amount)
    if number <= 0:
        message = "invalid expire time in 'set' command"
        raise ResponseError(message)
    ms = number * 1000 if option in {b"EX", b"EXAT"} else number
    return ms if option in {b"EXAT", b"PXAT"} else session.now_ms + ms


def _store(session: Session, key: bytes, value: bytes, expires_at_ms: int | None, *, keep_ttl: bool) -> None:
    row = session.find(key)
    if row is not None and row.kind != "string":
        session.delete(row)
    row = session.need(key, "string")
    row.data = value
    if not keep_ttl:
        row.expires_at_ms = expires_at_ms


@command("SETNX", least=2, writes=True)
def setnx(session: Session, args: list[bytes]) -> Reply:
    if session.find(args[0]) is not None:
        return 0
    _store(session, args[0], args[1], None, keep_ttl=False)
    return 1


@command("SETEX", least=3, writes=True)
def setex(session: Session, args: list[bytes]) -> Reply:
    _store(session, args[0], args[2], _deadline(session, b"EX", args[1]), keep_ttl=False)
    return OK


@command("PSETEX", least=3, writes=True)
def psetex(session: Session, args: list[bytes]) -> Reply:
    _store(session, args[0], args[2], _deadline(session, b"PX", args[1]), keep_ttl=False)
    return OK


@command("GETSET", least=2, writes=True)
def getset(session: Session, args: list[bytes]) -> Reply:
    old = get(session, args)
    _store(session, args[0], args[1], None, keep_ttl=False)
    return old


@command("GETDEL", least=1, writes=True)
def getdel(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "string")
    if row is None:
        return None
    session.delete(row)
    return bytes(row.data)


@command("MSET", least=2, writes=True)
def mset(session: Session, args: list[bytes]) -> Reply:
    for key, value in zip(args[::2], args[1::2], strict=True):
        _store(session, key, value, None, keep_ttl=False)
    return OK


def _add(session: Session, key: bytes, amount: int) -> int:
    row = session.find(key, "string")
    number = (0 if row is None else to_int(row.data)) + amount
    session.need(key, "string").data = b"%d" % number
    return number


@command("INCR", least=1, writes=True)
def incr(session: Session, args: list[bytes]) -> Reply:
    return _add(session, args[0], 1)


@command("DECR", least=1, writes=True)
def decr(session: Session, args: list[bytes]) -> Reply:
    return _add(session, args[0], -1)


@command("INCRBY", least=2, writes=True)
def incrby(session: Session, args: list[bytes]) -> Reply:
    return _add(session, args[0], to_int(args[1]))


@command("DECRBY", least=2, writes=True)
def decrby(session: Session, args: list[bytes]) -> Reply:
    return _add(session, args[0], -to_int(args[1]))


@command("INCRBYFLOAT", least=2, writes=True)
def incrbyfloat(session: Session, args: list[bytes]) -> Reply:
    amount = to_float(args[1])
    row = session.find(args[0], "string")
    number = from_float((0.0 if row is None else to_float(row.data)) + amount)
    session.need(args[0], "string").data = number
    return number

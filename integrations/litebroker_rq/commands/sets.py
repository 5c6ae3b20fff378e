"""Sets: the queues, workers, groups and dependents that RQ knows."""

from __future__ import annotations

from litebroker_rq.keyspace import Reply, Row, Session, command


@command("SMEMBERS", least=1, brief=True)
def smembers(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    if row is None:
        return []
    return [member for (member,) in session.select("select member from litebroker_rq_members where key_id = ?", row.id)]


@command("SCARD", least=1)
def scard(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    if row is None:
        return 0
    ((count,),) = session.select("select count(*) from litebroker_rq_members where key_id = ?", row.id)
    return int(count)


@command("SISMEMBER", least=2)
def sismember(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    return int(row is not None and _has(session, row, args[1]))


@command("SMISMEMBER", least=2)
def smismember(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    return [int(row is not None and _has(session, row, member)) for member in args[1:]]


def _has(session: Session, row: Row, member: bytes) -> bool:
    return bool(session.select("select 1 from litebroker_rq_members where key_id = ? and member = ?", row.id, member))


@command("SADD", least=2, writes=True, often_idle=True, brief=True)
def sadd(session: Session, args: list[bytes]) -> Reply:
    key, *members = args
    if not session.has_looked_at(key) and all(session.is_in(key, member) for member in members):
        for member in members:
            session.database.heartbeats.has_seen(key, member)
        return 0
    session.must_write()
    row = session.find(key, "set")
    added = 0
    for member in dict.fromkeys(members):
        if row is not None and _has(session, row, member):
            continue
        row = session.need(key, "set")
        session.write("insert into litebroker_rq_members (key_id, member) values (?, ?)", row.id, member)
        added += 1
    return added


@command("SREM", least=2, writes=True, often_idle=True)
def srem(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    return 0 if row is None else remove_members(session, row, args[1:])


def remove_members(session: Session, row: Row, members: list[bytes]) -> int:
    """Take members out of a set or a sorted set; an empty one is gone."""
    gone = 0
    for member in members:
        if session.writing:
            gone += len(
                session.write(
                    "delete from litebroker_rq_members where key_id = ? and member = ? returning 1", row.id, member
                )
            )
        elif _has(session, row, member):
            session.must_write()
    if gone:
        session.change(row)
        delete_if_empty(session, row)
    return gone


def delete_if_empty(session: Session, row: Row) -> None:
    if not session.select("select 1 from litebroker_rq_members where key_id = ? limit 1", row.id):
        session.delete(row, empty=True)


@command("SPOP", least=1, writes=True, often_idle=True)
def spop(session: Session, args: list[bytes]) -> Reply:
    row = session.find(args[0], "set")
    if row is None:
        return None
    session.must_write()
    ((member,),) = session.select(
        "select member from litebroker_rq_members where key_id = ? order by random() limit 1", row.id
    )
    remove_members(session, row, [member])
    return bytes(member)


@command("SSCAN", least=2)
def sscan(session: Session, args: list[bytes]) -> Reply:
    return [b"0", smembers(session, args[:1])]

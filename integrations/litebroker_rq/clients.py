"""Who is connected, as CLIENT INFO and CLIENT LIST say it. Only those that have a name are known to others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from litebroker_rq import processes

if TYPE_CHECKING:
    from litebroker_rq.database import Database
    from litebroker_rq.keyspace import Session

_ROW_BITS = 20

# redis-py wants every one of the numbers (5.0), RQ the address and the name.
_LINE = (
    "id={id} addr=127.0.0.1:{pid} laddr=127.0.0.1:0 fd=0 name={name} age=0 idle=0 flags=N db=0 sub=0 psub=0 ssub=0"
    " multi=-1 watch=0 qbuf=0 qbuf-free=0 argv-mem=0 multi-mem=0 rbs=0 rbp=0 obl=0 oll=0 omem=0 tot-mem=0 events=r"
    " cmd=client user=default redir=-1 resp=2 lib-name=litebroker lib-ver="
)


def register(database: Database, client: int, name: str) -> None:
    """Let others know the client by this name."""
    with database.writing() as session:
        remove_dead(session)
        session.write(
            "insert or replace into litebroker_rq_clients (id, name, process) values (?, ?, ?)",
            _row(client),
            name,
            processes.own(),
        )


def remove_dead(session: Session) -> None:
    """Forget those whose process is gone."""
    for row, process in session.select("select id, process from litebroker_rq_clients"):
        if not processes.is_alive(process):
            session.write("delete from litebroker_rq_clients where id = ?", row)


def line(client: int, name: str, pid: int) -> str:
    """What CLIENT INFO says of a client."""
    return _LINE.format(id=client, name=name, pid=pid)


def lines(database: Database, client: int, name: str) -> str:
    """All clients that have a name, and this one."""
    with database.reading() as session:
        found = session.select("select id, name, process from litebroker_rq_clients where id <> ?", _row(client))
    others = [line(row, other, row >> _ROW_BITS) for row, other, process in found if processes.is_alive(process)]
    return "\n".join([line(client, name, os.getpid()), *others])


def _row(client: int) -> int:
    return os.getpid() << _ROW_BITS | client

"""Running commands on the file: each by itself, or several as one transaction."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from litebroker_rq import answers, reaper, schedulers
from litebroker_rq.keyspace import COMMANDS, Reply, Session, TooBriefError, WouldWriteError
from litebroker_rq.naming import is_worker

if TYPE_CHECKING:
    from litebroker_rq.database import Database

# The timeout is the last of their words, and what they wait for is the first, or all before it.
BLOCKING = {b"BLPOP", b"BRPOP", b"BLMOVE", b"BRPOPLPUSH"}

POPS = {*BLOCKING, b"LPOP", b"LMOVE"}

# A command of these with so many words saves a whole job: it must be on disk before enqueue returns.
_JOB_FIELDS = 20
_SAVING = {b"HSET", b"HMSET", b"EVAL", b"EVALSHA"}

_SCRIPTS = {b"EVAL", b"EVALSHA", b"SCRIPT"}
_MOVES = {b"LMOVE", b"BLMOVE", b"RPOPLPUSH", b"BRPOPLPUSH"}


def check(args: list[bytes]) -> None:
    """Refuse what is not answered.

    Raises:
        ResponseError: The command is not known here, or has too few arguments.
    """
    name = args[0].decode("latin-1")
    entry = COMMANDS.get(args[0])
    if entry is None:
        message = (
            f"unknown command '{name}': litebroker_rq answers the commands that RQ and its tools send, and this is"
            " not one of them"
        )
        raise ResponseError(message)
    if len(args) - 1 < entry.least:
        message = f"wrong number of arguments for '{name.lower()}' command"
        raise ResponseError(message)


def run(database: Database, args: list[bytes]) -> Reply:
    """Run a command that is not one of several.

    Raises:
        ResponseError: It is refused.
    """
    check(args)
    name = args[0]
    if name in POPS:
        database.storage.recover([])  # a dead process' claims; at most twice a second it looks
    elif name in {b"EXISTS", b"HEXISTS"} and is_worker(args[1]):
        reaper.bury_dead(database)
    replies = run_together(database, [args], {}) or [None]
    if name in POPS:
        database.pops = 0 if replies[0] is None else database.pops + 1
    return only(replies)


def only(replies: list[Reply]) -> Reply:
    """The reply to a command that was not one of several.

    Raises:
        ResponseError: It was refused.
    """
    (reply,) = replies
    if isinstance(reply, Exception):
        raise reply
    return reply


def run_together(database: Database, batch: list[list[bytes]], watched: dict[bytes, int]) -> list[Reply] | None:
    """Run the commands as one transaction. None when a watched key has changed."""
    if watched:
        database.write_what_concerns([[b"WATCH", *watched]])  # set since then, by this process itself
    free = not watched and not database.in_transaction()
    if free:
        kept = database.heartbeats.keep(batch, database.now_ms())
        if kept is not None:
            reads = [args for args, reply in zip(batch, kept, strict=True) if reply is None]
            found = iter(run_together(database, reads, {}) or [] if reads else [])
            return [next(found) if reply is None else reply for reply in kept]
    keys = _keys(batch)
    popping = len(batch) == 1 and batch[0][0] in POPS
    # Where two pops have found something, the next need not look first whether it is worth a write transaction.
    if all(COMMANDS[args[0]].reads for args in batch) and not (popping and database.pops > 1):
        database.write_what_concerns(batch)
        try:
            if free and len(batch) == 1 and COMMANDS[batch[0][0]].brief:
                with contextlib.suppress(TooBriefError):
                    return _run_all(database.brief(), batch)
            with database.reading() as session:
                if not _unchanged(session, watched):
                    return None
                session.prefetch(keys)
                return _run_all(session, batch)
        except WouldWriteError:
            pass
    lasting = any(len(args) > _JOB_FIELDS and args[0] in _SAVING for args in batch)
    with database.writing(keys=keys, lasting=lasting, popping=popping) as session:
        if not _unchanged(session, watched):
            return None
        replies = _run_all(session, batch)
        answers.write(session, replies)
        return replies


def versions(database: Database, keys: list[bytes]) -> list[int]:
    """What WATCH notes of the keys."""
    database.write_what_concerns([[b"WATCH", *keys]])  # what was set before is no change
    if len(keys) == 1 and not database.in_transaction():
        return [database.brief().stored_version(keys[0])]
    with database.reading() as session:
        return [session.stored_version(key) for key in keys]


def _keys(batch: list[list[bytes]]) -> list[bytes]:
    """The keys that the commands are about, as far as can be told before they run."""
    keys = [args[1] for args in batch if len(args) > 1 and args[0] not in _SCRIPTS]
    if len(batch) == 1 and batch[0][0] in _MOVES:
        keys.append(batch[0][2])
    return keys


def _unchanged(session: Session, watched: dict[bytes, int]) -> bool:
    return all(session.stored_version(key) == version for key, version in watched.items())


def _run_all(session: Session, batch: list[list[bytes]]) -> list[Reply]:
    """Run the commands; what one of them refuses is its reply, and the others run."""
    session.batch = len(batch) > 1
    late = schedulers.late(session, batch) if session.batch and session.writing else {}
    replies: list[Reply] = []
    for position, args in enumerate(batch):
        if position in late:
            replies.append(late[position])
            continue
        try:
            replies.append(COMMANDS[args[0]].run(session, args[1:]))
        except ResponseError as error:
            replies.append(error)
    return replies

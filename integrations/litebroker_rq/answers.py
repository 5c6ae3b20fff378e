"""What became of a command that a worker was running for its work horse when it was killed.

Whatever such a command changes, its answer is written in the same transaction, in a row that each worker has for that.
A work horse whose worker is gone finds its answer there, or nothing: then the command was not run.
"""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError

from litebroker_rq import processes

if TYPE_CHECKING:
    from litebroker_rq.database import Database
    from litebroker_rq.keyspace import Reply, Session

_LONGEST = 4096


class Answer(NamedTuple):
    """What the worker would have answered."""

    replies: list[Reply]


class _Expected(threading.local):
    """To which question this thread is going to write an answer."""

    question: int | None = None


_expected = _Expected()


def expect(question: int) -> None:
    """In this thread: what is run next is the question of this number, of the work horse that the thread speaks for."""
    _expected.question = question


def write(session: Session, replies: list[Reply]) -> None:
    """In the transaction: note the answer to the question that this thread is at, if it is at one."""
    if _expected.question is None:
        return
    packed = pickle.dumps(replies)
    session.write(
        "insert or replace into litebroker_rq_answers (worker, horse, question, answer) values (?, ?, ?, ?)",
        processes.parent(),
        processes.own(),
        _expected.question,
        packed if len(packed) <= _LONGEST else None,
    )


def find(database: Database, question: int) -> Answer | None:
    """In the work horse: the answer to its question. None when it was not run.

    Raises:
        RedisConnectionError: It was run, and the answer was too long to be kept.
    """
    with database.reading() as session:
        found = session.select("select answer from litebroker_rq_answers where question = ?", question)
    if not found:
        return None
    ((packed,),) = found
    if packed is None:
        message = "the worker was killed after it had run a command of its work horse, and before it could answer"
        raise RedisConnectionError(message)
    return Answer(pickle.loads(packed))  # noqa: S301 - its own worker wrote it


def remove_dead(session: Session) -> None:
    """Forget the answers that nobody can ask for any more."""
    for worker, horse in session.select("select worker, horse from litebroker_rq_answers"):
        if not processes.is_alive(worker) and not processes.is_alive(horse):
            session.write("delete from litebroker_rq_answers where worker = ?", worker)

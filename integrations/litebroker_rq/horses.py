"""A work horse's commands are run by its worker, on the file that the worker has open.

A worker forks for each job. The process that performs it, the work horse, sends some ten commands and ends: to open the
file for them, and to close it before the fork and open it again in the worker, took longer than all else that was ours.
So the worker keeps its connection (litebroker's `stay_open_at_fork`), and a socket leads from the work horse to a
thread of the worker.

The work horse opens the file by itself after all

* when its worker is gone: it goes on alone, as it would with Redis (answers.py);
* for what is a process' own: waiting, subscribing, claims of jobs, a worker of its own;
* when an exception struck while it waited for an answer, such as RQ's time limit of a job;
* when it uses `litebroker_rq.Queue` with a priority or a dedupe key, whose transactions go beyond a command.

It does so for good, and not before all that it has sent was run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from litebroker import LitebrokerError
from litebroker_rq import answering, answers, processes
from litebroker_rq.answering import POPS
from litebroker_rq.database import Database, all_opened, forget_parent

if TYPE_CHECKING:
    from litebroker_rq.heartbeats import Heartbeats
    from litebroker_rq.keyspace import Reply

__all__ = ["run", "run_together", "versions"]

log = logging.getLogger("litebroker_rq")

# Longer than any command waits for the file, unless that was set otherwise.
_PATIENCE_S = 60.0

_Verb = Literal["run", "run_together", "versions", "write_heartbeats"]

_VERBS: dict[_Verb, Callable[..., Any]] = {
    "run": answering.run,
    "run_together": answering.run_together,
    "versions": answering.versions,
    "write_heartbeats": Database.write_heartbeats,
}


class _HungUpError(Exception):
    """The worker has not run it, and will not."""


class _WorkerGoneError(Exception):
    """The worker has ended, and whether it has run it before is to be seen in the file.

    Attributes:
        question: The number by which it can be found.
    """

    def __init__(self, question: int) -> None:
        super().__init__(question)
        self.question = question


def run(database: Database, args: list[bytes]) -> Reply:
    """As `answering.run`."""
    if database.line is not None:
        database.scripts.learn(args)
        kept = database.heartbeats.keep([args], database.now_ms())
        if kept is not None and kept[0] is not None:
            return kept[0]
    reply: Reply = _ask(database, "run", args, alone=_is_its_own(args))
    return reply


def run_together(database: Database, batch: list[list[bytes]], watched: dict[bytes, int]) -> list[Reply] | None:
    """As `answering.run_together`."""
    if database.line is not None:
        for args in batch:
            database.scripts.learn(args)
    replies: list[Reply] | None = _ask(database, "run_together", batch, watched, alone=any(map(_is_its_own, batch)))
    return replies


def versions(database: Database, keys: list[bytes]) -> list[int]:
    """As `answering.versions`."""
    found: list[int] = _ask(database, "versions", keys)
    return found


def _is_its_own(args: list[bytes]) -> bool:
    """Whether the command is about the process that sends it: the claim of a job, or the birth of a worker."""
    return args[0] in POPS or (args[0] == b"HSET" and b"birth" in args)


def _ask(database: Database, verb: _Verb, *args: Any, alone: bool = False) -> Any:
    """Have the worker run it, if this is a work horse; otherwise run it here."""
    line = database.line
    if line is not None:
        if alone:
            database.leave_worker()
        else:
            try:
                return line.ask(verb, *args)
            except _HungUpError:
                database.leave_worker()
            except _WorkerGoneError as error:
                database.leave_worker()
                answer = answers.find(database, error.question)
                if answer is not None:
                    return answering.only(answer.replies) if verb == "run" else answer.replies
    return _run_here(database, verb, args)


def _run_here(database: Database, verb: _Verb, args: tuple[Any, ...]) -> Any:
    """Run it in this process, after all that was sent by work horses that are gone."""
    run = _VERBS[verb]
    if _attendant is None:
        return run(database, *args)
    # In a transaction, or on top of a command, which a signal handler has interrupted, it may have what they wait for.
    outer = getattr(_running, "here", False)
    if not outer and not database.in_transaction():
        _attendant.finish()
    _running.here = True
    try:
        return run(database, *args)
    finally:
        _running.here = outer


class Line:
    """The work horse's end. One question at a time, of whichever thread.

    What the work horse keeps back (heartbeats.py) goes along with the next question, and is kept back by the worker.
    """

    def __init__(self, heartbeats: Heartbeats, end: Connection) -> None:
        self._heartbeats = heartbeats
        self._end = end
        self._lock = threading.RLock()
        self._asking = False
        self._broken = False

    def ask(self, verb: _Verb, *args: Any) -> Any:
        """What the worker answers.

        Raises:
            _HungUpError: It was not run.
            _WorkerGoneError: Whether it was run is to be seen in the file.
        """
        question = secrets.randbits(62)
        with self._lock:
            # On top of a question, which a signal handler has interrupted; or after one that an exception has ended.
            if self._asking or self._broken:
                raise _HungUpError
            kept = self._heartbeats.take() if self._heartbeats.pending else None
            try:
                self._asking = self._broken = True
                packed = self._exchange(question, pickle.dumps((os.getpid(), question, kept, verb, args)))
                self._broken = False
            finally:
                self._asking = False
                if self._broken and kept is not None:
                    self._heartbeats.give_back(kept)  # to write it twice does no harm
        done, answer = pickle.loads(packed)  # noqa: S301 - its own worker sends it
        if not done:
            raise answer
        return answer

    def _exchange(self, question: int, packed: bytes) -> bytes:
        try:
            self._end.send_bytes(packed)
        except OSError:
            raise _HungUpError from None
        try:
            return self._end.recv_bytes()
        except (OSError, EOFError):
            raise _WorkerGoneError(question) from None

    def hang_up(self) -> None:
        """Ask nothing any more. What was sent has been run then, and what the worker kept back is written."""
        with self._lock:
            if self._asking:
                return  # a signal handler must not wait for what it has interrupted
            with contextlib.suppress(_HungUpError, _WorkerGoneError):
                self.ask("write_heartbeats")
            with contextlib.suppress(OSError, EOFError):
                _end_sending(self._end)
                while True:
                    self._end.recv_bytes()
            self._broken = True
            with contextlib.suppress(OSError):  # somebody has closed all descriptors
                self._end.close()

    def forget(self) -> None:
        """In a child of the work horse: it is not its own."""
        with contextlib.suppress(OSError):
            self._end.close()


def _end_sending(end: Connection) -> None:
    with socket.socket(fileno=os.dup(end.fileno())) as copy:
        copy.shutdown(socket.SHUT_WR)


# The worker's side


class _Served(NamedTuple):
    """The worker's end of a line.

    Attributes:
        gone: All that came from the work horse was run, and nothing more will come.
    """

    database: Database
    end: Connection
    gone: threading.Event


class _Attendant:
    """A thread that runs what comes from work horses, one command after the other."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._lines: dict[int, _Served] = {}
        self._thread: threading.Thread | None = None

    def serve(self, database: Database, end: Connection) -> None:
        """Listen to this work horse, too. That does not wake the thread, which the processor has no time for now."""
        if self._thread is None:
            thread = threading.Thread(target=self._attend, name="work horse's commands", daemon=True)
            thread.start()
            self._thread = thread
        self._lines[end.fileno()] = _Served(database, end, threading.Event())
        try:
            self._poll.register(end.fileno(), select.EPOLLIN)
        except BaseException:
            del self._lines[end.fileno()]
            raise

    def finish(self) -> None:
        """Wait until all that was sent by work horses that have hung up, or are gone, was run.

        What the worker does about a dead work horse would otherwise overtake what that had sent: a job would be
        finished, and then fail, and be tried again.
        """
        for descriptor, served in list(self._lines.items()):
            poll = select.poll()
            poll.register(descriptor, select.POLLRDHUP)
            if poll.poll(0):
                served.gone.wait(_PATIENCE_S)

    def forget(self) -> None:
        """In a child: all of it is the parent's.

        With these ends open, another work horse would not see that its worker is gone.
        """
        self._poll.close()
        for served in self._lines.values():
            served.end.close()

    def _attend(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                served = self._lines[descriptor]
                try:
                    _answer(served.database, served.end)
                except Exception as error:
                    if not isinstance(error, (OSError, EOFError)):  # those say that it has ended
                        log.exception("a work horse could not be answered: it goes on alone")
                    self._poll.unregister(descriptor)
                    del self._lines[descriptor]
                    served.end.close()
                    processes.speak_for(None)
                    served.gone.set()


def _answer(database: Database, end: Connection) -> None:
    """Run one command of a work horse."""
    pid, question, kept, verb, args = pickle.loads(end.recv_bytes())  # noqa: S301 - its own work horse sends it
    processes.speak_for(pid)
    answers.expect(question)
    if kept is not None:
        database.heartbeats.take_over(kept)
    try:
        answer = True, _VERBS[verb](database, *args)
    except (RedisError, LitebrokerError) as error:
        answer = False, error
    except Exception as error:
        log.exception("%s for the work horse %d failed", verb, pid)
        answer = False, RedisConnectionError(f"{type(error).__name__}: {error}")
    end.send_bytes(pickle.dumps(answer))


_attendant: _Attendant | None = None
_running = threading.local()  # whether this thread runs a command
_at_fork = threading.local()  # of the thread that forks: databases, with the worker's end and the work horse's


def _before_fork() -> None:
    lines = _at_fork.lines = []
    for database in all_opened():
        if database.in_transaction() or database.line is not None:
            continue
        # gevent takes epoll away, and has no threads that could attend to a work horse.
        possible = hasattr(select, "epoll") and database.heartbeats.forks_for_job()
        if possible and database.storage.stay_open_at_fork():
            ours, its = socket.socketpair()
            lines.append((database, Connection(ours.detach()), Connection(its.detach())))
        else:
            database.write_heartbeats()


def _after_fork_in_parent() -> None:
    global _attendant  # noqa: PLW0603 - of the process
    for database, ours, its in _at_fork.lines:
        its.close()
        try:
            if _attendant is None:
                _attendant = _Attendant()
            _attendant.serve(database, ours)
        except Exception:
            log.exception("a work horse cannot be attended to: it goes on alone")
            ours.close()


def _after_fork_in_child() -> None:
    global _attendant
    attendant, _attendant = _attendant, None
    if attendant is not None:
        attendant.forget()
    forget_parent()
    for database in all_opened():
        if database.line is not None:
            database.line.forget()
            database.line = None
    for database, ours, its in _at_fork.lines:
        ours.close()
        database.line = Line(database.heartbeats, its)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

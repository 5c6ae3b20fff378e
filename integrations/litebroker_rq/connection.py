"""redis-py's connection, which answers from the file instead of a socket.

redis-py keeps what is its own: how arguments are built and answers are parsed, pipelines, WATCH, scripts, pub/sub. It
sends commands to a connection and reads the answers; this one runs a command when it is sent. A pipeline, which
redis-py sends as MULTI ... EXEC, is one transaction.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ExecAbortError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from litebroker import LitebrokerError, StorageError
from litebroker_rq import clients, commands, messages, reaper, schedulers
from litebroker_rq.commands import streams
from litebroker_rq.database import Database, opened
from litebroker_rq.keyspace import COMMANDS, OK, Reply, Session, Status, TooBriefError, WouldWriteError, to_float
from litebroker_rq.naming import is_queue, is_worker

if TYPE_CHECKING:
    from litebroker import Listener
    from litebroker_rq.client import ConnectionPool

__all__ = ["SQLiteFileConnection", "commands"]

# What a blocked client does not hear of, it sees after so long: a lease that lapsed, a lost wake-up, a dead worker.
_LOOK_S = 1.0

# The timeout is the last of their words, and what they wait for is the first, or all before it.
_BLOCKING = {b"BLPOP", b"BRPOP", b"BLMOVE", b"BRPOPLPUSH"}

_POPS = {*_BLOCKING, b"LPOP", b"LMOVE"}

_QUEUED = Status(b"QUEUED")

_serial = itertools.count(1)

# Of a child process after a fork: what belongs to its parent, and must be neither used nor closed.
_inherited: list[object] = []


class SQLiteFileConnection(AbstractConnection):
    """A connection of a `ConnectionPool`. What it needs to know is in the pool that it is given.

    Args:
        connection_pool: The pool. It is one of the arguments, since RQ copies a pool's arguments to other
            processes and other pools.
    """

    def __init__(self, *, connection_pool: ConnectionPool, **kwargs: Any) -> None:
        known = {name: value for name, value in kwargs.items() if name in _ARGUMENTS}
        super().__init__(**known, **_NO_DRIVER_INFO)
        self.database_url = connection_pool.database_url
        self.id = next(_serial)
        self._database: Database | None = None
        self._replies: deque[Reply] = deque()
        self._watched: dict[bytes, int] = {}
        self._queued: list[list[bytes]] | None = None
        self._refused: ResponseError | None = None
        self._name: str | None = None
        self._inbox: messages.Inbox | None = None
        self._listener: Listener | None = None
        self._connected = False
        self._lock = threading.RLock()

    # What redis-py asks of a connection

    def repr_pieces(self) -> list[tuple[str, Any]]:
        return [("database", self.database_url)]

    def _connect(self) -> Any:
        return None

    def _host_error(self) -> str:
        return self.database_url

    @property
    def is_connected(self) -> bool:
        return self._connected

    def connect(self) -> None:
        if self._connected:
            return
        try:
            self._database = opened(self.database_url)
        except LitebrokerError as error:
            raise RedisConnectionError(str(error)) from error
        self._connected = True
        for callback in [ref() for ref in self._connect_callbacks]:
            if callback is not None:
                callback(self)

    def connect_check_health(self, *_: Any, **__: Any) -> None:
        self.connect()

    def disconnect(self, *_: Any, **__: Any) -> None:
        self._replies.clear()
        self._watched.clear()
        self._queued = self._refused = None
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            if self.pid == os.getpid():
                inbox.close()
            else:
                _inherited.append(inbox)
        self._connected = False

    def __del__(self) -> None:
        if self._listener is not None and self.pid != os.getpid():
            _inherited.append(self._listener)

    def check_health(self) -> None:
        """There is no server that could be gone."""

    def should_reconnect(self) -> bool:
        return False

    def pack_command(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args]

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return [tuple(command) for command in commands]

    def send_command(self, *args: Any, **_: Any) -> None:
        self._send([args])

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:  # noqa: FBT001, FBT002
        del check_health
        self._send(command)

    def can_read(self, timeout: float | None = 0) -> bool:
        if self._replies:
            return True
        if self._inbox is None:
            return False
        return self._await_message(timeout)

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:  # noqa: FBT001, FBT002
        if not self._replies and self._inbox is not None:
            timeout = options.get("timeout")
            self._await_message(timeout if isinstance(timeout, (int, float)) else None)
        if not self._replies:
            message = "nothing to read"
            raise RedisTimeoutError(message)
        reply = self._replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply if disable_decoding or self.decoder is None else self.decoder(reply)

    @property
    def decoder(self) -> Callable[[Reply], Any] | None:
        """Turns answers into text, when that was asked for."""
        if not self.encoder.decode_responses:
            return None
        return lambda reply: _decoded(reply, self.encoder.decode)

    def discard_replies(self) -> None:
        """What was left unread, by somebody whom a signal interrupted, is not for the next."""
        self._replies.clear()
        self._watched.clear()

    # Commands

    def answer(self, args: Sequence[Any]) -> Reply:
        """Run a command that has one reply.

        Raises:
            RedisError: As redis-py would raise it on reading the reply.
        """
        self._send([args])
        reply = self._replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _send(self, commands: Iterable[Sequence[Any]]) -> None:
        self.connect()
        encode = self.encoder.encode
        for args in _transactions([_words(args, encode) for args in commands]):
            try:
                if isinstance(args, _Pipeline):
                    self._replies.extend(self._run_pipeline(args.commands))
                else:
                    self._run(args)
            except ResponseError as error:
                self._replies.append(error)
            except StorageError as error:
                self.disconnect()
                raise RedisConnectionError(str(error)) from error
            except LitebrokerError as error:
                self._replies.append(ResponseError(str(error)))
            except BaseException:
                # A signal handler may raise anywhere: RQ's time limit of a job. The transaction is rolled back.
                self._replies.clear()
                raise

    def transact(self, commands: Iterable[Sequence[Any]]) -> list[Reply] | None:
        """Run a pipeline as one transaction: what EXEC answers. None when a watched key has changed.

        Raises:
            ResponseError: One of the commands is refused, before any has run.
        """
        self.connect()
        encode = self.encoder.encode
        watched, self._watched = self._watched, {}
        queued = [_words(args, encode) for args in commands]
        for args in queued:
            _entry(args)
        try:
            return self._execute(queued, watched)
        except StorageError as error:
            self.disconnect()
            raise RedisConnectionError(str(error)) from error
        except LitebrokerError as error:
            raise ResponseError(str(error)) from error

    def _run(self, args: list[bytes]) -> None:
        name = args[0]
        if self._queued is not None and name not in {b"EXEC", b"DISCARD"}:
            self._replies.append(self._queue(args))
        elif name in _OWN:
            _OWN[name](self, args[1:])
        elif name in _BLOCKING:
            self._replies.append(self._blocking(args))
        elif name == b"XREAD":
            self._replies.append(self._read_streams(args))
        else:
            self._replies.append(self._single(args))

    def _multi(self, _: list[bytes]) -> None:
        self._queued = []
        self._refused = None
        self._replies.append(OK)

    def _exec(self, _: list[bytes]) -> None:
        queued, self._queued = self._queued, None
        refused, self._refused = self._refused, None
        watched, self._watched = self._watched, {}
        if refused is not None:
            raise _exec_abort()
        self._replies.append(self._execute(queued or [], watched))

    def _discard(self, _: list[bytes]) -> None:
        self._queued = self._refused = None
        self._unwatch([])

    def _watch(self, keys: list[bytes]) -> None:
        self._db.write_what_concerns([[b"WATCH", *keys]])  # what was set before is no change
        if len(keys) == 1 and not self._db.in_transaction():
            self._watched.setdefault(keys[0], self._db.brief().stored_version(keys[0]))
        else:
            with self._db.reading() as session:
                for key in keys:
                    self._watched.setdefault(key, session.stored_version(key))
        self._replies.append(OK)

    def _unwatch(self, _: list[bytes]) -> None:
        self._watched.clear()
        self._replies.append(OK)

    def _run_pipeline(self, queued: list[list[bytes]]) -> list[Reply]:
        replies: list[Reply] = [OK]
        for args in queued:
            try:
                _entry(args)
            except ResponseError as error:
                replies.append(error)
            else:
                replies.append(_QUEUED)
        watched, self._watched = self._watched, {}
        if any(isinstance(reply, Exception) for reply in replies):
            replies.append(_exec_abort())
        else:
            replies.append(self._execute(queued, watched))
        return replies

    def _queue(self, args: list[bytes]) -> Reply:
        try:
            _entry(args)
        except ResponseError as error:
            self._refused = error
            raise
        if self._queued is not None:
            self._queued.append(args)
        return _QUEUED

    @property
    def _db(self) -> Database:
        if self._database is None:
            self.connect()
            return self._db
        return self._database

    def _single(self, args: list[bytes]) -> Reply:
        _entry(args)
        name = args[0]
        database = self._db
        if name in _POPS:
            database.storage.recover([])  # a dead process' claims; at most twice a second it looks
        elif name in {b"EXISTS", b"HEXISTS"} and is_worker(args[1]):
            reaper.bury_dead(database)
        (reply,) = self._execute([args], {}) or [None]
        if name in _POPS:
            database.pops = 0 if reply is None else database.pops + 1
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _execute(self, batch: list[list[bytes]], watched: dict[bytes, int]) -> list[Reply] | None:
        """Run the commands as one transaction. None when a watched key has changed."""
        database = self._db
        if watched:
            database.write_what_concerns([[b"WATCH", *watched]])  # set since then, by this process itself
        free = not watched and not database.in_transaction()
        if free:
            kept = database.heartbeats.keep(batch, database.storage.clock.now_ms())
            if kept is not None:
                reads = [args for args, reply in zip(batch, kept, strict=True) if reply is None]
                answers = iter(self._execute(reads, {}) or [] if reads else [])
                return [next(answers) if reply is None else reply for reply in kept]
        keys = _keys(batch)
        popping = len(batch) == 1 and batch[0][0] in _POPS
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
            return _run_all(session, batch)

    # Waiting

    def _blocking(self, args: list[bytes]) -> Reply:
        _entry(args)
        timeout_s = to_float(args[-1])
        keys = args[1:-1] if args[0] in {b"BLPOP", b"BRPOP"} else args[1:2]
        queues = [key.decode() for key in keys if is_queue(key)]
        reply = self._single(args)
        if reply is not None:
            return reply
        self._db.write_heartbeats()
        return self._wait(lambda: self._single(args), timeout_s, queues, [], worker=bool(queues))

    def _read_streams(self, args: list[bytes]) -> Reply:
        block_ms, _, keys, after = streams.read_arguments(args[1:])
        if b"$" in after:
            with self._db.reading() as session:
                last = [b"%d-%d" % streams.last_id(session, key) for key in keys]
            after = [end if word == b"$" else word for word, end in zip(after, last, strict=True)]
            args = [*args[: len(args) - 2 * len(keys)], *keys, *after]
        reply = self._single(args)
        if reply is not None or block_ms is None:
            return reply
        self._db.write_heartbeats()
        topics = [streams.topic(key) for key in keys]
        return self._wait(lambda: self._single(args), block_ms / 1000, [], topics, worker=False)

    def _wait(
        self, look: Callable[[], Reply], timeout_s: float, queues: list[str], topics: list[str], *, worker: bool
    ) -> Reply:
        """Look again whenever something may have come, until there is a reply. 0 seconds are without limit."""
        end = time.monotonic() + timeout_s if timeout_s else None
        # It is made before the next look, so that nothing falls between looking and waiting; and not kept, since a
        # new job wakes one of the listeners, which must not be one that is not waiting.
        listener = self._listener = self._db.storage.listener(queues, topics)
        try:
            while True:
                reply = look()
                if reply is not None:
                    return reply
                left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
                if left <= 0:
                    return None
                if not listener.wait(left) and worker:
                    reaper.reap(self._db)
        finally:
            self._listener = None
            listener.close()

    # Pub/sub

    def _subscribe(self, args: list[bytes], kind: messages.Kind) -> None:
        with self._lock:
            inbox = self._inbox
            if inbox is None:
                inbox = self._inbox = messages.Inbox(self._db, self.id)
            self._replies.extend(inbox.subscribe(args, kind))

    def _unsubscribe(self, args: list[bytes], kind: messages.Kind) -> None:
        with self._lock:
            inbox = self._inbox
            if inbox is None:
                inbox = self._inbox = messages.Inbox(self._db, self.id)
            self._replies.extend(inbox.unsubscribe(args, kind))
            inbox.wake()

    def _await_message(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._replies:
            inbox = self._inbox
            if inbox is None:
                return False
            try:
                self._replies.extend(inbox.fetch())
                if self._replies:
                    return True
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                inbox.wait(left)
            except StorageError as error:
                raise RedisConnectionError(str(error)) from error
        return True

    def _publish(self, args: list[bytes]) -> None:
        self._replies.append(messages.publish(self._db, args[0], args[1]))

    # Clients

    def _client(self, args: list[bytes]) -> None:
        self._replies.append(self._client_reply(args))

    def _client_reply(self, args: list[bytes]) -> Reply:
        word = args[0].upper() if args else b""
        if word == b"SETNAME":
            self._name = args[1].decode()
            clients.register(self._db, self.id, self._name)
            return OK
        if word == b"GETNAME":
            return None if self._name is None else self._name.encode()
        if word == b"ID":
            return self.id
        if word == b"INFO":
            return clients.line(self.id, self._name or "", os.getpid()).encode()
        if word == b"LIST":
            return clients.lines(self._db, self.id, self._name or "").encode()
        if word in {b"SETINFO", b"NO-EVICT", b"NO-TOUCH"}:
            return OK
        message = f"CLIENT {word.decode('latin-1')} is not answered here: there is no server with clients to manage"
        raise ResponseError(message)

    def _select(self, args: list[bytes]) -> None:
        if args != [b"0"]:
            message = "a file holds one database: use another file instead of SELECT"
            raise ResponseError(message)
        self._replies.append(OK)


# A command of these with so many words saves a whole job: it must be on disk before enqueue returns.
_JOB_FIELDS = 20
_SCRIPTS = {b"EVAL", b"EVALSHA", b"SCRIPT"}
_MOVES = {b"LMOVE", b"BLMOVE", b"RPOPLPUSH", b"BRPOPLPUSH"}
_SAVING = {b"HSET", b"HMSET", b"EVAL", b"EVALSHA"}

_Own = Callable[[SQLiteFileConnection, "list[bytes]"], None]

_OWN: dict[bytes, _Own] = {
    b"MULTI": SQLiteFileConnection._multi,  # noqa: SLF001 - as below
    b"EXEC": SQLiteFileConnection._exec,  # noqa: SLF001
    b"DISCARD": SQLiteFileConnection._discard,  # noqa: SLF001
    b"WATCH": SQLiteFileConnection._watch,  # noqa: SLF001
    b"UNWATCH": SQLiteFileConnection._unwatch,  # noqa: SLF001
    b"SUBSCRIBE": lambda connection, args: connection._subscribe(args, "channel"),  # noqa: SLF001
    b"PSUBSCRIBE": lambda connection, args: connection._subscribe(args, "pattern"),  # noqa: SLF001
    b"UNSUBSCRIBE": lambda connection, args: connection._unsubscribe(args, "channel"),  # noqa: SLF001
    b"PUNSUBSCRIBE": lambda connection, args: connection._unsubscribe(args, "pattern"),  # noqa: SLF001
    b"PUBLISH": lambda connection, args: connection._publish(args),  # noqa: SLF001
    b"CLIENT": lambda connection, args: connection._client(args),  # noqa: SLF001
    b"SELECT": lambda connection, args: connection._select(args),  # noqa: SLF001
}

# redis-py 8 would look up its own version in its package's metadata for each connection: 8 ms in each work horse.
_NO_DRIVER_INFO: dict[str, Any] = (
    {"driver_info": None} if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters else {}
)

# What the base class takes in every release of redis-py; RQ and its tools put more into a pool's arguments.
_ARGUMENTS = {
    "db",
    "client_name",
    "decode_responses",
    "encoding",
    "encoding_errors",
    "health_check_interval",
    "protocol",
    "retry",
    "retry_on_error",
    "retry_on_timeout",
    "socket_connect_timeout",
    "socket_timeout",
    "username",
}


class _Pipeline:
    """MULTI ... EXEC, as a pipeline sends it."""

    def __init__(self, commands: list[list[bytes]]) -> None:
        self.commands = commands


def _exec_abort() -> ExecAbortError:
    return ExecAbortError("Transaction discarded because of previous errors.")


def _words(args: Sequence[Any], encode: Callable[[Any], bytes]) -> list[bytes]:
    """The command as words; the first of them in capitals. redis-py writes some commands with a space."""
    name = args[0]
    first = name.upper().encode() if type(name) is str else bytes(encode(name)).upper()
    words = first.split(b" ") if b" " in first else [first]
    for arg in args[1:]:
        kind = type(arg)
        if kind is bytes:
            words.append(arg)
        elif kind is str:
            words.append(arg.encode())
        else:
            words.append(bytes(encode(arg)))
    return words


def _transactions(batch: list[list[bytes]]) -> Iterable[list[bytes] | _Pipeline]:
    if len(batch) > 1 and batch[0] == [b"MULTI"] and batch[-1] == [b"EXEC"]:
        return [_Pipeline(batch[1:-1])]
    return batch


def _entry(args: list[bytes]) -> None:
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


def _decoded(reply: Any, decode: Callable[[Any], Any]) -> Any:
    if isinstance(reply, list):
        return [_decoded(item, decode) for item in reply]
    return decode(bytes(reply)) if isinstance(reply, bytes) else reply

"""redis-py's connection, which answers from the file instead of a socket.

redis-py keeps what is its own: how arguments are built and answers are parsed, pipelines, WATCH, scripts, pub/sub. It
sends commands to a connection and reads the answers; this one runs a command when it is sent. A pipeline, which
redis-py sends as MULTI ... EXEC, is one transaction.
"""

from __future__ import annotations

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
from litebroker_rq import adding, clients, commands, horses, messages, reaper
from litebroker_rq.answering import BLOCKING, check
from litebroker_rq.commands import streams
from litebroker_rq.database import Database, opened
from litebroker_rq.keyspace import OK, Reply, Status, to_float
from litebroker_rq.naming import is_queue

if TYPE_CHECKING:
    from litebroker import Listener
    from litebroker_rq.client import ConnectionPool

__all__ = ["SQLiteFileConnection", "commands"]

# What a blocked client does not hear of, it sees after so long: a lease that lapsed, a lost wake-up, a dead worker.
_LOOK_S = 1.0

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
            check(args)
        try:
            added = None if watched else adding.add(self._db, queued)
            return horses.run_together(self._db, queued, watched) if added is None else added
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
        elif name in BLOCKING:
            self._replies.append(self._blocking(args))
        elif name == b"XREAD":
            self._replies.append(self._read_streams(args))
        else:
            self._replies.append(horses.run(self._db, args))

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
        self._replies.append(horses.run_together(self._db, queued or [], watched))

    def _discard(self, _: list[bytes]) -> None:
        self._queued = self._refused = None
        self._unwatch([])

    def _watch(self, keys: list[bytes]) -> None:
        for key, version in zip(keys, horses.versions(self._db, keys), strict=True):
            self._watched.setdefault(key, version)
        self._replies.append(OK)

    def _unwatch(self, _: list[bytes]) -> None:
        self._watched.clear()
        self._replies.append(OK)

    def _run_pipeline(self, queued: list[list[bytes]]) -> list[Reply]:
        replies: list[Reply] = [OK]
        for args in queued:
            try:
                check(args)
            except ResponseError as error:
                replies.append(error)
            else:
                replies.append(_QUEUED)
        watched, self._watched = self._watched, {}
        if any(isinstance(reply, Exception) for reply in replies):
            replies.append(_exec_abort())
        else:
            replies.append(horses.run_together(self._db, queued, watched))
        return replies

    def _queue(self, args: list[bytes]) -> Reply:
        try:
            check(args)
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

    # Waiting

    def _blocking(self, args: list[bytes]) -> Reply:
        check(args)
        timeout_s = to_float(args[-1])
        keys = args[1:-1] if args[0] in {b"BLPOP", b"BRPOP"} else args[1:2]
        queues = [key.decode() for key in keys if is_queue(key)]
        reply = horses.run(self._db, args)
        if reply is not None:
            return reply
        self._db.write_heartbeats()
        return self._wait(lambda: horses.run(self._db, args), timeout_s, queues, [], worker=bool(queues))

    def _read_streams(self, args: list[bytes]) -> Reply:
        block_ms, _, keys, after = streams.read_arguments(args[1:])
        if b"$" in after:
            with self._db.reading() as session:
                last = [b"%d-%d" % streams.last_id(session, key) for key in keys]
            after = [end if word == b"$" else word for word, end in zip(after, last, strict=True)]
            args = [*args[: len(args) - 2 * len(keys)], *keys, *after]
        reply = horses.run(self._db, args)
        if reply is not None or block_ms is None:
            return reply
        self._db.write_heartbeats()
        topics = [streams.topic(key) for key in keys]
        return self._wait(lambda: horses.run(self._db, args), block_ms / 1000, [], topics, worker=False)

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


def _decoded(reply: Any, decode: Callable[[Any], Any]) -> Any:
    if isinstance(reply, list):
        return [_decoded(item, decode) for item in reply]
    return decode(bytes(reply)) if isinstance(reply, bytes) else reply

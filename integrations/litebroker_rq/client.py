"""The client: redis-py's own, on a pool whose connections answer from the file."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import threading
from typing import Any, cast

import redis

from litebroker_rq.connection import SQLiteFileConnection
from litebroker_rq.database import join, split

_MAX_CONNECTIONS = 2**31

# Without redis-py 8's look, in each call, for an argument that it has deprecated: longer than the call.
_hset: Any = inspect.unwrap(redis.client.Pipeline.hset)

# How many forks lie between the first process and this one: cheaper to compare than to ask for the process' number.
_generation = 0


def _count_fork() -> None:
    global _generation  # noqa: PLW0603 - of the process
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)

# Until release 5.3 redis-py's own pools, such as RQ's scheduler makes of our connections, want to be told the command.
_named = inspect.signature(redis.ConnectionPool.get_connection).parameters["command_name"]
_ANY_COMMAND: tuple[str, ...] = ("_",) if _named.default is inspect.Parameter.empty else ()


class ConnectionPool(redis.ConnectionPool):
    """A pool of connections to a file.

    RQ makes the same connection again in other processes and other pools: from the pool's `connection_kwargs`, copied,
    pickled, or written as source code (`redis.Redis(**kwargs)`, in the child of a `SpawnWorker`). So they hold the pool
    itself, as the argument that `redis.Redis` and our connections both take, and a pool is copied as its URL.

    Attributes:
        database_url: ``sqlite:///`` and an absolute path, with the options.
    """

    def __init__(self, database_url: str, **connection_kwargs: Any) -> None:
        self.database_url = join(*split(database_url))
        connection_kwargs.setdefault("protocol", 2)
        connection_kwargs.pop("connection_class", None)
        max_connections = connection_kwargs.pop("max_connections", None) or _MAX_CONNECTIONS
        super().__init__(connection_class=SQLiteFileConnection, max_connections=max_connections, **connection_kwargs)
        self.connection_kwargs["connection_pool"] = self
        self.connection_kwargs.pop("himport_registry", None)  # redis-py 8 puts it there, and `redis.Redis` refuses it

    def reset(self) -> None:
        # After a fork another thread of the parent may have held the lock, and redis-py 8 waits for it for ever.
        self._lock = threading.RLock()
        super().reset()
        self._generation = _generation

    # redis-py's, without its metrics, and without a look whether the server still answers.

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        if self._generation != _generation:
            self._checkpid()
        with self._lock:
            connection: Any = (
                self._available_connections.pop() if self._available_connections else self.make_connection()
            )
            self._in_use_connections.add(connection)
        try:
            connection.connect()
            connection.discard_replies()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: Any) -> None:
        if self._generation != _generation:
            self._checkpid()
        with self._lock:
            if connection in self._in_use_connections:
                self._in_use_connections.remove(connection)
                if connection.pid == self.pid:
                    self._available_connections.append(connection)

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> ConnectionPool:
        return cls(url, **kwargs)

    def __repr__(self) -> str:
        return f"__import__('litebroker_rq').pool({self.database_url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return pool, (self.database_url,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConnectionPool) and other.database_url == self.database_url

    def __hash__(self) -> int:
        return hash(self.database_url)


class Pipeline(redis.client.Pipeline):
    """redis-py's pipeline, but for the way to our connection: nothing is packed, and there is one answer."""

    hset = _hset

    def _execute_transaction(self, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:  # noqa: FBT001
        if not isinstance(connection, SQLiteFileConnection):
            done: list[Any] = super()._execute_transaction(connection, commands, raise_on_error)
            return done
        try:
            replies = connection.transact([args for args, _ in commands])
        finally:
            self.watching = False
        if replies is None:
            message = "Watched variable changed."
            raise redis.WatchError(message)
        decode, callbacks = connection.decoder, self.response_callbacks
        answers = []
        for reply, (args, options) in zip(replies, commands, strict=True):
            answer: Any = reply
            if isinstance(reply, Exception):
                if raise_on_error:
                    self.raise_first_error(commands, replies)  # type: ignore[no-untyped-call]
            else:
                if decode is not None:
                    answer = decode(reply)
                callback = callbacks.get(args[0])
                if callback is not None:
                    options.pop("keys", None)
                    answer = callback(answer, **options)
            answers.append(answer)
        return answers


_pools: dict[str, ConnectionPool] = {}


def pool(url: str) -> ConnectionPool:
    """This process' own pool for a URL."""
    found = _pools.get(url)
    if found is None:
        found = _pools[url] = ConnectionPool(url)
    return found


class SQLiteConnection(redis.Redis):
    """What RQ takes as its connection: a `redis.Redis` whose server is a SQLite file.

        $ rq worker --connection-class litebroker_rq.SQLiteConnection --url sqlite:///jobs.db high default

    Args:
        url: ``sqlite:///jobs.db``, or a path. Options: ``lease``, seconds that a worker may hold a job that it has
            not started yet (60); and those of every litebroker URL, such as ``durability=relaxed``.
        connection_pool: The pool, instead of a URL.
        kwargs: Arguments of the connections, such as ``decode_responses``.
    """

    def __init__(
        self, url: str | None = None, *, connection_pool: redis.ConnectionPool | None = None, **kwargs: Any
    ) -> None:
        if connection_pool is None:
            if url is None:
                message = "SQLiteConnection needs a URL: --url sqlite:///jobs.db, or RQ_REDIS_URL in the environment"
                raise ValueError(message)
            connection_pool = ConnectionPool(url, **kwargs)
        super().__init__(connection_pool=connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        # As redis-py's, without packing, metrics and reconnecting: all of it a matter of sockets.
        connection = self.connection or self.connection_pool.get_connection(*_ANY_COMMAND)
        if not isinstance(connection, SQLiteFileConnection):
            if self.connection is None:
                self.connection_pool.release(connection)
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        decode = None if options.pop("NEVER_DECODE", False) else connection.decoder
        try:
            reply: Any = connection.answer(args)
        except redis.ResponseError:
            if "EMPTY_RESPONSE" in options:
                return options["EMPTY_RESPONSE"]
            raise
        finally:
            if self.connection is None:
                self.connection_pool.release(connection)
        if decode is not None:
            reply = decode(reply)
        options.pop("EMPTY_RESPONSE", None)
        options.pop("keys", None)
        callback = self.response_callbacks.get(args[0])
        return reply if callback is None else callback(reply, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:  # noqa: FBT001, FBT002
        return Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> SQLiteConnection:
        kwargs.pop("single_connection_client", None)
        kwargs.pop("auto_close_connection_pool", None)
        return cls(url, **kwargs)


def connect(
    path: str | os.PathLike[str], *, durability: str | None = None, lease: float | None = None, **kwargs: Any
) -> SQLiteConnection:
    """A connection to a file, for ``connection=`` everywhere in RQ. It is opened at the first command.

    Args:
        path: The database file, or a ``sqlite:///`` URL.
        durability: "relaxed", "durable" or "full": what a power cut may take.
        lease: Seconds that a worker may hold a job that it has not started yet.
        kwargs: Arguments of the connections, such as ``decode_responses``.
    """
    location, options = split(os.fspath(path))
    if durability is not None:
        options["durability"] = durability
    if lease is not None:
        options["lease"] = str(lease)
    return SQLiteConnection(join(location, options), **kwargs)


def install() -> None:
    """Teach redis-py the scheme ``sqlite:///``, for tools that take nothing but a URL.

    `redis.Redis.from_url` and `redis.ConnectionPool.from_url` then open a file where the URL says so, and all else as
    ever; so does `redis_sentinel_url.connect`, which rq-dashboard uses, if it is there. It may be called twice, and has
    to be called before the tool is imported. ``python -m litebroker_rq MODULE ...`` does so and runs the module.
    """
    function: Any = getattr(redis.ConnectionPool.from_url, "__func__")  # noqa: B009 - of the class method
    if getattr(function, "litebroker_rq", False):
        return

    def from_url(cls: Any, url: str, **kwargs: Any) -> Any:
        return ConnectionPool(url, **kwargs) if url.startswith("sqlite:") else function(cls, url, **kwargs)

    setattr(from_url, "litebroker_rq", True)  # noqa: B010 - so that a second call sees it
    setattr(redis.ConnectionPool, "from_url", classmethod(cast("Any", from_url)))  # noqa: B010 - mypy knows its old signature
    with contextlib.suppress(ImportError):
        sentinel: Any = importlib.import_module("redis_sentinel_url")
        other_connect = sentinel.connect

        def connect_by_url(url: str, *args: Any, **kwargs: Any) -> Any:
            if url.startswith("sqlite:"):
                return None, SQLiteConnection(url)
            return other_connect(url, *args, **kwargs)

        sentinel.connect = connect_by_url


__all__ = ["ConnectionPool", "SQLiteConnection", "connect", "install", "pool"]

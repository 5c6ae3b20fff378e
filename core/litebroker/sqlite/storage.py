"""`SQLiteStorage`: the contract on one SQLite file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from litebroker.clock import Clock, SystemClock
from litebroker.jobs import JobRecord
from litebroker.sqlite import recovery, schema
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, Params, Row, drivers_share_sqlite, wrap
from litebroker.sqlite.copying import CopyVerbs
from litebroker.sqlite.engine import Engine
from litebroker.sqlite.listener import SQLiteListener
from litebroker.sqlite.location import MEMORY, Durability, Options, parse
from litebroker.sqlite.schedules import ScheduleVerbs
from litebroker.sqlite.session import BoundSession
from litebroker.sqlite.standing import StandingVerbs
from litebroker.sqlite.upkeep import Space, vacuum
from litebroker.sqlite.values import ValueVerbs
from litebroker.storage import Listener, Storage


class _Verbs(CopyVerbs, ScheduleVerbs, ValueVerbs, StandingVerbs):
    """All verbs, and what is the same on either connection."""

    _callbacks: list[Callable[[JobRecord], None]]

    @property
    def clock(self) -> Clock:
        return self._engine.clock

    @property
    def path(self) -> str | None:
        """The database file; None for one in memory."""
        return self._engine.path

    def listener(self, queues: Sequence[str] = (), topics: Sequence[str] = ()) -> Listener:
        if self._engine.path is not None and not self._engine.is_open:
            self._engine.open()
        return SQLiteListener(self._engine, self._waiting, queues, topics)

    def _waiting(self, queue: str) -> list[Row]:
        queue_id = self._queue(queue)
        return [] if queue_id is None else self._read(lambda db: db.rows(sql.WAITING, {"queue": queue_id}))

    def is_awaited(self, queue: str) -> bool | None:
        return self._engine.wakeups.is_awaited(queue)

    def notify(self, topic: str) -> None:
        tx = self._engine.current
        if tx is not None:
            tx.notify(topic)
        else:
            self._engine.wakeups.notify(topic)

    def notify_queue(self, queue: str, jobs: int = 1) -> None:
        tx = self._engine.current
        if tx is not None:
            tx.wake(queue, jobs)
        else:
            self._engine.wakeups.notify_queue(queue, jobs)

    def on_lapsed(self, callback: Callable[[JobRecord], None]) -> None:
        self._engine.callbacks.append(callback)
        self._callbacks.append(callback)

    def _forget_callbacks(self) -> None:
        """The engine may live on for others."""
        for callback in self._callbacks:
            with contextlib.suppress(ValueError):
                self._engine.callbacks.remove(callback)
        self._callbacks.clear()

    def bind(self, connection: object) -> Storage:
        wrapped = wrap(connection)
        path, mine = _main_file(wrapped), self._engine.path
        if path is None or mine is None or os.path.realpath(path) != os.path.realpath(mine):
            msg = (
                f"the connection is to {path or 'a database in memory'}, and this storage to"
                f" {mine or 'another database in memory'}: connect to the same file, so that one commit covers both"
            )
            raise ValueError(msg)
        if wrapped.driver != self._engine.driver and not drivers_share_sqlite():
            msg = (
                f"the connection is {wrapped.driver}'s, and this storage has driver={self._engine.driver!r}:"
                " use the same; two copies of SQLite in one process drop each other's locks"
            )
            raise ValueError(msg)
        return BoundStorage(self._engine, self._durability, wrapped, owned=False)


class SQLiteStorage(_Verbs):
    """Jobs, values and schedules in one SQLite file, for any number of processes and threads.

    It opens the file at the first operation, so it can be made at import time and carried through a fork. Beside
    ``jobs.db`` lies the folder ``jobs.db-litebroker`` with locks and wake-ups; it may be deleted when nothing runs.

    Args:
        where: A path, a URL such as ``sqlite:///jobs.db?durability=relaxed``, or ":memory:" for a database that only
            this object knows.
        clock: Where it takes the time from.
        options: The fields of `Options`; they go before those in the URL.

    Raises:
        TypeError: There is no such option.
        ValueError: The URL, or an option's value, is not understood.
    """

    def __init__(self, where: str | os.PathLike[str], *, clock: Clock | None = None, **options: Any) -> None:
        path, found = parse(where)
        chosen = _options({**found, **options})
        super().__init__(_new_engine(path, chosen, clock or SystemClock()), chosen.durability)
        self._open = True
        self._callbacks = []

    @classmethod
    def on(cls, engine: Engine, options: Options) -> SQLiteStorage:
        """A handle on an engine that others use too."""
        storage = cls.__new__(cls)
        super().__init__(storage, engine, options.durability)
        storage._open = True  # noqa: SLF001 - it is of this class
        storage._callbacks = []  # noqa: SLF001
        return storage

    @property
    def location(self) -> str:
        path = self._engine.path
        return MEMORY if path is None else os.path.abspath(path)

    @property
    def transactions(self) -> int:
        """How many write transactions this process has made on the file."""
        return self._engine.transactions

    def open(self) -> None:
        """Open the file now, and make or migrate its tables, instead of at the first operation.

        Raises:
            StorageError: Any of its kind: each says what is wrong with the file.
        """
        self._engine.open()

    def stay_open_at_fork(self) -> bool:
        """Leave the file open in this process when it next forks, instead of closing and opening it again.

        For a parent that does its child's work on the file meanwhile, such as the worker of a work horse. The child
        may still open the file by itself. To be called in a hook of `os.register_at_fork`, before each such fork.

        Returns:
            Whether it will: not outside Linux, nor while this thread is in a transaction, nor when it is not open.
        """
        return self._engine.stay_open_at_fork()

    @contextlib.contextmanager
    def transaction(self, *, durable: bool | None = None) -> Iterator[SQLiteStorage]:
        """As in `litebroker.storage.Storage`.

        Args:
            durable: Whether to wait for the disk at the end, whatever the durability; None leaves it to that and to the
                verbs inside.
        """
        if durable is None and self._durability == "full":
            durable = True
        with self._engine.transaction(durable=durable):
            yield self
        # Who claims in transactions, and is never idle, looks for dead processes here.
        if self._engine.registered and self._engine.current is None:
            recovery.recover_dead(self._engine)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[SQLiteStorage]:
        """All that this thread reads in the ``with`` block is of one moment. Keep it short: it pins the WAL."""
        with self._engine.snapshot():
            yield self

    def execute(self, statement: str, params: Params = ()) -> list[Row]:
        """Run one statement of the caller's own, for adapters with tables of their own; all its rows.

        Inside ``with storage.transaction():`` it is part of it. Outside it must only read.
        """
        tx = self._engine.current
        if tx is not None:
            size = 0
            # Whether it is a list is asked first: to ask whether it is a Mapping takes as long as all the rest.
            for value in (
                params if isinstance(params, (tuple, list)) or not isinstance(params, Mapping) else params.values()
            ):
                if isinstance(value, (bytes, str)):
                    size += len(value)
            tx.pages += 1
            tx.carries(size)
            return tx.db.rows(statement, params)
        return self._engine.read(lambda db: db.rows(statement, params))

    def install(self, component: str, migrations: Sequence[str]) -> None:
        """Bring an adapter's own tables up to date: the scripts beyond those that the file has had, in order.

        Args:
            component: The adapter's name; its tables begin with ``litebroker_<component>_``.
            migrations: Every script so far. One that was released is never changed.

        Raises:
            SchemaTooNewError: A newer version of the adapter made them.
        """
        path = self._engine.path
        if self._engine.read(lambda db: schema.is_installed(db, component, migrations)):
            return
        with self._engine.transaction(durable=True) as tx:
            schema.install(tx.db, component, migrations, path)

    def components(self) -> list[str]:
        """The adapters that have tables of their own in the file, by the names that they gave to `install`."""
        rows = self._engine.read(lambda db: db.rows(sql.COMPONENTS))
        return [key.partition(":")[2] for key, _version in rows if ":" in key]

    def vacuum(
        self,
        *,
        full: bool = False,
        incremental: bool = False,
        on_bite: Callable[[int, int], object] = lambda _left, _total: None,
    ) -> tuple[Space, Space]:
        """As `litebroker.sqlite.upkeep.vacuum`."""
        return vacuum(self._engine, full=full, incremental=incremental, on_bite=on_bite)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._forget_callbacks()
            engine = self._engine
            if not _let_go(engine):
                # Others go on with it; this handle is over all the same.
                self._engine = _closed(engine)


class BoundStorage(BoundSession, _Verbs):
    """A storage on the caller's own connection.

    Args:
        owned: The engine was made for this object, and is let go of with it.
    """

    def __init__(self, engine: Engine, durability: Durability, connection: Connection, *, owned: bool) -> None:
        super().__init__(engine, durability, connection)
        self._owned = owned
        self._callbacks = []
        # The engine's own connection cannot make what is missing while the caller holds the write lock.
        if engine.path is not None and not connection.in_transaction:
            engine.open()
        else:
            shared = engine.path is None or engine.shared
            schema.migrate(connection, schema.check(connection, engine.path, shared=shared))
            engine.use_anchor_in(connection)

    @property
    def location(self) -> str:
        return MEMORY if self._engine.path is None else os.path.abspath(self._engine.path)

    def bind(self, connection: object) -> Storage:
        # A database in memory has no name by which another object could be told to be the same one.
        return self if self._connection.is_on(connection) else super().bind(connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[BoundStorage]:
        """A part of the caller's transaction that happens whole or not at all; the commit remains the caller's."""
        self._connection.begin_implicitly()
        self._connection.rows("savepoint litebroker_bound")
        try:
            yield self
        except BaseException:
            if self._connection.in_transaction:
                self._connection.rows("rollback to litebroker_bound")
                self._connection.rows("release litebroker_bound")
            raise
        self._connection.rows("release litebroker_bound")

    def listener(self, queues: Sequence[str] = (), topics: Sequence[str] = ()) -> Listener:  # noqa: ARG002
        msg = "to wait takes a connection of its own: open the storage by its path, and listen there"
        raise ValueError(msg)

    def close(self) -> None:
        """Leaves the connection, which is the caller's, as it is."""
        self._forget_callbacks()
        if self._owned:
            self._owned = False
            _let_go(self._engine)


@overload
def open_storage(
    where: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    **options: Any,
) -> SQLiteStorage: ...


@overload
def open_storage(where: object, *, clock: Clock | None = None, **options: Any) -> Storage: ...


def open_storage(where: object, *, clock: Clock | None = None, **options: Any) -> Storage:
    """A storage at a path, a URL, or on a `sqlite3` or apsw connection of the caller's own.

    What is opened on one file with the same options shares its connection, within a process; each is closed by itself.

    Args:
        options: The fields of `Options`.

    Raises:
        TypeError: ``where`` is something else, or there is no such option.
        ValueError: The URL, or an option's value, is not understood.
    """
    if isinstance(where, (str, os.PathLike)):
        path, found = parse(where)
        chosen = _options({**found, **options})
        if path == MEMORY:
            return SQLiteStorage(path, clock=clock, **options)
        return SQLiteStorage.on(_shared_engine(path, chosen, clock), chosen)
    if where is None:
        msg = "where is None: give a path, a URL such as sqlite:///jobs.db, or a connection"
        raise TypeError(msg)
    connection = wrap(where)
    chosen = _options(options)
    file = _main_file(connection)
    if file is None:
        engine = _new_engine(MEMORY, chosen, clock or SystemClock())
    else:
        mine = {**_fields(chosen), "shared": True, "driver": connection.driver}
        engine = _shared_engine(file, Options(**mine), clock)
    return BoundStorage(engine, chosen.durability, connection, owned=True)


def _main_file(connection: Connection) -> str | None:
    """The file that a connection is to; None when it is in memory."""
    for _number, name, file in connection.rows("pragma database_list"):
        if name == "main":
            return str(file) or None
    return None


def _options(found: dict[str, Any]) -> Options:
    unknown = sorted(set(found) - set(_fields(Options())))
    if unknown:
        known = ", ".join(_fields(Options()))
        msg = f"there is no option {unknown[0]!r}; there are {known}"
        raise TypeError(msg)
    return Options(**found)


def _fields(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}


def _new_engine(path: str, options: Options, clock: Clock) -> Engine:
    return Engine(
        # Absolute, and without links: SQLite's own files lie beside what a link leads to.
        None if path == MEMORY else os.path.realpath(path),
        driver=options.driver,
        busy_timeout_ms=round(options.busy_timeout * 1000),
        clock=clock,
        shared=options.shared,
        network=options.network,
    )


_Key = tuple[str, str, float, bool, bool, int]
_shared: dict[_Key, tuple[Engine, int]] = {}
_shared_lock = threading.RLock()  # re-entrant: a signal handler may open and close, too


def _shared_engine(path: str, options: Options, clock: Clock | None) -> Engine:
    """The engine of this file in this process; made by the first, closed by the last."""
    real = os.path.realpath(path)
    key = (real, options.driver, options.busy_timeout, options.shared, options.network, id(clock) if clock else 0)
    with _shared_lock:
        engine, users = _shared.get(key, (None, 0))
        if engine is None:
            engine = _new_engine(real, options, clock or SystemClock())
        _shared[key] = (engine, users + 1)
        return engine


def _let_go(engine: Engine) -> bool:
    """Whether that closed it: who uses it last, does."""
    with _shared_lock:
        for key, (shared, users) in list(_shared.items()):
            if shared is engine:
                if users > 1:
                    _shared[key] = (engine, users - 1)
                    return False
                del _shared[key]
    engine.close(orderly=recovery.give_back(engine))
    return True


def _closed(engine: Engine) -> Engine:
    """An engine that answers with `StorageClosedError` only."""
    closed = Engine(engine.path, driver=engine.driver, busy_timeout_ms=0, clock=engine.clock, shared=True, network=True)
    closed.transactions = engine.transactions
    closed.close(orderly=True)
    return closed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_shared_lock.acquire, after_in_parent=_shared_lock.release, after_in_child=_shared_lock.release
    )

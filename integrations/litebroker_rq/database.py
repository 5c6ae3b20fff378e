"""One file in one process, as its Redis connections share it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from litebroker import SQLiteStorage, open_storage
from litebroker_rq.heartbeats import Heartbeats, Kept
from litebroker_rq.keyspace import Session, TooBriefError
from litebroker_rq.leases import Leases
from litebroker_rq.scripting import Scripts

if TYPE_CHECKING:
    from litebroker_rq.horses import Line

_SCHEME = "sqlite:///"
_DEFAULT_LEASE_S = 60.0
_PURGE_EVERY_MS = 1000
_PURGE_LIMIT = 100


class Database:
    """The storage, and what a process knows beside it.

    Attributes:
        line: In a work horse, the way to its worker, which runs its commands (horses.py); otherwise None.
        leases: The claims of this file's RQ queues.
        scripts: The Lua scripts that this process was given.
        heartbeats: What of this process' worker is kept back for the next write.
        pops: How many pops in a row have found something.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        location, options = split(url)
        lease_ms = int(float(options.pop("lease", _DEFAULT_LEASE_S)) * 1000)
        if lease_ms <= 0:
            message = f"lease={lease_ms / 1000} in {url}: it takes more than 0 seconds"
            raise ValueError(message)
        self._relaxed = options.get("durability") == "relaxed"
        self.line: Line | None = None
        self._storage: SQLiteStorage = open_storage(join(location, options))
        self.storage.install("litebroker_rq", _migrations())
        self.leases = Leases(lease_ms)
        self.scripts = Scripts()
        self.heartbeats = Heartbeats()
        self.pops = 0
        self._local = threading.local()
        self._known_queues: set[str] = set()
        self._known_keys: set[bytes] = set()
        self._new_queues: list[str] = []
        self._purge_at_ms = 0

    @property
    def storage(self) -> SQLiteStorage:
        """The engine on the file. A work horse opens the file for it."""
        if self.line is not None:
            self.leave_worker()
        return self._storage

    def now_ms(self) -> int:
        """The wall clock."""
        return self._storage.clock.now_ms()

    def leave_worker(self) -> None:
        """In a work horse: run its commands here from now on. What its worker keeps back is written."""
        line = self.line
        if line is not None:
            line.hang_up()
            self.line = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        """One moment of the file; or the transaction that this thread has open."""
        session: Session | None = getattr(self._local, "session", None)
        if session is not None:
            yield session
            return
        with self.storage.snapshot() as transaction:
            yield Session(self, transaction, writing=False)

    def brief(self) -> Session:
        """A reading session of one statement, which is of one moment by itself; the next raises `TooBriefError`.

        No write transaction may be open.
        """
        return Session(self, _OneStatement(self.storage), writing=False)

    @contextlib.contextmanager
    def writing(self, *, keys: Sequence[bytes] = (), lasting: bool = False, popping: bool = False) -> Iterator[Session]:
        """A write transaction, or the one that this thread has open.

        Args:
            keys: What it is going to look at.
            lasting: Its loss in a power cut would be a loss, so that it has to be on disk when this returns; unless the
                file was opened as "relaxed". What adds jobs to a queue lasts by itself.
            popping: It only takes a job, and more is written when that starts, or nothing came: what is kept back can
                wait for that.
        """
        session: Session | None = getattr(self._local, "session", None)
        if session is not None:
            yield session
            if session.ended:  # this is a signal handler, on top of its end
                session.end()
            return
        kept = Kept() if popping and not self.heartbeats.overdue else self.heartbeats.take()
        try:
            with self.storage.transaction(durable=True if lasting and not self._relaxed else None) as transaction:
                session = Session(self, transaction, writing=True)
                self._local.session = session
                try:
                    session.prefetch([*kept.keys(), *keys])
                    kept.write(session, self.heartbeats.key)
                    yield session
                    self._purge(session)
                    session.end()
                finally:
                    self._local.session = None
        except BaseException:
            self.heartbeats.give_back(kept)
            raise
        if self._new_queues:
            # The storage remembers a queue's id when it is asked outside a transaction.
            while self._new_queues:
                self.storage.find(self._new_queues.pop(), ref="")

    def in_transaction(self) -> bool:
        """Whether this thread has a write transaction open."""
        return getattr(self._local, "session", None) is not None

    def is_purge_due(self, now_ms: int) -> bool:
        """Whether the next transaction of a session deletes what has expired."""
        return not self._purge_at_ms - _PURGE_EVERY_MS <= now_ms < self._purge_at_ms

    def _purge(self, session: Session) -> None:
        if self.is_purge_due(session.now_ms):
            self._purge_at_ms = session.now_ms + _PURGE_EVERY_MS
            session.purge_expired(_PURGE_LIMIT)

    def knows_queue(self, key: bytes) -> bool:
        """Whether the key is one that this process has pushed to."""
        return key in self._known_keys

    def know_queue(self, session: Session, name: str) -> None:
        """A queue of this name is RQ's: KEYS and FLUSHDB must find it."""
        if name not in self._known_queues:
            session.write("insert or ignore into litebroker_rq_queues (name) values (?)", name)
            self._known_queues.add(name)
            self._known_keys.add(name.encode())
            self._new_queues.append(name)

    def write_heartbeats(self) -> None:
        """Write now what is kept back."""
        if self.heartbeats.pending:
            with self.writing():
                pass

    def write_what_concerns(self, commands: list[list[bytes]]) -> None:
        """Write now what is kept back, if one of the commands is about it."""
        if self.heartbeats.pending and self.heartbeats.concern(commands):
            self.write_heartbeats()


class _OneStatement:
    """What a brief session runs on."""

    def __init__(self, storage: SQLiteStorage) -> None:
        self._storage = storage
        self._used = False

    def execute(self, sql: str, params: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        if self._used:
            raise TooBriefError
        self._used = True
        return self._storage.execute(sql, params)


_databases: dict[tuple[str, str], Database] = {}
_databases_lock = threading.RLock()


def opened(url: str) -> Database:
    """This process' database of the URL. All connections of a process to a file share one."""
    location, options = split(url)
    key = (os.path.realpath(location), urlencode(sorted(options.items())))
    database = _databases.get(key)
    if database is None:
        with _databases_lock:
            database = _databases.get(key)
            if database is None:
                database = _databases[key] = Database(url)
    return database


def all_opened() -> list[Database]:
    """This process' databases, of all URLs."""
    return list(_databases.values())


def forget_parent() -> None:
    """In a child process, after a fork: what threads of the parent were at does not concern it."""
    global _databases_lock  # noqa: PLW0603 - another thread may have held it
    _databases_lock = threading.RLock()
    for database in _databases.values():
        database.heartbeats.start_anew()


def split(url: str) -> tuple[str, dict[str, str]]:
    """The path and the options of ``sqlite:///jobs.db?lease=60`` (four slashes: an absolute path), or of a path.

    Raises:
        ValueError: It is a URL of another scheme, or names no file.
    """
    location, query = url, ""
    if url.startswith(_SCHEME):
        location, _, query = url[len(_SCHEME) :].partition("?")
        location = unquote(location)
    elif "://" in url or url.startswith("sqlite:"):
        message = f"{url!r}: litebroker_rq takes a path, or sqlite:///jobs.db (sqlite:////srv/jobs.db when absolute)"
        raise ValueError(message)
    if not location or location == ":memory:":
        message = f"{url!r} names no file that workers could share: sqlite:///jobs.db"
        raise ValueError(message)
    return location, dict(parse_qsl(query))


def join(location: str, options: dict[str, str]) -> str:
    """The URL of a path and options. The path becomes absolute, so that it holds in any folder."""
    query = "?" + urlencode(options) if options else ""
    return _SCHEME + quote(os.path.abspath(location)) + query  # noqa: PTH100 - a link may be pointed elsewhere later


def _migrations() -> Sequence[str]:
    folder = resources.files("litebroker_rq") / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(folder / name).read_text(encoding="utf-8") for name in names]

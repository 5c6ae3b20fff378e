"""One way to talk to SQLite, whichever driver lies beneath: the standard library's `sqlite3`, or apsw.

Both are used in autocommit mode, and every statement is fetched to its end at once, so that no read transaction
stays open. What the drivers call their errors becomes ours here and nowhere else.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from litebroker.errors import (
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ForeignDatabaseError,
    StorageError,
)

Params = Sequence[Any] | Mapping[str, Any]
Row = tuple[Any, ...]

_STATEMENT_CACHE = 256
_LEGACY = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", -1)

# RETURNING came with 3.35 (sqlite.org/lang_returning.html), strict tables with 3.37 (sqlite.org/stricttables.html).
MINIMUM_VERSION = (3, 37, 0)

# sqlite.org/rescode.html; sqlite3 names them only since Python 3.11.
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT = 5, 6, 8, 10, 11
_FULL, _CANTOPEN, _PROTOCOL, _CONSTRAINT, _NOTADB = 13, 14, 15, 19, 26


class UniqueError(Exception):
    """A row with this key is there already. Never leaves the storage."""


class Connection(Protocol):
    """A connection of either driver.

    Every method raises `StorageError`'s subclasses, or `UniqueError`.
    """

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        """Run one statement; all its rows."""

    def change(self, sql: str, params: Params = ()) -> int:
        """Run one insert, update or delete without RETURNING; how many rows it touched."""

    def many(self, sql: str, rows: Iterable[Params]) -> None:
        """Run one statement for each of the rows. Only inside a transaction."""

    @property
    def driver(self) -> str:
        """As in `connect`."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    @property
    def version(self) -> tuple[int, ...]:
        """The SQLite library's."""

    def begin_implicitly(self) -> None:
        """Begin a transaction where the connection's owner expects one to begin by itself, before a row changes."""

    def copy_to(self, target: Connection, *, pages: int, on_step: Callable[[int, int], object]) -> None:
        """Copy the whole database into another connection's of the same driver (sqlite.org/backup.html).

        It goes in steps of so many pages. What others commit between two steps lets it begin again, unless a read
        transaction is open here.

        Args:
            on_step: Is told after each step how many pages are left, and how many there are.
        """

    def interrupt(self) -> None:
        """End the statement that runs, from another thread: it raises `StorageError` there. It may take a while."""

    def leave_wal(self) -> None:
        """Close it without a checkpoint, though it be the last: soon after a fork it is opened again.

        That saves two syncs and a new file. The standard library's driver can do it since Python 3.12.
        """

    def is_on(self, connection: object) -> bool:
        """Whether it is this driver's connection that lies beneath."""

    def close(self) -> None:
        """Close it. A transaction that is open is rolled back."""


def connect(path: str, driver: str, *, busy_timeout_ms: int, read_only: bool = False) -> Connection:
    """Open a connection of our own in autocommit mode, with the settings that do not touch the file.

    Args:
        read_only: It cannot write, nor does it copy the WAL back when it is the last one to close. The file must exist.

    Raises:
        DatabaseUnavailableError: The file cannot be opened, or the SQLite library is too old.
        ValueError: There is no such driver.
    """
    if driver == "sqlite3":
        connection: Connection = _open_stdlib(path, busy_timeout_ms, read_only=read_only)
    elif driver == "apsw":
        connection = _open_apsw(path, busy_timeout_ms, read_only=read_only)
    else:
        msg = f"driver={driver!r}: use 'sqlite3' (the standard library's) or 'apsw'"
        raise ValueError(msg)
    try:
        _set_up(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: Connection, path: str) -> None:
    if connection.version < MINIMUM_VERSION:
        found = ".".join(map(str, connection.version))
        msg = (
            f"this Python's SQLite is {found}, and litebroker needs 3.37 or later:"
            " pip install 'litebroker[apsw]' brings a newer one; then open it with driver='apsw'"
        )
        raise DatabaseUnavailableError(msg, path=path)
    # With the default temp_store the ephemeral tables of a claim cost five times its own work; secure_delete, which
    # Debian compiles in, overwrites each deleted payload. Checkpoints are made in one place only (engine.py): on
    # SQLite before 3.51.3 one that meets a committing writer can corrupt the file (sqlite.org/wal.html#walresetbug).
    for pragma in (
        "temp_store = memory",
        "secure_delete = off",
        "synchronous = normal",
        "wal_autocheckpoint = 0",
        "journal_size_limit = 16777216",
        "cache_size = -8000",
        "foreign_keys = off",
        "recursive_triggers = off",
    ):
        connection.rows(f"pragma {pragma}")


def drivers_share_sqlite() -> bool:
    """Whether both drivers can be used on one file in one process.

    apsw usually brings an SQLite of its own. Two of them in one process do not know of each other's locks, and drop
    them (sqlite.org/howtocorrupt.html, section 2.2.1).
    """
    try:
        import apsw
    except ImportError:
        return True
    return not apsw.using_amalgamation


def wrap(connection: object) -> Connection:
    """The caller's own connection, with nothing of it changed.

    Raises:
        TypeError: It is not a connection of `sqlite3` or apsw.
    """
    if isinstance(connection, sqlite3.Connection):
        return _CallersStdlib(connection, None)
    if type(connection).__module__.partition(".")[0] == "apsw" and hasattr(connection, "cursor"):
        return _Apsw(connection, None)
    msg = f"a sqlite3.Connection or an apsw.Connection was expected, not {type(connection).__name__}"
    raise TypeError(msg)


class _Stdlib:
    """The standard library's driver."""

    __slots__ = ("_db", "_path")
    driver = "sqlite3"

    def __init__(self, db: sqlite3.Connection, path: str | None) -> None:
        self._db = db
        self._path = path

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        try:
            return _fetched(self._db.execute, sql, params)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    def change(self, sql: str, params: Params = ()) -> int:
        try:
            return self._db.execute(sql, params).rowcount
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    def many(self, sql: str, rows: Iterable[Params]) -> None:
        try:
            self._db.executemany(sql, rows)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    @property
    def version(self) -> tuple[int, ...]:
        return sqlite3.sqlite_version_info

    def begin_implicitly(self) -> None:
        """Nothing begins by itself on a connection in autocommit mode."""

    def copy_to(self, target: Connection, *, pages: int, on_step: Callable[[int, int], object]) -> None:
        assert isinstance(target, _Stdlib)  # noqa: S101 - of the same driver
        try:
            self._db.backup(
                target._db,  # noqa: SLF001 - of the same class
                pages=pages,
                progress=lambda _code, left, total: on_step(left, total),
            )
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    def interrupt(self) -> None:
        self._db.interrupt()

    def leave_wal(self) -> None:
        setconfig = getattr(self._db, "setconfig", None)
        if setconfig is not None:
            setconfig(getattr(sqlite3, "SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE"), True)  # noqa: B009 - 3.10 has none

    def is_on(self, connection: object) -> bool:
        return self._db is connection

    def close(self) -> None:
        self._db.close()


class _CallersStdlib(_Stdlib):
    """A connection whose owner may have changed how rows and texts come out."""

    __slots__ = ()

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        row_factory, text_factory = self._db.row_factory, self._db.text_factory
        self._db.row_factory, self._db.text_factory = None, str
        try:
            return super().rows(sql, params)
        finally:
            self._db.row_factory, self._db.text_factory = row_factory, text_factory

    def begin_implicitly(self) -> None:
        # The module does so before an INSERT, but not before a SAVEPOINT, whose release would then be the commit.
        db = self._db
        if db.isolation_level is None or db.in_transaction or getattr(db, "autocommit", _LEGACY) != _LEGACY:
            return
        try:
            db.execute(f"begin {db.isolation_level}")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error


class _Apsw:
    """The apsw driver."""

    __slots__ = ("_db", "_path")
    driver = "apsw"

    def __init__(self, db: Any, path: str | None) -> None:
        self._db = db
        self._path = path

    def _cursor(self) -> Any:
        cursor = self._db.cursor()
        if self._db.row_trace is not None:
            cursor.row_trace = _plain_row
        return cursor

    def rows(self, sql: str, params: Params = ()) -> list[Row]:
        import apsw

        try:
            rows = _fetched(self._cursor().execute, sql, params or None)
        except (apsw.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error
        return rows

    def change(self, sql: str, params: Params = ()) -> int:
        self.rows(sql, params)
        changes: int = self._db.changes()
        return changes

    def many(self, sql: str, rows: Iterable[Params]) -> None:
        import apsw

        try:
            self._cursor().executemany(sql, rows)
        except (apsw.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    @property
    def in_transaction(self) -> bool:
        return bool(self._db.in_transaction)

    def begin_implicitly(self) -> None:
        """Nothing begins by itself in apsw."""

    @property
    def version(self) -> tuple[int, ...]:
        import apsw

        return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))

    def copy_to(self, target: Connection, *, pages: int, on_step: Callable[[int, int], object]) -> None:
        import apsw

        assert isinstance(target, _Apsw)  # noqa: S101 - of the same driver
        try:
            with target._db.backup("main", self._db, "main") as backup:  # noqa: SLF001 - of the same class
                while not backup.done:
                    backup.step(pages)
                    on_step(backup.remaining, backup.page_count)
        except (apsw.Error, UnicodeDecodeError) as error:
            raise _translate(error, self._path) from error

    def interrupt(self) -> None:
        self._db.interrupt()

    def leave_wal(self) -> None:
        import apsw

        self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)

    def is_on(self, connection: object) -> bool:
        return self._db is connection

    def close(self) -> None:
        self._db.close()


def _fetched(execute: Callable[..., Iterable[Row]], sql: str, params: Params | None) -> list[Row]:
    """All rows of a statement.

    In one call that runs no Python code: a signal handler between its first row and its last would find a statement
    under way, beside which SQLite refuses to begin or to end a transaction (sqlite.org/lang_savepoint.html).
    """
    return list(itertools.chain.from_iterable(map(execute, (sql,), (params,))))


def _plain_row(_cursor: object, row: Row) -> Row:
    return row


def _open_stdlib(path: str, busy_timeout_ms: int, *, read_only: bool) -> _Stdlib:
    try:
        db = sqlite3.connect(
            f"file:{quote(path)}?mode=ro" if read_only else path,
            uri=read_only,
            timeout=busy_timeout_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_STATEMENT_CACHE,
        )
    except sqlite3.Error as error:
        raise _translate(error, path) from error
    return _Stdlib(db, path)


def _open_apsw(path: str, busy_timeout_ms: int, *, read_only: bool) -> _Apsw:
    try:
        import apsw
    except ImportError as error:
        msg = "driver='apsw' needs the package apsw: pip install 'litebroker[apsw]'"
        raise ModuleNotFoundError(msg, name="apsw") from error
    try:
        flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        db = apsw.Connection(path, flags=flags, statementcachesize=_STATEMENT_CACHE)
        db.set_busy_timeout(busy_timeout_ms)
    except apsw.Error as error:
        raise _translate(error, path) from error
    return _Apsw(db, path)


def _translate(error: Exception, path: str | None) -> Exception:  # noqa: PLR0911 - one for each kind of error
    """Our error for the driver's."""
    code = _result_code(error)
    text = str(error)
    where = path or "the database"
    if code == _CONSTRAINT:
        return UniqueError(text) if "UNIQUE" in text else StorageError(f"{where}: {text}", path=path)
    if code in {_BUSY, _LOCKED, _PROTOCOL}:
        if path is None:
            # On the caller's connection. SQLite fails a transaction at once that has read, and would write after
            # another has (sqlite.org/rescode.html#busy_snapshot); the others wait as long as the connection says.
            return DatabaseBusyError(
                f"your connection could not write ({text}): begin the transaction with BEGIN IMMEDIATE, since one that"
                " has read first cannot write once another has; and connect with a longer timeout"
            )
        return DatabaseBusyError(
            f"{where}: another connection holds the write lock ({text}): look for a transaction that was left open,"
            " or raise busy_timeout",
            path=path,
        )
    if code == _FULL:
        return DatabaseFullError(f"{where}: no space left ({text}): make room; nothing was lost", path=path)
    if code == _READONLY:
        return DatabaseReadOnlyError(
            f"{where}: it may not be written ({text}): check the rights on the file and on its folder", path=path
        )
    if code == _CORRUPT:
        return DatabaseCorruptError(
            f"{where}: SQLite found it damaged ({text}): restore a backup, or salvage it with the sqlite3 shell's"
            " .recover; it was left as it is",
            path=path,
        )
    if code == _NOTADB:
        return ForeignDatabaseError(f"{where}: this is not an SQLite database ({text}): give another path", path=path)
    if code == _CANTOPEN:
        return DatabaseUnavailableError(
            f"{where}: it cannot be opened ({text}): its folder must exist, and be searchable and writable", path=path
        )
    if code == _IOERR:
        return DatabaseUnavailableError(f"{where}: reading or writing failed ({text}): look at the disk", path=path)
    return StorageError(f"{where}: {type(error).__name__}: {text}", path=path)


# Python 3.10's sqlite3 gives no code; these are SQLite's own texts (sqlite3_errstr in its main.c).
_TEXTS = (
    ("database is locked", _BUSY),
    ("table is locked", _LOCKED),
    ("locking protocol", _PROTOCOL),
    ("database or disk is full", _FULL),
    ("attempt to write a readonly database", _READONLY),
    ("disk image is malformed", _CORRUPT),
    ("malformed database schema", _CORRUPT),
    ("Could not decode to UTF-8", _CORRUPT),  # Python's own
    ("file is not a database", _NOTADB),
    ("file is encrypted or is not a database", _NOTADB),
    ("unable to open database file", _CANTOPEN),
    ("disk I/O error", _IOERR),
    ("constraint failed", _CONSTRAINT),
)


def _result_code(error: Exception) -> int | None:
    if isinstance(error, UnicodeDecodeError):
        return _CORRUPT  # only text is written: it is in a damaged page, or in SQLite's message about one
    code = getattr(error, "sqlite_errorcode", None) or getattr(error, "extendedresult", None)
    if isinstance(code, int) and code:
        return code & 0xFF
    text = str(error)
    return next((known for start, known in _TEXTS if start in text), None)

"""What is in the file: found, made, migrated, or refused, before anything is written."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

from litebroker.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    ForeignDatabaseError,
    SchemaError,
    SchemaTooNewError,
)
from litebroker.sqlite.connection import Connection

_TABLES = "select name from sqlite_master where type = 'table' and name not like 'sqlite\\_%' escape '\\'"
_OBJECTS = (
    "select name, sql from sqlite_master where tbl_name like 'litebroker\\_%' escape '\\' and sql is not null"
    " and type in ('table', 'index')"
)
_VERSION = "select value from litebroker_meta where key = :key"
_SET_VERSION = (
    "insert into litebroker_meta(key, value) values(:key, :value) on conflict(key) do update set value = :value"
)
_CORE = "schema"

# Of a new file. A commit writes whole pages, and what most of them change is small: at 2 kB an add takes a fifth less
# time than at SQLite's default of 4 kB, a claim a tenth; payloads above 10 kB take a fifth more. All sizes work.
PAGE_BYTES = 2048


@lru_cache(maxsize=1)
def migrations() -> tuple[str, ...]:
    """The scripts of the core's schema, in order: the first makes version 1."""
    folder = resources.files("litebroker.sqlite") / "migrations"
    scripts = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return tuple(script.read_text(encoding="utf-8") for script in scripts)


def statements(script: str) -> list[str]:
    """The script's statements, one by one: neither driver's own way to run a script leaves a transaction open."""
    found: list[str] = []
    rest = ""
    for line in script.splitlines(keepends=True):
        rest += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(rest):
            found.append(rest.strip())
            rest = ""
    if rest.strip() and not all(line.lstrip().startswith("--") or not line.strip() for line in rest.splitlines()):
        msg = f"a migration ends in the middle of a statement: {rest.strip()[:80]!r}"
        raise ValueError(msg)
    return found


def version(db: Connection) -> int:
    """The schema version in the file; 0 when it has none of our tables."""
    if not db.rows("select 1 from sqlite_master where type = 'table' and name = 'litebroker_meta'"):
        return 0
    found = db.rows(_VERSION, {"key": _CORE})
    number = str(found[0][0]) if found else "0"
    if not number.isdecimal():
        raise SchemaError(f"the file says that its schema is {number!r}: something else changed it; restore a backup")
    return int(number)


def check(db: Connection, path: str | None, *, shared: bool) -> int:
    """Read what is in the file, and refuse what is not ours to write. Writes nothing.

    Returns:
        Its schema version: 0 for a new file.

    Raises:
        ForeignDatabaseError: It holds other tables and none of ours, and ``shared`` was not asked for.
        SchemaTooNewError: A newer version of this package made it.
        SchemaError: Our tables are there, and are not as their version says.
    """
    found = version(db)
    if found == 0:
        tables = [str(name) for (name,) in db.rows(_TABLES)]
        (application_id,) = db.rows("pragma application_id")[0]
        if (tables or application_id) and not shared:
            names = ", ".join(sorted(tables)[:5]) or f"application_id {application_id:#x}"
            msg = (
                f"{path}: this database belongs to some other application ({names}): give another path; or, if it"
                " is yours and the jobs shall live beside its tables, open it with shared=True"
                " (in a URL: ?shared=1)"
            )
            raise ForeignDatabaseError(msg, path=path)
        return 0
    known = len(migrations())
    if found > known:
        msg = (
            f"{path}: a newer litebroker made it (schema {found}, and this version knows {known}):"
            " upgrade litebroker here; the file was not touched"
        )
        raise SchemaTooNewError(msg, path=path)
    _check_shape(db, path, found)
    return found


def migrate(db: Connection, found: int) -> None:
    """Bring the schema up to date: each migration is one transaction. The caller holds the writer lock."""
    for number, script in enumerate(migrations()[found:], start=found + 1):
        _apply(db, script, key=_CORE, number=number)


def install(db: Connection, component: str, scripts: Sequence[str], path: str | None) -> None:
    """Bring an adapter's own tables up to date, likewise. Cheap when they are. Inside a transaction or not.

    Raises:
        SchemaTooNewError: A newer version of the adapter made them.
    """
    key = f"{_CORE}:{component}"
    rows = db.rows(_VERSION, {"key": key})
    found = int(rows[0][0]) if rows else 0
    if found > len(scripts):
        msg = f"{path}: a newer version of {component} made its tables: upgrade it here; the file was not touched"
        raise SchemaTooNewError(msg, path=path)
    for number, script in enumerate(scripts[found:], start=found + 1):
        _apply(db, script, key=key, number=number)


def is_installed(db: Connection, component: str, scripts: Sequence[str]) -> bool:
    """Whether an adapter's own tables are up to date."""
    return db.rows(_VERSION, {"key": f"{_CORE}:{component}"}) == [(str(len(scripts)),)]


def use_wal(db: Connection, path: str | None, *, busy_timeout_ms: int = 0) -> None:
    """Switch the file to write-ahead logging, which stays with it.

    Raises:
        DatabaseUnavailableError: It refuses, as it does on file systems without shared memory.
    """
    deadline = time.monotonic() + busy_timeout_ms / 1000
    mode = None
    while mode is None:
        try:
            db.rows(f"pragma page_size = {PAGE_BYTES}")  # without effect on a file that is there
            (mode,) = db.rows("pragma journal_mode = wal")[0]
        except DatabaseBusyError:  # SQLite itself does not wait here
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
    if mode not in {"wal", "memory"}:
        msg = f"{path}: it stays in journal mode {mode!r}, and litebroker needs 'wal': put it on a local disk"
        raise DatabaseUnavailableError(msg, path=path)


def _apply(db: Connection, script: str, *, key: str, number: int) -> None:
    outermost = not db.in_transaction
    if outermost:
        db.rows("begin immediate")
    try:
        for statement in statements(script):
            db.rows(statement)
        db.rows(_SET_VERSION, {"key": key, "value": str(number)})
        if outermost:
            db.rows("commit")
    except BaseException:
        if outermost and db.in_transaction:
            db.rows("rollback")
        raise


def _check_shape(db: Connection, path: str | None, number: int) -> None:
    expected = _shape(number)
    found = {str(name): _normal(str(sql)) for name, sql in db.rows(_OBJECTS)}
    wrong = sorted(name for name, sql in expected.items() if found.get(name) != sql)
    if wrong:
        what = "missing" if wrong[0] not in found else "not as this version made it"
        msg = (
            f"{path}: {wrong[0]} is {what}, though the file says schema {number}:"
            " something else changed it; restore a backup, or move the file away and start with a new one"
        )
        raise SchemaError(msg, path=path)


@lru_cache(maxsize=8)
def _shape(number: int) -> dict[str, str]:
    """What a file of this version holds, made afresh in memory."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for script in migrations()[:number]:
            db.executescript(script)
        return {str(name): _normal(str(sql)) for name, sql in db.execute(_OBJECTS)}
    finally:
        db.close()


def _normal(sql: str) -> str:
    return " ".join(sql.split())

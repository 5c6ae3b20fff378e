"""Jobs in the caller's own transaction: on connections as their owners have set them up."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from litebroker.errors import DatabaseBusyError, ForeignDatabaseError, GroupConflictError
from litebroker.jobs import JobSpec, State
from litebroker.schedules import ScheduleSpec
from litebroker.sqlite import BoundStorage, SQLiteStorage, open_storage
from litebroker.storage import ScheduleRecord, Storage

LIMIT = 20


def job(payload: bytes = b"{}", **options: Any) -> JobSpec:
    return JobSpec(queue="work", payload=payload, **options)


def upper(_cursor: object, row: Any) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(row)}


def legacy(level: str | None) -> Callable[[Path], Any]:
    return lambda path: sqlite3.connect(path, isolation_level=level, timeout=0.5)  # type: ignore[arg-type]


def autocommit(on: bool) -> Callable[[Path], Any]:
    return lambda path: sqlite3.connect(path, autocommit=on, timeout=0.5)  # type: ignore[call-overload,unused-ignore]


def odd(path: Path) -> Any:
    db = sqlite3.connect(path, timeout=0.5)
    db.row_factory = upper
    db.text_factory = bytes
    return db


def rows(path: Path) -> Any:
    db = sqlite3.connect(path, timeout=0.5)
    db.row_factory = sqlite3.Row
    return db


def from_apsw(path: Path) -> Any:
    import apsw

    db = apsw.Connection(str(path))
    db.set_busy_timeout(500)
    return db


def traced_apsw(path: Path) -> Any:
    db = from_apsw(path)
    db.row_trace = lambda _cursor, row: {"row": row}
    return db


NEW = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has autocommit since Python 3.12")
APSW = pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")
# Those that begin a transaction by themselves before a row is changed, and those that have to be told.
IMPLICIT = [
    pytest.param(legacy(""), id="legacy"),
    pytest.param(legacy("DEFERRED"), id="deferred"),
    pytest.param(legacy("IMMEDIATE"), id="immediate"),
    pytest.param(legacy("EXCLUSIVE"), id="exclusive"),
    pytest.param(autocommit(False), id="autocommit off", marks=NEW),
    pytest.param(odd, id="factories"),
    pytest.param(rows, id="sqlite3.Row"),
]
EXPLICIT = [
    pytest.param(legacy(None), id="isolation_level None"),
    pytest.param(autocommit(True), id="autocommit on", marks=NEW),
    pytest.param(from_apsw, id="apsw", marks=APSW),
    pytest.param(traced_apsw, id="apsw with a row trace", marks=APSW),
]


class Caller:
    """A connection of one's own, and what one does with it."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def execute(self, statement: str) -> None:
        self.db.cursor().execute(statement)

    def begin(self) -> None:
        if isinstance(self.db, sqlite3.Connection) and (
            self.db.isolation_level is not None and getattr(self.db, "autocommit", -1) is not True
        ):
            return  # it begins by itself
        self.execute("begin")

    def commit(self) -> None:
        self._end("commit")

    def rollback(self) -> None:
        self._end("rollback")

    def _end(self, how: str) -> None:
        if isinstance(self.db, sqlite3.Connection) and getattr(self.db, "autocommit", -1) is not True:
            getattr(self.db, how)()
        else:
            self.execute(how)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with jobs, and with a table of its owner's."""
    path = tmp_path / "jobs.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("create table orders(id)")
    return path


@pytest.fixture
def storage(path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(path, shared=True, durability="relaxed")
    storage.add([JobSpec(queue="before", payload=b"{}", max_attempts=1)])
    yield storage
    storage.close()


@contextlib.contextmanager
def connected(connect: Callable[[Path], Any], path: Path) -> Iterator[tuple[Storage, Caller]]:
    """A storage on a connection of the caller's, and the caller."""
    with contextlib.closing(connect(path)) as db:
        storage = open_storage(db)
        try:
            yield storage, Caller(db)
        finally:
            storage.close()
            with contextlib.suppress(sqlite3.Error):
                if isinstance(db, sqlite3.Connection) and db.in_transaction:
                    db.rollback()


def seen(path: Path, connect: Callable[[Path], Any] = sqlite3.connect) -> tuple[int, int]:
    """How many orders and jobs a stranger sees."""
    # Of the same driver: two copies of SQLite in one process drop each other's locks.
    apart = from_apsw if connect in {from_apsw, traced_apsw} else sqlite3.connect
    with contextlib.closing(apart(path)) as db:
        (found,) = db.execute(
            "select (select count(*) from orders), (select count(*) from litebroker_job j"
            " join litebroker_queue q on q.id = j.queue where q.name <> 'before')"
        ).fetchall()
        return int(found[0]), int(found[1])


ADDS: list[tuple[str, Callable[[Storage], object], int]] = [
    ("one", lambda storage: storage.add([job()]), 1),
    ("three", lambda storage: storage.add([job(), job(), job()]), 3),
    ("with a key", lambda storage: storage.add([job(dedupe_key="k")]), 1),
    ("in a group", lambda storage: storage.add([job(group="g"), job(group="g")]), 2),
    ("in a nested transaction", lambda storage: _nested(storage), 2),  # noqa: PLW0108 - it stands below
]


def _nested(storage: Storage) -> None:
    with storage.transaction():
        storage.add([job()])
        storage.add([job()])


@pytest.mark.parametrize(("name", "add", "jobs"), ADDS, ids=[add[0] for add in ADDS])
@pytest.mark.parametrize("connect", [*IMPLICIT, *EXPLICIT])
@pytest.mark.parametrize("order_first", [True, False])
def test_jobs_come_and_go_with_the_callers_rows(  # noqa: PLR0917 - they are fixtures and parameters
    storage: SQLiteStorage,
    path: Path,
    connect: Callable[[Path], Any],
    order_first: bool,
    name: str,
    add: Callable[[Storage], object],
    jobs: int,
) -> None:
    storage.close()
    found = []
    with connected(connect, path) as (bound, caller):
        for end in (caller.rollback, caller.commit):
            caller.begin()
            if order_first:
                caller.execute("insert into orders values(1)")
            add(bound)
            if not order_first:
                caller.execute("insert into orders values(1)")
            found.append(seen(path, connect))
            end()
            found.append(seen(path, connect))

    assert found == [(0, 0), (0, 0), (0, 0), (1, jobs)]


@pytest.mark.parametrize("connect", EXPLICIT)
def test_without_a_transaction_a_verb_commits_as_any_statement_does(
    storage: SQLiteStorage, path: Path, connect: Callable[[Path], Any]
) -> None:
    storage.close()
    with connected(connect, path) as (bound, _caller):
        bound.add([job()])
        one = seen(path, connect)
        bound.add([job(), job()])

    assert one == (0, 1)
    assert seen(path, connect) == (0, 3)


@pytest.mark.parametrize("connect", [*IMPLICIT, *EXPLICIT])
def test_settling_values_and_schedules_belong_to_the_callers_transaction(
    storage: SQLiteStorage, path: Path, connect: Callable[[Path], Any]
) -> None:
    storage.close()
    record = ScheduleRecord("work", "s", ScheduleSpec(every_ms=1000), job(), 1, None)

    def everything(bound: Storage, caller: Caller) -> None:
        (claimed,) = bound.claim(["before"], limit=1, lease_ms=60_000)
        assert bound.complete([claimed.lease], keep=True) == [True]
        bound.put("results", "k", b"v", ttl_ms=60_000)
        bound.increment("results", "n", 2)
        bound.put_schedule(record)
        assert bound.fire_schedule(bound.due_schedules(["work"])[0], next_at_ms=2) is not None
        caller.execute("insert into orders values(1)")

    with connected(connect, path) as (bound, caller):
        caller.begin()
        everything(bound, caller)
        caller.rollback()
        gone = (
            bound.peek("results", ["k", "n"]),
            bound.list_schedules("work"),
            bound.counts("before"),
            seen(path, connect),
        )
        caller.begin()
        everything(bound, caller)
        caller.commit()
        values, schedules = bound.peek("results", ["k", "n"]), bound.list_schedules("work")
        counts = bound.counts("before")

    assert gone[:2] == ({}, [])
    assert (gone[2].ready, gone[2].completed) == (1, 0)
    assert gone[3] == (0, 0)
    assert (values["k"].data, values["n"].number) == (b"v", 2)
    assert [schedule.next_at_ms for schedule in schedules] == [2]
    assert (counts.ready, counts.completed) == (0, 1)
    assert seen(path, connect) == (1, 1)


def test_a_lease_is_settled_in_the_transaction_that_holds_the_handlers_rows(storage: SQLiteStorage, path: Path) -> None:
    (claimed,) = storage.claim(["before"], limit=1, lease_ms=60_000)
    with contextlib.closing(sqlite3.connect(path)) as db:
        bound = storage.bind(db)
        db.execute("insert into orders values(1)")
        first = bound.complete([claimed.lease])
        db.rollback()
        undone = storage.get(claimed.id)
        db.execute("insert into orders values(1)")
        second = bound.complete([claimed.lease])
        db.commit()

    assert first == second == [True]
    assert undone is not None
    assert undone.state is State.ACTIVE
    assert storage.get(claimed.id) is None
    assert seen(path)[0] == 1


@pytest.mark.parametrize("connect", [*IMPLICIT, *EXPLICIT])
def test_a_verb_that_fails_leaves_the_callers_transaction_as_it_was(
    storage: SQLiteStorage, path: Path, connect: Callable[[Path], Any]
) -> None:
    storage.close()
    with connected(connect, path) as (bound, caller):
        caller.begin()
        caller.execute("insert into orders values(1)")
        bound.add([job(group="g", group_concurrency=1)])
        with pytest.raises(GroupConflictError):
            bound.add([job(), job(group="g", group_concurrency=2)])
        with contextlib.suppress(LookupError), bound.transaction():
            bound.add([job()])
            raise LookupError
        caller.commit()

    assert seen(path, connect) == (1, 1)


@pytest.mark.parametrize("connect", [odd, rows])
def test_what_the_caller_has_set_stays_set(
    storage: SQLiteStorage, path: Path, connect: Callable[[Path], sqlite3.Connection]
) -> None:
    with contextlib.closing(connect(path)) as db:
        before = (db.row_factory, db.text_factory, db.isolation_level)
        bound = storage.bind(db)
        bound.add([job(b"payload", ref="r", headers={"a": "b"}, task="t")])
        db.commit()
        (record,) = bound.page("work", State.PENDING)

        assert (record.payload, record.ref, record.headers, record.task) == (b"payload", "r", {"a": "b"}, "t")
        assert (db.row_factory, db.text_factory, db.isolation_level) == before


def test_a_connection_to_another_database_is_refused(storage: SQLiteStorage, tmp_path: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other,
        contextlib.closing(sqlite3.connect(":memory:")) as memory,
    ):
        with pytest.raises(ValueError, match=r"other\.db"):
            storage.bind(other)
        with pytest.raises(ValueError, match="in memory"):
            storage.bind(memory)


def test_a_storage_on_a_connection_in_memory_can_be_bound_to_that_connection_alone() -> None:
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as db,
        contextlib.closing(sqlite3.connect(":memory:")) as other,
        contextlib.closing(open_storage(db)) as storage,
    ):
        assert storage.bind(db) is storage
        with pytest.raises(ValueError, match="in memory"):
            storage.bind(other)


@pytest.mark.parametrize("thing", [None, 7, object(), "jobs.db"])
def test_what_is_no_connection_is_refused(storage: SQLiteStorage, thing: object) -> None:
    with pytest.raises(TypeError, match="Connection"):
        storage.bind(thing)


@pytest.mark.parametrize("connect", [*IMPLICIT, *EXPLICIT])
def test_a_connection_to_a_file_without_jobs_makes_the_tables(path: Path, connect: Callable[[Path], Any]) -> None:
    with connected(connect, path) as (bound, caller):
        caller.begin()
        bound.add([job()])
        caller.commit()

    assert seen(path, connect) == (0, 1)
    driver = "apsw" if connect in {from_apsw, traced_apsw} else "sqlite3"
    with contextlib.closing(SQLiteStorage(path, driver=driver)) as storage:
        assert len(storage.claim(["work"], limit=1, lease_ms=1000)) == 1


@pytest.mark.parametrize("connect", [*IMPLICIT, *EXPLICIT])
def test_the_tables_are_part_of_an_open_transaction_in_a_file_without_jobs(
    path: Path, connect: Callable[[Path], Any]
) -> None:
    with contextlib.closing(connect(path)) as db:
        caller = Caller(db)
        caller.begin()
        caller.execute("insert into orders values(1)")
        open_storage(db).add([job()])
        caller.rollback()
        cursor = db.cursor()
        tables = cursor.execute("select count(*) from sqlite_master where name like 'litebroker%'").fetchall()
        caller.begin()
        caller.execute("insert into orders values(1)")
        bound = open_storage(db)
        bound.add([job()])
        caller.commit()

    assert [next(iter(row.values())) if isinstance(row, dict) else row[0] for row in tables] in ([0], [(0,)])
    assert seen(path, connect) == (1, 1)


@pytest.mark.parametrize(
    "connect", [pytest.param(legacy(""), id="legacy"), pytest.param(from_apsw, marks=APSW, id="apsw")]
)
def test_a_connection_of_ones_own_to_a_database_in_memory_has_jobs_of_its_own(connect: Callable[[Any], Any]) -> None:
    with contextlib.closing(connect(":memory:")) as db:
        bound = open_storage(db)
        bound.add([job(), job(delay_ms=60_000)])
        claimed = bound.claim(["work"], limit=5, lease_ms=1000)

        assert isinstance(bound, BoundStorage)
        assert len(claimed) == 1
        assert bound.complete([claimed[0].lease]) == [True]
        assert bound.counts("work").delayed == 1


@APSW
def test_what_is_opened_on_an_apsw_connection_uses_apsw_itself(path: Path) -> None:
    with contextlib.closing(from_apsw(path)) as db:
        bound = open_storage(db)

        assert isinstance(bound, BoundStorage)
        assert bound._engine.driver == "apsw"  # noqa: SLF001 - two copies of SQLite would drop each other's locks
        bound.close()


def test_closing_a_storage_on_the_callers_connection_leaves_that_open(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        bound = open_storage(db)
        bound.add([job()])
        bound.close()
        bound.close()
        db.commit()

        assert db.execute("select count(*) from litebroker_job").fetchone() == (1,)


def test_a_waiting_worker_notices_what_the_caller_commits(storage: SQLiteStorage, path: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(path)) as db,
        contextlib.closing(storage.listener(["work"])) as listener,
    ):
        storage.bind(db).add([job()])
        listener.wait(0)  # it may have been woken too early
        claimed_before = storage.claim(["work"], limit=1, lease_ms=1000)
        db.commit()

        assert claimed_before == []
        assert listener.wait(LIMIT)
        assert len(storage.claim(["work"], limit=1, lease_ms=1000)) == 1


# What a newcomer's first lines run into


def test_a_strangers_file_is_refused_on_his_own_connection_too(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("create table users(n)")
        db.commit()

        db.execute("insert into users values(1)")  # a transaction is open from here
        with pytest.raises(ForeignDatabaseError, match="users"):
            open_storage(path).bind(db)

        db.rollback()
        assert db.execute("select name from sqlite_master").fetchall() == [("users",)]


def test_a_transaction_that_read_before_another_wrote_is_told_how_to_begin(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "jobs.db")
    storage.add([JobSpec(queue="q", payload=b"")])
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as db:
        db.execute("begin")
        db.execute("select count(*) from litebroker_job").fetchall()
        storage.add([JobSpec(queue="q", payload=b"")])

        with pytest.raises(DatabaseBusyError, match="BEGIN IMMEDIATE"):
            storage.bind(db).add([JobSpec(queue="q", payload=b"")])
    storage.close()


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        (None, TypeError, "where is None"),
        (5, TypeError, "int"),
        ("jobs.db?durability=full", ValueError, "sqlite:///jobs.db"),
    ],
)
def test_what_is_no_place_is_refused(where: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_storage(where)

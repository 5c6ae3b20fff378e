"""A file of each version of the schema that was released is opened and worked off by today's code."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.proof.keep_schema import DATA

from litebroker import SchemaTooNewError, SQLiteStorage, State
from litebroker.sqlite import schema

KEPT = sorted(DATA.glob("schema-*.sql"))


@pytest.fixture(params=KEPT, ids=lambda kept: kept.stem)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        db.executescript(request.param.read_text())
    return tmp_path / "jobs.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SQLiteStorage]:
    with closing(SQLiteStorage(path)) as storage:
        yield storage


def test_there_is_a_file_of_every_version() -> None:
    assert [kept.stem for kept in KEPT] == [f"schema-{number:04}" for number in range(1, len(schema.migrations()) + 1)]


def test_an_older_file_is_opened_and_what_is_in_it_is_as_it_was(storage: SQLiteStorage) -> None:
    # If this version was not released yet and its schema has changed: python -m tests.proof.keep_schema
    assert [queue.name for queue in storage.queues()] == ["ends", "grouped", "ticks", "work"]
    (completed,) = storage.page("ends", State.COMPLETED)
    (failed,) = storage.page("ends", State.FAILED)
    assert completed.headers == {"a": "b"}
    assert (failed.error.type, failed.error.causes) == ("ValueError", ("KeyError: 1",)) if failed.error else False
    assert storage.peek("space", ["key"])["key"][:2] == (b"value", 3)
    assert storage.counts("work").delayed == 1
    assert [record.id for record in storage.find("work", dedupe_key="k")]
    assert storage.execute("pragma integrity_check") == [("ok",)]


def test_an_older_file_is_worked_off(storage: SQLiteStorage) -> None:
    (schedule,) = storage.list_schedules()
    storage.fire_schedule(schedule, next_at_ms=4_000_000_000_000)
    storage.recover()

    done = set()
    while records := storage.claim(["work", "grouped", "ends", "ticks"], limit=5, lease_ms=60_000):
        done |= {record.payload for record in records}
        assert all(storage.complete([record.lease for record in records]))

    # One was active, and its process is gone.
    assert {b'"ready %d"' % n for n in range(6)} <= done
    assert {b'"keyed"', b'"grouped 0"', b'"grouped 2"', b'"end 2"', b'"tick"'} <= done
    assert all(storage.counts(queue.name).active == 0 for queue in storage.queues())


def test_a_group_of_an_older_file_keeps_its_concurrency(storage: SQLiteStorage) -> None:
    assert len(storage.claim(["grouped"], limit=5, lease_ms=60_000)) == 2


def test_older_code_refuses_a_newer_file_and_leaves_it_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("update litebroker_meta set value = '9999' where key = 'schema'")
    before = path.read_bytes()

    storage = SQLiteStorage(path)
    with pytest.raises(SchemaTooNewError, match="upgrade litebroker"):
        storage.open()
    storage.close()

    assert path.read_bytes() == before

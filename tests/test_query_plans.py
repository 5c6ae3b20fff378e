"""Every statement finds its rows by an index, and in order: no plan scans a table or sorts."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

import pytest

from litebroker.sqlite import schema
from litebroker.sqlite import statements as sql

# Why a statement may walk a whole index or a small table.
_WALKS = {
    "QUEUES": "lists every queue",
    "PROCESSES": "a row for each living process",
    "ANY_GROUP": "one row, whichever",
    "RECOVER_PROCESS": "the index of active jobs, when a process has died",
    "REQUEUE_ACTIVE": "the index of active jobs, in a backup that is restored",
    "LEASES": "the index of active jobs, as far as the doctor looks",
    "BOOTS": "a row for each start of a machine",
    "OLDEST_DUE": "its own list of priorities, bounded",
    "BEFORE_IN_LINE": "what its own subquery has found, bounded",
    "BEFORE_IN_GROUP": "what its own subquery has found, bounded",
    "BEFORE_IN_DELAYED": "what its own subquery has found, bounded",
}
# Why a statement may sort.
_SORTS: dict[str, str] = {}


def _statements() -> Iterator[tuple[str, str]]:
    for name, value in vars(sql).items():
        if not name.isupper() or name.startswith("_"):
            continue
        if isinstance(value, str) and value.split(maxsplit=1)[0] in {"select", "insert", "update", "delete"}:
            yield name, value
        elif isinstance(value, tuple) and name != "GROUP_TRIGGERS":
            yield from ((f"{name}[{number}]", part) for number, part in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key}]", part) for key, part in value.items())


STATEMENTS = dict(_statements())


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    for script in schema.migrations():
        db.executescript(script)
    for trigger in sql.GROUP_TRIGGERS:
        db.execute(trigger)
    yield db
    db.close()


def _plan(db: sqlite3.Connection, statement: str) -> list[str]:
    names = set(re.findall(r":([a-z_]+)", statement))
    params: object = dict.fromkeys(names, 1) if names else [1] * statement.count("?")
    return [row[3] for row in db.execute(f"explain query plan {statement}", params)]  # type: ignore[arg-type]


def test_there_are_statements_to_explain() -> None:
    assert len(STATEMENTS) > 60


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_scans_no_table(database: sqlite3.Connection, name: str) -> None:
    plan = _plan(database, STATEMENTS[name])

    walks = [
        step for step in plan if step.startswith("SCAN") and not re.match(r"SCAN (json_each|\d+ CONST|CONSTANT)", step)
    ]
    assert not walks or name in _WALKS, plan
    assert walks or name not in _WALKS, f"{name} walks nothing: take it off the list"


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_does_not_sort(database: sqlite3.Connection, name: str) -> None:
    plan = _plan(database, STATEMENTS[name])

    assert not [step for step in plan if "TEMP B-TREE" in step] or name in _SORTS, plan


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_is_prepared_again_at_each_execution(name: str) -> None:
    """From SQLite 3.5x on, a bare parameter in LIMIT, or beside a partial index, expires the statement when bound."""
    statement = STATEMENTS[name]

    assert not re.search(r"(limit|offset) :", statement)
    if re.search(r"state = \d and[^()]*queue = :queue", statement):
        pytest.fail(f"write queue = +:queue: {statement}")


def test_no_statement_takes_a_state_as_a_parameter() -> None:
    """A partial index serves only where the query's own words imply its condition."""
    assert not [name for name, statement in STATEMENTS.items() if re.search(r"state = [:?]", statement)]

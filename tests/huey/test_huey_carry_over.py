"""``python -m litebroker_huey carry-over``, from a file that huey itself wrote."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import huey as stock
import pytest
from huey.api import SqliteHuey

from litebroker import State
from litebroker_huey import SQLiteHuey
from litebroker_huey.carry_over import CarryOverError, OfHuey, SqliteFile, carry_over

APPLICATION = """
from litebroker_huey import SQLiteHuey
from huey import SqliteHuey
huey = SQLiteHuey("app", filename="jobs.db")
old = SqliteHuey("app", filename="old.db")
@huey.task(name="add")
def add(a, b): return a + b
"""


def tasks_of(huey: Any) -> Any:
    def add(a: int, b: int) -> int:
        return a + b

    add.__module__ = "application"
    return huey.task(name="add")(add)


@pytest.fixture
def old(tmp_path: Path) -> Iterator[SqliteHuey]:
    """A file with one of each."""
    old = SqliteHuey("app", filename=str(tmp_path / "old.db"))
    add = tasks_of(old)
    old.enqueue(add.s(1, 2))
    old.enqueue(add.s(3, 4, priority=7))
    old.add_schedule(add.s(5, 6, eta=datetime(2030, 1, 2, 3, tzinfo=timezone.utc)))
    old.put_result("done", 42)
    old.revoke_by_id("some-id")
    old.lock_task("held").__enter__()
    if hasattr(old.storage, "incr"):
        old.storage.incr("counter", 3)
    yield old
    old.storage.close()


@pytest.fixture
def new(tmp_path: Path) -> Iterator[SQLiteHuey]:
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", read_timeout=0.05)
    tasks_of(huey)
    yield huey
    huey.storage.close()


def test_all_that_waits_in_a_file_of_hueys_own_is_carried_over(
    old: SqliteHuey, new: SQLiteHuey, tmp_path: Path
) -> None:
    carried = carry_over(SqliteFile(tmp_path / "old.db", "app"), new)

    has_counters = hasattr(old.storage, "incr")
    assert carried == (2, 1, 2, 1 if has_counters else 0, 1)
    assert [task.args for task in new.pending()] == [(3, 4), (1, 2)]
    assert [(task.args, task.eta) for task in new.scheduled()] == [((5, 6), datetime(2030, 1, 2, 3))]  # noqa: DTZ001
    assert new.result("done") == 42
    assert new.is_revoked("some-id")
    assert not new.is_locked("held")
    assert new.storage.incr("counter", 0) == (3 if has_counters else 0)
    assert old.pending_count() == 2
    [first, _] = new.storage.engine.page("huey:app", State.PENDING)
    assert first.task == "application.add"
    assert first.ref is not None


def test_a_file_is_carried_over_once(old: SqliteHuey, new: SQLiteHuey, tmp_path: Path) -> None:
    carry_over(SqliteFile(tmp_path / "old.db", "app"), new)

    with pytest.raises(CarryOverError, match="before"):
        carry_over(SqliteFile(tmp_path / "old.db", "app"), new)
    assert new.pending_count() == 2
    carry_over(SqliteFile(tmp_path / "old.db", "app"), new, again=True)
    assert new.pending_count() == 4


def test_a_huey_can_be_carried_over_and_back(old: SqliteHuey, new: SQLiteHuey, tmp_path: Path) -> None:
    back = SqliteHuey("app", filename=str(tmp_path / "back.db"))
    tasks_of(back)

    carry_over(OfHuey(old, "old"), new)
    carry_over(OfHuey(new, "new"), back)

    assert [task.args for task in back.pending()] == [(3, 4), (1, 2)]
    assert [task.eta for task in back.scheduled()] == [datetime(2030, 1, 2, 3)]  # noqa: DTZ001
    assert back.result("done") == 42
    back.storage.close()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [(None, "app", "no such file"), ("nothing", "app", "no file of huey"), ("huey", "other", "none of other")],
)
def test_what_cannot_be_carried_over_is_refused(tmp_path: Path, content: str | None, name: str, message: str) -> None:
    file = tmp_path / "old.db"
    if content == "nothing":
        file.write_bytes(b"")
    elif content == "huey":
        old = SqliteHuey("app", filename=str(file))
        tasks_of(old)(1, 2)
        old.storage.close()

    with pytest.raises(CarryOverError, match=message):
        SqliteFile(file, name)


def test_the_command_says_what_it_did(old: SqliteHuey, tmp_path: Path) -> None:
    (tmp_path / "application.py").write_text(APPLICATION)
    command = [sys.executable, "-m", "litebroker_huey", "carry-over", "old.db", "application.huey"]

    first = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    second = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=30, check=False)

    counters = 1 if hasattr(stock.api, "chord") else 0
    assert first.stdout == (
        f"carried over: 2 waiting, 1 scheduled, 2 results and flags, {counters} counters; left behind: 1 locks\n"
    )
    assert second.returncode == 1
    assert "carried over before" in second.stderr
    assert old.pending_count() == 2

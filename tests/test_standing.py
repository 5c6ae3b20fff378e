"""What SQLite's way of looking at jobs has to keep to where there are very many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from litebroker import JobSpec, SQLiteStorage, Standing
from litebroker.sqlite import statements as sql


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "jobs.db", durability="relaxed")
    yield storage
    storage.close()


@pytest.mark.parametrize("group", [None, "g"])
def test_the_oldest_due_job_is_found_among_more_priorities_than_are_looked_through_one_by_one(
    storage: SQLiteStorage, group: str | None
) -> None:
    count = sql.MOST_PRIORITIES + 10
    storage.add([JobSpec("q", b"", priority=count - n, run_at_ms=count - n, group=group) for n in range(count)])

    assert storage.oldest_due_at_ms("q") == 1


def test_no_more_than_a_hundred_thousand_are_counted_ahead(storage: SQLiteStorage) -> None:
    for _ in range(11):
        storage.add([JobSpec("q", b"")] * 10_000)
    last = storage.add([JobSpec("q", b"", priority=-1)])[0]

    assert storage.standing(last.id) == Standing(100_000)

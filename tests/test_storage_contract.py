"""Each storage keeps the contract."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from litebroker.clock import Clock
from litebroker.sqlite import SQLiteStorage
from litebroker.storage import Storage
from litebroker.testing.model import ModelStorage

pytest.register_assert_rewrite("litebroker.testing.contract")

from litebroker.testing.contract import StorageContract  # noqa: E402 - after its asserts are known to be rewritten


class TestModelStorage(StorageContract):
    """Shows that the suite asks for nothing that only SQLite has."""

    def make_storage(self, clock: Clock, tmp_path: Path) -> Storage:
        return ModelStorage(clock)


class TestSQLiteStorage(StorageContract):
    """On a file, through the standard library's driver."""

    def make_storage(self, clock: Clock, tmp_path: Path) -> Storage:
        return SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed")


class TestSQLiteStorageInMemory(StorageContract):
    def make_storage(self, clock: Clock, tmp_path: Path) -> Storage:
        return SQLiteStorage(":memory:", clock=clock)


@pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")
class TestSQLiteStorageOnApsw(StorageContract):
    def make_storage(self, clock: Clock, tmp_path: Path) -> Storage:
        return SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed", driver="apsw")

"""The SQLite storage: one file, any number of processes and threads."""

from __future__ import annotations

from litebroker.sqlite.location import Durability, Options
from litebroker.sqlite.storage import BoundStorage, SQLiteStorage, open_storage

__all__ = ["BoundStorage", "Durability", "Options", "SQLiteStorage", "open_storage"]

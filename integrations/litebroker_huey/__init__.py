"""Huey on one SQLite file, at least once.

Use `SQLiteHuey` where ``RedisHuey`` or ``SqliteHuey`` is used, with the same tasks and consumers::

    from litebroker_huey import SQLiteHuey

    huey = SQLiteHuey("app", filename="jobs.db")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from litebroker import late_names

if TYPE_CHECKING:
    from litebroker_huey.sqlite_huey import SIGNAL_DEAD, DeadTask, SQLiteHuey
    from litebroker_huey.storage import LitebrokerStorage

__all__ = ["SIGNAL_DEAD", "DeadTask", "LitebrokerStorage", "SQLiteHuey"]

__getattr__ = late_names(
    __name__,
    "huey",
    {
        "SIGNAL_DEAD": "sqlite_huey",
        "DeadTask": "sqlite_huey",
        "SQLiteHuey": "sqlite_huey",
        "LitebrokerStorage": "storage",
    },
)

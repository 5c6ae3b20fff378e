"""Huey on one SQLite file, at least once.

Use `SQLiteHuey` where ``RedisHuey`` or ``SqliteHuey`` is used, with the same tasks and consumers::

    from litebroker_huey import SQLiteHuey

    huey = SQLiteHuey("app", filename="jobs.db")
"""

from __future__ import annotations

try:
    import huey as _huey  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("litebroker_huey needs huey: pip install 'litebroker[huey]'", name="huey") from error

from litebroker_huey.sqlite_huey import SIGNAL_DEAD, DeadTask, SQLiteHuey
from litebroker_huey.storage import LitebrokerStorage

__all__ = ["SIGNAL_DEAD", "DeadTask", "LitebrokerStorage", "SQLiteHuey"]

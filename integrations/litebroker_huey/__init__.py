"""Huey on one SQLite file, at least once.

Use `SQLiteHuey` where ``RedisHuey`` or ``SqliteHuey`` is used, with the same tasks and consumers::

    from litebroker_huey import SQLiteHuey

    huey = SQLiteHuey("app", filename="jobs.db")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litebroker_huey.sqlite_huey import SIGNAL_DEAD, DeadTask, SQLiteHuey
    from litebroker_huey.storage import LitebrokerStorage

__all__ = ["SIGNAL_DEAD", "DeadTask", "LitebrokerStorage", "SQLiteHuey"]

_HOMES = {
    "SIGNAL_DEAD": "sqlite_huey",
    "DeadTask": "sqlite_huey",
    "SQLiteHuey": "sqlite_huey",
    "LitebrokerStorage": "storage",
}


def __getattr__(name: str) -> Any:
    # Late, since tools import the inspector beside it, and need no framework for that.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("huey")
    except ModuleNotFoundError as error:
        message = "litebroker_huey needs huey: pip install 'litebroker[huey]'"
        raise ModuleNotFoundError(message, name="huey") from error
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

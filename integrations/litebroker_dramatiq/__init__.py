"""Dramatiq on one SQLite file: broker, results, rate limits, schedules.

``dramatiq.set_broker(SQLiteBroker("jobs.db"))`` is all that an application needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litebroker_dramatiq.abort import SQLiteEventBackend
    from litebroker_dramatiq.broker import DeadLetter, SQLiteBroker
    from litebroker_dramatiq.limits import SQLiteRateLimiterBackend
    from litebroker_dramatiq.middleware import Dedupe, Schedules
    from litebroker_dramatiq.results import SQLiteResultBackend

__all__ = [
    "DeadLetter",
    "Dedupe",
    "SQLiteBroker",
    "SQLiteEventBackend",
    "SQLiteRateLimiterBackend",
    "SQLiteResultBackend",
    "Schedules",
]

_HOMES = {
    "SQLiteEventBackend": "abort",
    "DeadLetter": "broker",
    "SQLiteBroker": "broker",
    "SQLiteRateLimiterBackend": "limits",
    "Dedupe": "middleware",
    "Schedules": "middleware",
    "SQLiteResultBackend": "results",
}


def __getattr__(name: str) -> Any:
    # Late, since tools import the inspector beside it, and need no framework for that.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("dramatiq")
    except ModuleNotFoundError as error:
        message = "litebroker_dramatiq needs Dramatiq: pip install 'litebroker[dramatiq]'"
        raise ModuleNotFoundError(message, name="dramatiq") from error
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

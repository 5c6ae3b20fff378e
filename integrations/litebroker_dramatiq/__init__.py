"""Dramatiq on one SQLite file: broker, results, rate limits, schedules.

``dramatiq.set_broker(SQLiteBroker("jobs.db"))`` is all that an application needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from litebroker import late_names

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

__getattr__ = late_names(
    __name__,
    "Dramatiq",
    {
        "SQLiteEventBackend": "abort",
        "DeadLetter": "broker",
        "SQLiteBroker": "broker",
        "SQLiteRateLimiterBackend": "limits",
        "Dedupe": "middleware",
        "Schedules": "middleware",
        "SQLiteResultBackend": "results",
    },
)

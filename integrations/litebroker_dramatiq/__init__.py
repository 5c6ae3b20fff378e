"""Dramatiq on one SQLite file: broker, results, rate limits, schedules.

``dramatiq.set_broker(SQLiteBroker("jobs.db"))`` is all that an application needs.
"""

try:
    import dramatiq as _dramatiq
except ImportError as error:
    raise ImportError("litebroker_dramatiq needs Dramatiq: pip install 'litebroker[dramatiq]'") from error

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

del _dramatiq

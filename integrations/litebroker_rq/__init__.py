"""RQ on one SQLite file: unmodified RQ, its workers, its commands and its tools.

import rq
from litebroker_rq import connect

queue = rq.Queue(connection=connect("jobs.db"))
"""

from __future__ import annotations

try:
    import rq as _rq  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("litebroker_rq needs rq: pip install 'litebroker[rq]'", name="rq") from error

from litebroker_rq.client import ConnectionPool, SQLiteConnection, connect, install, pool
from litebroker_rq.enqueueing import Queue

__all__ = ["ConnectionPool", "Queue", "SQLiteConnection", "connect", "install", "pool"]

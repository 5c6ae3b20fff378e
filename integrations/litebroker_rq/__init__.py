"""RQ on one SQLite file: unmodified RQ, its workers, its commands and its tools.

import rq
from litebroker_rq import connect

queue = rq.Queue(connection=connect("jobs.db"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from litebroker import late_names

if TYPE_CHECKING:
    from litebroker_rq.client import ConnectionPool, SQLiteConnection, connect, install, pool
    from litebroker_rq.enqueueing import Queue

__all__ = ["ConnectionPool", "Queue", "SQLiteConnection", "connect", "install", "pool"]

__getattr__ = late_names(
    __name__,
    "rq",
    {
        "ConnectionPool": "client",
        "SQLiteConnection": "client",
        "connect": "client",
        "install": "client",
        "pool": "client",
        "Queue": "enqueueing",
    },
)

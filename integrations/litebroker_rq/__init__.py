"""RQ on one SQLite file: unmodified RQ, its workers, its commands and its tools.

import rq
from litebroker_rq import connect

queue = rq.Queue(connection=connect("jobs.db"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litebroker_rq.client import ConnectionPool, SQLiteConnection, connect, install, pool
    from litebroker_rq.enqueueing import Queue

__all__ = ["ConnectionPool", "Queue", "SQLiteConnection", "connect", "install", "pool"]

_HOMES = {
    "ConnectionPool": "client",
    "SQLiteConnection": "client",
    "connect": "client",
    "install": "client",
    "pool": "client",
    "Queue": "enqueueing",
}


def __getattr__(name: str) -> Any:
    # Late, since tools import the inspector beside it, and need no framework for that.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("rq")
    except ModuleNotFoundError as error:
        message = "litebroker_rq needs rq: pip install 'litebroker[rq]'"
        raise ModuleNotFoundError(message, name="rq") from error
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

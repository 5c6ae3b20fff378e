"""Python runs this at its start, in every process of the suite: Redis on this host is then a file.

`redis.Redis()` and `redis://localhost/N` get a pool of litebroker_rq, with database N in a file of its own. TLS, UNIX
sockets, other hosts and pools of the test's own remain redis-py's.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, cast
from urllib.parse import urlsplit

import redis

try:
    from litebroker_rq import ConnectionPool, SQLiteConnection
except ImportError as error:  # Python would go on without this file, and the suite with a server
    raise SystemExit(f"the suite cannot run: {error}") from error

_FOLDER = os.environ["LITEBROKER_COMPAT_FOLDER"]
_LOCAL = {None, "localhost", "127.0.0.1"}

_init = redis.Redis.__init__
_parameters = inspect.signature(_init)
_from_url: Any = getattr(redis.ConnectionPool.from_url, "__func__")  # noqa: B009 - of the class method


def _pool(db: int, **kwargs: Any) -> ConnectionPool:
    arguments: dict[str, Any] = {"host": "localhost", "port": 6379, "db": db, **kwargs}
    return ConnectionPool(f"sqlite:///{_FOLDER}/{db}.db", **arguments)


def _redis(self: redis.Redis, *args: Any, **kwargs: Any) -> None:
    given = _parameters.bind(self, *args, **kwargs).arguments
    given.pop("self")
    given.update(given.pop("kwargs", {}))
    local = given.get("host") in _LOCAL and not any(
        given.get(name) for name in ("connection_pool", "ssl", "unix_socket_path")
    )
    if local:
        given.pop("host", None)
        given = {"connection_pool": _pool(given.pop("db", 0), **given)}
    _init(self, **given)


def _pool_from_url(cls: Any, url: str, **kwargs: Any) -> Any:
    parts = urlsplit(url)
    if parts.scheme == "redis" and parts.hostname in _LOCAL and parts.port in {None, 6379}:
        return _pool(int(parts.path.strip("/") or 0), host=parts.hostname, **kwargs)
    return _from_url(cls, url, **kwargs)


_replaced: list[tuple[type, str, Any]] = [
    (redis.Redis, "__init__", _redis),
    (redis.Redis, "pipeline", SQLiteConnection.pipeline),
    (redis.ConnectionPool, "from_url", classmethod(cast("Any", _pool_from_url))),
]
for _where, _name, _what in _replaced:
    setattr(_where, _name, _what)

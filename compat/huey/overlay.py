"""A pytest plugin that puts `SQLiteHuey` in the place of the huey classes that huey's own test-suite uses.

``MemoryHuey`` is what its tests use throughout, with a new empty one in each test; ``SqliteHuey`` is used with a file.
Both become a `SQLiteHuey` here, before the test modules import the names. Each test's files are in a folder of its own.
"""

# mypy: disallow-untyped-calls=False
# Huey, whose methods super() is, has no types.

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import huey
import huey.api
import pytest

from litebroker_huey import SQLiteHuey

# What the names of the classes say that test another storage.
_OTHERS = (
    "CySqlite",
    "FileLock",
    "FileStorage",
    "KT",
    "Kyoto",
    "Postgres",
    "Redis",
    "Semaphore",
    "SqlStorage",
    "Valkey",
)

_names = itertools.count()
_scratch = tempfile.TemporaryDirectory(prefix="litebroker-compat-")
_folder = Path(_scratch.name)


def _put_in_place(**classes: type) -> None:
    for module in (huey, huey.api):
        vars(module).update(classes)


def _stock() -> None:
    """Huey's own SqliteHuey for MemoryHuey, for a figure to compare with."""

    class MemoryHuey(huey.api.SqliteHuey):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, filename=str(_folder / f"{next(_names)}.db"), **kwargs)

    _put_in_place(MemoryHuey=MemoryHuey)


def _litebroker() -> None:
    class MemoryHuey(SQLiteHuey):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("filename", str(_folder / f"{next(_names)}.db"))
            super().__init__(*args, **kwargs)

    class SqliteHuey(SQLiteHuey):
        def __init__(self, *args: Any, filename: str = "huey.db", **kwargs: Any) -> None:
            super().__init__(*args, filename=str(_folder / Path(filename).name), **kwargs)

    _put_in_place(MemoryHuey=MemoryHuey, SqliteHuey=SqliteHuey)


def _no_server(*_: object) -> dict[str, str]:
    return {"redis_version": "0.0.0"}


def _no_redis() -> None:
    """Older suites ask a Redis server for its version as they are imported. There need not be one."""
    with contextlib.suppress(ImportError):
        import redis

        vars(redis)["Redis"].info = _no_server


_no_redis()
if os.environ.get("LITEBROKER_COMPAT_STOCK"):
    _stock()
else:
    _litebroker()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _folder  # noqa: PLW0603 - a plugin is a module
    _folder = Path(_scratch.name) / str(next(_names))
    _folder.mkdir()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what tests huey's other storages: none of it would meet ours."""
    for item in items:
        name = item.cls.__name__ if isinstance(item, pytest.Function) and item.cls is not None else ""
        if any(other in name for other in _OTHERS):
            item.add_marker(pytest.mark.skip(reason="tests another storage"))

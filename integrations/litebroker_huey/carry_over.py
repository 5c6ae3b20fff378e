"""Carry what waits in one huey over to another: from huey's own storages to a litebroker file, and back."""

from __future__ import annotations

import contextlib
import inspect
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from huey.utils import load_class

from litebroker import LitebrokerError
from litebroker_huey.storage import LitebrokerStorage, Message

_READ = (
    "select data, priority from task where queue = ? order by priority desc, id",
    "select data, timestamp from schedule where queue = ? order by timestamp, id",
    "select key, value from kv where queue = ?",
    "select key, value from counter where queue = ?",
)


class CarryOverError(LitebrokerError):
    """It cannot be carried over, for the reason given. Nothing was."""


class Carried(NamedTuple):
    """How much was carried over, and how many locks were left behind.

    A lock belongs to a consumer that has stopped.
    """

    tasks: int = 0
    scheduled: int = 0
    values: int = 0
    counters: int = 0
    locks: int = 0


class Source(Protocol):
    """What is to be carried over."""

    @property
    def place(self) -> str:
        """Where it is, to know it again."""

    def tasks(self) -> Iterable[tuple[bytes, float | None]]:
        """Each waiting task with its priority, in order."""

    def scheduled(self) -> Iterable[tuple[bytes, datetime]]:
        """Each task of the schedule with its time, naive, as huey gives it."""

    def values(self) -> Iterable[tuple[str, bytes]]:
        """Results, flags and locks."""

    def counters(self) -> Iterable[tuple[str, int]]:
        """What chords and rate limits count."""


class SqliteFile:
    """The file of huey's own SqliteHuey, of whatever release, as it is now. It is only read."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise CarryOverError(f"{path}: there is no such file")
        self.place = str(path.resolve())
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("begin")
            tables = {table for (table,) in db.execute("select name from sqlite_master where type = 'table'")}
            if not {"task", "schedule", "kv"} <= tables:
                raise CarryOverError(f"{path}: this is no file of huey's SqliteHuey, with its tables")
            names = {name for (name,) in db.execute("select queue from task union select queue from schedule")}
            if names and name not in names:
                raise CarryOverError(
                    f"{path}: it holds tasks of {', '.join(sorted(names))}, none of {name}; give --name"
                )
            if "counter" not in tables:
                db.execute("create temp table counter (queue, key, value)")
            self._tasks, self._scheduled, self._values, self._counters = (
                db.execute(statement, [name]).fetchall() for statement in _READ
            )

    def tasks(self) -> Iterable[tuple[bytes, float | None]]:
        return self._tasks

    def scheduled(self) -> Iterable[tuple[bytes, datetime]]:
        # Huey turns a naive datetime into this figure as if it were local time. The way back is the same.
        return [(data, datetime.fromtimestamp(at)) for data, at in self._scheduled]  # noqa: DTZ006

    def values(self) -> Iterable[tuple[str, bytes]]:
        return self._values

    def counters(self) -> Iterable[tuple[str, int]]:
        return self._counters


class OfHuey:
    """What any huey holds, as far as its storage can list it: counters it cannot."""

    def __init__(self, huey: Any, name: str) -> None:
        self._huey = huey
        self._storage = huey.storage
        self.place = name

    def tasks(self) -> Iterable[tuple[bytes, float | None]]:
        for data in self._storage.enqueued_items():
            yield data, self._huey.serializer.deserialize(data).priority

    def scheduled(self) -> Iterable[tuple[bytes, datetime]]:
        for data in self._storage.scheduled_items():
            eta = self._huey.serializer.deserialize(data).eta
            yield data, eta or datetime.fromtimestamp(0)  # noqa: DTZ006 - huey's own "at once"

    def values(self) -> Iterable[tuple[str, bytes]]:
        for key, value in self._storage.result_items().items():
            yield key.decode() if isinstance(key, bytes) else key, value

    def counters(self) -> Iterable[tuple[str, int]]:
        return []


def open_source(where: str, name: str) -> Source:
    """A file, or the import path of a huey."""
    if os.sep in where or Path(where).exists():
        return SqliteFile(Path(where), name)
    return OfHuey(load_huey(where), where)


def load_huey(path: str) -> Any:
    """The huey of an import path, as huey_consumer takes it: ``package.module.huey``."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return load_class(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise CarryOverError(f"{path}: cannot be imported ({error}); give it as huey_consumer takes it") from error


def carry_over(source: Source, huey: Any, *, again: bool = False) -> Carried:
    """Add all that the source holds to a huey's storage. Into a litebroker file it is one transaction.

    The source is left as it is. Stop its consumers first.

    Raises:
        CarryOverError: This source was carried over before, and ``again`` is not set.
    """
    storage = huey.storage
    # All is read before the target is locked.
    tasks = [(_known(huey, data), priority) for data, priority in source.tasks()]
    scheduled = [(_known(huey, data), eta) for data, eta in source.scheduled()]
    everything = list(source.values())
    values = [(key, value) for key, value in everything if ".lock." not in key]
    counters = list(source.counters())
    with _at_once(storage, source.place, again=again):
        for data, priority in tasks:
            storage.enqueue(data, priority if storage.priority else None)
        # Huey before 2.5.2 says each time how naive datetimes are meant.
        meaning = (huey.utc,) if "utc" in inspect.signature(storage.add_to_schedule).parameters else ()
        for data, eta in scheduled:
            storage.add_to_schedule(data, eta, *meaning)
        for key, value in values:
            is_result = not key.startswith(("r:", "rt:")) and ".rl." not in key
            storage.put_data(key, bytes(value), is_result=is_result)
        for key, number in counters:
            storage.incr(key, number)
    return Carried(len(tasks), len(scheduled), len(values), len(counters), len(everything) - len(values))


@contextlib.contextmanager
def _at_once(storage: Any, place: str, *, again: bool) -> Iterator[None]:
    if not isinstance(storage, LitebrokerStorage):
        yield
        return
    with storage.engine.transaction():
        is_new = storage.engine.put(storage.marks, f"carried:{place}", if_absent=True)
        if not is_new and not again:
            raise CarryOverError(f"{place} was carried over before; to do it once more, give --again")
        yield


def _known(huey: Any, data: bytes) -> bytes:
    """With the task's id and name, if the data can be read."""
    message = Message(data)
    with contextlib.suppress(Exception):
        decoded = huey.serializer.deserialize(bytes(data))
        message.ref, message.task = decoded.id, decoded.name
    return message

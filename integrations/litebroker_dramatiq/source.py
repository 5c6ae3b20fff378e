"""Where the storage comes from: opened at its first use, and again after a close."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from litebroker import Durability, Storage, open_storage

Where: TypeAlias = "str | os.PathLike[str] | Storage"


class Source:
    """A storage that nobody has to open.

    Dramatiq's modules make their broker when they are imported, and their server forks afterwards: until the first
    message there is no file, no connection and no thread.

    Args:
        where: A path, a URL, or an open storage. The last is the caller's to close.
        prepare: Called with the storage each time that it was opened, before anyone has it.
    """

    def __init__(
        self,
        where: Where,
        durability: Durability | None = None,
        prepare: Callable[[Storage], None] | None = None,
    ) -> None:
        self._path: str | Path | None = None
        self._given: Storage | None = None
        self._options: dict[str, Any] = {} if durability is None else {"durability": durability}
        self._prepare = prepare
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        if isinstance(where, (str, os.PathLike)):
            path = os.fspath(where)
            # The process may change its folder before the first use.
            self._path = path if "://" in path or path == ":memory:" else Path(path).absolute()
        else:
            self._given = where
        reference = weakref.WeakMethod(self._reset_lock)
        os.register_at_fork(after_in_child=lambda: (reset := reference()) and reset())

    def __call__(self) -> Storage:
        storage = self._storage
        if storage is not None:
            return storage
        with self._lock:
            if self._storage is None:
                self._storage = self._open()
            return self._storage

    def __repr__(self) -> str:
        return str(self._path) if self._given is None else self._given.location

    def close(self) -> None:
        """Let go of it, if it was opened here. The next use opens it again."""
        with self._lock:
            storage, self._storage = self._storage, None
        if storage is not None and storage is not self._given:
            storage.close()

    def _open(self) -> Storage:
        storage = self._given
        if storage is None:
            storage = open_storage(str(self._path), **self._options)
        if self._prepare is not None:
            self._prepare(storage)
        return storage

    def _reset_lock(self) -> None:
        # Another thread may have held it when the process forked. The storage itself can be used on both sides.
        self._lock = threading.Lock()

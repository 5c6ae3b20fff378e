"""What consumers must know at once of tasks that they have claimed and not begun: that some are revoked, or flushed.

Who does that draws a new stamp, after the commit: eight bytes beside the database, in memory that all processes share.
As long as it stays the same, nothing has changed. To read it takes no system call, in which another thread would get
the interpreter's lock: with four of them, to look into the file costs more than all else that is done for a short task.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic

# Flags are read again after this time, though the stamp stays: one that was stored in a transaction of the caller's
# own is committed after the stamp was drawn.
_KEPT_S = 0.5
# They are not all read again more often than this. Meanwhile a task is looked up by itself.
_PAUSE_S = 0.05
_SIZE = 8


class Stamp:
    """The stamp of one file.

    Args:
        location: Gives the storage's; that of a file is its path.
    """

    def __init__(self, location: Callable[[], str]) -> None:
        self._location = location
        self._bytes: mmap.mmap | bytearray | None = None

    def read(self) -> bytes | None:
        """The present one; None where there can be none, so that anything may have changed."""
        shared = self._bytes or self._open()
        return None if shared is None else bytes(shared[:_SIZE])

    def draw(self) -> None:
        """Let all processes see that something has changed. Where that cannot be told, they see it in half a second."""
        shared = self._bytes or self._open()
        if isinstance(shared, bytearray):
            shared[:] = os.urandom(_SIZE)
        elif shared is not None:
            # Not through the memory: on a full disk, that would end the process (SIGBUS) instead of raising an error.
            with contextlib.suppress(OSError), Path(self._path()).open("r+b", buffering=0) as file:
                file.write(os.urandom(_SIZE))

    def _path(self) -> str:
        return f"{self._location()}-litebroker/huey-stamp"

    def _open(self) -> mmap.mmap | bytearray | None:
        location = self._location()
        if location == ":memory:":
            self._bytes = bytearray(_SIZE)
        elif Path(location).is_absolute():
            # None as long as the folder is not there, or may not be written.
            with contextlib.suppress(OSError):
                self._bytes = _map(self._path())
        return self._bytes


def _map(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if os.fstat(file).st_size < _SIZE:
            os.write(file, bytes(_SIZE))  # So that there is a place on the disk for it, however full that becomes.
        return mmap.mmap(file, _SIZE, access=mmap.ACCESS_READ)
    finally:
        os.close(file)


class Flags:
    """The keys of huey's flags that say that a task is revoked, or that all of its name are.

    Huey asks for two of them before it runs a task, and for one after it, and hardly one is ever there.

    Args:
        load: Reads them; None when there are too many.
    """

    def __init__(self, stamp: Stamp, load: Callable[[], Collection[str] | None]) -> None:
        self._stamp = stamp
        self._load = load
        self._loaded_at = 0.0
        # In one piece, since threads share it: the stamp, until when it counts, and what there is.
        self._known: tuple[bytes | None, float, frozenset[str] | None] = (None, 0.0, None)

    def may_have(self, keys: Collection[str]) -> bool:
        """False when none of them is there."""
        # First, so that what is revoked while they are read changes it.
        stamp = self._stamp.read()
        known, until, flags = self._known
        now = monotonic()
        if stamp is None or stamp != known or now >= until:
            if stamp is None or now < self._loaded_at + _PAUSE_S:
                return True
            self._loaded_at = now
            loaded = self._load()
            flags = None if loaded is None else frozenset(loaded)
            self._known = (stamp, now + _KEPT_S, flags)
        return flags is None or not flags.isdisjoint(keys)

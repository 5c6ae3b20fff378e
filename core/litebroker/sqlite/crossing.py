"""Connections that stay open in the parent at a fork, and what makes the file safe for the child all the same.

SQLite notes in memory which locks a process has on a file, since POSIX locks belong to the process, whatever connection
has asked for them (unixInodeInfo in os_unix.c). A child inherits the notes, and not the locks. If it opens the file by
itself, SQLite takes none that it believes to have: somebody else may close the file as the last one and delete the WAL,
and the child goes on in what nobody will ever see. So the child takes those locks by itself, before anything else, and
then the notes are true of it as well. While nothing is read or written there are two, which a connection in WAL mode
holds for life:

* a shared lock on the database, which keeps others from deleting the WAL (sqlite.org/lockingv3.html);
* a shared lock on the ``-shm``, by which others know that somebody goes by the index in it (sqlite.org/walformat.html).

The parent's connections are neither used nor closed in the child (sqlite.org/howtocorrupt.html, section 2.6). A
grandchild, which may be a daemon and close all descriptors, closes them first: it has the locks that it is believed to
have, too. Not where its parent had other threads, one of which might have been inside SQLite.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Protocol

from litebroker.errors import StorageError
from litebroker.sqlite.location import file_identity

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["POSSIBLE", "begin", "is_lost", "keep", "stay_open", "take_locks"]

POSSIBLE = fcntl is not None and sys.platform == "linux"

# Where SQLite locks: the bytes are a part of the file format, as processes of all its versions share a file.
_SHARED_FIRST, _SHARED_BYTES = 0x40000002, 510
_IN_USE_BYTE = 128
# Others hold such a lock alone only while they open or close the file.
_PATIENCE_S = 5.0
_NAP_S = 0.001

Identity = tuple[int, int]

_staying: dict[str, tuple[Identity, Identity]] = {}  # of this process, at the fork under way
_inherited: dict[str, tuple[Identity, Identity]] = {}  # of what SQLite's notes in this process tell
_lost: set[str] = set()
_held: dict[str, list[tuple[int, Identity]]] = {}  # descriptors that have the locks, and of which files they are
_forebears: dict[str, list[_Closable]] = {}  # their connections
_alone: list[bool] = []  # whether the thread that forks is the only one


class _Closable(Protocol):
    def close(self) -> None: ...


def begin() -> None:
    """Before a fork: nothing stays open yet."""
    _staying.clear()
    _alone[:] = [threading.active_count() == 1]


def stay_open(path: str) -> bool:
    """Before a fork: note that connections to this file stay open in the parent. False when they must be closed.

    No transaction is open on them.
    """
    database, index = file_identity(path), file_identity(f"{path}-shm")
    if not POSSIBLE or database is None or index is None:
        return False
    _staying[path] = database, index
    return True


def take_locks() -> None:
    """In the child, first of all: take the locks that it is believed to have.

    A grandchild does so again, as it inherits the same notes.
    """
    older = [path for path in _inherited if path not in _staying and not is_lost(path)]
    _inherited.update(_staying)
    _staying.clear()
    for path, (database, index) in _inherited.items():
        if file_identity(path) == database and not _take(path, database, index):
            _lost.add(path)
    if _alone == [True]:
        for path in older:
            if not is_lost(path):
                _let_go(path)


def keep(path: str, *connections: _Closable | None) -> None:
    """In the child: these are its parent's."""
    _forebears.setdefault(path, []).extend(db for db in connections if db is not None)


def is_lost(path: str | None) -> bool:
    """Whether this process must not open the file.

    All others closed it while this one was being forked; or this one has closed descriptors that it did not open, so
    that SQLite would lock whatever has their numbers now.
    """
    return path is not None and (path in _lost or not all(_is_open(*held) for held in _held.get(path, ())))


def _is_open(descriptor: int, identity: Identity) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == identity


def _let_go(path: str) -> None:
    """Close what the forebears have opened, so that SQLite notes nothing of the file any more."""
    for db in _forebears.pop(path, []):
        with contextlib.suppress(StorageError):
            db.close()
    for descriptor, _ in _held.pop(path, []):
        os.close(descriptor)
    del _inherited[path]


def _take(path: str, database: Identity, index: Identity) -> bool:
    """Take them for as long as SQLite notes them: to close either descriptor would let go of the locks."""
    try:
        descriptors = _lock(path, _SHARED_FIRST, _SHARED_BYTES), _lock(f"{path}-shm", _IN_USE_BYTE, 1)
    except OSError:
        return False
    _held.setdefault(path, []).extend(zip(descriptors, (database, index), strict=True))
    # Who closes the file as the last one deletes the WAL, and then this. No new one can have its number, as this
    # process has inherited a descriptor of it.
    return file_identity(f"{path}-shm") == index


def _lock(path: str, first: int, length: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, length, first)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which
            if time.monotonic() > deadline:
                raise
        else:
            return file
        time.sleep(_NAP_S)

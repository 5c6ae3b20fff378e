"""Connections that stay open in the parent at a fork, and what makes the file safe for the child all the same.

SQLite notes in memory which locks a process has on a file, since POSIX locks belong to the process, whatever connection
has asked for them (unixInodeInfo in os_unix.c). A child inherits the notes, and not the locks. If it opens the file by
itself, SQLite takes none that it believes to have: somebody else may close the file as the last one and delete the WAL,
and the child goes on in what nobody will ever see. So the child takes those locks by itself, before anything else, and
then the notes are true of it as well. While nothing is read or written there are two, which a connection in WAL mode
holds for life:

* a shared lock on the database, which keeps others from deleting the WAL (sqlite.org/lockingv3.html);
* a shared lock on the ``-shm``, by which others know that somebody goes by the index in it (sqlite.org/walformat.html).

The parent's connections are neither used nor closed in the child (sqlite.org/howtocorrupt.html, section 2.6).
"""

from __future__ import annotations

import os
import sys
import time

from litebroker.sqlite.location import file_identity

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["POSSIBLE", "begin", "is_lost", "stay_open", "take_locks"]

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


def begin() -> None:
    """Before a fork: nothing stays open yet."""
    _staying.clear()


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
    _inherited.update(_staying)
    _staying.clear()
    for path, (database, index) in _inherited.items():
        if file_identity(path) == database and not _take(path, index):
            _lost.add(path)


def is_lost(path: str | None) -> bool:
    """Whether this process must not open the file, as all others closed it while this one was being forked."""
    return path in _lost


def _take(path: str, index: Identity) -> bool:
    """Take them for good: to close either descriptor would let go of the locks."""
    try:
        _lock(path, _SHARED_FIRST, _SHARED_BYTES)
        _lock(f"{path}-shm", _IN_USE_BYTE, 1)
    except OSError:
        return False
    # Who closes the file as the last one deletes the WAL, and then this. No new one can have its number, as this
    # process has inherited a descriptor of it.
    return file_identity(f"{path}-shm") == index


def _lock(path: str, first: int, length: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, length, first)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which
            if time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(_NAP_S)

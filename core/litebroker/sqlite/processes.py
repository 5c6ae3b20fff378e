"""Which processes have a database open, and what they hold of it, as Linux tells it. Nothing is opened for that.

``/proc/<pid>/fd`` names what a process has open; to follow such a link with `stat` opens nothing, so that no lock is
lost. ``/proc/locks`` names the POSIX locks. SQLite's on the -shm file say who reads and who writes
(sqlite.org/walformat.html, section 2.3: one byte for each lock, from 120 on).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from litebroker.sqlite.location import file_identity

# Bytes of the -shm file that stand for locks: the writer's, and one for each of five marks of readers.
_WRITE_LOCK = 120
_READ_LOCKS = range(123, 128)
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Opener:
    """A process that has the database, or a file beside it, open.

    Attributes:
        command: Its command line, shortened.
        connected: It has the -shm open, as SQLite does for as long as it is connected.
        strange: Descriptors of the database or of the -shm that are not SQLite's, which opens them with O_NOFOLLOW.
        deleted: It has a database of this name open that has since been deleted or replaced.
    """

    pid: int
    command: str
    connected: bool
    strange: tuple[int, ...]
    deleted: bool


@dataclass(frozen=True, slots=True)
class Openers:
    """What `openers` found.

    Attributes:
        known: Whether this system tells at all.
        hidden: How many processes did not let us look: they are other users'.
    """

    known: bool
    processes: tuple[Opener, ...] = ()
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class ShmLock:
    """A lock of SQLite's on the -shm file.

    Attributes:
        pid: Who holds it; -1 or 0 where the kernel does not tell.
        byte: Which one.
    """

    pid: int
    byte: int

    @property
    def writes(self) -> bool:
        """It is that of the one who writes; else of one who reads."""
        return self.byte == _WRITE_LOCK


def openers(path: str) -> Openers:
    """Who has the database open, this process too."""
    if not sys.platform.startswith("linux") or not _PROC.is_dir():
        return Openers(known=False)
    files = {identity: name for name in ("", "-shm", "-wal") if (identity := file_identity(path + name)) is not None}
    found: list[Opener] = []
    hidden = 0
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        try:
            opener = _opener(int(name), path, files)
        except PermissionError:
            hidden += 1
        except OSError:  # it has ended
            continue
        else:
            if opener is not None:
                found.append(opener)
    return Openers(known=True, processes=tuple(sorted(found, key=lambda opener: opener.pid)), hidden=hidden)


def locks(path: str) -> frozenset[ShmLock]:
    """Who reads and who writes at this moment. Empty where the system does not tell."""
    shm = file_identity(f"{path}-shm")
    if shm is None:
        return frozenset()
    try:
        lines = (_PROC / "locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(lock for line in lines for lock in _locks_in(line, shm[1]))


def _locks_in(line: str, inode: int) -> Iterator[ShmLock]:
    """proc_locks(5): ``1: POSIX  ADVISORY  READ 4242 08:01:131077 124 124``, with ``->`` for one who waits."""
    fields = line.split()
    if len(fields) != 8 or fields[1] != "POSIX":  # noqa: PLR2004
        return
    _number, _kind, _advisory, _mode, pid, place, start, end = fields
    if place.rpartition(":")[2] != str(inode) or not start.isdigit() or not end.isdigit():
        return
    for byte in (_WRITE_LOCK, *_READ_LOCKS):
        if int(start) <= byte <= int(end):
            yield ShmLock(int(pid), byte)


def _opener(pid: int, path: str, files: dict[tuple[int, int], str]) -> Opener | None:
    folder = _PROC / str(pid) / "fd"
    names: set[str] = set()
    strange: list[int] = []
    deleted = False
    for descriptor in os.listdir(folder):
        try:
            link = folder / descriptor
            name = files.get(file_identity(link) or (0, 0))
            deleted = deleted or (name is None and os.readlink(link) == f"{path} (deleted)")
            if name is None:
                continue
            names.add(name)
            if name in {"", "-shm"} and not _is_sqlites(pid, descriptor):
                strange.append(int(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    if not names and not deleted:
        return None
    return Opener(pid, _command(pid), "-shm" in names, tuple(sorted(strange)), deleted)


def _is_sqlites(pid: int, descriptor: str) -> bool:
    """proc_pid_fdinfo(5): the flags of open(2), in octal."""
    text = (_PROC / str(pid) / "fdinfo" / descriptor).read_text(encoding="ascii", errors="replace")
    flags = next((int(line.split()[1], 8) for line in text.splitlines() if line.startswith("flags:")), 0)
    return bool(flags & os.O_NOFOLLOW) or bool(flags & getattr(os, "O_PATH", 0))


def _command(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = " ".join(word.decode("utf-8", "replace") for word in words if word)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004

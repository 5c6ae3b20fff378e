"""Names for processes that outlive them, so that a dead one is told from one that was given its number later.

A name holds the host, its boot, the namespace of process numbers, the number, and when the process started. Of a
process on another host, or in another container, nothing can be said, and it counts as living.
"""

from __future__ import annotations

import os
import socket
import threading
from functools import lru_cache
from pathlib import Path

_SEPARATOR = "|"
_NEVER = "0"  # when a process started that was gone before it could be asked
_STARTED_FIELD = 19  # of /proc/<pid>/stat, counted behind the name in parentheses (man 5 proc: field 22)


class _Speaker(threading.local):
    """Of which of its children a thread runs the commands."""

    child: int | None = None
    name: str | None = None


_speaker = _Speaker()


def speak_for(child: int | None) -> None:
    """In this thread, from now on: what is done is done for the child process of this number, or for none."""
    if _speaker.child != child:
        _speaker.child, _speaker.name = child, None


def speaks_for_itself() -> bool:
    """Whether what this thread does is done for this process, and not for a child of it."""
    return _speaker.child is None


def own() -> str:
    """The name of this process, or of the child that this thread speaks for."""
    if _speaker.child is None:
        return _named(os.getpid())
    if _speaker.name is None:
        _speaker.name = _named_afresh(_speaker.child)
    return _speaker.name


def parent() -> str:
    """The name of the process that started that one. As of the first call, when it is gone by now."""
    return _parent(os.getpid(), os.getppid()) if _speaker.child is None else _named(os.getpid())


def is_alive(name: str) -> bool:
    """Whether a process of this name may still run."""
    try:
        host, boot, namespace, number, started = name.rsplit(_SEPARATOR, 4)
        pid = int(number)
    except ValueError:
        return True
    here, this_boot, this_namespace = _machine()
    if host != here:
        return True
    if boot != this_boot:
        return False
    if namespace != this_namespace:
        return True
    return _started(pid) == started if started else _exists(pid)


@lru_cache(maxsize=8)
def _named(pid: int) -> str:
    return _named_afresh(pid)


@lru_cache(maxsize=8)
def _parent(pid: int, parent_pid: int) -> str:
    del pid
    return _named_afresh(parent_pid)


def _named_afresh(pid: int) -> str:
    host, boot, namespace = _machine()
    started = _started(pid) or (_NEVER if boot else "")
    return _SEPARATOR.join((host, boot, namespace, str(pid), started))


@lru_cache(maxsize=1)
def _machine() -> tuple[str, str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: no containers either
        boot = namespace = ""
    return socket.gethostname(), boot, namespace


def _started(pid: int) -> str | None:
    """When it started, in ticks since the boot. None when it is gone, or is only waited for, or this is not Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[_STARTED_FIELD]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True

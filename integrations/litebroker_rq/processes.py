"""Names for processes that outlive them, so that a dead one is told from one that was given its number later.

A name holds the host, its boot, the namespace of process numbers, the number, and when the process started. Of a
process on another host, or in another container, nothing can be said, and it counts as living.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path

_SEPARATOR = "|"
_STARTED_FIELD = 19  # of /proc/<pid>/stat, counted behind the name in parentheses (man 5 proc: field 22)


def own() -> str:
    """This process' name."""
    return _named(os.getpid())


def parent() -> str:
    """The name of the process that started this one. As of the first call, when it is gone by now."""
    return _parent(os.getpid(), os.getppid())


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
    return _SEPARATOR.join((*_machine(), str(pid), _started(pid) or ""))


@lru_cache(maxsize=8)
def _parent(pid: int, parent_pid: int) -> str:
    del pid
    return _named_afresh(parent_pid)


def _named_afresh(pid: int) -> str:
    return _SEPARATOR.join((*_machine(), str(pid), _started(pid) or ""))


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

"""What this machine says of itself: which start of it this is, and what kind of disk a file lies on."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from functools import lru_cache
from pathlib import Path

# Their locks do not reach every process that can open the file, or their memory maps are not shared.
_NETWORK = frozenset({
    "9p", "afs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs",
})  # fmt: skip
_LOCAL_FUSE = frozenset({"fuseblk"})  # ntfs-3g: a local disk
_FIELDS = 5
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a blank in a path


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Names this start of the machine; the same for all its processes and containers. "" where it cannot be told."""
    try:
        if sys.platform.startswith("linux"):
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        if sys.platform == "darwin":
            return _sysctl(b"kern.bootsessionuuid")
    except OSError:
        pass
    return ""


@lru_cache(maxsize=1)
def steady_clock_id() -> str:
    """Names the clock that `time.monotonic` reads: the boot, and the time namespace (time_namespaces(7)).

    "" where processes cannot agree on one; leases then go by the wall clock.
    """
    boot = boot_id()
    if not boot:
        return ""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return boot


def process_label() -> str:
    """``host:pid``, as the history and listings name a worker."""
    return f"{socket.gethostname()}:{os.getpid()}"


def network_file_system(path: Path) -> str | None:
    """The kind of network or user-space file system that the path lies on, or None for a local disk.

    Linux only; elsewhere None.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    kind, longest = "", -1
    for line in mounts:
        # proc_pid_mountinfo(5): ... mount point is field 5, the type follows " - ".
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < _FIELDS or not after:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, longest = after.split(" ")[0], len(point)
    if kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        return kind
    return None


def _sysctl(name: bytes) -> str:
    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(128)
    value = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name, value, ctypes.byref(size), None, 0) != 0:
        return ""
    return value.value.decode("ascii", "replace")

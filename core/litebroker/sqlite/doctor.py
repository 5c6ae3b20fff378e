"""What is well and what is not with a database file, its surroundings, and those who use it.

It looks and changes nothing: it makes no tables, migrates none, copies no WAL back, and opens neither the file nor its
-shm but through SQLite (closing them would drop the locks of this process). Every read is short; only with ``full``
is the whole file read in one go.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from litebroker.clock import SystemClock
from litebroker.errors import DatabaseCorruptError, StorageError
from litebroker.sqlite import machine, processes, schema, upkeep
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import MINIMUM_VERSION, Connection, Row, connect
from litebroker.sqlite.identities import issued_at_ms
from litebroker.sqlite.location import Options
from litebroker.sqlite.locks import is_alive

Severity = Literal["ok", "note", "warning", "error"]

# How long one read may take, so that it neither pins the WAL nor keeps a checkpoint waiting.
_READ_S = 0.08
_BUSY_MS = 2000
# A transaction is long that is there at each of so many looks: who makes short ones, one after the other, is caught
# between two of them.
_LOOKS, _LOOK_S = 100, 0.004
_MOST_LEASES = 10_000
_LATE_MS = 5000
_DRIFT_MS = 60_000
# In bytes.
_USUAL_WAL, _LARGE_WAL = 20 << 20, 64 << 20
_LEAST_FREE, _LITTLE_FREE = 64 << 20, 512 << 20
_WORTH_A_VACUUM = 64 << 20
# Which releases are without the bug, as sqlite.org/wal.html#walresetbug has it.
_WAL_RESET_FIXED = (3, 51, 3)
_WAL_RESET_MENDED: Mapping[tuple[int, ...], tuple[int, ...]] = {(3, 44): (3, 44, 6), (3, 50): (3, 50, 7)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What, in one word.
        severity: "ok" and "note" need no action; "warning" and "error" do.
        found: What was found, in a sentence.
        advice: What to do; "" where there is nothing to do.
    """

    check: str
    severity: Severity
    found: str
    advice: str = ""

    @property
    def needs_action(self) -> bool:
        return self.severity in {"warning", "error"}


def examine(path: str, options: Options, *, full: bool = False) -> Iterator[Finding]:
    """Look at everything, one after the other. What cannot be looked at is a finding, too.

    Args:
        path: The database, which is there.
        full: Check the integrity of the whole file, though it takes a long read transaction.
    """
    path = os.path.realpath(path)
    yield from _file(path)
    yield _file_system(path, options)
    yield _disk(path)
    yield from _sidecars(path)
    openers = processes.openers(path)
    yield from _openers(path, openers)
    try:
        db = connect(path, options.driver, busy_timeout_ms=_BUSY_MS, read_only=True)
    except StorageError as error:
        yield Finding("database", "error", str(error), "see above; nothing else could be looked at")
        return
    try:
        yield from _inside(db, path, options, openers, full=full)
    except DatabaseCorruptError as error:
        yield Finding("integrity", "error", str(error), "stop all workers, keep a copy of the file, restore a backup")
    except StorageError as error:
        yield Finding("database", "error", str(error), "nothing else could be looked at")
    finally:
        db.close()


def _inside(
    db: Connection, path: str, options: Options, openers: processes.Openers, *, full: bool
) -> Iterator[Finding]:
    yield _version(db)
    schema_finding, ours = _schema(db, path, options)
    yield schema_finding
    yield _journal(db)
    yield _durability(options)
    yield from _wal(path, openers)
    yield _space(db)
    yield _integrity(db, path, full=full)
    if ours:
        yield from _clocks(db)
        yield from _holders(db, path)


# -- around the file --


def _file(path: str) -> Iterator[Finding]:
    status = os.stat(path)
    folder = os.path.dirname(path)
    wrong = [
        what
        for what, right in (
            ("the file may not be read", os.access(path, os.R_OK)),
            ("the file may not be written", os.access(path, os.W_OK)),
            (f"its folder {folder} may not be written", os.access(folder, os.W_OK | os.X_OK)),
        )
        if not right
    ]
    if wrong:
        yield Finding("file", "error", "; ".join(wrong), "give this user the right, as SQLite needs all of it")
    elif status.st_nlink > 1:
        yield Finding(
            "file",
            "error",
            f"it has {status.st_nlink} names (hard links)",
            "use one of them only and remove the others: each name would get a WAL of its own"
            " (sqlite.org/howtocorrupt.html)",
        )
    elif status.st_mode & 0o006:
        yield Finding(
            "file",
            "note",
            f"{_bytes(status.st_size)}; all users of this machine may read it (mode {status.st_mode & 0o777:03o})",
            "chmod 600 or 640, if payloads are nobody else's business",
        )
    else:
        yield Finding("file", "ok", f"{_bytes(status.st_size)}, mode {status.st_mode & 0o777:03o}")


def _file_system(path: str, options: Options) -> Finding:
    kind = machine.network_file_system(Path(path).parent)
    if kind is not None:
        return Finding(
            "file system",
            "warning" if options.network else "error",
            f"it lies on {kind}, where SQLite's locks and shared memory cannot be trusted",
            "put it on a local disk: jobs can be lost, or run twice",
        )
    if not os.path.exists("/proc/self/mountinfo"):
        return Finding("file system", "note", "its kind is not known here", "make sure that it is a local disk")
    return Finding("file system", "ok", "a local one")


def _disk(path: str) -> Finding:
    usage = shutil.disk_usage(os.path.dirname(path))
    size = os.stat(path).st_size
    found = f"{_bytes(usage.free)} of {_bytes(usage.total)} are free"
    if usage.free < _LEAST_FREE:
        return Finding("disk", "error", found, "make room now: writes fail when it is full")
    if usage.free < _LITTLE_FREE or usage.free < size // 10:
        return Finding("disk", "warning", found, "make room: the file and its WAL grow with what waits")
    if usage.free < size:
        return Finding("disk", "note", f"{found}: less than the file takes", "a backup needs another disk")
    return Finding("disk", "ok", found)


def _sidecars(path: str) -> Iterator[Finding]:
    if os.path.exists(f"{path}-journal"):
        yield Finding(
            "sidecars",
            "error",
            f"{path}-journal is there, and a file in WAL mode has none",
            "do not delete it: SQLite may need it to undo what was interrupted; find out who uses the file in another"
            " journal mode",
        )
    folder = Path(f"{path}-litebroker")
    if not folder.is_dir():
        yield Finding("sidecars", "note", "there is no folder of locks yet: nothing has worked on the file here")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "sidecars",
            "error",
            f"{folder} may not be written by this user",
            "let all workers run as one user, or give their group the right to write there",
        )
    elif folder.stat().st_uid != os.stat(path).st_uid:
        yield Finding(
            "sidecars",
            "note",
            f"{folder} and the file belong to different users",
            "let all workers run as one user, or make sure that both may write in both places",
        )
    else:
        yield Finding("sidecars", "ok", f"the folder of locks is there ({folder.name})")


def _openers(path: str, openers: processes.Openers) -> Iterator[Finding]:
    if not openers.known:
        yield Finding("processes", "note", "this system does not tell who has the file open")
        yield Finding("descriptors", "note", "this system does not tell who has the file open")
        return
    mine = os.getpid()
    others = [opener for opener in openers.processes if opener.pid != mine]
    found = f"{len(others)} other{'s have' if len(others) != 1 else ' has'} it open"
    if others:
        found += f": {', '.join(_named(opener) for opener in others[:5])}{', ...' if len(others) > 5 else ''}"  # noqa: PLR2004
    if openers.hidden:
        found += f"; {openers.hidden} of other users could not be looked at"
    yield Finding("processes", "ok", found)
    for opener in others:
        if opener.deleted:
            yield Finding(
                "processes",
                "error",
                f"{_named(opener)} works on an older file of this name, which was deleted or replaced",
                "restart it: what it writes there is lost with it",
            )
    strange = [opener for opener in openers.processes if opener.strange]
    for opener in strange:
        who = "this process" if opener.pid == mine else _named(opener)
        which = ", ".join(map(str, opener.strange))
        if opener.connected:
            yield Finding(
                "descriptors",
                "error",
                f"{who} has {path} or its -shm open beside SQLite (descriptor {which})",
                "closing that drops SQLite's locks in that process, and commits can vanish: never open these files"
                " otherwise; for a copy, use `litebroker backup`",
            )
        else:
            yield Finding(
                "descriptors",
                "warning",
                f"{who} reads the file directly (descriptor {which})",
                "a copy of a file in use is no backup: use `litebroker backup`",
            )
    if not strange:
        yield Finding("descriptors", "ok", "nobody has it open but through SQLite")


def _named(opener: processes.Opener) -> str:
    return f"{opener.pid} ({opener.command})"


# -- inside --


def _version(db: Connection) -> Finding:
    number = ".".join(map(str, db.version))
    if db.version < MINIMUM_VERSION:
        return Finding("sqlite", "error", f"{number} is too old", "pip install 'litebroker[apsw]', and ?driver=apsw")
    mended = _WAL_RESET_MENDED.get(db.version[:2])
    if db.version < _WAL_RESET_FIXED and (mended is None or db.version < mended):
        return Finding(
            "sqlite",
            "note",
            f"{number} ({db.driver}) can damage a file when a checkpoint meets a commit (the WAL-reset bug, up to"
            " 3.51.2); litebroker keeps the two apart by a lock of its own",
            "other programs that write to this file shall set wal_autocheckpoint = 0, or have SQLite 3.51.3",
        )
    return Finding("sqlite", "ok", f"{number} ({db.driver})")


def _schema(db: Connection, path: str, options: Options) -> tuple[Finding, bool]:
    known = len(schema.migrations())
    try:
        found = schema.check(db, path, shared=options.shared)
    except DatabaseCorruptError:
        raise
    except StorageError as error:
        return Finding("schema", "error", str(error), "see the message"), False
    if found == 0:
        return Finding("schema", "note", "there are no tables of litebroker's yet"), False
    parts = [f"version {found}"]
    parts += [
        f"{key.partition(':')[2]} {version}" for key, version in db.rows(sql.COMPONENTS) if key.startswith("schema:")
    ]
    if found < known:
        return (
            Finding("schema", "note", f"{', '.join(parts)}; this litebroker makes {known} of it", "litebroker migrate"),
            False,
        )
    return Finding("schema", "ok", ", ".join(parts)), True


def _journal(db: Connection) -> Finding:
    (mode,) = db.rows("pragma journal_mode")[0]
    if mode != "wal":
        return Finding(
            "journal",
            "warning",
            f"journal mode {mode!r}, not 'wal'",
            "any command that writes switches it back; find out who changed it, unless it is a backup just restored",
        )
    return Finding("journal", "ok", "wal")


_TAKEN = {
    "relaxed": "a power cut can take the last moments",
    "durable": "a power cut can take no job that was added, only acknowledgements: such jobs run again",
    "full": "a power cut takes nothing",
}


def _durability(options: Options) -> Finding:
    return Finding(
        "durability", "ok", f"{options.durability!r}, as this command line has it: {_TAKEN[options.durability]}"
    )


def _wal(path: str, openers: processes.Openers) -> Iterator[Finding]:
    held = processes.locks(path)
    for _ in range(_LOOKS):
        if not held:
            break
        time.sleep(_LOOK_S)
        held &= processes.locks(path)
    lasting_s = _LOOKS * _LOOK_S
    names = {opener.pid: _named(opener) for opener in openers.processes}
    if not openers.hidden:
        # The kernel's list has inodes, which another file system may have, too.
        held = frozenset(lock for lock in held if lock.pid in names)
    pins = sorted({names.get(lock.pid, f"process {lock.pid}") for lock in held if not lock.writes})
    writers = sorted({names.get(lock.pid, f"process {lock.pid}") for lock in held if lock.writes})
    try:
        size = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        size = 0
    if writers:
        yield Finding(
            "wal",
            "warning",
            f"a write transaction has been open for {lasting_s:g} s and more, in {', '.join(writers)}",
            "end it: all others wait meanwhile",
        )
    if pins:
        yield Finding(
            "wal",
            "warning",
            f"{_bytes(size)}; a read transaction has been open for {lasting_s:g} s and more, in {', '.join(pins)}",
            "end it: the WAL grows until then (a backup under way does this, too)",
        )
    elif size > _LARGE_WAL:
        told = "nobody reads at this moment" if openers.known else "this system does not tell who reads"
        yield Finding(
            "wal",
            "warning",
            f"{_bytes(size)}, and about 4 MB are usual; {told}",
            "look for long read transactions; `litebroker vacuum` copies the WAL back",
        )
    elif size > _USUAL_WAL:
        yield Finding("wal", "note", f"{_bytes(size)}, and about 4 MB are usual: there was a long read transaction")
    else:
        yield Finding("wal", "ok", _bytes(size))


def _space(db: Connection) -> Finding:
    space = upkeep.space(db)
    found = f"{_bytes(space.free)} of {_bytes(space.size)} are free for new jobs"
    if space.free > _WORTH_A_VACUUM and space.free > space.size // 2:
        return Finding("space", "note", found, "`litebroker vacuum` gives them back to the disk")
    return Finding("space", "ok", found)


def _integrity(db: Connection, path: str, *, full: bool) -> Finding:
    if full:
        found = [str(line) for (line,) in db.rows("pragma integrity_check(10)")]
    else:
        timer = threading.Timer(_READ_S, db.interrupt)
        timer.start()
        began = time.monotonic()
        try:
            found = [str(line) for (line,) in db.rows("pragma quick_check(10)")]
        except DatabaseCorruptError:
            raise
        except StorageError:
            if time.monotonic() - began < _READ_S:
                raise
            return Finding(
                "integrity",
                "note",
                "the file is too large to be checked within a short read transaction",
                "`litebroker doctor --full` reads all of it (about 300 MB/s), or check a backup of it",
            )
        finally:
            timer.cancel()
            timer.join()
    if found != ["ok"]:
        return Finding(
            "integrity",
            "error",
            f"{path} is damaged: {'; '.join(found[:3])}",
            "stop all workers, keep a copy of the file, its -wal and -shm, and restore a backup",
        )
    return Finding("integrity", "ok", "the whole file, and its indexes" if full else "the whole file")


# -- what the tables say --


def _clocks(db: Connection) -> Iterator[Finding]:
    clock = SystemClock()
    now_ms = clock.now_ms()
    latest = db.rows(sql.LATEST)[0][0]
    ahead_ms = issued_at_ms(latest) - now_ms if latest is not None else 0
    if ahead_ms > _LATE_MS:
        yield Finding(
            "clock",
            "warning",
            f"the wall clock is {_seconds(ahead_ms)} behind the time at which the latest job was added",
            "set it: delayed jobs and schedules come so much too late",
        )
    else:
        yield Finding("clock", "ok", "the wall clock is not behind the jobs in the file")
    anchor_ms = _anchor_ms(db)
    if anchor_ms is None:
        yield Finding("clock", "ok", "the file has not been worked on since this machine started")
        return
    drift_ms = now_ms - (anchor_ms + clock.steady_ms())
    if abs(drift_ms) > _DRIFT_MS:
        yield Finding(
            "clock",
            "note",
            f"the wall clock was set {'forward' if drift_ms > 0 else 'back'} by {_seconds(abs(drift_ms))} since the"
            " file was first used after this machine's start, or the machine slept",
            "leases go by a steady clock and do not care; due times and schedules go by the wall clock",
        )


def _holders(db: Connection, path: str) -> Iterator[Finding]:
    leases = db.rows(sql.LEASES, {"limit": _MOST_LEASES})
    rows = {process: (boot, label) for process, boot, label in db.rows(sql.PROCESSES)}
    held = Counter(process for process, _until in leases)
    more = "at least " if len(leases) == _MOST_LEASES else ""
    gone = {
        label: held[process]
        for process, (boot, label) in sorted(rows.items())
        if held[process] and _is_gone(path, process, boot)
    }
    if gone:
        yield Finding(
            "holders",
            "warning",
            f"{more}{sum(gone.values())} jobs are held by processes that are gone: {_list(gone)}",
            "start a worker: the first to claim takes them back",
        )
    late = _late(db, leases)
    if late:
        yield Finding(
            "holders",
            "warning",
            f"{more}{late} leases ended more than {_LATE_MS // 1000} s ago, and nobody took the jobs back",
            "start workers for their queues",
        )
    living = {label: held[process] for process, (boot, label) in sorted(rows.items()) if label not in gone}
    if not gone and not late:
        found = f"{more}{len(leases)} active job{'s' if len(leases) != 1 else ''}"
        yield Finding("holders", "ok", f"{found}; claimed from by {_list(living)}" if living else found)


def _is_gone(path: str, process: int, boot: str) -> bool:
    if boot == machine.boot_id():
        return is_alive(Path(f"{path}-litebroker"), process) is False
    # Of another start of this machine; or of another machine, and then only its lease tells.
    return bool(machine.boot_id()) and machine.network_file_system(Path(path).parent) is None


def _late(db: Connection, leases: Sequence[Row]) -> int:
    """How many of these leases ended a while ago."""
    anchor_ms = _anchor_ms(db)
    if anchor_ms is None:
        return 0
    steady_ms = anchor_ms + SystemClock().steady_ms()
    return sum(until_ms < steady_ms - _LATE_MS for _process, until_ms in leases)


def _anchor_ms(db: Connection) -> int | None:
    """Where the file's steady time begins on this start of the machine; None when nobody has worked on it since."""
    return {name: anchor_ms for name, anchor_ms, _seen in db.rows(sql.BOOTS)}.get(machine.steady_clock_id())


def _list(jobs: Mapping[str, int]) -> str:
    shown = [f"{label} ({count})" for label, count in list(jobs.items())[:5]]
    return ", ".join(shown) + (", ..." if len(jobs) > len(shown) else "")


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 30), ("MB", 20), ("KB", 10)):
        if size >= 1 << scale:
            return f"{size / (1 << scale):.1f} {unit}"
    return f"{size} bytes"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.0f} s"

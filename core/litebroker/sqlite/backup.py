"""Copies of a database in use, and the way back.

A copy is made by SQLite's own backup (sqlite.org/backup.html) within one read transaction: it is of one moment, and
writers go on meanwhile; only the WAL cannot be begun anew until it is made. It lies under another name until it is
whole, checked and on disk, and is then renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from litebroker.errors import (
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseUnavailableError,
    ForeignDatabaseError,
    StorageError,
)
from litebroker.sqlite import machine, processes, schema
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, connect
from litebroker.sqlite.locks import WriterLock

OnStep = Callable[[int, int], object]

_STEP_PAGES = 1000
_BUSY_MS = 2000
_SUFFIXES = ("-wal", "-shm", "-journal")  # of what SQLite keeps beside a database


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What was copied.

    Attributes:
        size: In bytes.
        read_ms: How long the read transaction was open that kept the WAL from being begun anew.
        requeued: How many active jobs were made pending again.
    """

    size: int
    read_ms: int
    requeued: int = 0


def back_up(source: str, target: str, *, driver: str, overwrite: bool = False, on_step: OnStep) -> Copied:
    """Copy a database, which may be in use, into a new file; it is there whole, checked and on disk, or not at all.

    The copy is a single file, in rollback mode: it can be carried away, and read from a medium that takes no writes.

    Args:
        overwrite: Replace what is there under the target's name, unless it is a database in use.
        on_step: As in `Connection.copy_to`.

    Raises:
        StorageError: Any of its kind. The target is as it was.
    """
    refuse_parts(target, source)
    if not os.path.isfile(source):
        raise DatabaseUnavailableError(f"{source}: there is no such file", path=source)
    _refuse_target(target, overwrite=overwrite)
    with _partial(target) as partial:
        copied = _copy(source, partial, driver, on_step)
        os.chmod(partial, os.stat(source).st_mode & 0o777)
        _replace(partial, target, driver=driver)
    return copied


def restore(
    source: str,
    target: str,
    *,
    driver: str,
    overwrite: bool = False,
    requeue_active: bool = False,
    network: bool = False,
    on_step: OnStep,
) -> Copied:
    """Make a database of a backup, at a place where none is, or none that is in use.

    Leases come along as they were. Those of this start of this machine go on until they end; those of an earlier one,
    or of another machine, are taken back by the first worker that claims, as of a worker that died.

    Args:
        overwrite: Replace a database of ours that is there. It has to be readable, and nobody may have it open.
        requeue_active: Make all active jobs pending at once, in their old place, and their last attempt not counted.
            A job that has run since the backup runs again.
        network: Also on a network file system.

    Raises:
        DatabaseBusyError: A process has the target open.
        StorageError: Any other of its kind. The target is as it was.
    """
    refuse_parts(target, source)
    if not os.path.isfile(source):
        raise DatabaseUnavailableError(f"{source}: there is no such backup", path=source)
    kind = None if network else machine.network_file_system(Path(target).parent)
    if kind is not None:
        raise DatabaseUnavailableError(
            f"{target}: it lies on a {kind} file system, where SQLite's locks cannot be trusted: restore it to a local"
            " disk, or insist with ?network=1",
            path=target,
        )
    _refuse_target(target, overwrite=overwrite)
    with _partial(target) as partial:
        copied = _copy(source, partial, driver, on_step)
        if requeue_active:
            copied = Copied(size=copied.size, read_ms=copied.read_ms, requeued=_requeue(partial, driver))
        os.chmod(partial, os.stat(source).st_mode & 0o777)
        _replace(partial, target, driver=driver)
    return copied


def refuse_parts(target: str, database: str) -> None:
    """Refuse to write where the database lies, under any of its names, or where SQLite keeps a part of one.

    Raises:
        StorageError: It is so.
    """
    path, real = os.path.realpath(database), os.path.realpath(target)
    parts = [path + suffix for suffix in ("", *_SUFFIXES)]
    # Also by a hard link, which only stat(2) tells: to open it, and close it again, would drop SQLite's locks.
    if real in parts or any(_is_same(target, part) for part in parts):
        raise StorageError(f"{target}: this is the database itself: give another path", path=target)
    if real.startswith(f"{path}-litebroker{os.sep}"):
        raise StorageError(f"{target}: the locks of {database} lie there: give another path", path=target)
    for suffix in _SUFFIXES:
        other = real.removesuffix(suffix)
        if other != real and os.path.exists(other):
            raise StorageError(f"{target}: SQLite would take it for a part of {other}: give another path", path=target)


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


def _refuse_target(target: str, *, overwrite: bool) -> None:
    """What can be told before the work. It is looked at again when it is done."""
    folder = os.path.dirname(os.path.abspath(target))
    if os.path.isdir(target):
        raise StorageError(f"{target}: this is a folder: give the path of a file in it", path=target)
    if not os.path.isdir(folder):
        raise StorageError(f"{target}: the folder {folder} does not exist: make it first", path=target)
    if os.path.lexists(target):
        if not overwrite:
            raise StorageError(f"{target}: there is a file already: give another path, or --force", path=target)
        _refuse_opened(target)
    else:
        for suffix in ("-wal", "-journal"):
            if os.path.lexists(target + suffix):
                raise StorageError(
                    f"{target}{suffix} is there, and {target} is not: SQLite would take it for a part of the new file;"
                    " move it away first",
                    path=target,
                )


def _refuse_opened(path: str) -> None:
    """Name who has the file open, where the system tells."""
    mine = os.getpid()
    others = [opener for opener in processes.openers(os.path.realpath(path)).processes if opener.pid != mine]
    if others:
        who = ", ".join(f"{opener.pid} ({opener.command})" for opener in others[:5])
        raise DatabaseBusyError(f"{path}: it is in use, by process {who}: stop that first", path=path)


@contextlib.contextmanager
def _partial(target: str) -> Iterator[str]:
    """A new file beside the target, for our eyes only, and gone at the end unless it was renamed."""
    real = os.path.realpath(target)
    path = os.path.join(os.path.dirname(real), f".{os.path.basename(real)}.{secrets.token_hex(4)}.partial")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError as error:
        raise DatabaseUnavailableError(
            f"{target}: nothing can be written beside it ({error.strerror}): check the rights on its folder",
            path=target,
        ) from error
    try:
        yield path
    finally:
        for suffix in ("", *_SUFFIXES):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)


def _copy(source: str, partial: str, driver: str, on_step: OnStep) -> Copied:
    with _connected(source, driver, read_only=True) as db:
        if schema.version(db) == 0:
            raise ForeignDatabaseError(f"{source}: there are no jobs in it: this is not litebroker's", path=source)
        size = int(db.rows("pragma page_count")[0][0]) * int(db.rows("pragma page_size")[0][0])
        free = shutil.disk_usage(os.path.dirname(partial)).free
        if free < size:
            raise DatabaseFullError(f"{partial}: the copy takes {size:,} bytes, and {free:,} are free", path=partial)
        with _connected(partial, driver) as copy:
            # What is not whole is thrown away: nothing has to be undone, and the disk is waited for once, at the end.
            copy.rows("pragma journal_mode = off")
            copy.rows("pragma synchronous = off")
            began = time.monotonic()
            db.rows("begin")
            try:
                db.rows("select 1 from sqlite_master limit 1")  # a deferred transaction begins with its first read
                db.copy_to(copy, pages=_STEP_PAGES, on_step=on_step)
            finally:
                db.rows("rollback")
            read_ms = round((time.monotonic() - began) * 1000)
    with _connected(partial, driver) as copy:
        _verify(copy, source)
    return Copied(size=os.stat(partial).st_size, read_ms=read_ms)


def _verify(copy: Connection, source: str) -> None:
    (mode,) = copy.rows("pragma journal_mode = delete")[0]
    if mode != "delete":
        raise StorageError(f"{source}: its copy stays in journal mode {mode!r}", path=source)
    schema.check(copy, source, shared=True)
    found = [str(line) for (line,) in copy.rows("pragma integrity_check(3)")]
    if found != ["ok"]:
        raise DatabaseCorruptError(
            f"{source}: SQLite finds it damaged ({'; '.join(found)}): nothing was copied; see what `litebroker doctor"
            " --full` says, and go back to an earlier backup",
            path=source,
        )


def _requeue(partial: str, driver: str) -> int:
    with _connected(partial, driver) as db:
        db.rows("begin immediate")
        requeued = db.change(sql.REQUEUE_ACTIVE)
        # No lease is left that could be theirs.
        db.rows(sql.REMOVE_PROCESSES)
        db.rows("commit")
    return requeued


def _replace(partial: str, target: str, *, driver: str) -> None:
    """Put the file where it belongs, on disk. Refuse where somebody has come to use what is there."""
    _sync(partial)
    real = os.path.realpath(target)
    if not os.path.exists(real):
        try:
            os.link(partial, real)  # unlike rename(2), it does not replace what has come meanwhile
        except FileExistsError:
            raise StorageError(
                f"{target}: a file has come there meanwhile: it was left as it is", path=target
            ) from None
        except OSError:  # a file system without hard links
            os.rename(partial, real)
    else:
        with _alone(real, driver):
            os.replace(partial, real)
    _sync(os.path.dirname(real))


@contextlib.contextmanager
def _alone(path: str, driver: str) -> Iterator[None]:
    """Be the only one who has this database open, in every way that there is to know.

    SQLite lets nobody leave the WAL mode as long as anyone else is connected (sqlite.org/wal.html), and an exclusive
    transaction keeps off who would come now.
    """
    if os.stat(path).st_size == 0:
        yield
        return
    sidecar = Path(f"{path}-litebroker")
    lock = WriterLock(sidecar) if sidecar.is_dir() else None
    in_use = f"{path}: it is in use: stop the workers, and whatever else has it open, first"
    try:
        if lock is not None and not lock.acquire(_BUSY_MS):
            raise DatabaseBusyError(in_use, path=path)
        with contextlib.ExitStack() as stack:
            try:
                db = stack.enter_context(_connected(path, driver))
                ours = schema.version(db) > 0
                (mode,) = db.rows("pragma journal_mode = delete")[0]
                db.rows("begin exclusive")
            except DatabaseBusyError:
                raise DatabaseBusyError(in_use, path=path) from None
            except (DatabaseCorruptError, ForeignDatabaseError) as error:
                raise StorageError(
                    f"{error}; so nobody can tell whether it is in use: make sure, and move it away, with its -wal and"
                    " -shm, before you put another in its place",
                    path=path,
                ) from error
            if mode != "delete":
                raise DatabaseBusyError(in_use, path=path)
            if not ours:
                raise ForeignDatabaseError(f"{path}: this is some other application's database", path=path)
            yield
            db.rows("rollback")
    finally:
        if lock is not None:
            lock.release()
            lock.close()


@contextlib.contextmanager
def _connected(path: str, driver: str, *, read_only: bool = False) -> Iterator[Connection]:
    db = connect(os.path.realpath(path), driver, busy_timeout_ms=_BUSY_MS, read_only=read_only)
    try:
        yield db
    finally:
        db.close()


def _sync(path: str) -> None:
    """Have a file, or a folder's names, on disk. No connection may be open to it in this process."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

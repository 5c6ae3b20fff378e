"""Locks that belong to a process: whose turn it is to write, and who is still alive.

All of them are ``flock`` on files of the sidecar directory, never on the database: closing any descriptor of
that would drop SQLite's own locks. The kernel lets go of a flock when the last descriptor of its opening is
closed, however the process ended. Where there is no flock (Windows, some file systems), writers have SQLite's
locking alone, and nobody can tell who is alive.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Liveness", "WriterLock", "bury", "is_alive"]

log = logging.getLogger("litebroker")

_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}

if fcntl is not None:
    _flock = fcntl.flock
    _EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
    _SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
    _UNLOCK = fcntl.LOCK_UN

# Measured with 2 to 16 processes on 2 cores that add, claim and complete. When another process comes to write, its
# caches are cold, SQLite's included, which costs as much as ten operations. Shorter turns shorten the longest wait.
_TURN_S = 0.003  # how long one process may go on taking the lock while others stand in line
# Of who has not had the lock for a while: mostly, it is taken for one operation.
_FIRST_NAPS_S = (0.00005, 0.0001, 0.0002)
_NAP_S = 0.0003  # of who does not know when the turn ends, or knows that it has ended
_STAGGER_S = 0.0002  # so long after the end of a turn look all but the one who has waited longest
# How long stays away who had a turn; longer, when nobody took the lock meanwhile, as the processors are busy.
_COURTESY_S = (0.0004, 0.0008, 0.0016)
# In the lock file, by the clock that all processes share: when the turn ends, and since when the eldest waits.
_TURN = struct.Struct("dd")
_SINCE = struct.Struct("d")


class WriterLock:
    """Which process may write now. For one thread at a time; it is not the lock between threads.

    A flock alone is as good as its luck: whoever releases it takes it again before those in line have woken up, they
    wake at each release, and to wait for it has no limit. So nobody blocks in flock. Who finds the lock taken looks
    again a few times, and then stands in line: he sleeps until the end of the turn of who has it, which is written in
    the lock file, and looks then. Who has had his turn, and comes again, stays away for a moment if somebody is there.

    If the lock file is deleted in use, a new one takes its place: the file that is open is compared with the one
    that is there after any wait, after any pause, and every 3 ms. So long may two processes hold two different files.

    To be safe from exceptions that signal handlers raise, call `acquire` inside the ``try`` whose ``finally`` calls
    `release` itself. A signal handler that acquires while the thread that it interrupted is inside `acquire` gets False
    at once, and its release does not hurt. While that thread holds the lock it would get True, and its release would
    count: whoever owns this object keeps handlers from that.

    Attributes:
        release: Lets others take the lock. Does nothing when it is not held. It is a C function, so that no exception
            can come between its call and its effect. It changes with the descriptor: look it up at each call.
    """

    release: Callable[[], object]

    def __init__(self, directory: Path) -> None:
        self._directory = os.path.abspath(directory)
        self._path = os.path.join(self._directory, "write.lock")
        self._line_path = os.path.join(self._directory, "write.wait")
        self._flock_works = fcntl is not None
        self._line = -1  # of write.wait: those who stand in line share a lock on it
        self._line_identity: tuple[int, int] | None = None
        self._busy_until = 0.0
        self._disturbed = False
        self._in_vain = 0
        self._easy_until = 0.0
        self._taken_at = 0.0
        self._contended = False  # somebody stood in line when this turn began
        self._use(-1)

    def acquire(self, timeout_ms: int) -> bool:
        """Take it, waiting for up to ``timeout_ms``. False when somebody else had it for all that time.

        Always True where there is no flock.

        Raises:
            OSError: The lock file can be neither opened nor made.
        """
        now = monotonic()
        if now < self._busy_until:
            self._disturbed = True
            return False
        # A flag that ends by itself, should an exception strike before it is taken down.
        self._busy_until = now + timeout_ms / 1000 + 1
        self._disturbed = False
        try:
            if now < self._easy_until:
                # The usual way: one system call here, and one to release.
                try:
                    _flock(self._file, _EXCLUSIVE)
                except (OSError, ValueError):
                    pass
                else:
                    if not self._disturbed:
                        self._taken_at = now
                        return True
            return self._acquire_with_care(now, now + timeout_ms / 1000)
        except BaseException:
            self.release()
            self._leave_line()
            raise
        finally:
            self._busy_until = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether this thread is inside `acquire`: it is asked by a signal handler on top of that."""
        return monotonic() < self._busy_until

    def close(self) -> None:
        """Give up the descriptors, and the lock if it is held. The next `acquire` opens them again.

        To be called before a fork: a lock belongs to the opening of the file, which a child would share.
        """
        self._shut()

    def forget(self) -> None:
        """In a child that was forked without a `close` before: close the descriptors, and leave the parent its lock."""
        files = self._file, self._line
        self._line = -1
        self._use(-1)
        for file in files:
            if file >= 0:
                with contextlib.suppress(OSError):
                    os.close(file)

    def _acquire_with_care(self, now: float, deadline: float) -> bool:
        if not self._flock_works:
            return True
        goes_on = now < self._taken_at + _TURN_S
        self._contended = goes_on and self._let_others_go_first()
        while True:
            self._disturbed = False
            locked = self._wait(deadline, () if goes_on else _FIRST_NAPS_S)
            now = monotonic()
            if not locked:
                if now >= deadline:
                    return False
            elif self._is_current() or not self._flock_works:
                self._begin_turn(now)
                if not self._disturbed:
                    return True
            else:
                self._shut()

    def _begin_turn(self, now: float) -> None:
        self._taken_at = now
        self._easy_until = now + _TURN_S
        if self._contended:
            # Those in line sleep until then. Where it cannot be written, they look more often.
            with contextlib.suppress(OSError, ValueError):
                os.pwrite(self._file, _TURN.pack(self._easy_until, 0.0), 0)

    def _wait(self, deadline: float, naps: Sequence[float]) -> bool:
        try:
            if self._file < 0:
                self._open()
            for nap in (*naps, 0.0):
                if self._try():
                    return True
                left = deadline - monotonic()
                if left <= 0:
                    return False
                if nap:
                    sleep(min(nap, left))
            return self._stand_in_line(deadline)
        except OSError as error:
            if error.errno == errno.EBADF:  # somebody closed all descriptors of this process
                self._shut()
                return False
            if error.errno not in _NO_FLOCK:
                raise
            log.warning("no flock on %s (%s): writers rely on SQLite's own locks", self._path, error)
            self._flock_works = False
            return True

    def _try(self) -> bool:
        try:
            _flock(self._file, _EXCLUSIVE)
        except (BlockingIOError, ValueError):  # ValueError: a signal handler has closed it
            return False
        return True

    def _stand_in_line(self, deadline: float) -> bool:
        self._contended = True
        self._mark_line()
        since = monotonic()
        try:
            while self._file >= 0:
                now = monotonic()
                nap = self._rest_of_turn(now, since) if now < deadline else 0.0
                if nap <= 0:
                    if self._try():
                        return True
                    if now >= deadline:
                        return False
                    nap = _NAP_S
                sleep(min(nap, deadline - now))
            return False
        finally:
            self._leave_line()

    def _rest_of_turn(self, now: float, since: float) -> float:
        """How long to sleep until the turn of who has the lock ends; 0 when it has ended, or nothing is known of it."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            end, eldest = _TURN.unpack(os.pread(self._file, _TURN.size, 0))
            if now < end <= now + _TURN_S:
                if since <= eldest or eldest == 0:
                    os.pwrite(self._file, _SINCE.pack(since), _SINCE.size)
                    return float(end - now)
                return float(end - now + _STAGGER_S)
        return 0.0

    def _mark_line(self) -> None:
        """Let those who have the lock see that somebody stands in line. Without it, the wait is just longer."""
        with contextlib.suppress(OSError, ValueError):
            self._open_line()
            _flock(self._line, _SHARED)

    def _leave_line(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            _flock(self._line, _UNLOCK)

    def _let_others_go_first(self) -> bool:
        """If somebody stands in line, stay away for as long as it takes to wake up. Whether somebody does."""
        try:
            self._open_line()
            _flock(self._line, _EXCLUSIVE)
            _flock(self._line, _UNLOCK)
        except BlockingIOError:
            sleep(_COURTESY_S[self._in_vain % len(_COURTESY_S)])
            with contextlib.suppress(OSError):  # `_wait` meets it too, and knows what to do
                self._in_vain = self._in_vain + 1 if self._try() else 0
            return True
        except (OSError, ValueError):
            pass
        return False

    def _open_line(self) -> None:
        if self._line < 0:
            self._line = os.open(self._line_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._line_identity = _identity(os.fstat(self._line))

    def _open(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory)
        self._use(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def _use(self, file: int) -> None:
        """Make this the descriptor, locked or not; -1 for none."""
        self._easy_until = 0.0
        self._file = file
        self._identity = _identity(os.fstat(file)) if file >= 0 else None
        self.release = int if file < 0 else functools.partial(_flock, file, _UNLOCK)  # int() does nothing

    def _is_current(self) -> bool:
        """Whether what is locked is the file that others would open."""
        try:
            return _identity(os.fstat(self._file)) == self._identity == _identity(os.stat(self._path))
        except OSError:
            return False

    def _shut(self) -> None:
        files = (self._file, self._identity), (self._line, self._line_identity)
        self._line = -1
        self._use(-1)
        for file, identity in files:
            with contextlib.suppress(OSError):
                if file >= 0 and _identity(os.fstat(file)) == identity:  # else the number is somebody else's by now
                    _flock(file, _UNLOCK)  # as a child may have it too
                    os.close(file)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class Liveness:
    """A lock that this process holds for life, so that others can tell when it is gone.

    ``live/<holder>`` is never seen without its lock while its process lives: it is locked under another name first.
    A holder is one process; a forked child calls `forget` and is another one.
    """

    def __init__(self, directory: Path, holder: int) -> None:
        self._directory = os.path.abspath(os.path.join(directory, "live"))
        self._path = os.path.join(self._directory, str(holder))
        self._file = -1
        self._identity = (0, 0)
        self._process = os.getpid()

    def hold(self) -> None:
        """Make and lock the file, or see (at the cost of one ``stat``) that it is still there.

        Without effect where there is no flock, and while somebody else holds the lock of an old file of this holder.

        Raises:
            OSError: The file can be neither opened nor made.
        """
        if fcntl is None:
            return
        if self._file >= 0:
            with contextlib.suppress(OSError):
                if _identity(os.stat(self._path)) == self._identity and os.getpid() == self._process:
                    return
            self.forget()
        self._process = os.getpid()
        for _ in range(100):
            try:
                if self._take_over() or self._make():
                    return
            except FileNotFoundError:
                for missing in (os.path.dirname(self._directory), self._directory):  # not the database's own folder
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(missing)
            except BlockingIOError:
                sleep(0.001)  # somebody looks whether it is free, or buries it

    def drop(self) -> None:
        """Remove the file, and let go of the lock. In a forked child it only forgets."""
        if self._file >= 0 and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                if _identity(os.stat(self._path)) == self._identity:
                    os.unlink(self._path)
            with contextlib.suppress(OSError):
                _flock(self._file, _UNLOCK)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor that a fork has copied, and leave the parent its lock and its file."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                if _identity(os.fstat(file)) == self._identity:
                    os.close(file)

    def _take_over(self) -> bool:
        """Lock what is left of an earlier holder of this number. False when there is nothing, or it went away."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return self._lock(file)

    def _make(self) -> bool:
        new_path = os.path.join(self._directory, f".{os.path.basename(self._path)}-{secrets.token_hex(4)}")
        file = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _flock(file, _EXCLUSIVE)
            os.rename(new_path, self._path)
        except OSError as error:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(new_path)
            if error.errno in _NO_FLOCK:
                return True  # no file, and so nobody takes us for dead
            raise
        self._file, self._identity = file, _identity(os.fstat(file))
        return True

    def _lock(self, file: int) -> bool:
        try:
            _flock(file, _EXCLUSIVE)
            identity = _identity(os.fstat(file))
            if _identity(os.stat(self._path)) == identity:
                self._file, self._identity = file, identity
                return True
        except FileNotFoundError:
            pass
        except OSError:
            os.close(file)
            raise
        os.close(file)
        return False


def is_alive(directory: Path, holder: int) -> bool | None:
    """True while its process lives, False when that is gone, None when there is no way to tell.

    None is the answer to a holder that has no file: one that ended in order, or that never had a lock.
    """
    if fcntl is None:
        return None
    path = os.path.join(directory, "live", str(holder))
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _flock(file, _SHARED)  # shared, so that two who ask do not take each other for the holder
        return False if _identity(os.stat(path)) == _identity(os.fstat(file)) else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)


def bury(directory: Path, holder: int) -> None:
    """Remove a dead holder's file. A living one's, or one that is just taken over by a new process, stays."""
    if fcntl is None:
        return
    path = os.path.join(directory, "live", str(holder))
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # Whoever has the lock of the file that the path leads to may remove it, or keep it: nobody else does either.
        _flock(file, _EXCLUSIVE)
        if _identity(os.stat(path)) == _identity(os.fstat(file)):
            os.unlink(path)
    except OSError:
        pass
    finally:
        os.close(file)

"""Wake-ups between processes, through FIFOs beside the database.

A queue has one FIFO, which all its waiters read: a byte wakes one of them. For a topic, each listener has a FIFO of
its own, in the folder that the topic's name leads to: to notify it is to write to all of them. Who notifies never
waits and never fails, and pays one to three system calls while nobody listens.

A wake-up can get lost: a waiter is killed with the byte in its hand, or the folder is deleted. So look every half
second all the same. As often, a listener looks whether its FIFOs are still the ones that others would write to.
"""

# Paths are strings, put together at each notification.
# ruff: noqa: PTH100, PTH102, PTH108, PTH116, PTH118, PTH120, PTH208

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import math
import os
import secrets
import select
import signal
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["WakeupListener", "Wakeups"]

log = logging.getLogger("litebroker")

# The most waiters that one notification wakes. Those who then find more than they can take wake others.
_MOST_AT_ONCE = 8
_CHECK_S = 0.5
# Without descriptors a wait is cut into such slices, as Windows runs signal handlers only between them.
_SLICE_S = 0.05
_MOST_WRITERS = 64
_MOST_PATHS = 1024
_TRIES = 100
_CHUNK = 4096
# Not older than this, a FIFO that nobody reads may be about to be opened by its maker.
_BIRTH_S = 60

_HAS_FIFOS = hasattr(os, "mkfifo") and hasattr(select, "poll")
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_FOR_READING = os.O_RDWR | _FLAGS  # as its own writer too, so that it opens at once, and never meets an end of file
_FOR_WRITING = os.O_WRONLY | _FLAGS  # fails with ENXIO while nobody has it open for reading


class Wakeups:
    """The wake-ups of one database in one process. Any thread may use them, and a signal handler may notify.

    Args:
        directory: The sidecar folder, made when somebody listens. None: only what is notified here is heard here.
    """

    def __init__(self, directory: Path | None) -> None:
        self._in_process = directory is None
        self._folder = (
            os.path.abspath(os.path.join(directory, "wake")) if directory is not None and _HAS_FIFOS else None
        )
        self._paths: dict[str, str] = {}
        self._warned = False
        self._fresh()

    def _fresh(self) -> None:
        """What belongs to one process only."""
        self._writers: dict[str, _Writer] = {}
        self._writing = threading.Lock()
        self._registry = threading.RLock()
        self._listeners: weakref.WeakSet[WakeupListener] = weakref.WeakSet()
        self._some_without_fifo = False

    def notify_queue(self, queue: str, jobs: int = 1) -> None:
        """Wake up to ``jobs`` waiters of the queue, at most eight."""
        count = min(jobs, _MOST_AT_ONCE)
        if self._some_without_fifo:
            self._wake_here(queue, count)
        if self._folder is None or count <= 0:
            return
        path = self._paths.get(queue) or self._queue_path(queue)
        if path not in self._writers and not os.access(path, os.F_OK):
            return  # nobody waits, as for most jobs: an exception would cost three times as much
        # Only who has this lock uses or closes a descriptor that is kept: otherwise its number could mean another file
        # by now. Who finds it taken, even by the code that his signal handler interrupts, opens one of his own.
        if not self._writing.acquire(blocking=False):
            with contextlib.suppress(OSError):
                _knock(path, count)
            return
        try:
            writer = self._writers.get(path)
            if writer is not None:
                if writer.is_current(path) and _write(writer.file, count):
                    return
                os.close(self._writers.pop(path).file)
            file = os.open(path, _FOR_WRITING)
            if not _write(file, count):
                os.close(file)
                return
            if len(self._writers) >= _MOST_WRITERS:
                self._close_writers()
            self._writers[path] = _Writer(file)
        except OSError:
            pass  # ENXIO, ENOENT: nobody waits. Anything else costs a waiter half a second.
        finally:
            self._writing.release()

    def notify(self, topic: str) -> None:
        """Wake all listeners of the topic, in all processes."""
        if self._some_without_fifo:
            for listener in self._without_fifo():
                if topic in listener.topics:
                    listener.wake()
        if self._folder is None:
            return
        folder, _, start = _topic_fifo(self._folder, topic).rpartition("/")
        try:
            names = os.listdir(folder)
        except OSError:
            return  # nobody ever listened
        for name in names:
            if name.startswith(start):
                _knock_or_bury(f"{folder}/{name}")

    def listener(self, queues: Sequence[str], topics: Sequence[str]) -> WakeupListener:
        """A waiter for jobs in the queues, and for the topics. It wants to be closed."""
        listener = WakeupListener(self, queues, topics)
        with self._registry:
            self._listeners.add(listener)
        return listener

    def is_awaited(self, queue: str) -> bool | None:
        """Whether a listener for the queue is open, in any process; None where there are no FIFOs to tell by."""
        if any(queue in listener.queues and not listener.closed for listener in self._all()):
            return True
        if self._folder is None:
            return False if self._in_process else None
        try:
            os.close(os.open(self._paths.get(queue) or self._queue_path(queue), _FOR_WRITING))
        except OSError as error:
            return False if error.errno in {errno.ENXIO, errno.ENOENT, errno.ENOTDIR} else None
        return True

    def sweep(self) -> None:
        """Remove what killed listeners left behind. Their topics may never be notified again, which does so too."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                path = f"{self._folder}/{name}"
                with contextlib.suppress(OSError):
                    if name.startswith("t-"):
                        for entry in os.listdir(path):
                            _bury_if_dead(f"{path}/{entry}")
                    elif name.startswith("q-"):
                        file = os.open(path, _FOR_READING)
                        _retire(path, file, _identity(os.fstat(file)))
                    elif os.stat(path).st_mtime < time.time() - _BIRTH_S:
                        _bury_if_dead(path)

    def close(self) -> None:
        """Close its listeners, and let go of all descriptors."""
        for listener in self._all():
            listener.close()
        self.before_fork()

    def before_fork(self) -> None:
        """Let go of the descriptors that are kept for writing."""
        if self._writing.acquire(timeout=1):
            try:
                self._close_writers()
            finally:
                self._writing.release()

    def after_fork_in_child(self) -> None:
        """Make the listeners that the parent has useless here, and leave their files alone."""
        for listener in list(self._listeners):  # a thread that is not here may have had the locks
            listener.forget()
        self._close_writers()
        self._fresh()

    # -- what its listeners use --

    def _open(self, poller: _Poller, queues: Iterable[str], topics: Iterable[str]) -> _Channels:
        folder = self._folder
        if folder is None:
            return _Channels(poller, None, (), ())
        return _Channels(
            poller,
            folder,
            [self._paths.get(queue) or self._queue_path(queue) for queue in queues],
            [_topic_fifo(folder, topic) for topic in topics],
        )

    def _goes_without_fifo(self, error: OSError | None) -> None:
        self._some_without_fifo = True
        if error is not None and not self._warned:
            self._warned = True
            log.warning("%s: no FIFO to wait at (%s): jobs are polled for", self._folder, error)

    def _forget(self, listener: WakeupListener) -> None:
        with self._registry:
            self._listeners.discard(listener)

    # -- inside --

    def _queue_path(self, queue: str) -> str:
        if len(self._paths) >= _MOST_PATHS:
            self._paths.clear()
        path = self._paths[queue] = f"{self._folder}/q-{_hash(queue)}"
        return path

    def _close_writers(self) -> None:
        while self._writers:
            os.close(self._writers.popitem()[1].file)

    def _all(self) -> list[WakeupListener]:
        with self._registry:
            return list(self._listeners)

    def _without_fifo(self) -> list[WakeupListener]:
        return [listener for listener in self._all() if listener.without_fifo]

    def _wake_here(self, queue: str, count: int) -> None:
        waiters = [listener for listener in self._without_fifo() if queue in listener.queues]
        asleep = [listener for listener in waiters if listener.is_asleep]
        # One that is not asleep may have looked at the queue just before.
        for listener in asleep[:count] if len(asleep) >= count else waiters:
            listener.wake()


class WakeupListener:
    """One waiter, made by `Wakeups.listener`. Not for several threads at once, but for `wake` and `close`.

    Attributes:
        queues: The queues it waits for.
        topics: The topics it listens to.
        polling: Nobody can wake it from another process: there are no FIFOs here, or no descriptors left. Wait
            briefly, and look. It may change with a `wait`.
    """

    def __init__(self, wakeups: Wakeups, queues: Sequence[str], topics: Sequence[str]) -> None:
        self.queues = frozenset(queues)
        self.topics = frozenset(topics)
        self.polling = False
        self.is_asleep = False
        self._wakeups = wakeups
        self._process = os.getpid()
        self._poller: _Poller | None = None
        self._channels: _Channels | None = None
        self._woken = False
        self._bell = threading.Lock()  # rings, where there are no descriptors, when it is released
        self._bell.acquire()
        # Re-entrant, as a signal handler may wake and close. Whoever uses the descriptors counts as a user, and the
        # last user closes them: otherwise their numbers could mean other files by then.
        self._gate = threading.RLock()
        self._users = 0
        self._closed = False
        self._check_at = 0.0
        self._open()

    def wait(self, timeout: float | None) -> bool:
        """Block until it is woken, at most ``timeout`` seconds. True when it was, be it before the call.

        One wake-up of a queue is taken from what comes while it sleeps; what had gathered before is taken whole.
        False at once when it is closed, and when a `close` ends it.

        Raises:
            RuntimeError: It was made in another process, before a fork.
        """
        if os.getpid() != self._process:
            raise RuntimeError("this listener was made before a fork, and belongs to the parent: make another one")
        if not self._enter():
            return False
        try:
            self.is_asleep = True
            return self._wait(None if timeout is None else time.monotonic() + timeout)
        finally:
            self.is_asleep = False
            self._leave()

    def wake(self) -> None:
        """End the current or the next wait. Any thread and any signal handler may."""
        if os.getpid() != self._process:
            return
        self._woken = True
        with self._gate:
            self._users += 1
            try:
                self._ring()
            finally:
                self._leave()

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` would return at once, for an event loop.

        Let the loop call ``wait(0)`` then, and twice a second.

        Raises:
            io.UnsupportedOperation: There is none: it is polling, or the system has no epoll.
        """
        poller = self._poller
        if poller is None:
            raise io.UnsupportedOperation("this listener has no descriptor: wait in a thread, or poll")
        return poller.fileno()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let go of its FIFOs. Ends a wait. In a forked child it leaves the files alone."""
        if os.getpid() != self._process:
            self.forget()
            return
        with self._gate:
            if self._closed:
                return
            self._closed = True
            if self._users:
                self._ring()
            else:
                self._tear_down()
        self._wakeups._forget(self)  # noqa: SLF001 - the two are one module's inside

    def forget(self) -> None:
        """Close descriptors that a fork has copied. The files, and what the parent waits for, stay as they are."""
        self._closed = True
        channels, self._channels = self._channels, None
        poller, self._poller = self._poller, None
        if channels is not None:
            channels.forget()
        if poller is not None:
            poller.close()

    @property
    def without_fifo(self) -> bool:
        """Whether only this process can wake it."""
        return self._channels is None or not self._channels.have_fifos

    def __del__(self) -> None:
        if hasattr(self, "_check_at"):
            if os.getpid() == self._process:
                self._tear_down()
            else:
                self.forget()

    def _wait(self, deadline: float | None) -> bool:
        one = False
        files = self._sleep(0)
        while True:
            if self._closed:
                return False
            if files and self._channels is not None:
                rung = self._channels.hear(files)
                if (not (one and rung) and self._channels.take(files, one=one)) or (rung and not self._closed):
                    self._woken = True
            now = time.monotonic()
            if self._check_at <= now and not self._check(now):
                self._woken = True  # what came meanwhile went elsewhere
            if self._woken:
                self._woken = False
                self._bell.acquire(blocking=False)
                return True
            left = _CHECK_S if deadline is None else deadline - now
            if left <= 0:
                return False
            files = self._sleep(min(left, _CHECK_S))
            one = True

    def _sleep(self, seconds: float) -> list[int]:
        """Until some of the descriptors can be read: which."""
        if self._channels is not None and self._poller is not None:
            return self._poller.wait(seconds)
        if self._bell.acquire(timeout=min(seconds, _SLICE_S)):
            self._woken = True
        return []

    def _check(self, now: float) -> bool:
        """Whether others still reach it. If not, open everything anew."""
        self._check_at = now + _CHECK_S
        if self._channels is not None:
            if self._channels.are_current():
                return True
        elif self._wakeups._in_process or not _HAS_FIFOS:  # noqa: SLF001
            return True
        with self._gate:
            channels, self._channels = self._channels, None
            if channels is not None:
                channels.close()
            self._open()
        return self._channels is None

    def _open(self) -> None:
        self._check_at = time.monotonic() + _CHECK_S
        error = None
        if hasattr(select, "poll"):
            try:
                if self._poller is None:
                    self._poller = _Poller()
                self._channels = self._wakeups._open(self._poller, self.queues, self.topics)  # noqa: SLF001
            except OSError as failure:
                error = failure
                poller, self._poller = self._poller, None
                if poller is not None:
                    poller.close()
        self.polling = self.without_fifo and not self._wakeups._in_process  # noqa: SLF001
        if self.without_fifo:
            self._wakeups._goes_without_fifo(error)  # noqa: SLF001

    def _ring(self) -> None:
        if self._channels is not None:
            self._channels.ring()
        else:
            with contextlib.suppress(RuntimeError):  # it rings already
                self._bell.release()

    def _enter(self) -> bool:
        with self._gate:
            self._users += 1
            if self._closed:
                self._leave()
                return False
            return True

    def _leave(self) -> None:
        with self._gate:
            self._users -= 1
            if self._closed and self._users == 0:
                self._tear_down()

    def _tear_down(self) -> None:
        channels, self._channels = self._channels, None
        poller, self._poller = self._poller, None
        if channels is not None:
            channels.close()
        if poller is not None:
            poller.close()


class _Channels:
    """The descriptors of a listener: one of its own, and one for each queue.

    Its own is a pipe, or a FIFO with a name for each of its topics.
    """

    def __init__(
        self, poller: _Poller, folder: str | None, queue_paths: Sequence[str], topic_paths: Sequence[str]
    ) -> None:
        self.have_fifos = folder is not None
        self._poller = poller
        self._reads = -1
        self._rings = -1
        self._names: list[str] = []
        self._identity = (0, 0)
        self._queues: list[tuple[str, int, tuple[int, int]]] = []
        try:
            if topic_paths and folder is not None:
                self._make_own(folder, topic_paths)
            else:
                self._reads, self._rings = os.pipe()
                os.set_blocking(self._reads, False)
                os.set_blocking(self._rings, False)
            poller.add(self._reads)
            for path in queue_paths:
                file, identity = _open_shared(path)
                self._queues.append((path, file, identity))
                poller.add(file, shared=True)
        except BaseException:
            self.close()
            raise

    def _make_own(self, folder: str, topic_paths: Sequence[str]) -> None:
        name = f"{os.getpid():x}-{secrets.token_hex(6)}"
        new = f"{folder}/new-{name}"
        _make_fifo(new)
        try:
            # Opened before it has its name: one that nobody reads is dead, and whoever meets it may remove it.
            self._reads = self._rings = os.open(new, _FOR_READING)
            self._identity = _identity(os.fstat(self._reads))
            for number, path in enumerate(topic_paths, 1):
                move = os.rename if number == len(topic_paths) else os.link
                self._names.append(path + name)
                try:
                    move(new, path + name)
                except FileNotFoundError:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(os.path.dirname(path))  # stays: a folder costs ten times as much as a FIFO
                    move(new, path + name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise

    def hear(self, files: Sequence[int]) -> bool:
        """Whether it was rung, or a topic notified, when these descriptors can be read."""
        return self._reads in files and _drain(self._reads)

    def take(self, files: Sequence[int], *, one: bool) -> bool:
        """Take a byte from the first queue that has any, or all of all queues. Whether there were any."""
        readable = [file for _, file, _ in self._queues if file in files]
        if not one:
            return sum(map(_drain, readable)) > 0
        for file in readable:
            with contextlib.suppress(BlockingIOError):
                return bool(os.read(file, 1))
        return False

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._rings, b"\0")

    def are_current(self) -> bool:
        try:
            return all(_identity(os.stat(name)) == self._identity for name in self._names) and all(
                _identity(os.stat(path)) == identity for path, _, identity in self._queues
            )
        except OSError:
            return False

    def close(self) -> None:
        names, self._names = self._names, []
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name)
        for file in {self._reads, *(file for _, file, _ in self._queues)} - {-1}:
            with contextlib.suppress(OSError, KeyError):
                self._poller.remove(file)
        queues, self._queues = self._queues, []
        for path, file, identity in queues:
            _retire(path, file, identity)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors, and do no more: neither files nor the poller, which a fork shares, are touched."""
        queues, self._queues = self._queues, []
        own = {self._reads, self._rings} - {-1}
        self._reads = self._rings = -1
        for file in (*own, *(file for _, file, _ in queues)):
            with contextlib.suppress(OSError):
                os.close(file)


class _Poller:
    """Sleeps until one of several descriptors can be read."""

    def __init__(self) -> None:
        # Of all the pollers that sleep on a queue's FIFO, epoll can let a byte wake a single one: with 16 processes
        # that wait, the writer's call takes 14 us instead of 110.
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll = None if self._epoll is not None else select.poll()

    def add(self, file: int, *, shared: bool = False) -> None:
        if self._epoll is not None:
            self._epoll.register(file, select.EPOLLIN | (getattr(select, "EPOLLEXCLUSIVE", 0) if shared else 0))
        elif self._poll is not None:
            self._poll.register(file, select.POLLIN)

    def remove(self, file: int) -> None:
        # Closing would do, but not if a forked child has the descriptor too.
        if self._epoll is not None:
            self._epoll.unregister(file)
        elif self._poll is not None:
            self._poll.unregister(file)

    def wait(self, seconds: float) -> list[int]:
        """Those that can be read."""
        if self._epoll is not None:
            return [file for file, _ in self._epoll.poll(seconds)]
        if self._poll is not None:
            return [file for file, _ in self._poll.poll(math.ceil(seconds * 1000))]
        return []

    def fileno(self) -> int:
        if self._epoll is None:
            raise io.UnsupportedOperation("no epoll on this system: wait in a thread, or poll")
        return self._epoll.fileno()

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


class _Writer:
    """A queue's FIFO, kept open for writing."""

    __slots__ = ("check_at", "file", "identity")

    def __init__(self, file: int) -> None:
        self.file = file
        self.identity = _identity(os.fstat(file))
        self.check_at = time.monotonic() + _CHECK_S

    def is_current(self, path: str) -> bool:
        now = time.monotonic()
        if now < self.check_at:
            return True
        self.check_at = now + _CHECK_S
        return _identity(os.stat(path)) == self.identity


def _hash(name: str) -> str:
    return hashlib.sha1(name.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()[:16]


def _topic_fifo(folder: str, topic: str) -> str:
    """How the paths of the topic's FIFOs begin: one of sixteen folders, and its hash."""
    name = _hash(topic)
    return f"{folder}/t-{name[0]}/{name}-"


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _make_fifo(path: str) -> None:
    try:
        os.mkfifo(path, 0o666)
    except FileNotFoundError:
        folder = os.path.dirname(path)
        for missing in (os.path.dirname(folder), folder):  # but not the database's own folder
            with contextlib.suppress(FileExistsError):
                os.mkdir(missing)
        os.mkfifo(path, 0o666)


def _open_shared(path: str) -> tuple[int, tuple[int, int]]:
    """Open a queue's FIFO for reading, make it where it is not there, and keep others from removing it.

    Each reader shares a flock on it. Who can make that an exclusive one is the last, and may remove the file.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            _make_fifo(path)
        try:
            file = os.open(path, _FOR_READING)
        except FileNotFoundError:
            continue
        try:
            status = os.fstat(file)
            if not stat.S_ISFIFO(status.st_mode):
                os.unlink(path)
            elif _flock_shared(file) and _identity(os.stat(path)) == _identity(status):
                return file, _identity(status)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, "somebody keeps removing it", path)


def _flock_shared(file: int) -> bool:
    """False when somebody is about to remove the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.001)
        return False
    except OSError:
        pass  # no flock on a FIFO here: nobody removes any then
    return True


def _retire(path: str, file: int, identity: tuple[int, int]) -> None:
    """Close a queue's FIFO, and remove it if nobody else reads it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _identity(os.stat(path)) == identity:
            os.unlink(path)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.close(file)


def _bury_if_dead(path: str) -> None:
    """Remove a FIFO that nobody reads."""
    try:
        os.close(os.open(path, _FOR_WRITING))
    except OSError as error:
        if error.errno == errno.ENXIO:
            os.unlink(path)


def _knock(path: str, count: int) -> None:
    file = os.open(path, _FOR_WRITING)
    try:
        _write(file, count)
    finally:
        os.close(file)


def _knock_or_bury(path: str) -> None:
    """Wake the one who reads the FIFO; remove it if there is none."""
    try:
        _knock(path, 1)
    except OSError as error:
        if error.errno == errno.ENXIO:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _write(file: int, count: int) -> bool:
    """Write so many bytes, each on its own, so that each wakes somebody. False when nobody reads any more."""
    handler = signal.getsignal(signal.SIGPIPE)
    if handler is None or handler == signal.SIG_DFL:
        return _write_under_mask(file, count)
    try:
        for _ in range(count):
            os.write(file, b"\0")
    except BlockingIOError:
        pass  # it is full: who reads it next finds enough
    except BrokenPipeError:
        return False
    return True


def _write_under_mask(file: int, count: int) -> bool:
    """The same in a program that has given SIGPIPE back its default, which is to die of it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        for _ in range(count):
            os.write(file, b"\0")
    except BlockingIOError:
        pass
    except BrokenPipeError:
        if signal.SIGPIPE not in mask and signal.SIGPIPE in signal.sigpending():
            signal.sigwait({signal.SIGPIPE})
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return True


def _drain(file: int) -> bool:
    """Read what is there. Whether there was anything."""
    came = False
    with contextlib.suppress(BlockingIOError):
        while data := os.read(file, _CHUNK):
            came = True
            if len(data) < _CHUNK:
                break
    return came

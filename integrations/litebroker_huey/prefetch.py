"""What the workers of one process share: tasks that are claimed and have not begun, and leases that are to be ended.

A worker that finds no task here goes to the storage. In one transaction it ends the leases of what has been done
meanwhile, and claims more: as many as take some 20 ms, by what tasks have taken so far. So tasks that take no time cost
one transaction for dozens of them, and long ones are claimed one at a time, as a worker comes free.

Nobody has to wait for long by it. What does not begin soon is given back, for other consumers and for what has a higher
priority by now; and a lease waits no longer than 5 ms for others to be ended with. Where all workers are busy, the
heartbeat's thread sees to both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from litebroker import JobRecord, Listener, Storage
from litebroker_huey.delivery import Delivery, heartbeat_of, native
from litebroker_huey.storage import LitebrokerStorage

logger = logging.getLogger("huey.litebroker")

# How much is claimed at once: so many seconds of work, by what tasks have taken so far.
_AHEAD_S = 0.02
_MOST = 64
# What was claimed and does not begin in this time is given back.
_STALE_S = 0.05
# A lease waits no longer than this for others to be ended with.
_SETTLE_S = 0.005
# The heartbeat's thread tries again so long after an error of the storage.
_PAUSE_S = 5.0


class Prefetch:
    """See above. A forked child begins with an empty one."""

    def __init__(self, storage: LitebrokerStorage) -> None:
        self.storage = storage
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        # Native, since the heartbeat's thread takes it, too: also a greenlet holds it for a few lines only.
        self._lock = native("_thread", "allocate_lock")()
        self._buffer: deque[JobRecord] = deque()
        self._stale_at = 0.0
        self._stamp: bytes | None = None  # That of the storage, before they were claimed.
        self._done: list[Delivery] = []
        self._done_at = 0.0  # The first of them.
        self._waiting: list[Listener] = []
        self._watched = False  # The heartbeat's thread looks after it.

        self._fetching = threading.Lock()  # Of the workers, one goes to the storage at a time.
        self._tidying = native("_thread", "allocate_lock")()
        self._resume_at = 0.0  # After an error, the heartbeat's thread waits until then.
        self._seconds = _AHEAD_S  # What a task usually takes.
        self._most = 1

    def take(self, *, unless: Callable[[], bool]) -> JobRecord | None:
        """The next task. Waits for one as `LitebrokerStorage.claim` does.

        Args:
            unless: When this says so, none is begun any more, and those that wait here are given back.
        """
        storage = self.storage
        deadline = monotonic() + storage.read_timeout
        woken = False
        while not unless():
            job = self._next()
            if job is None:
                with self._fetching:
                    job = self._next() or self._fetch(unless=unless, woken=woken)
            if job is not None:
                return job
            patience = deadline - monotonic()
            if not unless() and (not storage.blocking or patience <= 0 or not (woken := self._wait(patience))):
                return None
        self.settle()
        return None

    def ran(self, seconds: float) -> None:
        """A task took so long."""
        self._seconds += (seconds - self._seconds) * 0.1

    def end_soon(self, delivery: Delivery) -> None:
        """End its lease, together with others'. All that follows from the task is stored."""
        delivery.leave()
        with self._lock:
            if not self._done:
                self._done_at = monotonic()
            self._done.append(delivery)
            watched, self._watched = self._watched, True
        if not watched:
            heartbeat_of(self.storage).watch(self)

    def settle(self) -> None:
        """End now what is to be ended, and give back what has not begun. An error of the storage is only logged.

        Nothing of that is under way in another thread when it returns; nor is a claim, if ``unless`` says so by now.
        """
        with self._fetching, self._tidying:
            done, unbegun = self._empty()
            self._try_to_settle(self.storage.engine, done, unbegun)

    def tidy(self, engine: Storage) -> bool:
        """See to what busy workers leave lying. Whether to come again soon."""
        with self._tidying:
            now = monotonic()
            done: list[Delivery] = []
            unbegun: list[JobRecord] = []
            listener = None
            with self._lock:
                if self._done and now >= max(self._done_at + _SETTLE_S, self._resume_at):
                    done, self._done = self._done, []
                if self._buffer and now >= max(self._stale_at, self._resume_at):
                    unbegun = self._empty_buffer()
                elif self._buffer and engine is self.storage.engine:  # It is not beside greenlets, whose locks it has.
                    listener = self._who_waits()
            if listener is not None:
                listener.wake()
            if not self._try_to_settle(engine, done, unbegun):
                self._resume_at = monotonic() + _PAUSE_S
            with self._lock:
                self._watched = bool(self._buffer or self._done)
                return self._watched

    # With the lock

    def _empty_buffer(self) -> list[JobRecord]:
        jobs = list(self._buffer)
        self._buffer.clear()
        return jobs

    def _who_waits(self) -> Listener | None:
        """A worker to be woken, if there is one: it calls the next."""
        return self._waiting.pop() if self._waiting else None

    # Without it

    def _empty(self) -> tuple[list[Delivery], list[JobRecord]]:
        """Take out what is to be ended, and what has not begun."""
        with self._lock:
            done, self._done = self._done, []
            return done, self._empty_buffer()

    def _next(self) -> JobRecord | None:
        """The next of those that were claimed ahead, unless they are stale."""
        if not self._buffer:
            return None
        stamp = self.storage.stamp.read()
        with self._lock:
            if not self._buffer or monotonic() >= self._stale_at or stamp != self._stamp:
                return None
            job = self._buffer.popleft()
            listener = self._who_waits() if self._buffer else None
        if listener is not None:
            listener.wake()
        return job

    def _fetch(self, *, unless: Callable[[], bool], woken: bool) -> JobRecord | None:
        """One trip to the storage: end leases, give back what is stale, and claim.

        A consumer that stops gives back what it interrupts. What is claimed here just then may be that, and is not
        to begin once more: who settles next gives it back.
        """
        if unless():
            return None
        storage = self.storage
        done, unbegun = self._empty()
        limit = max(1, min(self._most, int(_AHEAD_S / max(self._seconds, 1e-9))))
        stamp = storage.stamp.read()
        stale_at = monotonic() + min(_STALE_S, storage.lease_ms / 1000)
        try:
            if not (done or unbegun) and (limit == 1 or not woken):
                # There may be nothing to do, and then this takes no transaction.
                claimed = storage.engine.claim([storage.queue], limit=1, lease_ms=storage.lease_ms)
            else:
                claimed = self._trade(storage.engine, done, unbegun, limit)
        except BaseException:
            self._put_back(done, unbegun)
            raise
        if not claimed:
            return None
        if woken and len(claimed) == limit:
            # It was a new task that woke this worker, and there may be more than it takes.
            storage.engine.notify_queue(storage.queue)
        first = None if unless() else claimed.pop(0)
        if claimed:
            with self._lock:
                # What `tidy` could not give back may be there.
                self._stale_at = 0.0 if self._buffer else stale_at
                self._buffer.extend(claimed)
                self._stamp = stamp
                listener = self._who_waits()
                watched, self._watched = self._watched, True
            if listener is not None:
                listener.wake()
            if not watched:
                heartbeat_of(storage).watch(self)
        return first

    def _trade(
        self, engine: Storage, done: Sequence[Delivery], unbegun: Sequence[JobRecord], limit: int
    ) -> list[JobRecord]:
        claimed: list[JobRecord] = []
        with engine.transaction():
            ended = engine.complete([delivery.lease for delivery in done])
            engine.release([job.lease for job in unbegun])
            if limit:
                claimed = engine.claim([self.storage.queue], limit=limit, lease_ms=self.storage.lease_ms)
                fit = _fit(claimed)
                engine.release([job.lease for job in claimed[fit:]])
                self._most = min(2 * self._most, _MOST) if fit == len(claimed) else fit
                del claimed[fit:]
        for delivery, yes in zip(done, ended, strict=True):
            delivery.left(ended=yes)
        return claimed

    def _try_to_settle(self, engine: Storage, done: list[Delivery], unbegun: list[JobRecord]) -> bool:
        """False when the storage could not."""
        if done or unbegun:
            try:
                self._trade(engine, done, unbegun, 0)
            except Exception:
                self._put_back(done, unbegun)
                logger.exception("The leases of %d tasks that are done cannot be ended yet.", len(done))
                return False
        return True

    def _put_back(self, done: list[Delivery], unbegun: list[JobRecord]) -> None:
        with self._lock:
            self._done[:0] = done
            if unbegun:
                self._buffer.extend(unbegun)
                self._stale_at = 0.0  # None of them begins. They are to be given back still.

    def _wait(self, patience: float) -> bool:
        listener = self.storage.listener()
        with self._lock:
            self._waiting.append(listener)
        try:
            return listener.wait(patience)
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(listener)


def _fit(claimed: Sequence[JobRecord]) -> int:
    """How many of them may be held at once.

    The first begins at once. Of the others none may have its last attempt: it would be a dead letter without having
    run, if the process died before.
    """
    for number, job in enumerate(claimed):
        if number and job.attempts == job.max_attempts:
            return number
    return len(claimed)


_all: weakref.WeakSet[Prefetch] = weakref.WeakSet()


def _forget_all() -> None:
    for prefetch in _all:
        prefetch.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

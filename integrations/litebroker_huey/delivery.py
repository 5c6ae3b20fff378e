"""A task under a lease: it ends once, together with what follows from it."""

from __future__ import annotations

import _thread  # noqa: F401 - native takes it from sys.modules
import contextlib
import contextvars
import enum
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Protocol

from litebroker import JobError, JobRecord, Lease, SQLiteStorage, State, Storage, StorageError, job_error
from litebroker_huey.storage import LitebrokerStorage

logger = logging.getLogger("huey.litebroker")

_current: contextvars.ContextVar[Delivery | None] = contextvars.ContextVar("litebroker_huey_delivery", default=None)

_LONGEST_DELAY_MS = 60_000
# How often the heartbeat's thread looks after what busy workers leave lying.
_CHORES_S = 0.005


def current_delivery() -> Delivery | None:
    """The delivery whose task this thread or greenlet is executing."""
    return _current.get()


@contextlib.contextmanager
def no_delivery() -> Iterator[None]:
    """While in it, what is stored belongs to no running task."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


class _Phase(enum.Enum):
    """How far a delivery has come."""

    HELD = "held"
    # All is done, and the lease will be ended together with others'.
    LEAVING = "leaving"
    # The lease is ended. What the task asks for afterwards, having enqueued itself, is its own affair.
    ENDED = "ended"
    # Given back, but the task still runs, in a thread that the end of its process will stop. It may be done before.
    INTERRUPTED = "interrupted"
    # Another run is the one that counts.
    GONE = "gone"


class Delivery:
    """One claim of one task, from `LitebrokerStorage.claim` or `claim_due`.

    Attributes:
        task: The task object that huey works on.
        queue: The engine's queue that it was claimed from.
        error: What the task failed with for good; it becomes a dead letter as it ends.
        consumed: Keys of "revoke once" flags that stopped the task; they are deleted as it ends.
    """

    def __init__(self, storage: LitebrokerStorage, job: JobRecord, task: Any) -> None:
        self.task = task
        self.queue = job.queue
        self.error: JobError | None = None
        self.consumed: list[str | bytes] = []
        self.lease: Lease = job.lease
        self.storage = storage
        self._job = job
        self._phase = _Phase.HELD

    @property
    def held(self) -> bool:
        return self._phase is _Phase.HELD

    @property
    def is_leased(self) -> bool:
        """Whether its lease is to be renewed."""
        return self._phase in {_Phase.HELD, _Phase.LEAVING}

    @property
    def ended(self) -> bool:
        return self._phase is _Phase.ENDED

    @property
    def gone(self) -> bool:
        return self._phase is _Phase.GONE

    def end(self, then: Callable[[], None] | None = None) -> bool:
        """End the lease, and do ``then`` in the same transaction. False, and nothing done, when the lease is lost.

        A delivery that was ended before only does ``then``.
        """
        if self.ended:
            if then is not None:
                then()
            return True
        if self.gone:
            self._log_lost()
            return False
        if then is None and self.error is None and not self.consumed:
            ended = self._settle()
        else:
            with self.storage.engine.transaction():
                ended = self._settle()
                if ended:
                    for key in self.consumed:
                        self.storage.delete_data(key)
                    if then is not None:
                        then()
        if not ended:
            self._log_lost()
        self._phase = _Phase.ENDED if ended else _Phase.GONE
        return ended

    def _settle(self) -> bool:
        engine = self.storage.engine
        if self._phase is _Phase.INTERRUPTED:
            # Its job waits again. If nobody has it yet, nobody needs to.
            return engine.remove([self.lease.job_id])[0]
        if self.error is not None and self.storage.keep_dead:
            return engine.fail(self.lease, self.error, retry_in_ms=None) is not None
        return engine.complete([self.lease])[0]

    @property
    def may_leave(self) -> bool:
        """Whether its lease may be ended a little later: that is all there is to do, and nobody waits for it."""
        return self.held and self.error is None and not self.consumed and self._job.dedupe_key is None

    def leave(self) -> None:
        """Its lease will be ended together with others', and is renewed until then."""
        self._phase = _Phase.LEAVING

    def left(self, *, ended: bool) -> None:
        """Its lease was ended, or was lost before."""
        self._phase = _Phase.ENDED if ended else _Phase.GONE
        heartbeat_of(self.storage).drop(self)
        if not ended:
            self._log_lost()

    def lose(self) -> None:
        """The lease turned out to be lost."""
        if self.held:
            self._phase = _Phase.GONE
            self._log_lost()

    def _log_lost(self) -> None:
        logger.warning(
            "The lease of task %s was lost, to another worker or a flush: what this run still led to is dropped.",
            getattr(self.task, "id", self._job.ref),
        )

    def give_back(self, *, delay_ms: int | None = None) -> None:
        """Let another worker have the task, as if this one had never got it."""
        if self.held:
            self._phase = _Phase.GONE
            self.storage.engine.release([self.lease], delay_ms=delay_ms)

    def fail(self, error: JobError, *, for_good: bool = False) -> bool:
        """Let the task run again after a while, if it may be given out once more; else make it a dead letter: True."""
        if not self.held:
            return False
        self._phase = _Phase.GONE
        delay_ms = None if for_good else min(1000 * 2 ** (self._job.attempts - 1), _LONGEST_DELAY_MS)
        return self.storage.engine.fail(self.lease, error, retry_in_ms=delay_ms) is State.FAILED

    def interrupt(self) -> bool:
        """The worker has to stop in the middle of the task. True when it is a dead letter now: it may run but once."""
        if not self.held:
            return False
        if self._job.max_attempts == 1:
            error = JobError("interrupted", message="its worker was told to stop, and it may run only once")
            is_dead = self.fail(error)
        else:
            is_dead = False
            self.give_back()
        if current_delivery() is not self:
            # Told by the main thread, while the task's own goes on.
            self._phase = _Phase.INTERRUPTED
        return is_dead

    def abandon(self, error: BaseException) -> bool:
        """Huey's bookkeeping broke off with an error. True when the task is a dead letter now.

        When the storage is what failed, it may fail here too. Then the lease runs out, with the same effect.
        """
        reason = "exit" if isinstance(error, SystemExit) else "bookkeeping"
        try:
            return self.fail(job_error(error, reason=reason))
        except StorageError:
            logger.exception("Task %s could not be given back; it is, when its lease runs out.", self.task.id)
            return False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While in it, the lease is renewed, and this delivery is the current one."""
        heartbeat = heartbeat_of(self.storage)
        heartbeat.hold(self)
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            if self._phase is not _Phase.LEAVING:
                heartbeat.drop(self)


class Chores(Protocol):
    """What wants to be looked after while workers are busy."""

    def tidy(self, engine: Storage) -> bool:
        """Do what is due, on this engine. Whether to come again soon."""


class Heartbeat:
    """Renews the leases of what runs in this process, from a thread of its own, three times within each lease.

    Only what runs: a task that was claimed but not started goes to another worker, though the process lives.
    """

    def __init__(self, storage: LitebrokerStorage) -> None:
        self._storage = weakref.ref(storage)
        self._lease_ms = storage.lease_ms
        # Touched by single operations, which are atomic: the workers come here twice a task.
        self._held: dict[Lease, Delivery] = {}
        self.forget()

    def forget(self) -> None:
        """In a forked child: the thread is not there, and what runs is the parent's."""
        self._held.clear()
        self._beating = False
        self._starting = native("_thread", "allocate_lock")()
        # Rings when it is released.
        self._bell = native("_thread", "allocate_lock")()
        self._bell.acquire()
        self._chores: Callable[[], Chores | None] = lambda: None

    def hold(self, delivery: Delivery) -> None:
        self._held[delivery.lease] = delivery
        if not self._beating:
            self._start()

    def drop(self, delivery: Delivery) -> None:
        self._held.pop(delivery.lease, None)

    def watch(self, chores: Chores) -> None:
        """Look after these every few milliseconds, until they say that it is enough."""
        self._chores = weakref.ref(chores)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()
        if not self._beating:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if not self._beating:
                native("_thread", "start_new_thread")(self._beat, ())
                self._beating = True

    def _beat(self) -> None:
        own: SQLiteStorage | None = None
        interval = self._lease_ms / 3000
        beat_at = monotonic() + interval
        busy = False
        while True:
            patience = _CHORES_S if busy else interval
            busy = self._bell.acquire(True, max(0.0, min(beat_at - monotonic(), patience))) or busy
            storage, chores = self._storage(), self._chores()
            if storage is None:
                break
            beats = monotonic() >= beat_at
            held = [delivery for delivery in list(self._held.values()) if delivery.is_leased] if beats else []
            try:
                if (held or busy) and own is None and _threads_are_green():
                    if storage.engine.location == ":memory:":
                        return  # Only the greenlets can reach it.
                    # Locks are gevent's: a native thread must not wait for one that a greenlet holds.
                    own = SQLiteStorage(storage.engine.location)
                    own.open()
                engine = own or storage.engine
                if beats:
                    beat_at = monotonic() + interval
                    self._renew(engine, held)
                busy = busy and chores is not None and chores.tidy(engine)
            except Exception:
                logger.exception("The leases of %d running tasks may not be renewed; it is tried again.", len(held))
            del storage, chores
        if own is not None:
            own.close()

    def _renew(self, engine: Storage, held: list[Delivery]) -> None:
        kept = engine.extend([delivery.lease for delivery in held], self._lease_ms)
        for delivery, is_kept in zip(held, kept, strict=True):
            if not is_kept:
                delivery.lose()


_heartbeats: weakref.WeakKeyDictionary[LitebrokerStorage, Heartbeat] = weakref.WeakKeyDictionary()


def heartbeat_of(storage: LitebrokerStorage) -> Heartbeat:
    """The one of this process."""
    heartbeat = _heartbeats.get(storage)
    return heartbeat or _heartbeats.setdefault(storage, Heartbeat(storage))


def _forget_all() -> None:
    for heartbeat in _heartbeats.values():
        heartbeat.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _threads_are_green() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and monkey.is_module_patched("threading")


def native(module: str, name: str) -> Any:
    """The standard library's own, whatever gevent has put in its place."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None:
        return monkey.get_original(module, name)
    return getattr(sys.modules[module], name)

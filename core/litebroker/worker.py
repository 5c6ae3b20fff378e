"""Threads that claim a queue's jobs, run a handler on each, and settle them.

There is no dispatcher. The handler threads share a buffer of claimed jobs. One that finds it empty goes to the
storage: in one transaction it settles what has been finished meanwhile and claims more. So jobs that take no time are
run by one thread in batches, without a switch between threads, and long ones are claimed as threads come free. Of the
threads without work, one listens for new jobs and the others rest.

Two threads stand beside them: the heartbeat renews the leases, and the keeper sees to what busy threads would leave
lying, to schedules and retention, and to the end.

An async handler runs on an event loop. One thread, the feeder, does then what handler threads do, for all coroutines.

With child processes each handler thread has one, which it gives its jobs to. It claims none while it has no child.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

from litebroker.arguments import duration_ms, whole_number
from litebroker.children import Children, Lane, Processes
from litebroker.contexts import Held
from litebroker.errors import DatabaseBusyError, ProcessStartError, StorageClosedError
from litebroker.handlers import Handler, is_async
from litebroker.jobs import JobError, JobRecord, Lease, State
from litebroker.observers import after, tell
from litebroker.results import keep, keep_progress
from litebroker.storage import Listener, Storage
from litebroker.terms import ErrorKind, Teller, Terms

if TYPE_CHECKING:
    # They import asyncio, which a worker with threads does not need, and which takes long.
    import asyncio

    from litebroker.coroutines import Coroutines, Run

# How much is claimed beyond what free threads take at once: so many seconds of work, by what jobs have taken so far.
_AHEAD_S = 0.02
_MOST_AT_ONCE = 64
# A finished job waits no longer than this for company to be settled with.
_SETTLE_S = 0.005
# A listener may be woken so often in a row for nothing, before it becomes slower.
_MOST_IN_VAIN = 5
# What was claimed and no thread has come to in this time is given back, for other workers.
_HOARD_S = 0.1
# An idle worker looks for jobs this often, though nothing woke it.
_LOOK_S = 0.5
# Between two looks for schedules that are due, and between two at everything that only time brings about.
_UPKEEP_S, _ROUND_S = 0.5, 60.0
# Retention goes on later, when it is not through after so many bites.
_MOST_BITES = 10
# Waits after an error of the storage: the first, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# How long `run` lets handlers see that they are cancelled.
_LAST_WORDS_S = 5.0
# How long a signal may go unnoticed that its thread slept through.
_SIGNAL_S = 0.5


class Worker:
    """Runs a handler on a queue's jobs, in threads of its own, until it is closed. `Queue.process` makes it.

    An async handler runs on an event loop instead: ``loop``, or one that the worker has in a thread.

    The threads are daemons: they do not keep the process alive. Where nothing else does, call `run`. When the process
    ends in order, the worker is closed first, as by ``close()``. It leaves signals alone, but in `run`.

    After a fork the child has none of the threads: using it there raises ``RuntimeError``, and the parent works on.
    """

    def __init__(
        self,
        storage: Storage,
        terms: Terms,
        handler: Callable[..., object],
        *,
        concurrency: int = 1,
        batch: int | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._storage = storage
        self._terms = terms
        self._concurrency = whole_number("concurrency", concurrency, at_least=1, at_most=10_000)
        self._batch = 1 if batch is None else whole_number("batch", batch, at_least=1, at_most=10_000)
        self._lock = threading.Lock()
        self._teller = Teller(terms)
        self._handler = Handler(handler, storage, terms, self._teller, self._lock, in_batches=batch is not None)
        self._children = None if processes is None else self._children_for(handler, processes, batch is not None)
        self._coroutines = self._coroutines_on(loop) if processes is None and is_async(handler) else None
        if loop is not None and self._coroutines is None:
            raise ValueError(f"loop={loop!r} is for async handlers, and for these alone: leave it out")
        self._lease_s = terms.lease_ms / 1000
        self._pid = os.getpid()

        self._work = threading.Condition(self._lock)  # The idle rest here,
        self._chores = threading.Condition(self._lock)  # the keeper here,
        self._beats = threading.Condition(self._lock)  # the heartbeat here,
        self._relief = threading.Condition(self._lock)  # and here who waits for a storage in trouble.

        self._buffer: deque[JobRecord] = deque()
        self._buffer_until = 0.0  # The leases in the buffer live at least until then,
        self._buffered_at = 0.0  # and the last of them were claimed then.
        self._held: dict[Lease, Held] = {}
        self._well: list[Held] = []  # Finished: to be completed,
        self._badly: list[Held] = []  # and to be failed;
        self._finished_at = 0.0  # the first of them then.
        self._seconds = _AHEAD_S  # What a job usually takes.
        self._active = 0  # Threads with a job,
        self._idle = 0  # threads at rest,
        self._alive = 1 if self._coroutines else self._concurrency  # and all.
        self._called = False  # One at rest has been called, and has not come yet.
        self._exchanging = False  # Someone is settling and claiming,
        self._listening = False  # and someone waits for new jobs.
        self._heard = False  # The listener has come back, and nobody has looked since.
        self._in_vain = 0  # How often in a row the listener was woken for nothing.
        self._look = True  # There may be jobs to claim.
        self._armed = False  # The keeper watches closely.
        self._prune = True
        self._sweep = False
        self._troubles = 0  # Errors of the storage in a row.
        self._closing = False
        self._ended = threading.Event()
        self._events: SimpleQueue[int | None] = SimpleQueue()  # Signals, and None for the end.

        self._listener: Listener = storage.listener([terms.queue])
        name = f"litebroker-{terms.queue}"
        serve = self._serve if self._coroutines is None else functools.partial(self._feed, self._coroutines)
        lanes = [()] * self._alive if self._children is None else [(lane,) for lane in self._children.lanes]
        self._threads = [
            threading.Thread(target=serve, args=args, name=f"{name}-{number}", daemon=True)
            for number, args in enumerate(lanes)
        ]
        self._attendants = [
            threading.Thread(target=self._renew, name=f"{name}-heartbeat", daemon=True),
            threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True),
        ]

    def _children_for(self, handler: Callable[..., object], processes: Processes, in_batches: bool) -> Children:  # noqa: FBT001
        return Children(
            handler,
            self._terms,
            processes,
            location=self._storage.location,
            count=self._concurrency,
            in_batches=in_batches,
            with_context=self._handler.with_context,
        )

    def _coroutines_on(self, loop: asyncio.AbstractEventLoop | None) -> Coroutines:
        from litebroker.coroutines import Coroutines

        return Coroutines(loop, f"litebroker-{self._terms.queue}-loop", self._call_feeder)

    def start(self) -> None:
        """Start its threads, once. `Queue.process` has done so."""
        try:
            if self._children is not None:
                self._children.start()
            if self._coroutines is not None:
                self._coroutines.open()
            for thread in (*self._attendants, *self._threads):
                thread.start()
        except BaseException:
            # Those that came to be end as ever, if the keeper is among them.
            with self._lock:
                self._alive = sum(thread.ident is not None for thread in self._threads)
            self._stop()
            if self._attendants[-1].ident is None:
                self._end()
            raise
        atexit.register(self._at_exit)

    def step(self) -> bool:
        """Claim a job, run it in this thread and settle it, as the worker would if it were started. False: none is due.

        For tests (`litebroker.testing.drain`). Nothing renews the lease. An error of the storage rises.
        """
        claimed = self._claim(self._storage, self._batch)
        if not claimed:
            return False
        tell(self._terms.observers, lambda observer: observer.claimed(claimed))
        unit = [Held(record, monotonic() + self._lease_s) for record in claimed]
        self._handler.run(unit)
        well = [held for held in unit if not held.settled and held.failure is None]
        badly = [held for held in unit if not held.settled and held.failure is not None]
        with self._storage.transaction() as transaction:
            lost = self._settle(transaction, well, badly)
        self._tell_settled(well, badly, lost)
        while self._prune:
            self._prune = bool(self._storage.prune(self._terms.queue, self._terms.keep))
        return True

    @property
    def closed(self) -> bool:
        """Whether it has ended: nothing runs any more, and all is settled."""
        return self._ended.is_set()

    def close(self, timeout: float | timedelta | None = None) -> bool:
        """Claim no more, give back what has not started, and wait for the jobs that run. Idempotent.

        Args:
            timeout: Seconds to wait; None is without limit. Then the running handlers' ``context.cancelled`` is set.

        Returns:
            Whether all have ended. If not, they still run, their leases are renewed, and `close` may be called again.
            A handler that closes its own worker gets False at once, since it runs itself; so does who blocks the event
            loop that the handlers run on.
        """
        self._check_process()
        seconds = None if timeout is None else duration_ms("timeout", timeout) / 1000
        self._stop()
        if self._attendants[-1].ident is None and not self._ended.is_set():
            self._end()  # It was not started, so that nobody else does.
        own = (*self._threads, *self._attendants)
        if threading.current_thread() in own or (self._coroutines is not None and self._coroutines.is_here()):
            return False
        if not self._ended.wait(seconds):
            self._cancel()
            return False
        for thread in own:
            if thread.ident is not None:
                thread.join()
        if self._coroutines is not None:
            self._coroutines.join()
        atexit.unregister(self._at_exit)
        return True

    def run(self, *, timeout: float | timedelta | None = None) -> bool:
        """Work until SIGTERM or SIGINT (Ctrl-C) comes, then close in order. Answers whether all handlers ended.

        A second signal, or ``timeout`` seconds after the first, sets the running handlers' ``context.cancelled``; five
        seconds later it returns, whatever they do. The signals' own handlers are back then. Outside of the main
        thread, which alone gets signals, it works until someone closes the worker.
        """
        self._check_process()
        seconds = None if timeout is None else duration_ms("timeout", timeout) / 1000
        with self._signals():
            if not self._ends_in(None):
                self._stop()
                if not self._ends_in(seconds):
                    self._cancel()
                    self._ends_in(_LAST_WORDS_S)
        ended = self.close(0)
        if not ended:
            atexit.unregister(self._at_exit)  # it would wait for what has been given up
        return ended

    def __enter__(self) -> Worker:  # noqa: PYI034 (Self came with Python 3.11)
        self._check_process()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The handler threads, or the one that feeds coroutines

    def _serve(self, lane: Lane | None = None) -> None:
        unit: list[Held] = []
        started = 0.0
        while (taken := self._next(unit, started, lane)) is not None:
            unit, started = taken
            if lane is None:
                self._handler.run(unit)
            else:
                self._handler.run_in(lane, unit)

    def _next(self, unit: list[Held], started: float, lane: Lane | None) -> tuple[list[Held], float] | None:
        """Put down what has been done, and take what comes next. None is the end."""
        now = monotonic()
        if unit and os.getpid() != self._pid:
            return None  # The handler forked, and this is the child.
        with self._lock:
            if unit:
                self._put_down(unit, started, now)
            while not self._closing:
                if lane is not None and not lane.ready:
                    self._prepare(lane)
                elif self._buffer:
                    now = monotonic()
                    if now < self._buffer_until:
                        return self._take(), now
                    # The process stood still for so long that the leases are over.
                    self._buffer.clear()
                    self._look = True
                elif self._exchanging:
                    self._rest()
                elif self._well or self._badly or self._look:
                    self._fetch()
                elif self._listening:
                    self._rest()
                else:
                    self._listen()
            self._alive -= 1
            self._chores.notify()
            return None

    def _prepare(self, lane: Lane) -> None:
        """Have a child process ready, and be away meanwhile; with the lock, which is let go of."""
        self._active += 1
        self._armed = True
        self._chores.notify()
        self._call_one()
        pause = lane.pause_s
        if pause:
            self._relief.wait(pause)
        else:
            self._lock.release()
            try:
                lane.prepare(_LOOK_S)
            except (OSError, ProcessStartError) as error:
                self._teller.error("process", error)
            finally:
                self._lock.acquire()
        self._active -= 1

    def _feed(self, coroutines: Coroutines) -> None:
        ended: list[Run] = []
        while (units := self._next_units(coroutines, ended)) is not None:
            ended += self._handler.start(units, coroutines)
            while coroutines.finished:
                run = coroutines.finished.popleft()
                self._handler.judge(run, closing=self._closing)
                ended.append(run)

    def _next_units(self, coroutines: Coroutines, ended: list[Run]) -> list[list[Held]] | None:
        """Put down what has ended, and take what comes next; nothing when more has ended meanwhile. None is the end."""
        with self._lock:
            for run in ended:
                self._put_down(run.unit, run.started, run.ended)
            if ended and self._closing:
                self._chores.notify()
            ended.clear()
            while not coroutines.finished:
                if coroutines.has_left(closing=self._closing) and (self._active or not self._closing):
                    self._lose(coroutines)
                elif self._closing:
                    if not self._active:
                        self._alive = 0
                        self._chores.notify()
                        return None
                    self._work.wait(_LOOK_S)
                elif units := self._take_units():
                    return units
                else:
                    self._seek(coroutines)
            return []

    def _take_units(self) -> list[list[Held]]:
        """As many as may run now."""
        if self._buffer and monotonic() >= self._buffer_until:
            self._buffer.clear()  # As in `_next`.
            self._look = True
        return [self._take() for _ in range(self._concurrency - self._active) if self._buffer]

    def _seek(self, coroutines: Coroutines) -> None:
        """Settle and claim, or wait for what comes first: an end, or a job."""
        is_full = self._active >= self._concurrency
        if self._exchanging:
            self._rest()
        elif self._well or self._badly or (self._look and not is_full):
            self._fetch()
        elif is_full:
            self._work.wait(_LOOK_S)
        else:
            self._listen()
            if coroutines.finished and self._in_vain:
                self._in_vain -= 1  # It was woken for these.

    def _call_feeder(self) -> None:
        """On the event loop: a handler has ended."""
        with self._lock:
            if self._listening:
                self._listener.wake()
            else:
                self._work.notify()

    def _lose(self, coroutines: Coroutines) -> None:
        """The event loop has left, and what was on it ends so; with the lock, which is let go of meanwhile."""
        expected = self._closing
        self._closing = True
        self._lock.release()
        try:
            coroutines.give_up()
            if not expected:
                self._stop()
                error = RuntimeError("the event loop of the handler was closed: close its worker before")
                self._teller.error("claim", error)
        finally:
            self._lock.acquire()

    def _put_down(self, unit: list[Held], started: float, now: float) -> None:
        self._active -= 1
        self._seconds += ((now - started) / len(unit) - self._seconds) * 0.1
        if not self._well and not self._badly:
            self._finished_at = now
        for held in unit:
            if held.settled:
                self._held.pop(held.lease, None)
                self._prune = True
            elif held.lease in self._held:  # If not, the heartbeat has found it lost, and said so.
                (self._well if held.failure is None else self._badly).append(held)
        unit.clear()  # So that a thread at rest keeps no payload.

    def _take(self) -> list[Held]:
        unit = []
        for _ in range(min(self._batch, len(self._buffer))):
            held = Held(self._buffer.popleft(), self._buffer_until)
            self._held[held.lease] = held
            unit.append(held)
        self._active += 1
        if not self._armed and (self._buffer or self._well or self._badly):
            # This thread may be away for long, and so may all others.
            self._armed = True
            self._chores.notify()
        self._call_one()
        return unit

    def _call_one(self) -> None:
        """Have one more thread come, if it would find something to do. It calls the next, if there is more."""
        if self._called:
            return
        if self._idle:
            if (
                self._buffer
                or not self._listening
                or (not self._exchanging and (self._well or self._badly or self._look))
            ):
                self._called = True
                self._work.notify()
        elif self._listening and self._buffer:
            self._called = True
            self._listener.wake()

    def _rest(self) -> None:
        self._idle += 1
        self._work.wait()
        self._idle -= 1
        self._called = False

    def _listen(self) -> None:
        self._listening = True
        if self._in_vain > _MOST_IN_VAIN:
            # Others were faster each time, or what is there cannot be claimed: be slower.
            self._relief.wait(min(_PAUSE_S, 0.001 * 2 ** min(self._in_vain - _MOST_IN_VAIN, 10)))
        self._lock.release()
        failed = woken = False
        try:
            woken = self._listener.wait(_LOOK_S)
        except Exception as error:  # noqa: BLE001 (told; it goes on)
            failed = True
            self._trouble("claim", error)
        finally:
            self._lock.acquire()
        if failed:
            self._pause()
        self._listening = self._called = False
        self._in_vain = self._in_vain + 1 if woken else 0
        if woken or failed:  # If not, the listener itself has looked, and found nothing.
            self._look = self._heard = True

    def _fetch(self) -> None:
        """Settle what is finished; claim what the free threads can take, and a little more where jobs are short."""
        free = (self._concurrency - self._active) * self._batch
        ahead = int(_AHEAD_S / self._seconds) if self._seconds < _AHEAD_S else 0
        self._exchange(max(free, min(free + ahead, _MOST_AT_ONCE) // self._batch * self._batch))

    def _exchange(self, limit: int) -> None:
        """One trip to the storage, without the lock: settle what is finished, and claim up to ``limit``."""
        well, badly = self._well, self._badly
        self._well, self._badly = [], []
        for held in (*well, *badly):
            held.settled = True
        heard, self._heard = self._heard, False
        self._exchanging = True
        self._lock.release()
        started = monotonic()
        claimed: list[JobRecord] = []
        try:
            claimed = self._trade(well, badly, limit)
            if heard and limit and len(claimed) == limit:
                self._pass_on()
        finally:
            self._lock.acquire()
        for held in well:
            self._put_back(held, self._well)
        for held in badly:
            self._put_back(held, self._badly)
        if claimed:
            self._in_vain = 0
            until = started + self._lease_s
            self._buffer_until = min(self._buffer_until, until) if self._buffer else until
            self._buffered_at = started
            self._buffer.extend(claimed)
        if limit:
            self._look = len(claimed) == limit or self._troubles > 0
        self._pause()
        self._exchanging = False
        if self._closing:
            self._chores.notify()

    def _put_back(self, held: Held, finished: list[Held]) -> None:
        if held.settled:
            self._held.pop(held.lease, None)
        elif held.lease in self._held:
            finished.append(held)

    def _trade(self, well: list[Held], badly: list[Held], limit: int) -> list[JobRecord]:
        try:
            if not well and not badly:
                claimed, lost = self._claim(self._storage, limit), []
            else:
                with self._storage.transaction() as transaction:
                    lost = self._settle(transaction, well, badly)
                    claimed = self._claim(transaction, limit)
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            if not well and not badly:
                self._trouble("claim", error)
            else:
                # Whichever of them it was must not hold up the others, and is to be told by its name.
                self._settle_apart(well, badly)
            return []
        self._troubles = 0
        self._tell_settled(well, badly, lost)
        if claimed and self._terms.observers:
            tell(self._terms.observers, lambda observer: observer.claimed(claimed))
        return claimed

    def _claim(self, storage: Storage, limit: int) -> list[JobRecord]:
        return storage.claim((self._terms.queue,), limit=limit, lease_ms=self._terms.lease_ms) if limit else []

    def _settle(self, storage: Storage, well: list[Held], badly: list[Held]) -> list[tuple[ErrorKind, Held]]:
        """Answers those whose lease was lost."""
        lost: list[tuple[ErrorKind, Held]] = []
        if well:
            done = storage.complete([held.lease for held in well], keep=self._terms.keeps_completed)
            for held, yes in zip(well, done, strict=True):
                if not yes:
                    lost.append(("complete", held))
                elif held.result is not None:
                    keep(storage, held.record, held.result)
                    self._sweep = True
            self._prune = self._prune or self._terms.keeps_completed
        for held in badly:
            error, wait_ms = held.failure or (JobError("handler"), None)
            held.state = self._terms.fail(storage, held.record, error, wait_ms)
            if held.state is None:
                lost.append(("fail", held))
            self._prune = self._prune or held.state is State.FAILED
        return lost

    def _settle_apart(self, well: list[Held], badly: list[Held]) -> None:
        parts: list[tuple[ErrorKind, list[Held], list[Held]]] = [("fail", [], [held]) for held in badly]
        if well:
            parts.insert(0, ("complete", well, []))
        error: Exception | None = None
        for kind, *part in parts:
            if not isinstance(error, DatabaseBusyError):  # Its timeout is waited for once.
                error = self._try_to_settle(*part)
            if error is None:
                self._troubles = 0
                continue
            self._trouble(kind, error)
            now = monotonic()
            for held in chain(*part):
                held.settled = held.until <= now or isinstance(error, StorageClosedError)
                if held.settled:
                    self._teller.error(kind, error, held.record)

    def _try_to_settle(self, well: list[Held], badly: list[Held]) -> Exception | None:
        try:
            with self._storage.transaction() as transaction:
                lost = self._settle(transaction, well, badly)
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            return error
        self._tell_settled(well, badly, lost)
        return None

    def _give_back(self) -> None:
        """Release what is claimed and has not started; the lock is let go of meanwhile."""
        leases = [record.lease for record in self._buffer]
        self._buffer.clear()
        self._look = True
        self._exchanging = True
        self._lock.release()
        try:
            self._storage.release(leases)
        except Exception as error:  # noqa: BLE001 (told; the leases end by themselves)
            self._teller.error("cleanup", error)
        finally:
            self._lock.acquire()
        self._exchanging = False

    def _pass_on(self) -> None:
        """It was a new job that woke us, and there are more than we can take: wake another worker."""
        try:
            self._storage.notify_queue(self._terms.queue)
        except Exception as error:  # noqa: BLE001 (told; the others look by themselves)
            self._teller.error("claim", error)

    # The heartbeat

    def _renew(self) -> None:
        wait = interval = self._lease_s / 3
        while True:
            with self._lock:
                if not self._ended.is_set():
                    self._beats.wait(wait)
                if self._ended.is_set():
                    return
                leases = [held.lease for held in self._held.values()]
                leases += [record.lease for record in self._buffer]
            wait = interval
            if leases:
                started = monotonic()
                try:
                    kept = self._storage.extend(leases, self._terms.lease_ms)
                except Exception as error:  # noqa: BLE001 (told; it is tried again)
                    self._teller.error("heartbeat", error)
                    wait = min(interval / 4, 1.0)
                else:
                    self._renewed(leases, kept, started + self._lease_s)

    def _renewed(self, leases: list[Lease], kept: list[bool], until: float) -> None:
        gone = {lease for lease, yes in zip(leases, kept, strict=True) if not yes}
        lost: list[JobRecord] = []
        with self._lock:
            for lease in leases:
                held = self._held.get(lease)
                if held is None:
                    continue
                if lease not in gone:
                    held.until = until
                elif not held.settled:
                    held.cancel()
                    del self._held[lease]
                    lost.append(held.record)
            if gone:
                self._well = [held for held in self._well if held.lease in self._held]
                self._badly = [held for held in self._badly if held.lease in self._held]
                lost += [record for record in self._buffer if record.lease in gone]
                self._buffer = deque(record for record in self._buffer if record.lease not in gone)
            self._buffer_until = until  # What was claimed since lives longer.
        for record in lost:
            self._teller.lost("heartbeat", record)
            self._teller.settled(record, "lost")

    # The keeper

    def _keep(self) -> None:
        upkeep_at = round_at = monotonic()
        while True:
            with self._lock:
                if self._closing:
                    if self._wind_up():
                        break
                elif self._armed:
                    self._chores.wait(_SETTLE_S)
                    self._tidy()
                else:
                    self._chores.wait(max(upkeep_at - monotonic(), 0))
            now = monotonic()
            if now >= upkeep_at and not self._closing:
                if self._children is not None and self._children.look():
                    with self._lock:
                        self._work.notify_all()  # One of them is to start another.
                self._upkeep(everything=now >= round_at)
                round_at = round_at if now < round_at else now + _ROUND_S
            if now >= upkeep_at:
                self._write_reports()
                upkeep_at = monotonic() + _UPKEEP_S
        self._end()

    def _end(self) -> None:
        if self._children is not None:
            self._children.close()
        with self._lock:
            self._ended.set()
            self._beats.notify()
        if self._coroutines is not None:
            self._coroutines.close()
        self._handler.close()
        self._events.put(None)
        self._listener.close()

    def _tidy(self) -> None:
        """See to what busy threads leave lying."""
        if self._exchanging:
            return
        now = monotonic()
        if (self._well or self._badly) and now - self._finished_at >= _SETTLE_S:
            self._exchange(0)
            self._call_one()
        busy = not self._idle and not self._listening and not self._exchanging
        if self._buffer and busy and now - self._buffered_at >= _HOARD_S:
            self._give_back()
            self._call_one()
        self._armed = bool(self._buffer or self._well or self._badly)

    def _wind_up(self) -> bool:
        """Settle and give back what there is, and wait for what still runs. Whether that is all."""
        if self._exchanging:
            self._chores.wait()
        elif self._buffer:
            self._give_back()
        elif self._well or self._badly:
            self._exchange(0)
        elif self._alive:
            self._chores.wait(_UPKEEP_S)
        else:
            return True
        return False

    def _upkeep(self, *, everything: bool) -> None:
        try:
            for error in self._terms.fire_schedules(self._storage, everything=everything):
                self._teller.error("schedule", error)
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            self._teller.error("schedule", error)
        bites = _MOST_BITES if self._prune or everything else 0
        self._prune = False
        try:
            while bites and self._storage.prune(self._terms.queue, self._terms.keep):
                bites -= 1
                self._prune = not bites
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            self._prune = True
            self._teller.error("cleanup", error)
        bites = _MOST_BITES if self._sweep or everything else 0
        self._sweep = False
        try:
            while bites and self._storage.sweep():
                bites -= 1
                self._sweep = not bites
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            self._sweep = True
            self._teller.error("cleanup", error)

    def _write_reports(self) -> None:
        """Let everyone see how far the jobs have come that run."""
        with self._lock:
            news = [held for held in self._held.values() if held.report is not held.reported and not held.settled]
        if not news:
            return
        reports = [(held, held.report) for held in news]
        try:
            keep_progress(self._storage, [(held.lease, said) for held, said in reports if said is not None])
        except Exception as error:  # noqa: BLE001 (told; it is tried again)
            self._teller.error("progress", error)
            return
        self._sweep = True
        for held, said in reports:
            held.reported = said

    # For all of them

    def _trouble(self, kind: ErrorKind, error: Exception) -> None:
        """The storage did not do what it was asked for: tell, and be slower. Without the lock."""
        self._troubles += 1
        self._teller.error(kind, error)
        if isinstance(error, StorageClosedError):
            self._stop()

    def _pause(self) -> None:
        """Spare a storage in trouble; with the lock, which is let go of meanwhile."""
        if self._troubles and (not self._closing or self._well or self._badly):
            self._relief.wait(min(_PAUSE_S * 2 ** min(self._troubles - 1, 10), _LONGEST_PAUSE_S))

    def _tell_settled(self, well: list[Held], badly: list[Held], lost: list[tuple[ErrorKind, Held]]) -> None:
        for kind, held in lost:
            self._teller.lost(kind, held.record)
        if self._terms.observers:
            gone = {held for _, held in lost}
            for held in well:
                self._teller.settled(held.record, "lost" if held in gone else "completed")
            for held in badly:
                self._teller.settled(held.record, after(held.state))

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._chores.notify()
            self._relief.notify_all()
            if not self._ended.is_set():
                self._listener.wake()

    def _cancel(self) -> None:
        with self._lock:
            for held in self._held.values():
                held.cancel()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this worker was started before the fork, and its threads stayed with the parent: call process() here"
            )

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Meanwhile, SIGTERM and SIGINT go to `_events`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: FrameType | None) -> None:
            self._events.put(number)  # Of all that threads can wait for, this one is made for signal handlers.

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ends_in(self, seconds: float | None) -> bool:
        """Wait for the end, for a signal, or so many seconds. Whether it was the end."""
        ends_at = None if seconds is None else monotonic() + seconds
        while True:
            # In slices, since a signal that comes just before the thread blocks, or to another one, only sets a flag:
            # its handler runs when this thread comes back to Python.
            left = _SIGNAL_S if ends_at is None else min(_SIGNAL_S, ends_at - monotonic())
            try:
                event = self._events.get(timeout=max(left, 0))
            except Empty:
                if left <= 0:
                    return False
                continue
            if event is None:
                self._events.put(None)  # It stays ended, whoever asks next.
            return event is None

"""What became of a job, for whoever waits for it; and how far a running one has come.

Whether a job keeps a result, and for how long, stands in a header of its own: it goes where the job goes, so that a
worker needs no settings for it. The result is a value of the storage, under the job's id, put in the transaction that
ends the job: there is one exactly when the job has ended.

Who waits is woken by a topic of the queue. In each process one thread waits for all, however many they are, since to
listen takes descriptors: it looks at all their jobs together, and only at their states.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import datetime
from time import monotonic
from typing import Any, NamedTuple

from litebroker.arguments import instant
from litebroker.errors import (
    JobCancelledError,
    JobFailedError,
    JobLapsedError,
    JobRemovedError,
    RemoteTraceback,
    ResultExpiredError,
    ResultNotKeptError,
    ResultRefusedError,
    ResultTimeoutError,
    StorageClosedError,
)
from litebroker.jobs import KEEP_RESULT, JobError, JobRecord, Lease, State
from litebroker.storage import Listener, Storage

# The spaces among the storage's values. The keys are the jobs' ids.
RESULTS = "litebroker-results"
PROGRESS = "litebroker-progress"

# A wake-up may be lost, and of some ends nobody tells: the jobs are looked at this often.
_LOOK_S = 0.5
# The thread goes on listening for so long when nobody waits any more: somebody often does, soon.
_LINGER_S = 1.0
# Of the time, looking takes a tenth at most, but that no look is put off for longer than this.
_SHARE, _LONGEST_PAUSE_S = 9, 0.05
_LONGEST_NOTE = 500  # characters
_MOST_DIGITS = 13
_NONE_YET: Any = object()
_ALIVE = frozenset({State.PENDING, State.ACTIVE})

_logger = logging.getLogger("litebroker")


# Keeping


def kept_for_ms(headers: Mapping[str, str]) -> int | None:
    """For how long the result of a job with these headers is kept; None when it is not."""
    text = headers.get(KEEP_RESULT, "")
    return int(text) or None if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def own_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers without ours: those that the user gave."""
    if KEEP_RESULT not in headers:
        return headers
    return {name: text for name, text in headers.items() if name != KEEP_RESULT}


def pack_value(payload: bytes, encoding: str | None) -> bytes:
    """What a handler returned, encoded, as it is kept: a line of JSON that says what it is, and the bytes."""
    return _packed("value", encoding) + payload


def pack_failure(error: JobError) -> bytes:
    """The same for why a job failed for good."""
    return _packed("failed", error.reason, error.type, error.message, error.stack, list(error.causes))


def pack_refusal(why: str) -> bytes:
    """The same for a job that is done, and whose result could not be kept."""
    return _packed("refused", why)


def _packed(*what: object) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode() + b"\n"


def keep(storage: Storage, record: JobRecord, packed: bytes) -> None:
    """Keep the result of a job, and wake who waits for it: a part of the transaction that ends the job."""
    storage.put(RESULTS, str(record.id), packed, ttl_ms=kept_for_ms(record.headers))
    tell_waiters(storage, record)


def tell_waiters(storage: Storage, record: JobRecord) -> None:
    """Wake who waits for results of the job's queue."""
    storage.notify(_topic(record.queue))


def _topic(queue: str) -> str:
    return f"{RESULTS}:{queue}"


# Progress


class Progress(NamedTuple):
    """How far a job has come, as its handler said last.

    Attributes:
        fraction: From 0 to 1.
        note: What it is doing, or "".
        at: When it said so.
    """

    fraction: float
    note: str
    at: datetime


Report = tuple[float, str, int]  # fraction, note, at_ms


def report(fraction: float, note: str, at_ms: int) -> Report:
    """What a handler says, checked. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"fraction={fraction!r} is no number: give one from 0 to 1")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction!r} is out of range: it goes from 0 to 1, as in done / total")
    if not isinstance(note, str):
        raise TypeError(f"note={note!r} is no string")
    return float(fraction), note if len(note) <= _LONGEST_NOTE else f"{note[: _LONGEST_NOTE - 1]}…", at_ms


def keep_progress(storage: Storage, reports: Iterable[tuple[Lease, Report]]) -> None:
    """Let everyone see them, until the lease of each ends, in whatever way."""
    with storage.transaction() as transaction:
        for lease, said in reports:
            transaction.put(PROGRESS, str(lease.job_id), json.dumps(said).encode(), owner=lease)


def read_progress(storage: Storage, job_ids: Sequence[int]) -> dict[int, Progress]:
    """How far those have come that are running, and have said so in this attempt."""
    found = storage.peek(PROGRESS, [str(job_id) for job_id in job_ids])
    reports = {int(key): json.loads(value.data) for key, value in found.items()}
    return {job_id: Progress(fraction, note, instant(at_ms)) for job_id, (fraction, note, at_ms) in reports.items()}


# Waiting


class _Waiter:
    """Someone who waits for a job."""

    __slots__ = ("future", "job_id", "over", "record", "seen")

    def __init__(self, job_id: int, record: JobRecord | None) -> None:
        self.job_id = job_id
        self.record = record  # as it was when it was read
        self.future: Future[Any] = Future()
        self.seen = False  # It was there, and had not ended.
        self.over = False


class Results:
    """The results of a queue's jobs, for those who wait for them in this process.

    After a fork the child begins anew: what the parent waits for is the parent's.

    Args:
        storage: It needs a connection of its own: on a caller's, one can look but not wait.
        decode: Makes a payload a value again.
    """

    def __init__(self, storage: Storage, queue: str, decode: Callable[[bytes, str | None], Any]) -> None:
        self.storage = storage
        self._queue = queue
        self._decode = decode
        self._fresh()

    def _fresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant, since a signal handler may ask, too
        self._called = threading.Condition(self._lock)
        self._waiters: dict[int, _Waiter] = {}  # by what `id` says of each
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None
        self._closing = False

    def result(self, job_id: int, record: JobRecord | None, timeout_s: float | None) -> Any:
        """Wait for the result. The arguments are those of `future`.

        Raises:
            ResultTimeoutError: The job has not ended after ``timeout_s`` seconds; with 0, now.
        """
        if timeout_s == 0:
            waiter = self._waiter(job_id, record)
            self._look([waiter])
            future = waiter.future
        else:
            future = self.future(job_id, record)
        try:
            wait([future], timeout_s)
            if future.done():
                return future.result()
        finally:
            future.cancel()  # Whatever interrupts the wait: nobody is looked for any more.
        state = self.storage.states([job_id]).get(job_id)
        after = f" after {timeout_s:g} s" if timeout_s else ""
        now = f"it is {state}" if state in _ALIVE else "it has just now: ask again"
        raise ResultTimeoutError(f"job {job_id} had not ended{after}: {now}", job_id=job_id)

    def future(self, job_id: int, record: JobRecord | None) -> Future[Any]:
        """A future of the result. What it raises is what `Queue.result` says.

        Args:
            record: The job as it was read once, for those who know it.

        Raises:
            ResultNotKeptError, JobFailedError: That is known already.
            ValueError: The storage is on a connection of the caller's, and the job has not ended.
        """
        waiter = self._waiter(job_id, record)
        if self._thread is None:
            self._look([waiter])  # It may have ended, and then nobody has to listen.
            if waiter.over:
                return waiter.future
        with self._lock:
            self._waiters[id(waiter)] = waiter
            try:
                if self._thread is None:
                    self._start()
            except BaseException:
                del self._waiters[id(waiter)]
                raise
            self._called.notify()
        waiter.future.add_done_callback(lambda _: self._forget(waiter))
        try:
            # Whatever ends from here on is heard; what has ended before is seen now.
            self._look([waiter])
        except BaseException:
            waiter.future.cancel()
            raise
        return waiter.future

    def close(self) -> None:
        """End the thread. Whoever waits still gets `StorageClosedError`."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            thread = self._thread
            self._closing = True
            self._called.notify()
            if self._listener is not None:
                self._listener.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _waiter(self, job_id: int, record: JobRecord | None) -> _Waiter:
        if os.getpid() != self._pid:
            self._fresh()
        if record is not None and kept_for_ms(record.headers) is None:
            if record.state is State.FAILED and record.error is not None:
                raise _failed(job_id, record.error)
            raise ResultNotKeptError(
                f"job {job_id} keeps no result: ask for it as the job is added, by add(..., keep_result=3600) or"
                " Queue(..., results=3600)",
                job_id=job_id,
            )
        return _Waiter(job_id, record)

    def _start(self) -> None:
        """With the lock held."""
        self._listener = self.storage.listener(topics=[_topic(self._queue)])
        self._closing = False
        self._thread = threading.Thread(
            target=self._serve, args=[self._listener], name=f"litebroker-{self._queue}-results", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            self._listener = self._thread = None
            raise
        atexit.register(self.close)  # So that it leaves no FIFO behind.

    def _serve(self, listener: Listener) -> None:
        error: Exception | None = None
        look_after_at = 0.0
        try:
            while self._goes_on():
                woken = listener.wait(_LOOK_S)
                started = monotonic()
                with self._lock:
                    waiters = list(self._waiters.values())
                self._look(waiters)
                if not woken or started >= look_after_at:
                    self._look_after(waiters)
                    look_after_at = monotonic() + _LOOK_S
                self._rest(monotonic() - started)
        except Exception as raised:  # noqa: BLE001 (whoever waits gets it)
            error = raised
        finally:
            self._end(listener, error or StorageClosedError("the queue was closed while its results were waited for"))

    def _goes_on(self) -> bool:
        """Whether there is someone who waits, or comes soon."""
        with self._lock:
            if not self._waiters and not self._closing:
                self._called.wait(_LINGER_S)
            if self._waiters and not self._closing:
                return True
            self._thread = None  # From here on, whoever comes starts another one.
            return False

    def _rest(self, seconds: float) -> None:
        """Where many wait, or much ends, looking must not take all of the time."""
        with self._lock:
            if not self._closing:
                self._called.wait(min(seconds * _SHARE, _LONGEST_PAUSE_S))

    def _end(self, listener: Listener, error: Exception) -> None:
        left: list[_Waiter] = []
        with self._lock:
            if self._thread in {None, threading.current_thread()}:
                self._thread = self._listener = None
                left = list(self._waiters.values())
                atexit.unregister(self.close)
        listener.close()
        for waiter in left:
            self._finish(waiter, error=error)

    def _forget(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiters.pop(id(waiter), None)

    def _look(self, waiters: Sequence[_Waiter]) -> None:
        """Tell those whose job has ended."""
        states = self.storage.states(list({waiter.job_id for waiter in waiters}))
        over = []
        for waiter in waiters:
            if states.get(waiter.job_id) in _ALIVE:
                waiter.seen = True
            else:
                over.append(waiter)
        if not over:
            return
        # The states first: what a job that is tried again has left from its earlier end does not count.
        kept = self.storage.peek(RESULTS, list({str(waiter.job_id) for waiter in over}))
        for waiter in over:
            value = kept.get(str(waiter.job_id))
            self._conclude(waiter, states.get(waiter.job_id), None if value is None else value.data)

    def _look_after(self, waiters: Sequence[_Waiter]) -> None:
        """Have leases taken back that have ended: where nobody works any more, nobody else would."""
        try:
            holders = self.storage.holders(list({waiter.job_id for waiter in waiters}))
            now_ms = self.storage.clock.now_ms()
            if any(it.alive is False or it.lease_until_ms <= now_ms for it in holders.values()):
                self.storage.recover([self._queue])
                self._look(waiters)
        except StorageClosedError:
            raise
        except Exception as error:  # noqa: BLE001 (logged; it is tried again)
            _logger.warning("queue %r: the leases that have ended could not be taken back: %s", self._queue, error)

    def _conclude(self, waiter: _Waiter, state: State | None, packed: bytes | None) -> None:
        try:
            value = self._value(waiter, state, packed)
        except Exception as error:  # noqa: BLE001 (it is the result)
            self._finish(waiter, error=error)
        else:
            if value is not _NONE_YET:
                self._finish(waiter, value)

    def _value(self, waiter: _Waiter, state: State | None, packed: bytes | None) -> Any:
        """The result of a job that has ended."""
        job_id = waiter.job_id
        if state is State.FAILED:
            record = self.storage.get(job_id)
            if record is not None and record.state is not State.FAILED:
                return _NONE_YET  # It is being tried again.
            if record is not None and record.error is not None:
                raise _failed(job_id, record.error)
        if state is State.CANCELLED:
            raise JobCancelledError(f"job {job_id} was cancelled", job_id=job_id)
        if packed is None:
            raise _missing(job_id, state, waiter.record, seen=waiter.seen, now_ms=self.storage.clock.now_ms())
        return self._unpack(job_id, packed)

    def _unpack(self, job_id: int, packed: bytes) -> Any:
        head, _, payload = packed.partition(b"\n")
        kind, *rest = json.loads(head)
        if kind == "value":
            return self._decode(payload, rest[0])
        if kind == "failed":
            raise _failed(job_id, JobError(*rest))
        raise ResultRefusedError(
            f"job {job_id} is done, but what it returned could not be kept: {rest[0]}", job_id=job_id
        )

    def _finish(self, waiter: _Waiter, value: Any = None, *, error: Exception | None = None) -> None:
        with self._lock:
            if waiter.over:
                return
            waiter.over = True
        if not waiter.future.set_running_or_notify_cancel():
            return
        if error is None:
            waiter.future.set_result(value)
        else:
            waiter.future.set_exception(error)


def _failed(job_id: int, error: JobError) -> JobFailedError:
    what = f"{error.type}: {error.message}" if error.type else error.message or error.reason
    made = (JobLapsedError if error.reason == "lapsed" else JobFailedError)(
        f"job {job_id} failed: {what}",
        job_id=job_id,
        reason=error.reason,
        type_name=error.type,
        message=error.message,
        stack=error.stack,
        causes=error.causes,
    )
    if error.stack:
        made.__cause__ = RemoteTraceback(error.stack)
    return made


def _missing(
    job_id: int, state: State | None, record: JobRecord | None, *, seen: bool, now_ms: int
) -> JobRemovedError | ResultExpiredError:
    """Why a job that has ended has no result."""
    keep_ms = None if record is None else kept_for_ms(record.headers)
    if state is not None:
        return ResultExpiredError(f"job {job_id} is {state}, and its result has expired", job_id=job_id)
    if seen or (record is not None and keep_ms is not None and now_ms < record.created_at_ms + keep_ms):
        return JobRemovedError(f"job {job_id} is gone, and left no result: it was removed", job_id=job_id)
    return ResultExpiredError(
        f"job {job_id} is not there, and no result of it: that has expired, or the job was removed, or the transaction"
        " that added it is not committed",
        job_id=job_id,
    )

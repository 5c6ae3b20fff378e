"""A job in a handler's hands, and what the handler may know about it, and do with it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from litebroker.arguments import duration_ms, instant
from litebroker.failures import as_job_error
from litebroker.jobs import JobError, JobRecord, JobSpec, State
from litebroker.observers import Outcome, after, tell
from litebroker.results import Report, own_headers, report
from litebroker.storage import Storage
from litebroker.terms import Terms

if TYPE_CHECKING:
    # It imports asyncio, which a worker with threads does not need, and which takes long.
    from litebroker.hops import Hops

P = ParamSpec("P")
R = TypeVar("R")


class Held:
    """A job in a thread's hands: it runs, or has been run and is not settled.

    Attributes:
        interrupt: Called when it is cancelled.
    """

    __slots__ = (
        "cancelled",
        "event",
        "failure",
        "interrupt",
        "lease",
        "record",
        "report",
        "reported",
        "result",
        "settled",
        "state",
        "uncommitted",
        "until",
    )

    def __init__(self, record: JobRecord, until: float) -> None:
        self.record = record
        self.lease = record.lease
        self.until = until  # Its lease lives at least until then (monotonic).
        self.failure: tuple[JobError, int | None] | None = None
        self.state: State | None = None  # What its failure has made of it.
        self.result: bytes | None = None  # To be kept when it is completed.
        self.report: Report | None = None  # How far it is, as its handler said,
        self.reported: Report | None = None  # and as everyone can see.
        self.settled = False  # Or being settled: the heartbeat must not call it lost.
        self.uncommitted = False  # Settled in a transaction that the handler was to commit.
        self.cancelled = False
        self.event: threading.Event | None = None
        self.interrupt: Callable[[], object] | None = None

    def cancel(self) -> None:
        """With the worker's lock held."""
        self.cancelled = True
        if self.event is not None:
            self.event.set()
        if self.interrupt is not None:
            self.interrupt()


class JobContext:
    """What a handler may know about its job."""

    __slots__ = ("_held", "_lock", "_record", "_storage", "_terms")

    def __init__(self, held: Held, storage: Storage, terms: Terms, lock: threading.Lock) -> None:
        self._held = held
        self._record = held.record
        self._storage = storage
        self._terms = terms
        self._lock = lock

    @property
    def job_id(self) -> int:
        return self._record.id

    @property
    def queue(self) -> str:
        return self._record.queue

    @property
    def attempt(self) -> int:
        """Which attempt this is. The first is 1; those of workers that vanished count."""
        return self._record.attempts

    @property
    def max_attempts(self) -> int | None:
        """How many it may have; None is without limit."""
        return self._record.max_attempts

    @property
    def priority(self) -> int:
        return self._record.priority

    @property
    def headers(self) -> Mapping[str, str]:
        return own_headers(self._record.headers)

    @property
    def group(self) -> str | None:
        return self._record.group

    @property
    def task(self) -> str | None:
        return self._record.task

    @property
    def ref(self) -> str | None:
        return self._record.ref

    @property
    def created_at(self) -> datetime:
        return instant(self._record.created_at_ms)

    @property
    def cancelled(self) -> threading.Event:
        """Set when the lease is lost, so that the job is another worker's now, and when a shutdown waits no longer."""
        with self._lock:
            if self._held.event is None:
                self._held.event = threading.Event()
                if self._held.cancelled:
                    self._held.event.set()
            return self._held.event

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far the job has come, for `Queue.progress` and the tools: from 0 to 1, and what it is doing.

        Call it as often as you like: it writes nothing itself. The worker writes the latest one twice a second, until
        the attempt ends; with it, it is gone. A note of over 500 characters is cut.

        Raises:
            TypeError: ``fraction`` is no number, or ``note`` no string.
            ValueError: ``fraction`` is not from 0 to 1.
        """
        self._held.report = report(fraction, note, self._storage.clock.now_ms())


class Context(JobContext):
    """What a handler may know about its job, and do with it.

    A handler that returns completes its job, and one that raises fails it. Before that it may settle the job itself,
    with more to say: what follows it, a transaction of its own, another delay. Its return then adds nothing.
    """

    __slots__ = ()

    def complete(self, *, result: Any = None, then: Sequence[Any] = (), connection: object | None = None) -> bool:
        """Complete the job and add what follows it, in one transaction. False, and nothing done: the lease was lost.

        Args:
            result: Kept where the job is to keep one, in the same transaction; one that cannot be kept is refused with
                `PayloadError`.
            then: Payloads, or `NewJob`s, also for other queues of the same storage.
            connection: The handler's own connection to the same database. The job is completed in its transaction:
                when the handler commits, together with its own rows, and not at all when it rolls back.
        """
        return self._complete(self._terms.specs(then), self._terms.result(self._record, result), connection)

    def _complete(self, specs: Sequence[JobSpec], result: bytes | None, connection: object | None) -> bool:
        storage = self._storage if connection is None else self._storage.bind(connection)
        with self._settling():
            done = self._terms.complete(storage, self._record, specs, result)
            self._held.uncommitted = done and connection is not None
        if connection is None:
            self._observe("completed" if done else "lost")
        return done

    def fail(
        self,
        error: BaseException | JobError | str | None = None,
        *,
        retry_in: float | timedelta | None = None,
        retry: bool = True,
    ) -> bool:
        """Fail this attempt. False, and nothing done: the lease was lost.

        Args:
            retry_in: Seconds until the next attempt; None is as the queue's backoff says.
            retry: False makes it a dead letter at once.
        """
        wait_ms = self._terms.wait_ms(self._record, retry_in=retry_in, retry=retry)
        return self._fail(as_job_error(error, reason="handler" if retry else "rejected"), wait_ms)

    def _fail(self, failure: JobError, wait_ms: int | None) -> bool:
        with self._settling():
            state = self._terms.fail(self._storage, self._record, failure, wait_ms)
        self._observe(after(state))
        return state is not None

    def release(self, *, delay: float | timedelta | None = None) -> bool:
        """Give the job back, this attempt not counted. False, and nothing done: the lease was lost."""
        return self._release(None if delay is None else duration_ms("delay", delay))

    def _release(self, delay_ms: int | None) -> bool:
        with self._settling():
            done = self._storage.release([self._record.lease], delay_ms=delay_ms)[0]
        self._observe("released" if done else "lost")
        return done

    def _answer(self, what: str, *rest: Any) -> bool:
        """Do what a child process asks for in the name of its handler."""
        if what == "progress":
            self.progress(*rest)
            return True
        if what == "settles":
            # On a connection of the handler's own: in its process, and it has still to be committed.
            self._held.settled, self._held.uncommitted = rest
            return True
        if what == "complete":
            specs, result = rest
            return self._complete([JobSpec(*fields) for fields in specs], result, None)
        if what == "fail":
            failure, wait_ms = rest
            return self._fail(JobError(*failure), wait_ms)
        (delay_ms,) = rest
        return self._release(delay_ms)

    def _observe(self, outcome: Outcome) -> None:
        # What the heartbeat has found lost, it has told.
        if self._terms.observers and not (outcome == "lost" and self._held.cancelled):
            tell(self._terms.observers, lambda observer: observer.settled(self._record, outcome))

    @contextmanager
    def _settling(self) -> Iterator[None]:
        self._held.settled = True
        try:
            yield
        except BaseException:
            self._held.settled = False
            raise


def _in_thread(
    method: Callable[Concatenate[Context, P], R],
) -> Callable[Concatenate[AsyncContext, P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(self: AsyncContext, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._hops.do(functools.partial(method, self.sync, *args, **kwargs))

    return call


class AsyncContext(JobContext):
    """The `Context` of an async handler: what it does with the job is awaited, and done in a thread.

    The handler's task is cancelled when the lease is lost, and when a shutdown waits no longer; ``cancelled`` is set
    then.

    Attributes:
        sync: The same for a thread, which it blocks: for a function that `asyncio.to_thread` runs, or beside a
            connection of your own.
    """

    __slots__ = ("_hops", "sync")

    def __init__(self, sync: Context, hops: Hops) -> None:
        super().__init__(sync._held, sync._storage, sync._terms, sync._lock)  # noqa: SLF001 (they are of one make)
        self.sync = sync
        self._hops = hops

    complete = _in_thread(Context.complete)
    fail = _in_thread(Context.fail)
    release = _in_thread(Context.release)

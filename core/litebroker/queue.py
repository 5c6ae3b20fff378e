"""A queue of jobs: the direct API."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from copy import copy
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from litebroker.arguments import (
    Group,
    NewJob,
    Retention,
    duration_ms,
    instant,
    instant_ms,
    job_spec,
    key,
    queue_name,
    whole_number,
)
from litebroker.backoff import Backoff
from litebroker.children import Processes
from litebroker.contexts import AsyncContext, Context
from litebroker.errors import LeaseLostError
from litebroker.explanation import Explanation, why
from litebroker.failures import as_job_error, job_error
from litebroker.jobs import LARGEST_ID, Attempt, Counts, DedupeUntil, JobError, JobRecord, JobSpec, State
from litebroker.observers import Observer, Outcome, after, tell
from litebroker.results import Progress, Results, own_headers, read_progress
from litebroker.schedules import ScheduleSpec
from litebroker.serializer import JSON, Serializer
from litebroker.sqlite import Durability, open_storage
from litebroker.storage import ScheduleRecord, Storage
from litebroker.terms import ErrorContext, OnError, Terms, log_error
from litebroker.worker import Worker

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_UNREAD: Any = object()
# How long `claim` waits for a wake-up before it looks by itself.
_LOOK_S = 0.5
# `claim` fires schedules, and `complete` removes what has been kept long enough, once in this time.
_UPKEEP_MS = 500
_PAGE = 500
_NO_OPTIONS = (None,) * 9

# A job that was added just now: what it was made of, its id, and when. Few who add ask for the rest.
_Added = tuple[JobSpec, int, int]


class Job(Generic[T_co]):
    """A job as it was when it was read; it does not follow what becomes of it. `Queue.get` reads it again.

    Attributes:
        duplicate: `add` found its dedupe key held: this is the job that holds it, and nothing was added.
    """

    __slots__ = ("_data", "_queue", "_source", "duplicate")

    def __init__(
        self, source: JobRecord | _Added, queue: Queue[Any], *, data: T_co = _UNREAD, duplicate: bool = False
    ) -> None:
        self._source = source
        self._queue = queue
        self._data = data
        self.duplicate = duplicate

    @property
    def data(self) -> T_co:
        """The payload, decoded when it is first asked for. Raises whatever the serializer raises."""
        if self._data is _UNREAD:
            self._data = self._queue._terms.decode(self.record.payload, self.record.encoding)  # noqa: SLF001
        return self._data

    @property
    def record(self) -> JobRecord:
        """The job as the storage has it; of one that was added just now, the times are those of the call."""
        source = self._source
        if not isinstance(source, JobRecord):
            source = self._source = _record(*source)
        return source

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def queue(self) -> str:
        return self.record.queue

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def priority(self) -> int:
        return self.record.priority

    @property
    def attempts(self) -> int:
        """How often it was claimed; claims that were given back do not count."""
        return self.record.attempts

    @property
    def max_attempts(self) -> int | None:
        """How often it may be claimed; None is without limit."""
        return self.record.max_attempts

    @property
    def group(self) -> str | None:
        return self.record.group

    @property
    def dedupe_key(self) -> str | None:
        return self.record.dedupe_key

    @property
    def headers(self) -> Mapping[str, str]:
        return own_headers(self.record.headers)

    @property
    def task(self) -> str | None:
        return self.record.task

    @property
    def ref(self) -> str | None:
        return self.record.ref

    @property
    def error(self) -> JobError | None:
        """Why it failed the last time, with the stack and the causes; None when it never did."""
        return self.record.error

    @property
    def history(self) -> Sequence[Attempt]:
        """Its latest attempts that have ended, oldest first."""
        return self.record.history

    @property
    def created_at(self) -> datetime:
        return instant(self.record.created_at_ms)

    @property
    def due_at(self) -> datetime:
        """When it is, or was, due."""
        return instant(self.record.due_at_ms)

    @property
    def claimed_at(self) -> datetime | None:
        """When it was claimed last."""
        return _instant(self.record.claimed_at_ms)

    @property
    def lease_until(self) -> datetime | None:
        """When its lease ends, unless it is renewed; None when it is not active."""
        return _instant(self.record.lease_until_ms)

    @property
    def ended_at(self) -> datetime | None:
        """When it was completed, cancelled, or failed for good."""
        return _instant(self.record.ended_at_ms)

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Wait for what the handler returns; as `Queue.result`."""
        return self._queue.result(self, timeout=timeout)

    def progress(self) -> Progress | None:
        """How far it has come by now; as `Queue.progress`."""
        return self._queue.progress(self)

    def __repr__(self) -> str:
        return f"<Job {self.id} of queue {self.queue!r}, {self.state}>"


class Schedule(Generic[T_co]):
    """A schedule as it was when it was read."""

    __slots__ = ("_record", "_terms")

    def __init__(self, record: ScheduleRecord, terms: Terms) -> None:
        self._record = record
        self._terms = terms

    @property
    def data(self) -> T_co:
        """The payload that each tick adds. Raises whatever the serializer raises."""
        return cast("T_co", self._terms.decode(self._record.job.payload, self._record.job.encoding))

    @property
    def record(self) -> ScheduleRecord:
        """The schedule as the storage has it."""
        return self._record

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def queue(self) -> str:
        return self._record.queue

    @property
    def every(self) -> timedelta | None:
        """Its interval, or None when it goes by ``cron``."""
        every_ms = self._record.spec.every_ms
        return None if every_ms is None else timedelta(milliseconds=every_ms)

    @property
    def cron(self) -> str | None:
        return self._record.spec.cron

    @property
    def tz(self) -> str | None:
        """The time zone of ``cron``; None is UTC."""
        return self._record.spec.tz

    @property
    def next_at(self) -> datetime:
        return instant(self._record.next_at_ms)

    @property
    def last_at(self) -> datetime | None:
        """The latest tick that has fired."""
        return _instant(self._record.last_at_ms)

    def __repr__(self) -> str:
        return f"<Schedule {self.id!r} of queue {self.queue!r}, next at {self.next_at.isoformat()}>"


class Queue(Generic[T]):
    """Jobs with payloads of type ``T``, under one name in one storage. Any thread may use it.

    Args:
        name: 1 to 255 characters. The same name on the same file is the same queue, in all processes.
        where: A path, a URL (``sqlite:///jobs.db?durability=relaxed``), a storage that queues share, or your own
            `sqlite3` or `apsw` connection, whose open transaction is then the queue's, too.
        durability: What a power cut may take. "durable", the default: a job is on disk before `add` returns, while a
            claim or an acknowledgement may be forgotten, so that the job runs again. "relaxed": the last moments.
            "full": nothing.
        attempts: How often a job may be claimed before it is a dead letter; None is without limit.
        backoff: How long a job that failed waits for its next attempt.
        lease: Seconds that a claim holds a job, unless it is renewed. Workers renew it, by heartbeats at a third of it.
        retention: How many ended jobs are kept, and for how long.
        results: How long (seconds or `timedelta`) what a handler returns is kept, for `Job.result`; None is not at all.
            It goes with each job that is added here, wherever that runs.
        serializer: `JSON`, `RAW` for bytes, or your own.
        max_payload_bytes: A larger payload, or result, is refused.
        on_error: Called with what goes wrong in workers, and with payloads that cannot be read. The default logs it.

    Payloads are refused before anything is written, with `PayloadError`, where they would not come back as they are.
    Errors of the database are `StorageError`s; nothing was stored then.
    """

    # `Queue[Any]`, since no argument tells the type of the payloads: write `queue: Queue[Email] = Queue(...)`.
    def __init__(
        self: Queue[Any],
        name: str,
        where: str | os.PathLike[str] | Storage | object,
        *,
        durability: Durability | None = None,
        attempts: int | None = 3,
        backoff: Backoff | None = None,
        lease: float | timedelta = 30.0,
        retention: Retention | None = None,
        results: float | timedelta | None = None,
        serializer: Serializer = JSON,
        max_payload_bytes: int = 1024 * 1024,
        on_error: OnError = log_error,
    ) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise TypeError(f"retention={retention!r}: give a Retention, such as Retention(failed=1000)")
        self._terms = Terms(
            queue=queue_name(name),
            serializer=serializer,
            max_payload_bytes=whole_number("max_payload_bytes", max_payload_bytes, at_least=1, at_most=2**30),
            attempts=None if attempts is None else whole_number("attempts", attempts, at_least=1),
            backoff=Backoff() if backoff is None else backoff,
            lease_ms=duration_ms("lease", lease, positive=True),
            keep=(retention or Retention()).keep(),
            on_error=on_error,
            results_ms=None if results is None else duration_ms("results", results, positive=True),
        )
        self._workers: list[Worker] = []
        self._watched: Storage | None = None  # Where it hears of jobs whose workers vanished.
        self._upkeep_at_ms = {"schedule": 0, "cleanup": 0}
        self._owned = not hasattr(where, "fire_schedule")
        if not self._owned:
            if durability is not None:
                raise ValueError(f"durability={durability!r} belongs to the storage, which was opened before")
            self._storage = cast("Storage", where)
        elif durability is None:
            self._storage = open_storage(where)
        else:
            self._storage = open_storage(where, durability=durability)
        self._results = Results(self._storage, self.name, self._terms.decode)

    @property
    def name(self) -> str:
        return self._terms.queue

    @property
    def storage(self) -> Storage:
        return self._storage

    def bind(self, connection: object) -> Queue[T]:
        """The same queue on your own connection to the same database, in that connection's transaction.

        What it adds is there when you commit, and gone when you roll back. Waiting workers notice within half a
        second of the commit; call `notify` after it to have them notice at once.

        Raises:
            TypeError: It is no `sqlite3` or `apsw` connection.
            ValueError: It is connected to another database.
        """
        bound: Queue[T] = copy(self)
        bound._set_bound(self._storage.bind(connection))
        return bound

    def _set_bound(self, storage: Storage) -> None:
        self._storage = storage
        self._owned = False
        self._workers = []

    @contextmanager
    def transaction(self) -> Iterator[Queue[T]]:
        """Everything that this thread does to the storage in the ``with`` block is one transaction.

        Also through other queues on the same storage. An exception rolls all of it back. Others wait meanwhile, so
        keep it short.
        """
        with self._storage.transaction():
            yield self

    def close(self) -> None:
        """Close the workers that it started, as by their `close`, and the storage, unless it was given one.

        In a handler of one of them, which `close` cannot wait for, the storage stays open.
        """
        ended = [worker.close() for worker in self._workers]
        if self._results.storage is self._storage:  # If not, they are those of the queue that this one is bound from.
            self._results.close()
        if self._owned and all(ended):
            self._storage.close()

    def __enter__(self) -> Queue[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} on {self._storage.location}>"

    # Adding

    def add(
        self,
        data: T,
        *,
        delay: float | timedelta | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        dedupe_key: str | None = None,
        dedupe_until: DedupeUntil = "removed",
        group: str | Group | None = None,
        attempts: int | None = None,
        keep_result: float | timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        task: str | None = None,
        ref: str | None = None,
    ) -> Job[T]:
        """Add a job. With a dedupe key that a job of this queue holds, add nothing and answer that job.

        The options are those of `NewJob`.

        Raises:
            PayloadError: The payload would not come back as it is, or is too large.
            GroupConflictError: The group exists with another concurrency.
            TypeError: An option is of a wrong type.
            ValueError: An option is out of range, or two exclude each other.
        """
        terms, storage = self._terms, self._storage
        options = (delay, run_at, dedupe_key, group, attempts, keep_result, headers, task, ref)
        if options == _NO_OPTIONS and dedupe_until == "removed" and priority == 0 and type(priority) is int:
            spec = terms.spec(data)
        else:
            spec = job_spec(
                terms.queue,
                terms.encode(data),
                terms.encoding,
                attempts=terms.attempts if attempts is None else attempts,
                delay=delay,
                run_at=run_at,
                priority=priority,
                dedupe_key=dedupe_key,
                dedupe_until=dedupe_until,
                group=group,
                keep_result_ms=terms.keep_result_ms(keep_result),
                headers=headers,
                task=task,
                ref=ref,
            )
        while True:
            now_ms = storage.clock.now_ms()
            (stored,), (added,) = terms.add(storage, (spec,))
            if added.created:
                return Job((stored, added.id, now_ms), self, data=data)
            holder = storage.get(added.id)
            if holder is not None:
                return Job(holder, self, duplicate=True)
            # The holder has gone since, so that the key is free again.

    def add_many(self, jobs: Iterable[T | NewJob[T]]) -> builtins.list[Job[T]]:
        """Add payloads, or `NewJob`s where one has options of its own: all in one transaction, in order.

        All are checked before anything is written. The answer has a job for each position, as from `add`.

        Raises:
            As `add`; the message names the position.
        """
        specs = self._terms.specs(jobs)
        if not specs:
            return []
        now_ms = self._storage.clock.now_ms()
        if all(spec.dedupe_key is None for spec in specs):
            stored, added = self._terms.add(self._storage, specs)
            return [Job((spec, it.id, now_ms), self) for spec, it in zip(stored, added, strict=True)]
        result: list[Job[T]] = []
        with self._storage.transaction() as transaction:
            stored, added = self._terms.add(transaction, specs)
            for spec, it in zip(stored, added, strict=True):
                record = None if it.created else transaction.get(it.id)
                result.append(Job(record or (spec, it.id, now_ms), self, duplicate=not it.created))
        return result

    def notify(self, jobs: int = 1) -> None:
        """Wake waiting workers, after a commit of your own that added jobs through `bind`."""
        self._storage.notify_queue(self.name, whole_number("jobs", jobs, at_least=1))

    # The message level

    def claim(
        self,
        limit: int = 1,
        *,
        lease: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> builtins.list[Job[T]]:
        """Lease up to ``limit`` due jobs, each to be settled by `complete`, `fail` or `release` before its lease ends.

        Highest priority first, then earliest due, then oldest; groups take turns. Each claim counts as an attempt. A
        payload that cannot be read is failed with reason "parse", `on_error` is told, and the next job is given.
        Schedules that are due fire, as they do in workers.

        Args:
            lease: Seconds; None is as the queue says. `extend` renews it.
            wait: Seconds to wait for a job when none is due; None does not wait. On a connection of your own it is a
                ``ValueError``: no new job would be seen in its transaction.

        Returns:
            ``[]`` when nothing is due, or the queue is paused.
        """
        limit = whole_number("limit", limit, at_least=1)
        lease_ms = self._terms.lease_ms if lease is None else duration_ms("lease", lease, positive=True)
        if wait is None:
            return self._claim(limit, lease_ms)
        ends_at = time.monotonic() + duration_ms("wait", wait) / 1000
        with closing(self._storage.listener([self.name])) as listener:
            while True:
                jobs = self._claim(limit, lease_ms)
                left = ends_at - time.monotonic()
                if jobs or left <= 0:
                    return jobs
                listener.wait(min(left, _LOOK_S))

    def _claim(self, limit: int, lease_ms: int) -> builtins.list[Job[T]]:
        if self._is_due("schedule"):
            for error in self._terms.fire_schedules(self._storage):
                self._terms.on_error(error, ErrorContext(kind="schedule", queue=self.name))
        jobs: list[Job[T]] = []
        refused: set[int] = set()
        while True:
            records = self._storage.claim((self.name,), limit=limit - len(jobs), lease_ms=lease_ms)
            self._tell_claimed(records)
            again = False
            for record in records:
                try:
                    data: T = self._terms.decode(record.payload, record.encoding)
                except Exception as error:  # noqa: BLE001 (whatever the serializer raises)
                    # One that comes back at once must not keep us here.
                    again = again or record.id not in refused
                    refused.add(record.id)
                    self._refuse(record, error)
                else:
                    jobs.append(Job(record, self, data=data))
            if not again:
                return jobs

    def _refuse(self, record: JobRecord, error: Exception) -> None:
        wait_ms = self._terms.wait_ms(record)
        self._terms.on_error(error, ErrorContext.of("parse", record, wait_ms=wait_ms, settled=False))
        failure = job_error(error, reason="parse", skip=1)
        self._tell_settled(record, after(self._terms.fail(self._storage, record, failure, wait_ms)))

    def complete(self, job: Job[Any], *, result: Any = None, then: Sequence[Any] = ()) -> bool:
        """Complete the job and add what follows it, in one transaction. False, and nothing done: the lease was lost.

        Args:
            result: Kept where the job is to keep one, in the same transaction; one that cannot be kept is refused with
                `PayloadError`, and nothing done.
            then: Payloads, or `NewJob`s, also for other queues of the same storage.
        """
        record, terms = self._record_of(job), self._terms
        kept = terms.result(record, result)
        done = terms.complete(self._storage, record, () if then == () else terms.specs(then), kept)
        self._tell_settled(record, "completed" if done else "lost")
        if done and (terms.keeps_completed or kept is not None) and self._is_due("cleanup"):
            if terms.keeps_completed:
                self._storage.prune(self.name, terms.keep)
            if kept is not None:
                self._storage.sweep()
        return done

    def fail(
        self,
        job: Job[Any],
        error: BaseException | JobError | str | None = None,
        *,
        retry_in: float | timedelta | None = None,
        retry: bool = True,
    ) -> bool:
        """Fail this attempt: the job is tried again while attempts remain, or is a dead letter.

        Args:
            error: Kept with the job: an exception with its stack and causes.
            retry_in: Seconds until the next attempt; None is as the queue's backoff says.
            retry: False makes it a dead letter at once.

        Returns:
            False, and nothing done: the lease was lost.
        """
        record = self._record_of(job)
        failure = as_job_error(error, reason="handler" if retry else "rejected")
        wait_ms = self._terms.wait_ms(record, retry_in=retry_in, retry=retry)
        state = self._terms.fail(self._storage, record, failure, wait_ms)
        self._tell_settled(record, after(state))
        if state is State.FAILED:
            self._storage.prune(self.name, self._terms.keep)
        return state is not None

    def extend(self, job: Job[Any], seconds: float | timedelta | None = None) -> bool:
        """Let the lease end so many seconds from now; None is the queue's own lease. False: it was lost."""
        lease_ms = self._terms.lease_ms if seconds is None else duration_ms("seconds", seconds, positive=True)
        return self._storage.extend([self._record_of(job).lease], lease_ms)[0]

    def release(self, job: Job[Any], *, delay: float | timedelta | None = None) -> bool:
        """Give the job back to its old place, the attempt not counted. False, and nothing done: the lease was lost.

        ``delay`` makes it due only so many seconds later.
        """
        delay_ms = None if delay is None else duration_ms("delay", delay)
        record = self._record_of(job)
        done = self._storage.release([record.lease], delay_ms=delay_ms)[0]
        self._tell_settled(record, "released" if done else "lost")
        return done

    def _tell_claimed(self, records: Sequence[JobRecord]) -> None:
        if records and self._terms.observers:
            tell(self._terms.observers, lambda observer: observer.claimed(records))

    def _tell_settled(self, record: JobRecord, outcome: Outcome) -> None:
        if self._terms.observers:
            tell(self._terms.observers, lambda observer: observer.settled(record, outcome))

    # Workers

    def process(
        self,
        handler: Callable[[T], object]
        | Callable[[T, Context], object]
        | Callable[[T, AsyncContext], Coroutine[Any, Any, object]],
        *,
        concurrency: int = 1,
        workers: Literal["threads", "processes"] = "threads",
        time_limit: float | timedelta | None = None,
        recycle_after: int | None = None,
        recycle_mb: int | None = None,
        initializer: Callable[[], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Worker:
        """Run the handler on each job, on ``concurrency`` jobs at once, until the worker is closed.

        A job whose handler returns is completed; one whose handler raises fails, and is tried again after the
        queue's backoff while attempts remain. Its lease is renewed while it runs. What finishes is settled
        within a few milliseconds; when the process is killed before, it runs again.

        Args:
            handler: ``handler(data)``, or ``handler(data, context)`` when its second argument has no default or is
                named "context". It runs in threads; an ``async def`` one on an event loop, with an `AsyncContext`.
            workers: "processes" runs it in ``concurrency`` child processes, for work that computes. A crash costs
                only the job of that process, which fails with reason "crashed". The handler has to be found by its
                module and name; `process` returns when all of them have imported it.
            time_limit: Seconds that a child process may take for a job. It is killed then, and the job fails, with
                reason "timeout".
            recycle_after: A child process is replaced after so many jobs,
            recycle_mb: or when it holds so many megabytes after a job.
            initializer: Called once in each child process, before its first job.
            loop: The running event loop for an async handler; None is one of the worker's own, in a thread.

        Raises:
            ProcessStartError: A child process cannot import the handler. Nothing was claimed.
            TypeError: The handler cannot be given to a child process: it is a lambda, or was defined in a function.
        """
        processes = Processes.asked(
            workers,
            time_limit=time_limit,
            recycle_after=recycle_after,
            recycle_mb=recycle_mb,
            initializer=initializer,
        )
        return self._start(handler, concurrency=concurrency, batch=None, loop=loop, processes=processes)

    def process_many(
        self,
        handler: Callable[[builtins.list[T]], object]
        | Callable[[builtins.list[T], builtins.list[Context]], object]
        | Callable[[builtins.list[T], builtins.list[AsyncContext]], Coroutine[Any, Any, object]],
        *,
        batch: int,
        concurrency: int = 1,
        workers: Literal["threads", "processes"] = "threads",
        time_limit: float | timedelta | None = None,
        recycle_after: int | None = None,
        recycle_mb: int | None = None,
        initializer: Callable[[], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Worker:
        """As `process`, with up to ``batch`` jobs at once: those that are there, without waiting for more.

        They end alike, by the handler's return or exception, but for those whose `Context` the handler used to
        complete, fail or release them one by one. In a child process, the time limit is for one call of the handler,
        and what is counted for ``recycle_after`` are calls; a crash costs the jobs of its call.
        """
        processes = Processes.asked(
            workers,
            time_limit=time_limit,
            recycle_after=recycle_after,
            recycle_mb=recycle_mb,
            initializer=initializer,
        )
        return self._start(handler, concurrency=concurrency, batch=batch, loop=loop, processes=processes)

    def _start(
        self,
        handler: Callable[..., object],
        *,
        concurrency: int,
        batch: int | None,
        loop: asyncio.AbstractEventLoop | None,
        processes: Processes | None,
    ) -> Worker:
        worker = Worker(
            self._storage, self._terms, handler, concurrency=concurrency, batch=batch, loop=loop, processes=processes
        )
        if self._watched is not self._storage:
            self._watched = self._storage
            self._storage.on_lapsed(self._lapsed)
        # A handler that closes the queue as soon as it runs has to find its worker here.
        self._workers = [*(it for it in self._workers if not it.closed), worker]
        worker.start()
        return worker

    def _lapsed(self, record: JobRecord) -> None:
        """One of this process's claims has found a job that its last worker had not settled."""
        if record.queue == self.name:
            why = record.error.message if record.error else "its worker vanished"
            self._terms.on_error(LeaseLostError(why), ErrorContext.of("lapsed", record, settled=False))
            self._tell_settled(record, "failed")

    def observe(self, observer: Observer) -> None:
        """Have it told what happens to this queue's jobs in this process, also in workers that run already.

        As `litebroker.metrics.WorkerMetrics`, `litebroker.tracing.Tracing`, or one of your own.
        """
        if not isinstance(observer, Observer):
            raise TypeError(f"{observer!r} is no Observer: subclass litebroker.Observer")
        self._terms.observers.append(observer)

    # Looking

    def get(self, job_id: int) -> Job[T] | None:
        """The job; None when this queue has none of this id any more."""
        record = self._storage.get(whole_number("job_id", job_id, at_least=0, at_most=LARGEST_ID))
        return None if record is None or record.queue != self.name else Job(record, self)

    def find(self, *, ref: str | None = None, dedupe_key: str | None = None) -> builtins.list[Job[T]]:
        """The jobs of this name or of this key, in the order they were added. Give exactly one of the two.

        A name is looked for among all jobs that are ready: a tenth of a second for a million. A key costs one look.
        """
        if (ref is None) == (dedupe_key is None):
            raise ValueError(f"ref={ref!r}, dedupe_key={dedupe_key!r}: give exactly one")
        return [Job(it, self) for it in self._storage.find(self.name, ref=ref, dedupe_key=dedupe_key)]

    def list(self, state: State | str, *, limit: int = 100, after: Job[Any] | None = None) -> builtins.list[Job[T]]:
        """A page of the jobs in a state, following ``after``, the last of the page before.

        Pending ones: first those that are due, as they would be claimed, then the delayed, soonest first. Active ones:
        the soonest end of lease first. Ended ones: the latest end first.
        """
        limit = whole_number("limit", limit, at_least=1)
        last = None if after is None else self._record_of(after)
        if last is not None:
            # As it is now: one that was just added, or has changed since, stands elsewhere than its record says.
            last = self._storage.get(last.id) or last
        return [Job(it, self) for it in self._storage.page(self.name, _state(state), limit=limit, after=last)]

    def dead_letters(self, *, limit: int = 100, after: Job[Any] | None = None) -> builtins.list[Job[T]]:
        """A page of the failed jobs, the latest first; as `list`."""
        return self.list(State.FAILED, limit=limit, after=after)

    def why(self, job: Job[Any] | int) -> Explanation:
        """Why the job is where it is, with the evidence: what keeps it, who holds it, how it ended. Changes nothing.

        ``print(queue.why(job))`` says it in words. Also of a job that is gone, or in another queue of the storage.
        """
        if not isinstance(job, Job):
            whole_number("job", job, at_least=0, at_most=LARGEST_ID)
        return why(self._storage, job.id if isinstance(job, Job) else job)

    def stats(self) -> Counts:
        """How many jobs are in each state, counted now."""
        return self._storage.counts(self.name)

    def size(self) -> int:
        """How many jobs are pending: due or delayed."""
        return self._storage.counts(self.name).pending

    # Results

    def result(self, job: Job[Any] | int, *, timeout: float | timedelta | None = None) -> Any:
        """Wait until the job has ended, and give what its handler returned.

        A job that is tried again has not ended. Do not wait in a transaction of your own, whose end the job's would
        have to wait for, nor in a handler of the same queue, whose thread the job may need.

        Args:
            timeout: Seconds; None is without limit, and 0 only looks. On a connection of your own, to wait is a
                ``ValueError``.

        Raises:
            JobFailedError: It failed for good; `JobLapsedError` where its workers vanished.
            JobCancelledError, JobRemovedError: So it ended.
            ResultExpiredError: It is over, and its result is not there any more.
            ResultNotKeptError: It keeps none: nobody asked for it.
            ResultRefusedError: It is done, but what its handler returned cannot be kept.
            ResultTimeoutError: It has not ended in this time. It is a ``TimeoutError``, too.
            Exception: Whatever the serializer raises.
        """
        timeout_s = None if timeout is None else duration_ms("timeout", timeout) / 1000
        return self._results.result(*self._awaited(job), timeout_s)

    def future(self, job: Job[Any] | int) -> Future[Any]:
        """A future of what `result` gives, for `concurrent.futures.as_completed`, or `asyncio.wrap_future`.

        However many there are, one thread waits for them. To cancel it is to wait no longer; the job goes on.

        Raises:
            ResultNotKeptError: It keeps none: nobody asked for it.
            ValueError: It is on a connection of your own, and the job has not ended.
        """
        return self._results.future(*self._awaited(job))

    def progress(self, job: Job[Any] | int) -> Progress | None:
        """How far a running job has come, as its handler said by ``context.progress``, half a second ago at most.

        None: it does not run, or has not said so in this attempt.
        """
        job_id = self._id(job)
        return read_progress(self._storage, [job_id]).get(job_id)

    def _awaited(self, job: Job[Any] | int) -> tuple[int, JobRecord | None]:
        """The job's id, and its record, where there is one."""
        if isinstance(job, Job):
            record = self._record_of(job)
            return record.id, record
        job_id = whole_number("job", job, at_least=0, at_most=LARGEST_ID)
        found = self._results.storage.get(job_id)
        if found is not None and found.queue != self.name:
            raise ValueError(f"job {job_id} is of queue {found.queue!r}, and this is {self.name!r}")
        return job_id, found

    # Changing

    def retry(self, job: Job[Any] | int, *, to: str | None = None) -> bool:
        """Make a failed job due at once, with its history and at least one more attempt. False: it is not failed.

        Args:
            to: The queue that it goes on in; None is this one. False, too, where its dedupe key is held there.
        """
        target = None if to is None else queue_name(to)
        return self._storage.retry([self._id(job)], queue=target)[0]

    def retry_all(self, *, to: str | None = None, limit: int | None = None) -> int:
        """Make failed jobs due at once, the latest first; answers how many.

        Args:
            to: They go on in this queue of the same storage; one whose dedupe key is held there stays.
            limit: At most so many.
        """
        target = None if to is None else queue_name(to)
        left = None if limit is None else whole_number("limit", limit, at_least=0)
        retried = 0
        after: JobRecord | None = None
        while left is None or left > 0:
            size = _PAGE if left is None else min(_PAGE, left)
            page = self._storage.page(self.name, State.FAILED, limit=size, after=after)
            if not page:
                break
            after = page[-1]
            done = sum(self._storage.retry([record.id for record in page], queue=target))
            retried += done
            left = None if left is None else left - done
        return retried

    def cancel(self, job: Job[Any] | int) -> bool:
        """End a pending job as cancelled. False, unchanged: it is not pending."""
        return self._storage.cancel([self._id(job)])[0]

    def reschedule(
        self, job: Job[Any] | int, *, delay: float | timedelta | None = None, run_at: datetime | None = None
    ) -> bool:
        """Make a pending job due then; give one of the two. False, unchanged: it is not pending."""
        if (delay is None) == (run_at is None):
            raise ValueError(f"delay={delay!r}, run_at={run_at!r}: give exactly one")
        if run_at is not None:
            due_at_ms = instant_ms("run_at", run_at)
        else:
            due_at_ms = self._storage.clock.now_ms() + duration_ms("delay", delay or 0)
        return self._storage.reschedule(self._id(job), due_at_ms=due_at_ms)

    def remove(self, job: Job[Any] | int) -> bool:
        """Delete a job, and free its dedupe key. False, unchanged: it is active, or gone."""
        return self._storage.remove([self._id(job)])[0]

    def purge(self, state: State | str | None = None) -> int:
        """Delete all jobs in a state, or all that are not active; answers how many. It runs in bites."""
        states = [_state(state)] if state is not None else [it for it in State if it is not State.ACTIVE]
        if State.ACTIVE in states:
            raise ValueError("active jobs belong to their workers: they cannot be purged")
        return self._storage.purge(self.name, states)

    def pause(self) -> bool:
        """Stop new claims and schedules, in all processes, until `resume`. What runs goes on. False: it was paused."""
        return self._storage.pause(self.name, paused=True)

    def resume(self) -> bool:
        """Go on with claims and schedules. False: it was not paused."""
        return self._storage.pause(self.name, paused=False)

    @property
    def paused(self) -> bool:
        return any(it.name == self.name and it.paused_at_ms is not None for it in self._storage.queues())

    # Schedules

    def schedule(
        self,
        data: T,
        *,
        id: str,
        every: float | timedelta | None = None,
        cron: str | None = None,
        tz: str | None = None,
        priority: int = 0,
        dedupe_key: str | None = None,
        dedupe_until: DedupeUntil = "removed",
        group: str | Group | None = None,
        attempts: int | None = None,
        keep_result: float | timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        task: str | None = None,
        ref: str | None = None,
    ) -> Schedule[T]:
        """Add a job at each tick, as long as anyone works on the queue, also after this process has ended.

        Scheduling again under the same id changes the schedule: with the same times its next tick stays where it is,
        with others it is reckoned anew. Ticks that were missed fire once, together.

        Args:
            every: Seconds between ticks; the first is so long from now.
            cron: Five fields, such as ``0 6 * * *``, instead of ``every``.
            tz: The time zone of ``cron``, such as "Europe/Berlin"; None is UTC.
            dedupe_key: With ``dedupe_until="ended"``, a tick adds nothing while an earlier one's job is unfinished.

        Raises:
            ScheduleError: It is not understood, can never fire, or the time zone does not exist.
            PayloadError, TypeError, ValueError: As `add`.
        """
        key("id", id)
        spec = ScheduleSpec.parse(every=every, cron=cron, tz=tz)
        job = job_spec(
            self.name,
            self._terms.encode(data),
            self._terms.encoding,
            attempts=self._terms.attempts if attempts is None else attempts,
            priority=priority,
            dedupe_key=dedupe_key,
            dedupe_until=dedupe_until,
            group=group,
            keep_result_ms=self._terms.keep_result_ms(keep_result),
            headers=headers,
            task=task,
            ref=ref,
        )
        with self._storage.transaction() as transaction:
            old = transaction.get_schedule(self.name, id)
            now_ms = self._storage.clock.now_ms()
            record = ScheduleRecord.defined(self.name, id, spec, job, old=old, now_ms=now_ms)
            if record != old:
                transaction.put_schedule(record)
        return Schedule(record, self._terms)

    def get_schedule(self, id: str) -> Schedule[T] | None:
        """The schedule, or None."""
        record = self._storage.get_schedule(self.name, id)
        return None if record is None else Schedule(record, self._terms)

    def schedules(self) -> builtins.list[Schedule[T]]:
        """All of this queue, by id."""
        return [Schedule(it, self._terms) for it in self._storage.list_schedules(self.name)]

    def remove_schedule(self, id: str) -> bool:
        """Delete it; the jobs that it added stay. False: there is none of this id."""
        return self._storage.remove_schedule(self.name, id)

    # Below the surface

    def _record_of(self, job: Job[Any]) -> JobRecord:
        if not isinstance(job, Job):
            raise TypeError(f"{job!r} is no Job: give one that this queue gave you")
        record = job.record
        if record.queue != self._terms.queue:
            raise ValueError(f"job {record.id} is of queue {record.queue!r}, and this is {self.name!r}")
        return record

    def _id(self, job: Job[Any] | int) -> int:
        """The job's id; -1, which no job has, where it is of another queue."""
        if isinstance(job, Job):
            return self._record_of(job).id
        found = self.get(job)
        return -1 if found is None else found.id

    def _is_due(self, upkeep: Literal["schedule", "cleanup"]) -> bool:
        now_ms = self._storage.clock.steady_ms()
        if now_ms < self._upkeep_at_ms[upkeep]:
            return False
        self._upkeep_at_ms[upkeep] = now_ms + _UPKEEP_MS
        return True


def _record(spec: JobSpec, job_id: int, now_ms: int) -> JobRecord:
    """A job that was added just now."""
    due_at_ms = spec.run_at_ms if spec.run_at_ms is not None else now_ms + (spec.delay_ms or 0)
    return JobRecord(
        job_id,
        spec.queue,
        State.PENDING,
        spec.priority,
        due_at_ms,
        0,
        spec.max_attempts,
        now_ms,
        None,
        None,
        None,
        None,
        spec.group,
        spec.dedupe_key,
        spec.ref,
        spec.task,
        spec.encoding,
        spec.headers or {},
        None,
        (),
        spec.payload,
    )


def _state(value: State | str) -> State:
    try:
        return State(value)
    except ValueError:
        raise ValueError(f"state={value!r}: it is one of {', '.join(State)}") from None


def _instant(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else instant(at_ms)

"""`SQLiteHuey`: huey, at least once.

A few methods of `Huey` are widened; consumer, workers, scheduler and management commands stay huey's own. A task that
`dequeue` or `read_schedule` hands out carries its `Delivery`, and huey's own bookkeeping decides how that ends:

* the task ran, failed for good, expired, was revoked or cancelled: `execute` returns, and the lease ends;
* it goes on (a retry, the schedule, the next of its pipeline, a chord): the end of the lease and what is stored for it
  are one transaction, and neither happens when the lease was lost;
* it was interrupted: it is given back;
* huey's bookkeeping raised, mostly since the storage failed: it is given out again later, up to ``max_receives`` times;
* its worker vanished: the engine takes it back.

In a consumer, tasks come out of a `Prefetch`, and leases that nothing is stored with are ended there.
"""

# mypy: disallow-untyped-calls=False
# Huey, whose methods super() is, has no types.

from __future__ import annotations

import contextvars
import functools
import hashlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

from huey import api, signals
from huey.exceptions import HueyException, TaskLockedException
from huey.utils import Error

from litebroker import JobError, JobRecord, Keep, State, StorageError, job_error
from litebroker_huey.delivery import Delivery, current_delivery, no_delivery
from litebroker_huey.periodic import due_ticks
from litebroker_huey.prefetch import Prefetch
from litebroker_huey.storage import LitebrokerStorage, Message

logger = logging.getLogger("huey.litebroker")

# Sent with each task that became a dead letter without huey having told of an error: its worker vanished, it cannot be
# decoded, no consumer knows it.
SIGNAL_DEAD = "dead"

_SIGNAL_TIMEOUT = "timeout"  # signals.SIGNAL_TIMEOUT is missing before huey 3.0
_DELIVERY = "_litebroker_delivery"
_MESSAGE = "_litebroker_message"
_TICK = "_litebroker_tick"
_SHUTDOWN_HOOK = "litebroker-leases"  # no name of a function
# How many due tasks the scheduler leases at a time, to move them one by one.
_DUE = 100
_SHORTEST_WAIT_MS, _LONGEST_WAIT_MS = 1000, 15_000
_UPKEEP_S = 10.0
_DAY_MS = 24 * 3600 * 1000
_HOUR_MS = 3600 * 1000

# Signals that wait for the commit of the transaction that they tell of.
_held_signals: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar(
    "litebroker_huey_signals", default=None
)
# Keys that huey asked to delete while it looked whether a task is revoked.
_consumed_keys: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "litebroker_huey_consumed", default=None
)


class DeadTask(NamedTuple):
    """A dead letter.

    Attributes:
        id: The task's id, or None when it was enqueued without `SQLiteHuey`.
        job_id: The job's id in the file, as the ``litebroker`` command shows it.
        name: The task's name.
        reason: "handler" (it raised, and has no retries left), "lapsed" (its worker vanished too often), "parse" (it
            cannot be decoded), "unknown" (no consumer knew it), "result" (what it returned cannot be serialized),
            "bookkeeping" (huey could not store what follows from it), "exit" (it ended its worker), "interrupted".
        error: ``Type: message``.
        receives: How often a worker was given it.
        died_at: When it came to that.
    """

    id: str | None
    job_id: int
    name: str | None
    reason: str
    error: str
    traceback: str
    receives: int
    died_at: datetime | None


class SQLiteHuey(api.Huey):
    """A `Huey` whose tasks are in a litebroker file, and are lost by nothing but `flush`.

    Takes all arguments of `Huey`, and those of `LitebrokerStorage`: ``filename`` (or ``url``, or ``storage``),
    ``durability``, ``lease``, ``max_receives``, ``result_ttl``, ``expire_time`` and more.

    ``@huey.task(...)`` and ``@huey.periodic_task(...)`` take two more options:

    ``max_receives``
        As for the whole huey. 1 is at most once for this task.
    ``dedupe_key``
        A string, or a function of the task's arguments that gives one (or None), or True for "the same arguments".
        While a task of this key waits, is scheduled or runs, enqueuing another gives the result handle of that one.
    """

    storage_class = LitebrokerStorage
    # Set by a consumer: whether it stops, and what its workers share.
    _is_stopping: Callable[[], bool] = staticmethod(bool)
    _prefetch: Prefetch | None = None

    def __init__(self, name: str = "huey", *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)

    def task(self, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        decorate: Callable[[Callable[..., Any]], Any] = super().task(*args, **options)
        return decorate

    def periodic_task(self, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        decorate: Callable[[Callable[..., Any]], Any] = super().periodic_task(*args, **options)
        return decorate

    def get_storage(self, **kwargs: Any) -> Any:
        if isinstance(self.storage_class, type) and issubclass(self.storage_class, LitebrokerStorage):
            kwargs.setdefault("utc", self.utc)
        return super().get_storage(**kwargs)

    def create_storage(self) -> Any:
        storage = super().create_storage()
        if isinstance(storage, LitebrokerStorage):
            storage.on_lapsed(_Lapsed(self, storage))
        return storage

    @property
    def _live(self) -> LitebrokerStorage | None:
        """The storage, when tasks go through it: huey changes it as immediate mode is turned on and off."""
        storage = self.storage
        return storage if isinstance(storage, LitebrokerStorage) and not self._immediate else None

    def create_consumer(self, **options: Any) -> Any:
        consumer = super().create_consumer(**options)
        self._is_stopping = consumer.stop_flag.is_set
        storage = self._live
        if storage is not None and self._prefetch_of(storage) is None:
            self._prefetch = Prefetch(storage)
            # Before the application's own, which may take long.
            others = {name: hook for name, hook in self._shutdown.items() if name != _SHUTDOWN_HOOK}
            self._shutdown = {_SHUTDOWN_HOOK: self._prefetch.settle, **others}
        return consumer

    def _prefetch_of(self, storage: LitebrokerStorage) -> Prefetch | None:
        prefetch = self._prefetch
        return prefetch if prefetch is not None and prefetch.storage is storage else None

    def notify_interrupted_tasks(self) -> None:
        super().notify_interrupted_tasks()
        # The process ends under its threads now. What they have done is not to be run again.
        if self._prefetch is not None:
            self._prefetch.settle()

    # Into the queue

    def serialize_task(self, task: Any) -> bytes:
        data: bytes = super().serialize_task(task)
        storage = self._live
        if storage is None:
            return data
        message = Message(data)
        message.ref = task.id
        message.task = self._registry.task_to_string(type(task))
        message.max_receives = getattr(task, "max_receives", None)
        message.dedupe_key = _dedupe_key(task)
        message.within = self._within(storage, task)
        setattr(task, _MESSAGE, message)
        return message

    def _within(self, storage: LitebrokerStorage, task: Any) -> Callable[[Callable[[], None]], object] | None:
        """What storing the task belongs to, in one transaction."""
        own = _delivery_of(task)
        if own is not None and not own.ended:
            return own.end
        running = current_delivery()
        if running is not None and running.task.on_complete is task:
            return running.end
        tick = getattr(task, _TICK, None)
        return None if tick is None else functools.partial(tick.claim, storage)

    def enqueue(self, task: Any) -> Any:
        storage = self._live
        if storage is None or not isinstance(task, api.Task):
            return super().enqueue(task)
        move = _delivery_of(task)
        if move is None and (key := _dedupe_key(task)) is not None:
            holder = storage.holder(key)
            if holder is not None:
                return self._results_of(holder)
        try:
            results = super().enqueue(task)
        except Exception:
            if move is None or move.queue != storage.schedule:
                raise
            # Huey before 3.5 would end the scheduler, and 3.5 drop the task.
            logger.exception("Task %s is due, but could not be enqueued. It is tried again.", task.id)
            self._give_back(move)
            return None
        message: Message | None = task.__dict__.pop(_MESSAGE, None)
        holder = None if message is None else message.holder
        return results if holder is None else self._results_of(holder)

    def _give_back(self, delivery: Delivery) -> None:
        try:
            delivery.give_back(delay_ms=_SHORTEST_WAIT_MS)
        except StorageError:
            logger.exception("Task %s could not be given back; it is, when its lease runs out.", delivery.task.id)

    def _results_of(self, job: JobRecord) -> Any:
        """The handles that enqueuing it gave."""
        if not self.results:
            return None
        try:
            task = self.deserialize_task(job.payload)
        except Exception:  # noqa: BLE001 - another program's task, maybe; its id is enough for a handle
            task = api.Task(id=job.ref)
        results = []
        while task is not None:
            results.append(api.Result(self, task))
            task = task.on_complete
        return results[0] if len(results) == 1 else api.ResultGroup(results)

    # Out of the queue

    def dequeue(self) -> Any:
        storage = self._live
        if storage is None:
            return super().dequeue()
        # A consumer that stops gives back what it interrupts. Its other workers are not to begin it once more.
        prefetch = self._prefetch_of(storage)
        job = (storage.claim if prefetch is None else prefetch.take)(unless=self._is_stopping)
        return None if job is None else self._deliver(storage, job)

    def _deliver(self, storage: LitebrokerStorage, job: JobRecord) -> Any:
        """The task, with its delivery; None when it cannot be decoded, or not yet."""
        try:
            task = self.deserialize_task(job.payload)
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything
            self._refuse(storage, job, error)
            return None
        setattr(task, _DELIVERY, Delivery(storage, job, task))
        return task

    def _refuse(self, storage: LitebrokerStorage, job: JobRecord, error: Exception) -> None:
        delivery = Delivery(storage, job, None)
        name = job.task or f"of job {job.id}"
        # Another release of the application may have the task, or the class: this one may be going, or not yet come.
        if isinstance(error, HueyException | ImportError | AttributeError):
            waited_ms = _waited_ms(storage, job)
            if waited_ms < storage.unknown_ttl_ms:
                delivery.give_back(delay_ms=min(max(waited_ms, _SHORTEST_WAIT_MS), _LONGEST_WAIT_MS))
                logger.warning("Task %s is not known here (%s). It is offered again.", name, error)
                return
            letter = job_error(error, reason="unknown")
        else:
            letter = job_error(error, reason="parse")
        logger.error("Task %s cannot be read, and is a dead letter now.", name, exc_info=error)
        if delivery.fail(letter, for_good=True):
            self._bury(delivery)

    # Running

    def execute(self, task: Any, timestamp: datetime | None = None) -> Any:
        delivery = _delivery_of(task)
        if delivery is None or not delivery.held:
            return super().execute(task, timestamp)
        prefetch = self._prefetch_of(delivery.storage)
        with delivery.running():
            started = time.monotonic()
            try:
                value = super().execute(task, timestamp)
            except BaseException as error:
                is_dead = delivery.abandon(error) if isinstance(error, Exception | SystemExit) else delivery.interrupt()
                if is_dead:
                    self._bury(delivery)
                raise
            if prefetch is not None:
                prefetch.ran(time.monotonic() - started)
            if prefetch is not None and delivery.may_leave:
                prefetch.end_soon(delivery)
            elif not delivery.gone:
                delivery.end()
        return value

    def _emit(self, signal: str, task: Any, *args: Any, **kwargs: Any) -> None:
        held = _held_signals.get()
        if held is not None:
            held.append(functools.partial(self._emit, signal, task, *args, **kwargs))
            return
        delivery = _delivery_of(task)
        if delivery is not None:
            if signal == signals.SIGNAL_ERROR and not task.retries:
                delivery.error = job_error(args[0])
            elif signal == _SIGNAL_TIMEOUT and not task.retries:
                delivery.error = JobError("handler", "TaskTimeout", f"timed out after {task.timeout} s")
            elif signal == signals.SIGNAL_RETRYING:
                delivery.error = None
        super()._emit(signal, task, *args, **kwargs)
        # After the application's own handlers, since one may have enqueued the task itself.
        if signal == signals.SIGNAL_INTERRUPTED and delivery is not None and delivery.interrupt():
            self._bury(delivery)

    def put_result(self, key: Any, data: Any) -> Any:
        delivery = current_delivery()
        own = delivery is not None and key == delivery.task.id
        if delivery is not None and own and delivery.gone:
            return None  # The run that counts is another one.
        try:
            return super().put_result(key, data)
        except StorageError:
            raise
        except Exception as error:
            # To run the task again would not make its value storable.
            if delivery is not None and own and delivery.fail(job_error(error, reason="result"), for_good=True):
                self._bury(delivery)
            raise

    def is_revoked(self, task: Any, timestamp: datetime | None = None, peek: bool = True) -> bool:  # noqa: FBT001, FBT002 - huey's
        delivery = current_delivery()
        if peek or delivery is None or delivery.task is not task:
            return bool(super().is_revoked(task, timestamp, peek))
        # "Revoke once" is used up in the transaction that ends the task, not before.
        keys: list[Any] = []
        token = _consumed_keys.set(keys)
        try:
            revoked = bool(super().is_revoked(task, timestamp, peek))
        finally:
            _consumed_keys.reset(token)
        if revoked:
            delivery.consumed = keys
        else:
            for key in keys:
                self.delete(key)
        return revoked

    def delete(self, key: Any) -> Any:
        keys = _consumed_keys.get()
        if keys is not None:
            keys.append(key)
            return True
        storage = self.storage
        return storage.delete_data(key)

    def get(self, key: Any, peek: bool = False) -> Any:  # noqa: FBT001, FBT002 - huey's
        keys = _consumed_keys.get()
        if keys is not None and not peek:  # how huey before 3.3 deletes
            keys.append(key)
            return True
        return super().get(key, peek)

    def _check_chord(self, member: Any, value: Any) -> None:
        storage = self._live
        if storage is None:
            super()._check_chord(member, value)
            return
        config = getattr(member, "chord_config", member)  # huey before 3.3 passes the task
        signals_after: list[Callable[[], None]] = []

        def count() -> None:
            # A dead letter that runs again was counted when it died.
            if storage.has_data_for_key(f"chord:{config.cid}:{config.idx}"):
                return
            token = _held_signals.set(signals_after)
            try:
                super(SQLiteHuey, self)._check_chord(member, value)
            finally:
                _held_signals.reset(token)

        delivery = current_delivery()
        if delivery is not None:
            delivery.end(count)
        else:
            with storage.engine.transaction():
                count()
        for send in signals_after:
            send()

    # The scheduler

    def read_schedule(self, timestamp: datetime | None = None) -> Iterable[Any]:
        """As huey's. Without a timestamp, the tasks are leased as they are iterated over, and `enqueue` moves each."""
        storage = self._live
        if storage is None or timestamp is not None:
            tasks: list[Any] = super().read_schedule(timestamp)
            return tasks
        self._look_after(storage)
        return self._due(storage, storage.claim_due(_DUE))

    def _due(self, storage: LitebrokerStorage, jobs: list[JobRecord]) -> Iterator[Any]:
        while jobs:
            waiting = deque(jobs)
            try:
                while waiting:
                    task = self._deliver(storage, waiting.popleft())
                    if task is not None:
                        yield task
            finally:
                if waiting:
                    storage.engine.release([job.lease for job in waiting])
            try:
                jobs = storage.claim_due(_DUE)
            except StorageError:
                logger.exception("The schedule cannot be read. It is tried again.")
                return

    def read_periodic(self, timestamp: datetime | None) -> list[Any]:
        storage = self._live
        if storage is None or timestamp is not None:
            tasks: list[Any] = super().read_periodic(timestamp)
            return tasks
        ticks = due_ticks(storage, lambda: self._registry.periodic_tasks)
        for tick in ticks:
            setattr(tick.task, _TICK, tick)
        return [tick.task for tick in ticks]

    def _look_after(self, storage: LitebrokerStorage) -> None:
        """Once in a while: drop old dead letters, and tell of those that another process found."""
        now = time.monotonic()
        if now < storage.looked_after_at + _UPKEEP_S:
            return
        storage.looked_after_at = now
        storage.engine.prune(storage.queue, {State.FAILED: Keep(count=storage.keep_dead)})
        recent = storage.engine.clock.now_ms() - _HOUR_MS
        for job in storage.engine.page(storage.queue, State.FAILED, limit=50):
            if (job.ended_at_ms or 0) > recent and job.error is not None and job.error.reason != "handler":
                self._after_death(storage, job)

    # Locks and limits

    def lock_task(self, lock_name: str, ttl: float | None = None) -> Any:
        """As huey's, with a ttl in every release. In a ``with`` or as a decorator, it ends with the task's lease."""
        return _Lock(self, lock_name, ttl)

    def rate_limit(self, name: str, limit: int, per: int, retry: bool = True) -> Any:  # noqa: FBT001, FBT002 - huey's
        """As huey's, but exact: to look and to count are one transaction."""
        rate_limit = super().rate_limit(name, limit, per, retry)
        count = rate_limit.acquire

        def acquire() -> None:
            storage = self.storage
            if not isinstance(storage, LitebrokerStorage):
                count()
                return
            exceeded: HueyException | None = None
            with storage.engine.transaction():
                try:
                    count()
                except HueyException as error:
                    exceeded = error  # not through the transaction, which would take the count back
            if exceeded is not None:
                raise exceeded

        rate_limit.acquire = acquire
        return rate_limit

    # What huey does not have

    def inflight_count(self) -> int:
        """How many tasks are with workers."""
        storage = self._live
        return 0 if storage is None else storage.engine.counts(storage.queue).active

    def dead_tasks(self, limit: int | None = None) -> list[DeadTask]:
        """The dead letters, the latest first."""
        storage = self._live
        if storage is None:
            return []
        return [_dead_task(job) for job in _dead_jobs(storage, limit)]

    def retry_dead(self, *task_ids: str) -> int:
        """Run these dead letters again, or all when none are named. How many there were."""
        storage = self._live
        if storage is None:
            return 0
        jobs = _dead_jobs(storage)
        return sum(storage.engine.retry([job.id for job in jobs if not task_ids or job.ref in task_ids]))

    def discard_dead(self, *task_ids: str) -> int:
        """Delete these dead letters, or all when none are named. How many there were."""
        storage = self._live
        if storage is None:
            return 0
        jobs = _dead_jobs(storage)
        return sum(storage.engine.remove([job.id for job in jobs if not task_ids or job.ref in task_ids]))

    def _bury(self, delivery: Delivery) -> None:
        storage = delivery.storage
        job = storage.engine.get(delivery.lease.job_id)
        if job is not None and job.state is State.FAILED:
            self._after_death(storage, job)

    def _after_death(self, storage: LitebrokerStorage, job: JobRecord) -> None:
        """Let those who wait for a dead letter know: its results, its chord, its signal. Once, whoever finds it."""
        mark = f"dead:{job.id}:{job.ended_at_ms}"
        if not storage.engine.put(storage.marks, mark, ttl_ms=_DAY_MS, if_absent=True):
            return
        letter = _dead_task(job)
        logger.error("Task %s (%s) is a dead letter: %s, %s", letter.id, letter.name, letter.reason, letter.error)
        try:
            task = self.deserialize_task(job.payload)
        except Exception:  # noqa: BLE001 - which may be just why it died
            task = api.Task(id=job.ref)
        with no_delivery():
            self._fail_followers(task, letter)
            self._emit(SIGNAL_DEAD, task)

    def _fail_followers(self, task: Any, letter: DeadTask) -> None:
        metadata = {"error": f"{letter.reason}: {letter.error}", "retries": 0, "traceback": letter.traceback}
        error = Error({**metadata, "task_id": task.id})
        stage = task
        while stage is not None:
            if self.results and stage.id is not None and not isinstance(task, api.PeriodicTask):
                self.put_result(stage.id, error)
            if getattr(stage, "chord_config", None) is not None:
                self._check_chord(stage.chord_config if hasattr(api.Huey, "_abort_chord_member") else stage, error)
            stage = stage.on_complete


class _Lapsed:
    """What a storage calls, without keeping huey and its storage in memory for it."""

    def __init__(self, huey: SQLiteHuey, storage: LitebrokerStorage) -> None:
        self._huey = weakref.ref(huey)
        self._storage = weakref.ref(storage)
        self._queue = storage.queue

    def __call__(self, job: JobRecord) -> None:
        huey, storage = self._huey(), self._storage()
        if job.queue == self._queue and huey is not None and storage is not None:
            huey._after_death(storage, job)  # noqa: SLF001 - of one module


class _Lock(api.TaskLock):
    """Huey's lock, of which a ``with`` inside a running task does not outlive the task's lease.

    What a task takes by `acquire` alone, maybe for another one to release, stays until then.
    """

    def __init__(self, huey: SQLiteHuey, name: str, ttl: float | None) -> None:
        super().__init__(huey, name)
        self._ttl = ttl

    def __enter__(self) -> _Lock:  # noqa: PYI034 - typing has no Self in Python 3.10
        delivery = current_delivery()
        self._take(None if delivery is None or not delivery.held else delivery)
        return self

    def acquire(self) -> bool:
        self._take(None)
        return True

    def _take(self, delivery: Delivery | None) -> None:
        storage = self._huey.storage
        if isinstance(storage, LitebrokerStorage):
            owner = None if delivery is None else delivery.lease
            taken = storage.put_if_empty(self._key, self._huey.serializer.serialize("1"), self._ttl, owner=owner)
        else:
            taken = self._huey.put_if_empty(self._key, "1")
        if not taken:
            raise TaskLockedException(f"unable to acquire lock {self._name}")


def _delivery_of(task: Any) -> Delivery | None:
    delivery: Delivery | None = getattr(task, _DELIVERY, None)
    # A copy of a task is a task of its own.
    return delivery if delivery is not None and delivery.task is task else None


def _dedupe_key(task: Any) -> str | None:
    # From the class, where a function is not bound to the task.
    key = task.__dict__.get("dedupe_key", getattr(type(task), "dedupe_key", None))
    if key is None or key is False:
        return None
    kwargs = {name: value for name, value in task.kwargs.items() if value is not task}
    if key is True:
        arguments = repr((task.args, sorted(kwargs.items())))
        return f"{type(task).__module__}.{type(task).__name__}:{hashlib.sha256(arguments.encode()).hexdigest()}"
    if callable(key):
        key = key(*task.args, **kwargs)
    return None if key is None else str(key)


def _waited_ms(storage: LitebrokerStorage, job: JobRecord) -> int:
    """How long ago a consumer first met this task without knowing it."""
    now_ms = storage.engine.clock.now_ms()
    mark = f"unknown:{job.id}"
    storage.engine.put(storage.marks, mark, number=now_ms, ttl_ms=storage.unknown_ttl_ms + _DAY_MS, if_absent=True)
    found = storage.engine.peek(storage.marks, [mark]).get(mark)
    return 0 if found is None else max(0, now_ms - found.number)


def _dead_jobs(storage: LitebrokerStorage, limit: int | None = None) -> list[JobRecord]:
    queues = (storage.queue, storage.schedule)
    jobs = [job for queue in queues for job in storage.jobs(queue, State.FAILED, limit=limit)]
    jobs.sort(key=lambda job: job.ended_at_ms or 0, reverse=True)
    return jobs[:limit] if limit else jobs


def _dead_task(job: JobRecord) -> DeadTask:
    error = job.error or JobError("unknown")
    return DeadTask(
        id=job.ref,
        job_id=job.id,
        name=job.task,
        reason=error.reason,
        error=f"{error.type}: {error.message}" if error.type else error.message,
        traceback=error.stack,
        receives=job.attempts,
        died_at=None if job.ended_at_ms is None else datetime.fromtimestamp(job.ended_at_ms / 1000, timezone.utc),
    )

"""Huey's storage on the engine: queue, schedule, results, locks and counters of one name in a litebroker file."""

# mypy: disallow-untyped-calls=False
# Huey, whose methods super() is, has no types.

from __future__ import annotations

import calendar
import contextlib
import functools
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any

from huey.constants import EmptyData
from huey.exceptions import ConfigurationError
from huey.storage import BaseStorage

from litebroker import JobRecord, JobSpec, Lease, Listener, State, Storage, open_storage
from litebroker_huey.stamp import Flags, Stamp

_PAGE = 500
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
# How the keys begin of huey's flags that say that a task is revoked, or that all of its name are. Where there are more
# than so many, each task is looked up.
_FLAGS = ("r:", "rt:")
_FLAGS_AT_ONCE, _MOST_FLAGS = 50, 1000

# Other storages' options that say nothing here, by the reason.
_FOREIGN = {
    "no Redis server is used": (
        "clean_name",
        "client_name",
        "connection_pool",
        "db",
        "host",
        "max_connections",
        "max_errors",
        "notify_result_ttl",
        "password",
        "port",
        "socket_connect_timeout",
        "socket_timeout",
        "ssl",
        "unix_socket_path",
        "username",
    ),
    "litebroker sets up its database by itself": ("cache_mb", "isolation_level", "journal_mode", "pragmas"),
}
# What these ask for is always so.
_ALWAYS_SO: dict[str, tuple[Any, ...]] = {
    "journal_mode": ("wal", "WAL"),
    "notify_result": (True,),
    "strict_fifo": (True, False),
}

# What is to be closed since nobody has it any more: storages, of which huey makes a new one whenever immediate mode is
# turned on or off, and listeners of threads that ended. The garbage collector, which finds them, may come at any time,
# and must not wait for a lock.
_dropped: SimpleQueue[Storage | Listener] = SimpleQueue()

Within = Callable[[Callable[[], None]], object]


class Message(bytes):
    """A serialized task, with what belongs beside the payload.

    Attributes:
        ref: The task's id.
        task: Its name.
        max_receives: How often it may be given to a worker; None is without limit.
        dedupe_key: No second one of this key waits or runs in the queue or its schedule.
        within: Runs what it is given in one transaction with something else, or not at all: the end of a lease, the
            claim of a periodic tick.
        holder: Afterwards, the job that held the dedupe key already.
    """

    ref: str | None = None
    task: str | None = None
    max_receives: int | None = None
    dedupe_key: str | None = None
    within: Within | None = None
    holder: JobRecord | None = None


class LitebrokerStorage(BaseStorage):
    """All of huey's `BaseStorage` on one litebroker file. `SQLiteHuey` adds leases to it; alone, it is at most once.

    Args:
        name: Names in the same file share nothing else.
        filename: The database file, "huey.db" if nothing is said; ":memory:" keeps all in this process.
        url: Instead of a filename: what `litebroker.open_storage` takes.
        storage: Instead of either: an open storage. It is not closed with this one.
        durability: What a power cut may take, as for `litebroker.SQLiteStorage`.
        timeout: How many seconds to wait for another writer.
        lease: Seconds after which a task is taken from a worker of which nothing is heard any more.
        max_receives: How often a task is given to a worker before it becomes a dead letter; 1 is at most once.
        result_ttl: Seconds after which a result that nobody fetched is dropped; None keeps it.
        expire_time: As in huey's RedisExpireHuey: a result lasts so many seconds, and reading does not remove it.
        unknown_ttl: For how many seconds a task that this consumer does not know is offered again.
        keep_dead: How many dead letters are kept.
        read_timeout: For how many seconds `dequeue` waits.
        blocking: False makes huey's workers poll instead.
        utc: What naive datetimes mean; `SQLiteHuey` passes huey's own setting.
        fsync: As in huey's SqliteHuey: True is durability "full", False "relaxed".
        create_tables: False leaves that to `initialize_schema`, or to the first use.

    Raises:
        ConfigurationError: An option of another storage that means nothing here, or two places at once.
    """

    blocking = True
    priority = True

    def __init__(
        self,
        name: str = "huey",
        *,
        filename: str | os.PathLike[str] | None = None,
        url: str | None = None,
        storage: Storage | None = None,
        durability: str | None = None,
        timeout: float | None = None,
        lease: float = 30.0,
        max_receives: int = 5,
        result_ttl: float | None = None,
        expire_time: float | None = None,
        unknown_ttl: float = 3600.0,
        keep_dead: int = 1000,
        read_timeout: float = 1.0,
        blocking: bool = True,
        utc: bool = True,
        fsync: bool | None = None,
        create_tables: bool = True,
        **foreign: Any,
    ) -> None:
        super().__init__(name)
        _refuse(foreign)
        if sum(place is not None for place in (filename, url, storage)) > 1:
            raise ConfigurationError("give one of filename, url and storage: each says where the tasks are")
        if max_receives < 1:
            raise ConfigurationError(f"max_receives={max_receives!r} would never run a task: give 1 or more")
        if durability is None and fsync is not None:
            durability = "full" if fsync else "relaxed"
        self.lease_ms = _milliseconds("lease", lease)
        self.max_receives = max_receives
        self.unknown_ttl_ms = int(unknown_ttl * 1000)
        self.keep_dead = keep_dead
        self.blocking = blocking
        self.utc = utc
        self.queue = f"huey:{name}"
        self.schedule = f"huey-schedule:{name}"
        self._values = f"huey:{name}"
        self._counters = f"huey-counters:{name}"
        self.marks = f"huey-marks:{name}"
        self._keep_read_results = expire_time is not None
        ttl = result_ttl if expire_time is None else expire_time
        self._result_ttl_ms = None if ttl is None else _milliseconds("the time that results last", ttl)
        self.read_timeout = read_timeout
        self._place = url or os.fspath(filename or "huey.db")
        options: dict[str, Any] = {"durability": durability, "busy_timeout": timeout}
        self._options = {option: value for option, value in options.items() if value is not None}
        self._given = storage
        self._opened: Storage | None = None
        self._opening = threading.Lock()
        self._ears = threading.local()
        self.looked_after_at = -math.inf
        self._on_lapsed: Callable[[JobRecord], None] | None = None
        self.stamp = Stamp(lambda: self.engine.location)
        self._flags = Flags(self.stamp, self._load_flags)
        if create_tables:
            self.initialize_schema()

    @property
    def engine(self) -> Storage:
        """The storage beneath, opened on first use, and again on the first one after `close`."""
        return self._given or self._opened or self._open()

    def _open(self) -> Storage:
        _close_dropped()
        with self._opening:
            if self._opened is None:
                engine = open_storage(self._place, **self._options)
                if self._on_lapsed is not None:
                    engine.on_lapsed(self._on_lapsed)
                weakref.finalize(self, _dropped.put, engine).atexit = False
                self._opened = engine
            return self._opened

    def initialize_schema(self) -> None:
        """Make the file, or bring it up to date."""
        self.engine.counts(self.queue)

    def close(self) -> bool:
        """Let go of the file until it is used again. True when there was something to let go of."""
        with self._opening:
            engine, self._opened = self._opened, None
        if engine is None:
            return False
        engine.close()
        return True

    def on_lapsed(self, callback: Callable[[JobRecord], None]) -> None:
        """As the engine's, for every engine that this storage opens."""
        self._on_lapsed = callback
        if (engine := self._given or self._opened) is not None:
            engine.on_lapsed(callback)

    # The queue

    def enqueue(self, data: bytes, priority: float | None = None) -> None:
        self._store(data, self._spec(self.queue, data, priority=_sortable(priority)))

    def _spec(self, queue: str, data: bytes, *, priority: int = 0, run_at_ms: int | None = None) -> JobSpec:
        known = data if isinstance(data, Message) else Message()
        return JobSpec(
            queue=queue,
            payload=bytes(data),
            encoding="huey",
            priority=priority,
            run_at_ms=run_at_ms,
            dedupe_key=known.dedupe_key,
            dedupe_until="ended",
            # In the schedule a task is only moved, not run: nothing there can use up its receives.
            max_attempts=(known.max_receives or self.max_receives) if queue == self.queue else None,
            ref=known.ref,
            task=known.task,
        )

    def _store(self, data: bytes, spec: JobSpec) -> None:
        add: Callable[[], None] = functools.partial(self._add, data, spec)
        within = data.within if isinstance(data, Message) else None
        if within is None:
            add()
        else:
            within(add)

    def _add(self, data: bytes, spec: JobSpec) -> None:
        if spec.dedupe_key is None:
            self.engine.add([spec])
            return
        assert isinstance(data, Message)  # noqa: S101 - where the key came from
        with self.engine.transaction():
            data.holder = self.holder(spec.dedupe_key)
            if data.holder is None:
                self.engine.add([spec])

    def holder(self, dedupe_key: str) -> JobRecord | None:
        """The job of this key that waits, is scheduled or runs."""
        for queue in (self.queue, self.schedule):
            for job in self.engine.find(queue, dedupe_key=dedupe_key):
                if job.state in (State.PENDING, State.ACTIVE):
                    return job
        return None

    def dequeue(self) -> bytes | None:
        with self.engine.transaction():
            claimed = self.engine.claim([self.queue], limit=1, lease_ms=self.lease_ms)
            self.engine.complete([job.lease for job in claimed])
        return claimed[0].payload if claimed else None

    def claim(self, *, unless: Callable[[], bool] = bool) -> JobRecord | None:
        """Lease the next task. Waits for one up to ``read_timeout``, unless ``blocking`` is off.

        Args:
            unless: None is leased when this says so.
        """
        engine = self.engine
        listener = self.listener() if self.blocking else None
        deadline = time.monotonic() + self.read_timeout
        while not unless():
            if claimed := engine.claim([self.queue], limit=1, lease_ms=self.lease_ms):
                if not unless():
                    return claimed[0]
                # It may be what another worker of this consumer has just given back, to stop.
                engine.release([claimed[0].lease])
                break
            patience = deadline - time.monotonic()
            if listener is None or patience <= 0 or not listener.wait(patience):
                break
        return None

    def listener(self) -> Listener:
        """The calling thread's own waiter for tasks."""
        engine = self.engine
        ear: _Ear | None = getattr(self._ears, "ear", None)
        if ear is None or ear.engine is not engine or ear.pid != os.getpid():
            _close_dropped()
            ear = self._ears.ear = _Ear(engine, self.queue)
        return ear.listener

    def queue_size(self) -> int:
        return self.engine.counts(self.queue).pending

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        return [job.payload for job in self._pending(self.queue, limit)]

    def _pending(self, queue: str, limit: int | None, due_by_ms: int | None = None) -> Iterator[JobRecord]:
        return self.jobs(queue, State.PENDING, limit=limit, due_by_ms=due_by_ms)

    def jobs(
        self, queue: str, state: State, *, limit: int | None = None, due_by_ms: int | None = None
    ) -> Iterator[JobRecord]:
        """The queue's jobs in a state, in the engine's order, read page by page."""
        left = limit or _HIGHEST
        last: JobRecord | None = None
        while left > 0:
            size = min(left, _PAGE)
            page = self.engine.page(queue, state, limit=size, after=last, due_by_ms=due_by_ms)
            yield from page
            if len(page) < size:
                return
            left -= size
            last = page[-1]

    def flush_queue(self) -> None:
        self._flush(self.queue)

    def _flush(self, queue: str) -> None:
        """Forget all jobs, those too that workers hold: what they have begun, they finish, but it leads to nothing."""
        self.engine.purge(queue, [State.PENDING])
        with self.engine.transaction():
            held = [job.lease for job in self.jobs(queue, State.ACTIVE)]
            self.engine.complete(held)
            self.engine.purge(queue, [State.PENDING])  # what consumers have given back meanwhile
        if held:
            self.stamp.draw()  # Some may not have begun.

    # The schedule: a queue of its own, so that only `read_schedule` makes a task due, at the moment that it is given

    def add_to_schedule(self, data: bytes, ts: datetime, utc: bool | None = None) -> None:  # noqa: FBT001 - huey 2.5.1 passes it
        run_at_ms = epoch_ms(ts, utc=self.utc if utc is None else utc)
        self._store(data, self._spec(self.schedule, data, run_at_ms=run_at_ms))

    def read_schedule(self, ts: datetime) -> list[bytes]:
        with self.engine.transaction():
            due = list(self._pending(self.schedule, None, epoch_ms(ts, utc=self.utc)))
            self.engine.remove([job.id for job in due])
        return [job.payload for job in due]

    def claim_due(self, limit: int) -> list[JobRecord]:
        """Lease tasks of the schedule whose time has come, the earliest first, so that they can be moved."""
        return self.engine.claim([self.schedule], limit=limit, lease_ms=self.lease_ms)

    def schedule_size(self) -> int:
        counts = self.engine.counts(self.schedule)
        return counts.pending + counts.active

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        # Those that are just being moved come first, since they are due.
        jobs = [*self.jobs(self.schedule, State.ACTIVE, limit=limit), *self._pending(self.schedule, limit)]
        return [job.payload for job in jobs[: limit or None]]

    def flush_schedule(self) -> None:
        self._flush(self.schedule)

    # Keys and values

    def put_data(self, key: str | bytes, value: bytes, is_result: bool = False) -> None:  # noqa: FBT001, FBT002 - huey's
        key = _text(key)
        ttl_ms = self._result_ttl_ms if is_result else None
        self.engine.put(self._values, key, bytes(value), ttl_ms=ttl_ms)
        if key.startswith(_FLAGS):  # Also for a result: the id of its task may begin so.
            self.stamp.draw()
        if is_result:
            self.engine.notify(self._topic(key))

    def _load_flags(self) -> set[str] | None:
        flags: set[str] = set()
        for prefix in _FLAGS:
            last = prefix
            while page := self.engine.scan(self._values, after=last, limit=_FLAGS_AT_ONCE):
                found = [key for key, _ in page if key.startswith(prefix)]
                flags.update(found)
                if len(found) < _FLAGS_AT_ONCE:
                    break
                if len(flags) >= _MOST_FLAGS:
                    return None
                last = found[-1]
        return flags

    def _are_missing_flags(self, keys: list[str]) -> bool:
        return all(key.startswith(_FLAGS) for key in keys) and not self._flags.may_have(keys)

    def peek_data(self, key: str | bytes) -> Any:
        return self.peek_many([key]).get(_text(key), EmptyData)

    def peek_many(self, keys: Iterable[str | bytes]) -> dict[str, bytes]:
        texts = [_text(key) for key in keys]
        if self._are_missing_flags(texts):
            return {}
        found = self.engine.peek(self._values, texts)
        return {key: value.data for key, value in found.items()}

    def pop_data(self, key: str | bytes) -> Any:
        key = _text(key)
        if self._are_missing_flags([key]):
            return EmptyData
        if self._keep_read_results:
            found = self.engine.peek(self._values, [key]).get(key)
            # What does not expire is no result, but a flag, which huey before 3.3 deletes in this way.
            if found is None or found.expires_in_ms is not None:
                return EmptyData if found is None else found.data
        value = self.engine.pop(self._values, key)
        return EmptyData if value is None else value.data

    def delete_data(self, key: str | bytes) -> bool:
        key = _text(key)
        return not self._are_missing_flags([key]) and self.engine.delete(self._values, [key]) > 0

    def has_data_for_key(self, key: str | bytes) -> bool:
        return bool(self.engine.peek(self._values, [_text(key)]))

    def put_if_empty(
        self, key: str | bytes, value: bytes, ttl: float | None = None, *, owner: Lease | None = None
    ) -> bool:
        """As huey's. With an ``owner`` it is gone when that lease ends."""
        ttl_ms = None if ttl is None else _milliseconds("ttl", ttl)
        return self.engine.put(self._values, _text(key), bytes(value), ttl_ms=ttl_ms, owner=owner, if_absent=True)

    def wait_result(
        self, key: str | bytes, timeout: float | None = None, backoff: float = 1.15, max_delay: float = 1.0
    ) -> bool:
        """As huey's, but woken when the result is stored; ``max_delay`` is how long to trust in that."""
        key = _text(key)
        if not self._comes(key, timeout, max_delay):
            return False
        if key.startswith(_FLAGS):
            # The stamp was drawn before the commit of what has stored it.
            self.stamp.draw()
        return True

    def _comes(self, key: str, timeout: float | None, max_delay: float) -> bool:
        if self.has_data_for_key(key):
            return True
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with contextlib.closing(self.engine.listener(topics=[self._topic(key)])) as listener:
            while not self.has_data_for_key(key):
                patience = deadline - time.monotonic()
                if patience <= 0:
                    return False
                listener.wait(min(patience, max_delay))
        return True

    def _topic(self, key: str) -> str:
        return f"huey-result:{self.name}:{key}"

    def incr(self, key: str | bytes, amount: int = 1) -> int:
        key = _text(key)
        if amount == 0:
            found = self.engine.peek(self._counters, [key])
            return found[key].number if key in found else 0
        ttl_ms = self._result_ttl_ms if self._keep_read_results else None
        number = self.engine.increment(self._counters, key, amount, ttl_ms=ttl_ms)
        assert number is not None  # noqa: S101 - it has no bounds
        return number

    def delete_counter(self, key: str | bytes) -> None:
        self.engine.delete(self._counters, [_text(key)])

    def result_store_size(self) -> int:
        return self.engine.size(self._values)

    def result_items(self) -> dict[str, bytes]:
        items: dict[str, bytes] = {}
        after = ""
        while page := self.engine.scan(self._values, after=after, limit=_PAGE):
            items.update((key, value.data) for key, value in page)
            after = page[-1][0]
        return items

    def flush_results(self) -> None:
        self.engine.clear(self._values)

    def flush_counters(self) -> None:
        self.engine.clear(self._counters)

    def flush_all(self) -> None:
        """As huey's, with the dead letters."""
        super().flush_all()
        for queue in (self.queue, self.schedule):
            self.engine.purge(queue, [State.COMPLETED, State.FAILED, State.CANCELLED])


class _Ear:
    """A thread's listener, to be closed when the thread is gone."""

    def __init__(self, engine: Storage, queue: str) -> None:
        self.engine = engine
        self.pid = os.getpid()
        self.listener = engine.listener(queues=[queue])
        weakref.finalize(self, _drop, self.listener, self.pid).atexit = False


def _drop(listener: Listener, pid: int) -> None:
    if pid == os.getpid():
        _dropped.put(listener)


def _close_dropped() -> None:
    with contextlib.suppress(Empty):
        while True:
            _dropped.get_nowait().close()


def epoch_ms(moment: datetime, *, utc: bool) -> int:
    """The instant that huey means: a naive datetime is UTC where ``huey.utc`` is set, else local time."""
    if moment.utcoffset() is not None:
        return calendar.timegm(moment.utctimetuple()) * 1000 + moment.microsecond // 1000
    if utc:
        return calendar.timegm(moment.timetuple()) * 1000 + moment.microsecond // 1000
    return int(moment.timestamp() * 1000)


def _sortable(priority: float | None) -> int:
    """An integer that sorts as the number does, and is 0 for 0.

    Raises:
        ValueError: It is no number.
    """
    if not priority:
        return 0
    try:
        number = float(priority)
    except OverflowError:
        return _HIGHEST if priority > 0 else _LOWEST
    if math.isnan(number):
        raise ValueError(f"priority={priority!r} is no number, and would have no place in the order")
    # A positive double sorts as its bits do, read as an integer (IEEE 754).
    bits: int = struct.unpack("<q", struct.pack("<d", abs(number)))[0]
    return bits if number > 0 else -bits


def _text(key: str | bytes) -> str:
    """Huey calls b"k" and "k" the same key."""
    return key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key)


def _milliseconds(name: str, seconds: float) -> int:
    if not seconds > 0:
        raise ConfigurationError(f"{name} is {seconds!r} seconds: give more than 0")
    return max(1, round(seconds * 1000))


def _refuse(foreign: dict[str, Any]) -> None:
    """Name at once all options that say nothing here, so that nobody relies on one."""
    for option, always in _ALWAYS_SO.items():
        if foreign.get(option) in always:
            del foreign[option]
    complaints = []
    for reason, options in _FOREIGN.items():
        if given := [option for option in options if option in foreign]:
            complaints.append(f"{', '.join(given)} ({reason})")
    if unknown := sorted(foreign.keys() - {option for options in _FOREIGN.values() for option in options}):
        complaints.append(f"{', '.join(unknown)} (unknown)")
    if complaints:
        raise ConfigurationError(
            f"remove these options, which mean nothing to a litebroker file: {'; '.join(complaints)}"
        )

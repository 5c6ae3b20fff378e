"""The contract between the engine and whatever keeps its jobs: jobs, values, schedules, and what tools ask.

Everything above this page works on any storage that keeps it; `litebroker.testing.contract` is its test.
Three rules hold for every verb:

* It is one transaction: it happened whole, or not at all. Once it has returned, its durability is what the
  storage was opened with. After the commit nothing raises, unless the disk did not confirm it.
* Called inside ``with storage.transaction():`` in the same thread, or on what `bind` returned, it becomes part of
  that transaction and commits nothing by itself.
* Any thread may call it.

Times are integer milliseconds: ``*_at_ms`` is an instant of the wall clock, any other ``*_ms`` a duration. Due times
and schedules go by the wall clock, leases and the ages of values by the steady one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from litebroker.clock import Clock
from litebroker.jobs import (
    Added,
    Arrivals,
    Counts,
    Holder,
    JobCopy,
    JobError,
    JobRecord,
    JobSpec,
    Keep,
    Lease,
    QueueInfo,
    Standing,
    State,
)
from litebroker.schedules import ScheduleSpec, first_tick

__all__ = ["Jobs", "Listener", "ScheduleRecord", "ScheduleSpec", "Schedules", "Storage", "Tools", "Value", "Values"]


class Jobs(Protocol):
    """Jobs in queues. A queue comes into being when a verb that writes names it first, and stays."""

    def add(self, specs: Sequence[JobSpec]) -> list[Added]:
        """Store the jobs in order, on one reading of the clock; answer for each position.

        Raises:
            GroupConflictError: A group exists with another concurrency. Nothing was stored.
        """

    def claim(self, queues: Sequence[str], *, limit: int, lease_ms: int) -> list[JobRecord]:
        """Lease up to ``limit`` due jobs, of the first queue that has any, then of the next.

        Within a queue each group is a stream, and so are the ungrouped jobs together. Streams that are below their
        concurrency take turns; within one, the highest priority goes first, then the earliest due, then the oldest.
        Each claim counts as an attempt and carries a token of its own.

        What has become due stays due, though the wall clock is set back. Leases that have run out are taken
        back first, and so are those of this machine's dead processes: such a job becomes pending again in its
        old place, or failed with reason "lapsed" when its attempts are spent. From then on it is claimed alone,
        whatever the limit: should it be what kills its workers, no other job loses its attempts along with it.
        Answers ``[]`` when nothing is due, or the queues are paused.
        """

    def extend(self, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        """Let each lease end ``lease_ms`` from now. False where it is no longer current: the job is lost.

        As for every verb that settles: whoever has the lease may, also another process than the one that claimed.
        """

    def complete(self, leases: Sequence[Lease], *, keep: bool = False) -> list[bool]:
        """End the jobs well: remove them, or keep them as completed. False where the lease was lost."""

    def fail(self, lease: Lease, error: JobError, *, retry_in_ms: int | None) -> State | None:
        """End this attempt badly: pending again in ``retry_in_ms``, while attempts remain; else failed.

        ``retry_in_ms=None`` makes it a dead letter whatever remains. Answers the state that it has now, or None
        when the lease was lost and nothing changed.
        """

    def release(self, leases: Sequence[Lease], *, delay_ms: int | None = None) -> list[bool]:
        """Give jobs back untouched: pending in their old place, the attempt not counted. False where lost.

        ``delay_ms`` makes them due only so much later.
        """

    def recover(self, queues: Sequence[str] | None = None) -> list[JobRecord]:
        """Take back the leases that have ended, as `claim` does. Answers the jobs that failed by it."""

    def get(self, job_id: int) -> JobRecord | None:
        """The job, or None when there is none of this id any more."""

    def states(self, job_ids: Sequence[int]) -> dict[int, State]:
        """Where those of the jobs stand that are there: one short look, however many they are."""

    def find(self, queue: str, *, ref: str | None = None, dedupe_key: str | None = None) -> list[JobRecord]:
        """The jobs of this name, in the order they were added; or the one that holds this key.

        A name may cost a walk through all jobs that are ready.

        Raises:
            ValueError: Not exactly one of the two was given.
        """

    def page(
        self,
        queue: str,
        state: State,
        *,
        limit: int = 100,
        after: JobRecord | None = None,
        offset: int = 0,
        due_by_ms: int | None = None,
        payloads: bool = True,
    ) -> list[JobRecord]:
        """A page of the queue's jobs in a state, following ``after``, the last of the page before.

        Pending jobs: first those that are due, as they would be claimed (grouped ones behind the others, group
        by group, by name), then the delayed, soonest first. Active ones: the soonest end of lease first. Ended
        ones: the latest end first. ``offset`` skips so many more, at a cost. ``due_by_ms`` leaves out those
        pending that are due later. Without ``payloads`` these are not read, however large, and are b"" in the answer.
        """

    def rank(self, job_id: int) -> int | None:
        """How many jobs `page` would give before this pending one; None when it is not pending."""

    def counts(self, queue: str) -> Counts:
        """How many jobs are in each state, counted now: it costs a walk through the indexes (5 ms for 100,000 jobs)."""

    def oldest_due_at_ms(self, queue: str) -> int | None:
        """When the job that has been due the longest became due; None when none is."""

    def queues(self) -> list[QueueInfo]:
        """Every known queue, by name."""

    def retry(
        self, job_ids: Sequence[int], *, queue: str | None = None, payloads: Mapping[int, bytes] | None = None
    ) -> list[bool]:
        """Make failed jobs due at once, with their history, and at least one more attempt; True for each.

        With ``queue`` they go on there; a group goes along, under the concurrency that it has there, if any.
        A job whose id is in ``payloads`` goes on with that payload. False, unchanged, where the job is not failed, or
        its dedupe key is held in that queue.
        """

    def cancel(self, job_ids: Sequence[int]) -> list[bool]:
        """End pending jobs as cancelled. False, unchanged, for all others."""

    def reschedule(self, job_id: int, *, due_at_ms: int) -> bool:
        """Make a pending job due then. False, unchanged, when it is not pending."""

    def remove(self, job_ids: Sequence[int]) -> list[bool]:
        """Delete jobs that are not active. False for the others, and for those that are not there."""

    def move(self, source: str, target: str) -> int:
        """Move every pending job to another queue, in its order. Answers how many.

        Groups go along, under the concurrency that they have there, if any. A job whose dedupe key is held in
        the target stays where it is.
        """

    def move_jobs(self, job_ids: Sequence[int], target: str) -> list[bool]:
        """Move these pending jobs, as `move` does; True for each that is in the target now.

        False, unchanged, where the job is not pending, or its dedupe key is held in the target.
        """

    def purge(self, queue: str, states: Sequence[State], *, limit: int | None = None) -> int:
        """Delete every job in these states, or ``limit`` at most, but never an active one. Answers how many.

        Outside a transaction it runs in bites, so that others can work in between: on an error, some may be gone.
        """

    def prune(self, queue: str, keep: Mapping[State, Keep]) -> int:
        """Delete the oldest ended jobs beyond what is to be kept, a few hundred at most. Answers how many."""

    def pause(self, queue: str, *, paused: bool) -> bool:
        """Stop or go on with new claims and schedules of the queue. False when it is so already."""


class Value(NamedTuple):
    """What is kept under a key. ``data`` is b"" for a counter that was never put; ``number`` 0 for plain data."""

    data: bytes
    number: int
    expires_in_ms: int | None


class Values(Protocol):
    """Results, locks, counters: data and a number under a key in a space. What has expired is gone for all at once.

    Ages are counted by the steady clock. An ``owner`` ties a value to a lease: it is gone when that lease ends, in
    whatever way.
    """

    def put(
        self,
        space: str,
        key: str,
        data: bytes = b"",
        *,
        ttl_ms: int | None = None,
        owner: Lease | None = None,
        if_absent: bool = False,
        number: int = 0,
    ) -> bool:
        """Store it, in place of what is there. ``if_absent``: only where nothing is, else False.

        Storing a value again does not keep its old expiry or owner. False, too, where the owner's lease is
        over. A second caller with the same key within the ttl getting False is what makes ``if_absent`` a lock,
        or a "once".
        """

    def peek(self, space: str, keys: Sequence[str]) -> dict[str, Value]:
        """Those of the keys that are there."""

    def pop(self, space: str, key: str) -> Value | None:
        """Take it out: of many callers, one gets it."""

    def delete(self, space: str, keys: Sequence[str]) -> int:
        """Remove them; how many were there. One that is not costs no write transaction."""

    def increment(
        self,
        space: str,
        key: str,
        amount: int = 1,
        *,
        low: int | None = None,
        high: int | None = None,
        ttl_ms: int | None = None,
    ) -> int | None:
        """Add to the number under the key (0 where nothing is); the new number.

        None, and unchanged, when it would fall below ``low`` or pass ``high``. ``ttl_ms`` starts its age anew;
        None leaves the expiry as it is. Data and owner stay.
        """

    def scan(self, space: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, Value]]:
        """A page of a space in the order of its keys, following the key ``after``."""

    def size(self, space: str) -> int:
        """How many values the space has."""

    def clear(self, space: str) -> int:
        """Delete all of a space; how many."""

    def sweep(self) -> int:
        """Delete what is gone for all already, some hundreds at most, of all spaces; how many.

        Whoever puts a value outside of a transaction does a little of it now and then. Who puts many, and in
        transactions, calls this.
        """


class ScheduleRecord(NamedTuple):
    """A schedule as it is stored.

    Attributes:
        job: What each tick adds. Its ``queue`` is the schedule's; it has no delay.
        next_at_ms: The next tick.
        last_at_ms: The last one that fired, or None.
    """

    queue: str
    id: str
    spec: ScheduleSpec
    job: JobSpec
    next_at_ms: int
    last_at_ms: int | None

    @classmethod
    def defined(
        cls, queue: str, id: str, spec: ScheduleSpec, job: JobSpec, *, old: ScheduleRecord | None, now_ms: int
    ) -> ScheduleRecord:
        """What to store for a definition. The same times as ``old`` has keep their next tick; others begin now.

        Raises:
            ScheduleError: As `next_tick`.
        """
        if old is not None and old.spec == spec:
            return old._replace(job=job)
        last_at_ms = None if old is None else old.last_at_ms
        return cls(queue, id, spec, job, first_tick(spec, last_at_ms, now_ms), last_at_ms)


class Schedules(Protocol):
    """Durable schedules: which ticks are due, and who fires them. When a tick comes is decided above."""

    def put_schedule(self, record: ScheduleRecord) -> None:
        """Store it, in place of the one of this id in its queue."""

    def get_schedule(self, queue: str, schedule_id: str) -> ScheduleRecord | None:
        """The schedule, or None."""

    def list_schedules(self, queue: str | None = None) -> list[ScheduleRecord]:
        """Those of a queue, or all, by queue and id."""

    def remove_schedule(self, queue: str, schedule_id: str) -> bool:
        """Delete it. Its jobs stay. False when it is not there."""

    def due_schedules(self, queues: Sequence[str], *, limit: int = 100) -> list[ScheduleRecord]:
        """Those of the queues, none of them paused, whose next tick has come; the most overdue first."""

    def fire_schedule(self, record: ScheduleRecord, *, next_at_ms: int, add: bool = True) -> Added | None:
        """Add the tick's job and go on to the next tick, if the schedule still is as ``record`` says.

        None, nothing done, when another process was first, or it was changed. Of many, one fires a tick. Its time
        becomes ``last_at_ms``. With ``add=False`` it goes on to ``next_at_ms`` without a job, ``last_at_ms`` stays,
        and the answer is ``Added(0, False)``.
        """


class Tools(Protocol):
    """What only tools ask: where jobs stand, what comes and goes, and jobs as they are, for another storage."""

    def holders(self, job_ids: Sequence[int]) -> dict[int, Holder]:
        """Who has the active ones among these jobs, by id. It changes nothing, also where a lease has ended."""

    def standing(self, job_id: int) -> Standing | None:
        """Where a pending job stands in its stream, and its group; None when it is not pending. It changes nothing."""

    def issued_at_ms(self, job_id: int) -> int | None:
        """When a job of this id was added, or would have been, by the id alone; None when it does not tell."""

    def arrivals(self, after: int | None, *, limit: int = 1000) -> Arrivals:
        """The next jobs, ``limit`` at most, with higher ids than ``after``; None counts none and answers the latest id.

        Ids are given in the order of adding, but for transactions that their callers hold open for long.
        """

    def ended_since(self, queue: str, state: State, since_ms: int) -> int:
        """How many jobs came to this end, one of the last three states, at that instant or later, and are there."""

    def walk_jobs(self, *, after: int | None = None, limit: int = 1000) -> list[JobCopy]:
        """A page of all jobs of all queues, in the order of their ids, following the id ``after``.

        A walk from end to end meets every job once that is there all the while, whatever becomes of it meanwhile.
        """

    def put_jobs(self, copies: Sequence[JobCopy]) -> list[bool]:
        """Store jobs as they are, under their own ids. False, unchanged, for those that cannot come.

        These are jobs whose id is there, or whose dedupe key is held in their queue. A group goes along, under the
        concurrency that it has here, if any.

        Raises:
            ValueError: One is active: a lease is bound to its storage. Nothing was stored.
        """

    def walk_values(self, *, after: tuple[str, str] | None = None, limit: int = 1000) -> list[tuple[str, str, Value]]:
        """A page of all spaces, in the order of spaces and keys, following this space and key.

        Values that have an owner are left out: they are gone with a lease.
        """

    def is_awaited(self, queue: str) -> bool | None:
        """Whether a listener for the queue is open in any process; None where that cannot be told from here.

        Workers have one open as long as they live, whether they are busy or not.
        """


class Listener(Protocol):
    """One waiter. Not for several threads at once, but for `wake` and `close`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there may be something to do, or ``timeout`` seconds have passed; None is without limit.

        True: a job may be claimable (one was added, or became due, or its lease ended), a topic was notified, or `wake`
        was called. It may be wrong, so look. What happened since the last `wait`, or since the listener was made,
        counts: nothing is missed between looking and waiting. A signal handler that raises ends the wait.
        """

    def wake(self) -> None:
        """End the current or the next `wait`. Any thread, and a signal handler, may call it."""

    def close(self) -> None:
        """Let go of it. Ends a current `wait`. After a fork the child makes its own; closing this one there is safe."""


class Storage(Jobs, Tools, Values, Schedules, Protocol):
    """All of these, with what they share."""

    @property
    def clock(self) -> Clock:
        """The clocks it goes by."""

    @property
    def location(self) -> str:
        """Where it is, as a URL or path that opens it again, for messages and for child processes."""

    def transaction(self) -> AbstractContextManager[Storage]:
        """Everything that this thread does in the ``with`` block is one transaction, committed at its end.

        An exception rolls all of it back and goes on. Nested in the same thread, the inner block is part of
        the outer one. Other writers wait meanwhile: keep it short.
        """

    def bind(self, connection: object) -> Storage:
        """This storage on the caller's own connection to the same database, in the caller's transaction.

        Its verbs are the caller's own statements: they are there when the caller commits, and gone when the caller
        rolls back. Waiting workers notice within half a second, or at once after a `notify_queue`. Only `listener` is
        refused there, with ``ValueError``: to wait inside of a transaction would be to wait for ever.

        Raises:
            TypeError: It is not a connection of a driver that this storage knows.
            ValueError: It is connected to another database.
        """

    def listener(self, queues: Sequence[str] = (), topics: Sequence[str] = ()) -> Listener:
        """A waiter for jobs in these queues (one is woken for each new job) and for these topics (all are)."""

    def notify(self, topic: str) -> None:
        """Wake every listener of the topic, in all processes; after the commit, inside a transaction."""

    def notify_queue(self, queue: str, jobs: int = 1) -> None:
        """Wake listeners of the queue. `add` does it by itself, but cannot after a commit that is the caller's."""

    def on_lapsed(self, callback: Callable[[JobRecord], None]) -> None:
        """Call this with each job that fails because its last worker vanished, as this storage finds it.

        After the commit, in the thread that found it. An exception is logged.
        """

    def close(self) -> None:
        """Let go of everything; idempotent. Leases still held by this process are recovered by others at once."""

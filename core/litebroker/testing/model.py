"""The storage contract once more, as plainly as it can be said: dicts, lists, one lock, O(n) everywhere.

It is the reference that the real storages are compared with, and the proof that the contract's test-suite
asks for nothing that only SQLite has. It forgets everything when the process ends, so it is no storage to
run jobs on; a test of your own wants a real one, in a file or in memory.

Where the contract leaves a choice open the reference makes it, and storages are compared by it:

* A verb with a list of jobs or leases answers them one after the other: of two equal ones the second finds
  what the first has done.
* A group comes into being when a job names it, though that job's dedupe key be held.
* Due is a state: a delayed job enters it when a claim or a listing of its queue finds its time come, any other
  job at once, and does not leave it when the wall clock is set back.
* Turns: a queue counts its claims. A stream that is served gets the count as its turn. A group that had no due
  job and gets one moves up to the present count, if it is behind it. The stream with the smallest turn goes
  first: of equals the ungrouped one, then the older group.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from litebroker.clock import Clock, SystemClock
from litebroker.errors import GroupConflictError, StorageClosedError
from litebroker.jobs import (
    Added,
    Arrivals,
    Attempt,
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
from litebroker.storage import ScheduleRecord, Storage, Value

_log = logging.getLogger(__name__)

_Place = tuple[int, str, int, int, int]

_ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED)
_HISTORY = 20
_PRUNE_AT_ONCE = 300
_LOOK_AGAIN_S = 0.02
_LAPSED = JobError("lapsed", message="the worker vanished, or held the job for longer than its lease")


@dataclass(frozen=True, kw_only=True)
class _Queue:
    name: str
    paused_at_ms: int | None = None
    claims: int = 0
    turn: int = 0


@dataclass(frozen=True, kw_only=True)
class _Group:
    queue: str
    id: str
    number: int
    concurrency: int
    turn: int = 0


@dataclass(frozen=True, kw_only=True)
class _Job:
    id: int
    spec: JobSpec
    queue: str
    state: State
    due: bool
    due_at_ms: int
    priority: int
    created_at_ms: int
    max_attempts: int | None
    attempts: int = 0
    token: int | None = None
    lease_end_steady_ms: int = 0
    renewed_at_ms: int | None = None
    claimed_at_ms: int | None = None
    ended_at_ms: int | None = None
    error: JobError | None = None
    history: tuple[Attempt, ...] = ()

    @property
    def place(self) -> tuple[int, int, int]:
        return (-self.priority, self.due_at_ms, self.id)

    @property
    def holds_key(self) -> bool:
        return self.spec.dedupe_key is not None and (self.spec.dedupe_until == "removed" or self.state not in _ENDS)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    data: bytes
    number: int
    expires_steady_ms: int | None
    owner: Lease | None


@dataclass(kw_only=True)
class _Contents:
    """All that is stored. The rows are immutable, so that a copy of the dicts is a snapshot."""

    queues: dict[str, _Queue] = field(default_factory=dict)
    groups: dict[tuple[str, str], _Group] = field(default_factory=dict)
    jobs: dict[int, _Job] = field(default_factory=dict)
    values: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    schedules: dict[tuple[str, str], ScheduleRecord] = field(default_factory=dict)

    def snapshot(self) -> _Contents:
        return _Contents(
            queues=dict(self.queues),
            groups=dict(self.groups),
            jobs=dict(self.jobs),
            values=dict(self.values),
            schedules=dict(self.schedules),
        )


class ModelStorage:
    """The reference storage, in memory."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._contents = _Contents()
        self._ids = itertools.count(1)
        self._tokens = itertools.count(1)
        self._group_numbers = itertools.count(1)
        self._depth = 0
        self._after_commit: list[Callable[[], None]] = []
        self._listeners: list[_Listener] = []
        self._lapsed_callbacks: list[Callable[[JobRecord], None]] = []
        self._closed = False

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def location(self) -> str:
        return "model:"

    # -- transactions

    @contextmanager
    def transaction(self) -> Iterator[Storage]:
        with self._lock:
            if self._closed:
                raise StorageClosedError("the storage is closed")
            before = self._contents.snapshot()
            promised = len(self._after_commit)
            self._depth += 1
            try:
                yield self
            except BaseException:
                self._contents = before
                del self._after_commit[promised:]
                raise
            finally:
                self._depth -= 1
            if self._depth:
                return
            due_now, self._after_commit = self._after_commit, []
        for act in due_now:
            act()

    def bind(self, connection: object) -> Storage:
        raise TypeError(f"the model has no database that a {type(connection).__name__} could be connected to")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener.close()

    # -- jobs

    def add(self, specs: Sequence[JobSpec]) -> list[Added]:
        self._know_queues(spec.queue for spec in specs)
        with self.transaction():
            now_ms = self._clock.now_ms()
            return [self._add(spec, now_ms) for spec in specs]

    def _add(self, spec: JobSpec, now_ms: int) -> Added:
        if spec.group is not None:
            group = self._know_group(spec.queue, spec.group, spec.group_concurrency)
            if group.concurrency != spec.group_concurrency:
                raise GroupConflictError(group.id, asked=spec.group_concurrency, concurrency=group.concurrency)
        due_at_ms = now_ms + (spec.delay_ms or 0) if spec.run_at_ms is None else spec.run_at_ms
        if spec.front and due_at_ms <= now_ms:
            self._take_back(spec.queue)
            self._promote(spec.queue)
        holder = self._holder(spec.queue, spec.dedupe_key)
        if holder is not None:
            return Added(holder.id, created=False)
        priority = spec.priority
        if spec.front and due_at_ms <= now_ms:
            stream = [job for job in self._jobs(spec.queue) if job.due and job.spec.group == spec.group]
            priority = max([priority, *(job.priority for job in stream)])
            due_at_ms = min([now_ms, *(job.due_at_ms - 1 for job in stream if job.priority == priority)])
        job = _Job(
            id=next(number for number in self._ids if number not in self._contents.jobs),
            spec=spec,
            queue=spec.queue,
            state=State.PENDING,
            due=False,
            due_at_ms=due_at_ms,
            priority=priority,
            created_at_ms=now_ms,
            max_attempts=spec.max_attempts,
        )
        self._become_pending(job, due=due_at_ms <= now_ms)
        return Added(job.id, created=True)

    def claim(self, queues: Sequence[str], *, limit: int, lease_ms: int) -> list[JobRecord]:
        claimed: list[JobRecord] = []
        with self.transaction():
            for name in queues:
                if len(claimed) >= limit:
                    break
                self._take_back(name)
                queue = self._contents.queues.get(name)
                if queue is None or queue.paused_at_ms is not None:
                    continue
                self._promote(name)
                while len(claimed) < limit and (job := self._next_in_turn(name)) is not None:
                    has_lapsed = self._record(job).has_lapsed
                    if has_lapsed and claimed:
                        return claimed
                    claimed.append(self._lease(job, lease_ms))
                    if has_lapsed:
                        return claimed
        return claimed

    def _next_in_turn(self, queue: str) -> _Job | None:
        streams: dict[tuple[int, int], list[_Job]] = {}
        for job in self._jobs(queue):
            if job.state is not State.PENDING or not job.due:
                continue
            group = self._group_of(job)
            if group is None:
                streams.setdefault((self._contents.queues[queue].turn, 0), []).append(job)
            elif self._active_in(group) < group.concurrency:
                streams.setdefault((group.turn, group.number), []).append(job)
        if not streams:
            return None
        return min(streams[min(streams)], key=lambda job: job.place)

    def _lease(self, job: _Job, lease_ms: int) -> JobRecord:
        queue = self._contents.queues[job.queue]
        turn = queue.claims + 1
        group = self._group_of(job)
        self._contents.queues[job.queue] = replace(queue, claims=turn, turn=turn if group is None else queue.turn)
        if group is not None:
            self._contents.groups[job.queue, group.id] = replace(group, turn=turn)
        claimed = replace(
            job,
            state=State.ACTIVE,
            due=False,
            attempts=job.attempts + 1,
            token=next(self._tokens),
            lease_end_steady_ms=self._clock.steady_ms() + lease_ms,
            renewed_at_ms=None,
            claimed_at_ms=self._clock.now_ms(),
        )
        self._contents.jobs[job.id] = claimed
        return self._record(claimed)

    def extend(self, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        def extend(job: _Job) -> None:
            self._contents.jobs[job.id] = replace(
                job,
                lease_end_steady_ms=self._clock.steady_ms() + lease_ms,
                renewed_at_ms=self._clock.now_ms(),
            )

        return self._for_each_current(leases, extend)

    def complete(self, leases: Sequence[Lease], *, keep: bool = False) -> list[bool]:
        def complete(job: _Job) -> None:
            if keep:
                self._end(self._with_attempt(job, "completed", None), State.COMPLETED)
            else:
                del self._contents.jobs[job.id]

        return self._for_each_current(leases, complete)

    def release(self, leases: Sequence[Lease], *, delay_ms: int | None = None) -> list[bool]:
        def release(job: _Job) -> None:
            claimed_at_ms = job.history[-1].started_at_ms if job.history else None
            given_back = replace(job, attempts=job.attempts - 1, claimed_at_ms=claimed_at_ms)
            if delay_ms is None:
                self._become_pending(given_back, due=True)
            else:
                due_at_ms = self._clock.now_ms() + delay_ms
                self._become_pending(replace(given_back, due_at_ms=due_at_ms), due=delay_ms <= 0)

        return self._for_each_current(leases, release)

    def _for_each_current(self, leases: Sequence[Lease], settle: Callable[[_Job], None]) -> list[bool]:
        answers = []
        with self.transaction():
            for lease in leases:
                job = self._current(lease)
                if job is not None:
                    settle(job)
                answers.append(job is not None)
        return answers

    def fail(self, lease: Lease, error: JobError, *, retry_in_ms: int | None) -> State | None:
        with self.transaction():
            job = self._current(lease)
            if job is None:
                return None
            text = f"{error.type}: {error.message}" if error.type else error.message
            job = replace(job, error=error)
            if retry_in_ms is None or _is_spent(job):
                self._end(self._with_attempt(job, "failed", text), State.FAILED)
                return State.FAILED
            job = replace(self._with_attempt(job, "retried", text), due_at_ms=self._clock.now_ms() + retry_in_ms)
            self._become_pending(job, due=retry_in_ms <= 0)
            return State.PENDING

    def recover(self, queues: Sequence[str] | None = None) -> list[JobRecord]:
        with self.transaction():
            names = list(self._contents.queues) if queues is None else queues
            return [failed for name in names for failed in self._take_back(name)]

    def _take_back(self, queue: str) -> list[JobRecord]:
        failed = []
        steady_ms = self._clock.steady_ms()
        for job in self._jobs(queue):
            if job.state is not State.ACTIVE or job.lease_end_steady_ms > steady_ms:
                continue
            lapsed = self._with_attempt(replace(job, error=_LAPSED), "lapsed", _LAPSED.message)
            if _is_spent(lapsed):
                self._end(lapsed, State.FAILED)
                failed.append(self._record(self._contents.jobs[job.id]))
            else:
                self._become_pending(lapsed, due=True)
        if failed:
            self._after_commit.append(lambda: self._tell_of_lapsed(failed))
        return failed

    def _tell_of_lapsed(self, failed: Sequence[JobRecord]) -> None:
        for record in failed:
            for callback in self._lapsed_callbacks:
                try:
                    callback(record)
                except Exception:  # noqa: BLE001 - the job has failed already, whatever a callback makes of it
                    _log.exception("the on_lapsed callback failed for job %d", record.id)

    def get(self, job_id: int) -> JobRecord | None:
        with self.transaction():
            job = self._contents.jobs.get(job_id)
            return None if job is None else self._record(job)

    def states(self, job_ids: Sequence[int]) -> dict[int, State]:
        with self.transaction():
            return {job_id: self._contents.jobs[job_id].state for job_id in job_ids if job_id in self._contents.jobs}

    def find(self, queue: str, *, ref: str | None = None, dedupe_key: str | None = None) -> list[JobRecord]:
        if (ref is None) == (dedupe_key is None):
            raise ValueError(f"give exactly one of ref={ref!r} and dedupe_key={dedupe_key!r}")
        with self.transaction():
            jobs = self._jobs(queue)
            if ref is not None:
                return [self._record(job) for job in jobs if job.spec.ref == ref]
            return [self._record(job) for job in jobs if job.spec.dedupe_key == dedupe_key and job.holds_key]

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
        with self.transaction():
            if state is State.PENDING:
                self._promote(queue)
            listed = [(self._listing_place(job), job) for job in self._jobs(queue) if job.state is state]
            if after is not None:
                last = self._place_of_record(after)
                listed = [(place, job) for place, job in listed if place > last]
            if due_by_ms is not None and state is State.PENDING:
                listed = [(place, job) for place, job in listed if job.due_at_ms <= due_by_ms]
            listed.sort(key=lambda placed: placed[0])
            page = [self._record(job) for _, job in listed[offset : offset + limit]]
            return page if payloads else [record._replace(payload=b"") for record in page]

    def _listing_place(self, job: _Job) -> _Place:
        return _place_in_listing(self._record(job), due=self._is_due(job))

    def _place_of_record(self, record: JobRecord) -> _Place:
        """Where a job stood that was listed before: it may be gone by now."""
        job = self._contents.jobs.get(record.id)
        unchanged = job is not None and job.state is State.PENDING and job.due_at_ms == record.due_at_ms
        due = self._is_due(job) if job is not None and unchanged else record.due_at_ms <= self._clock.now_ms()
        return _place_in_listing(record, due=due)

    def rank(self, job_id: int) -> int | None:
        with self.transaction():
            job = self._contents.jobs.get(job_id)
            if job is None or job.state is not State.PENDING:
                return None
            self._promote(job.queue)
            place = self._listing_place(self._contents.jobs[job_id])
            pending = [other for other in self._jobs(job.queue) if other.state is State.PENDING]
            return sum(self._listing_place(other) < place for other in pending)

    def holders(self, job_ids: Sequence[int]) -> dict[int, Holder]:
        with self.transaction():
            jobs = [job for job_id in job_ids if (job := self._contents.jobs.get(job_id)) is not None]
            return {
                job.id: Holder(
                    token=job.token,
                    worker=_own_label(),
                    alive=True,
                    claimed_at_ms=job.claimed_at_ms,
                    lease_until_ms=self._clock.now_ms() + job.lease_end_steady_ms - self._clock.steady_ms(),
                    renewed_at_ms=job.renewed_at_ms,
                )
                for job in jobs
                if job.token is not None and job.claimed_at_ms is not None
            }

    def standing(self, job_id: int) -> Standing | None:
        with self.transaction():
            job = self._contents.jobs.get(job_id)
            if job is None or job.state is not State.PENDING:
                return None
            group = self._group_of(job)
            stream = [it for it in self._jobs(job.queue) if it.spec.group == job.spec.group]
            due = [it for it in stream if it.state is State.PENDING and self._is_due(it)]
            ahead = sum(it.place < job.place for it in due) if self._is_due(job) else None
            if group is None:
                return Standing(ahead)
            active = [it for it in stream if it.state is State.ACTIVE]
            active.sort(key=lambda it: it.lease_end_steady_ms)
            return Standing(ahead, group.concurrency, len(active), tuple(it.id for it in active[:100]))

    def issued_at_ms(self, job_id: int) -> int | None:  # noqa: ARG002 - its ids are counted
        return None

    def arrivals(self, after: int | None, *, limit: int = 1000) -> Arrivals:
        with self.transaction():
            ids = sorted(self._contents.jobs)
            if after is None:
                return Arrivals(ids[-1] if ids else 0, {})
            found = [job_id for job_id in ids if job_id > after][:limit]
            queues = Counter(self._contents.jobs[job_id].queue for job_id in found)
            return Arrivals(found[-1] if found else after, dict(queues))

    def ended_since(self, queue: str, state: State, since_ms: int) -> int:
        with self.transaction():
            jobs = self._jobs(queue)
            return sum(job.state is state and (job.ended_at_ms or 0) >= since_ms for job in jobs)

    def counts(self, queue: str) -> Counts:
        with self.transaction():
            jobs = self._jobs(queue)
            ready = sum(job.state is State.PENDING and self._is_due(job) for job in jobs)
            by_state = {state: sum(job.state is state for job in jobs) for state in State}
            return Counts(
                ready=ready,
                delayed=by_state[State.PENDING] - ready,
                active=by_state[State.ACTIVE],
                completed=by_state[State.COMPLETED],
                failed=by_state[State.FAILED],
                cancelled=by_state[State.CANCELLED],
            )

    def oldest_due_at_ms(self, queue: str) -> int | None:
        with self.transaction():
            due = [job.due_at_ms for job in self._jobs(queue) if job.state is State.PENDING and self._is_due(job)]
            return min(due, default=None)

    def queues(self) -> list[QueueInfo]:
        with self.transaction():
            known = self._contents.queues
            return [QueueInfo(name, known[name].paused_at_ms) for name in sorted(known)]

    def retry(
        self, job_ids: Sequence[int], *, queue: str | None = None, payloads: Mapping[int, bytes] | None = None
    ) -> list[bool]:
        if queue is not None:
            self._know_queues([queue])
        with self.transaction():
            return [self._retry(job_id, queue, (payloads or {}).get(job_id)) for job_id in job_ids]

    def _retry(self, job_id: int, queue: str | None, payload: bytes | None) -> bool:
        job = self._contents.jobs.get(job_id)
        if job is None or job.state is not State.FAILED:
            return False
        target = job.queue if queue is None else queue
        holder = self._holder(target, job.spec.dedupe_key)
        if holder is not None and holder.id != job.id:
            return False
        again = replace(
            job,
            spec=job.spec if payload is None else job.spec._replace(payload=payload),
            queue=target,
            due_at_ms=self._clock.now_ms(),
            ended_at_ms=None,
            max_attempts=None if job.max_attempts is None else max(job.max_attempts, job.attempts + 1),
        )
        self._take_group_along(job, target)
        self._become_pending(again, due=True)
        return True

    def cancel(self, job_ids: Sequence[int]) -> list[bool]:
        with self.transaction():
            return [self._cancel(job_id) for job_id in job_ids]

    def _cancel(self, job_id: int) -> bool:
        job = self._contents.jobs.get(job_id)
        if job is None or job.state is not State.PENDING:
            return False
        self._end(job, State.CANCELLED)
        return True

    def reschedule(self, job_id: int, *, due_at_ms: int) -> bool:
        with self.transaction():
            job = self._contents.jobs.get(job_id)
            if job is None or job.state is not State.PENDING:
                return False
            self._become_pending(replace(job, due_at_ms=due_at_ms), due=due_at_ms <= self._clock.now_ms())
            return True

    def remove(self, job_ids: Sequence[int]) -> list[bool]:
        with self.transaction():
            return [self._remove(job_id) for job_id in job_ids]

    def _remove(self, job_id: int) -> bool:
        job = self._contents.jobs.get(job_id)
        if job is None or job.state is State.ACTIVE:
            return False
        del self._contents.jobs[job_id]
        return True

    def move(self, source: str, target: str) -> int:
        moved = 0
        with self.transaction():
            if source == target or source not in self._contents.queues:
                return 0
            self._know_queues([target])
            for job in sorted(self._jobs(source), key=lambda job: job.spec.group or ""):
                if job.state is not State.PENDING or self._holder(target, job.spec.dedupe_key) is not None:
                    continue
                self._take_group_along(job, target)
                del self._contents.jobs[job.id]
                self._become_pending(replace(job, queue=target, due=False), due=job.due)
                moved += 1
        return moved

    def move_jobs(self, job_ids: Sequence[int], target: str) -> list[bool]:
        if job_ids:
            self._know_queues([target])
        with self.transaction():
            return [self._move_job(job_id, target) for job_id in job_ids]

    def _move_job(self, job_id: int, target: str) -> bool:
        job = self._contents.jobs.get(job_id)
        if job is None or job.state is not State.PENDING:
            return False
        if job.queue == target:
            return True
        if self._holder(target, job.spec.dedupe_key) is not None:
            return False
        self._take_group_along(job, target)
        del self._contents.jobs[job.id]
        self._become_pending(replace(job, queue=target, due=False), due=job.due)
        return True

    def purge(self, queue: str, states: Sequence[State], *, limit: int | None = None) -> int:
        with self.transaction():
            gone = [job for job in self._jobs(queue) if job.state in states and job.state is not State.ACTIVE][:limit]
            for job in gone:
                del self._contents.jobs[job.id]
            return len(gone)

    def prune(self, queue: str, keep: Mapping[State, Keep]) -> int:
        with self.transaction():
            now_ms = self._clock.now_ms()
            beyond: list[_Job] = []
            for state in _ENDS:
                wanted = keep.get(state, Keep())
                ended = [job for job in self._jobs(queue) if job.state is state]
                ended.sort(key=self._listing_place)
                for newer, job in enumerate(ended):
                    too_many = wanted.count is not None and newer >= wanted.count
                    too_old = wanted.age_ms is not None and (job.ended_at_ms or 0) <= now_ms - wanted.age_ms
                    if too_many or too_old:
                        beyond.append(job)
            beyond.sort(key=self._listing_place, reverse=True)
            for job in beyond[:_PRUNE_AT_ONCE]:
                del self._contents.jobs[job.id]
            return len(beyond[:_PRUNE_AT_ONCE])

    def pause(self, queue: str, *, paused: bool) -> bool:
        with self.transaction():
            known = self._contents.queues.get(queue)
            if (known is not None and known.paused_at_ms is not None) == paused:
                return False
            self._know_queues([queue])
            paused_at_ms = self._clock.now_ms() if paused else None
            self._contents.queues[queue] = replace(self._contents.queues[queue], paused_at_ms=paused_at_ms)
            self._wake_queue(queue)
            return True

    # -- carrying jobs from one storage to another

    def walk_jobs(self, *, after: int | None = None, limit: int = 1000) -> list[JobCopy]:
        with self.transaction():
            jobs = [job for _id, job in sorted(self._contents.jobs.items()) if after is None or job.id > after]
            return [self._copy(job) for job in jobs[:limit]]

    def _copy(self, job: _Job) -> JobCopy:
        group = self._group_of(job)
        until = job.spec.dedupe_until if job.spec.dedupe_key is not None else "removed"
        return JobCopy(self._record(job), until, 1 if group is None else group.concurrency)

    def put_jobs(self, copies: Sequence[JobCopy]) -> list[bool]:
        active = [copy.record.id for copy in copies if copy.record.state is State.ACTIVE]
        if active:
            raise ValueError(f"job {active[0]} is active: its lease is not valid here")
        self._know_queues(copy.record.queue for copy in copies)
        with self.transaction():
            return [self._put_job(copy) for copy in copies]

    def _put_job(self, copy: JobCopy) -> bool:
        record = copy.record
        if record.group is not None:
            self._know_group(record.queue, record.group, copy.group_concurrency)
        job = _Job(
            id=record.id,
            spec=JobSpec(
                queue=record.queue,
                payload=record.payload,
                encoding=record.encoding,
                dedupe_key=record.dedupe_key,
                dedupe_until=copy.dedupe_until,
                group=record.group,
                headers=record.headers,
                ref=record.ref,
                task=record.task,
            ),
            queue=record.queue,
            state=record.state,
            due=False,
            due_at_ms=record.due_at_ms,
            priority=record.priority,
            created_at_ms=record.created_at_ms,
            max_attempts=record.max_attempts,
            attempts=record.attempts,
            claimed_at_ms=record.claimed_at_ms,
            ended_at_ms=record.ended_at_ms,
            error=record.error,
            history=tuple(record.history),
        )
        taken = job.holds_key and self._holder(record.queue, record.dedupe_key) is not None
        if taken or record.id in self._contents.jobs:
            return False
        if record.state is State.PENDING:
            self._become_pending(job, due=record.due_at_ms <= self._clock.now_ms())
        else:
            self._contents.jobs[job.id] = job
        return True

    # -- what jobs have in common

    def _jobs(self, queue: str) -> list[_Job]:
        """The queue's jobs in the order they were added."""
        return sorted((job for job in self._contents.jobs.values() if job.queue == queue), key=lambda job: job.id)

    def _is_due(self, job: _Job) -> bool:
        return job.due or job.due_at_ms <= self._clock.now_ms()

    def _holder(self, queue: str, dedupe_key: str | None) -> _Job | None:
        if dedupe_key is None:
            return None
        holders = [job for job in self._jobs(queue) if job.spec.dedupe_key == dedupe_key and job.holds_key]
        return holders[0] if holders else None

    def _current(self, lease: Lease) -> _Job | None:
        job = self._contents.jobs.get(lease.job_id)
        if job is None or job.token != lease.token or job.lease_end_steady_ms <= self._clock.steady_ms():
            return None
        return job

    def _become_pending(self, job: _Job, *, due: bool) -> None:
        """Every way into the line leads through here."""
        was = self._contents.jobs.get(job.id)
        group = self._group_of(job)
        if due and group is not None and not self._due_in(group):
            claims = self._contents.queues[job.queue].claims
            self._contents.groups[group.queue, group.id] = replace(group, turn=max(group.turn, claims))
        if due and (was is None or not was.due):
            self._wake_queue(job.queue)
        self._contents.jobs[job.id] = replace(job, state=State.PENDING, due=due, token=None)

    def _promote(self, queue: str) -> None:
        for job in self._jobs(queue):
            if job.state is State.PENDING and not job.due and self._is_due(job):
                self._become_pending(job, due=True)

    def _end(self, job: _Job, state: State) -> None:
        ended_at_ms = self._clock.now_ms()
        self._contents.jobs[job.id] = replace(job, state=state, due=False, token=None, ended_at_ms=ended_at_ms)

    def _with_attempt(self, job: _Job, outcome: str, error: str | None) -> _Job:
        attempt = Attempt(
            number=job.attempts,
            started_at_ms=job.claimed_at_ms or 0,
            ended_at_ms=self._clock.now_ms(),
            worker=_own_label(),
            outcome=outcome,
            error=error,
        )
        return replace(job, history=(*job.history, attempt)[-_HISTORY:])

    def _record(self, job: _Job) -> JobRecord:
        spec = job.spec
        lease_until_ms = None
        if job.state is State.ACTIVE:
            lease_until_ms = self._clock.now_ms() + job.lease_end_steady_ms - self._clock.steady_ms()
        return JobRecord(
            id=job.id,
            queue=job.queue,
            state=job.state,
            priority=job.priority,
            due_at_ms=job.due_at_ms,
            attempts=job.attempts,
            max_attempts=job.max_attempts,
            created_at_ms=job.created_at_ms,
            token=job.token,
            lease_until_ms=lease_until_ms,
            claimed_at_ms=job.claimed_at_ms,
            ended_at_ms=job.ended_at_ms,
            group=spec.group,
            dedupe_key=spec.dedupe_key,
            ref=spec.ref,
            task=spec.task,
            encoding=spec.encoding,
            headers=dict(spec.headers or {}),
            error=job.error,
            history=job.history,
            payload=spec.payload,
        )

    def _know_queues(self, names: Iterable[str]) -> None:
        """By itself: a queue that was named is known, though nothing comes of what names it."""
        with self.transaction():
            for name in names:
                self._contents.queues.setdefault(name, _Queue(name=name))

    def _know_group(self, queue: str, group_id: str, concurrency: int) -> _Group:
        if (queue, group_id) not in self._contents.groups:
            self._contents.groups[queue, group_id] = _Group(
                queue=queue, id=group_id, number=next(self._group_numbers), concurrency=concurrency
            )
        return self._contents.groups[queue, group_id]

    def _take_group_along(self, job: _Job, target: str) -> None:
        group = self._group_of(job)
        if group is not None:
            self._know_group(target, group.id, group.concurrency)

    def _group_of(self, job: _Job) -> _Group | None:
        return None if job.spec.group is None else self._contents.groups[job.queue, job.spec.group]

    def _members(self, group: _Group) -> list[_Job]:
        return [job for job in self._jobs(group.queue) if job.spec.group == group.id]

    def _active_in(self, group: _Group) -> int:
        return sum(job.state is State.ACTIVE for job in self._members(group))

    def _due_in(self, group: _Group) -> int:
        return sum(job.state is State.PENDING and job.due for job in self._members(group))

    # -- values

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
        with self.transaction():
            if if_absent and self._living(space, key) is not None:
                return False
            if owner is not None and self._current(owner) is None:
                return False
            expires = None if ttl_ms is None else self._clock.steady_ms() + ttl_ms
            self._contents.values[space, key] = _Entry(
                data=bytes(data), number=number, expires_steady_ms=expires, owner=owner
            )
            return True

    def peek(self, space: str, keys: Sequence[str]) -> dict[str, Value]:
        with self.transaction():
            entries = {key: self._living(space, key) for key in keys}
            return {key: self._value(entry) for key, entry in entries.items() if entry is not None}

    def pop(self, space: str, key: str) -> Value | None:
        with self.transaction():
            entry = self._living(space, key)
            self._contents.values.pop((space, key), None)
            return None if entry is None else self._value(entry)

    def delete(self, space: str, keys: Sequence[str]) -> int:
        with self.transaction():
            return sum(self.pop(space, key) is not None for key in keys)

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
        with self.transaction():
            entry = self._living(space, key) or _Entry(data=b"", number=0, expires_steady_ms=None, owner=None)
            number = entry.number + amount
            if (low is not None and number < low) or (high is not None and number > high):
                return None
            expires = entry.expires_steady_ms if ttl_ms is None else self._clock.steady_ms() + ttl_ms
            self._contents.values[space, key] = replace(entry, number=number, expires_steady_ms=expires)
            return number

    def scan(self, space: str, *, after: str = "", limit: int = 1000) -> list[tuple[str, Value]]:
        with self.transaction():
            keys = sorted(key for key in self._living_keys(space) if key > after)
            found = self.peek(space, keys[:limit])
            return [(key, found[key]) for key in keys[:limit]]

    def size(self, space: str) -> int:
        with self.transaction():
            return len(self._living_keys(space))

    def clear(self, space: str) -> int:
        with self.transaction():
            return self.delete(space, self._living_keys(space))

    def walk_values(self, *, after: tuple[str, str] | None = None, limit: int = 1000) -> list[tuple[str, str, Value]]:
        with self.transaction():
            places = sorted(place for place in self._contents.values if after is None or place > after)
            living = [(place, self._living(*place)) for place in places]
            return [
                (*place, self._value(entry)) for place, entry in living if entry is not None and entry.owner is None
            ][:limit]

    def sweep(self) -> int:
        with self.transaction():
            gone = [place for place in self._contents.values if self._living(*place) is None][:_PRUNE_AT_ONCE]
            for place in gone:
                del self._contents.values[place]
            return len(gone)

    def _living_keys(self, space: str) -> list[str]:
        return [key for held, key in self._contents.values if held == space and self._living(space, key) is not None]

    def _living(self, space: str, key: str) -> _Entry | None:
        entry = self._contents.values.get((space, key))
        if entry is None:
            return None
        if entry.expires_steady_ms is not None and entry.expires_steady_ms <= self._clock.steady_ms():
            return None
        if entry.owner is not None and self._current(entry.owner) is None:
            return None
        return entry

    def _value(self, entry: _Entry) -> Value:
        left_ms = None if entry.expires_steady_ms is None else entry.expires_steady_ms - self._clock.steady_ms()
        return Value(entry.data, entry.number, left_ms)

    # -- schedules

    def put_schedule(self, record: ScheduleRecord) -> None:
        with self.transaction():
            self._know_queues([record.queue])
            self._contents.schedules[record.queue, record.id] = record

    def get_schedule(self, queue: str, schedule_id: str) -> ScheduleRecord | None:
        with self.transaction():
            return self._contents.schedules.get((queue, schedule_id))

    def list_schedules(self, queue: str | None = None) -> list[ScheduleRecord]:
        with self.transaction():
            records = [self._contents.schedules[place] for place in sorted(self._contents.schedules)]
            return [record for record in records if queue is None or record.queue == queue]

    def remove_schedule(self, queue: str, schedule_id: str) -> bool:
        with self.transaction():
            return self._contents.schedules.pop((queue, schedule_id), None) is not None

    def due_schedules(self, queues: Sequence[str], *, limit: int = 100) -> list[ScheduleRecord]:
        with self.transaction():
            due = [
                record
                for record in self.list_schedules()
                if record.queue in queues
                and self._contents.queues[record.queue].paused_at_ms is None
                and record.next_at_ms <= self._clock.now_ms()
            ]
            return sorted(due, key=lambda record: record.next_at_ms)[:limit]

    def fire_schedule(self, record: ScheduleRecord, *, next_at_ms: int, add: bool = True) -> Added | None:
        with self.transaction():
            if self.get_schedule(record.queue, record.id) != record:
                return None
            if not add:
                self.put_schedule(record._replace(next_at_ms=next_at_ms))
                return Added(0, created=False)
            self.put_schedule(record._replace(next_at_ms=next_at_ms, last_at_ms=record.next_at_ms))
            return self.add([record.job])[0]

    # -- waking up

    def listener(self, queues: Sequence[str] = (), topics: Sequence[str] = ()) -> _Listener:
        with self.transaction():
            listener = _Listener(self, frozenset(queues), frozenset(topics))
            self._listeners.append(listener)
            return listener

    def is_awaited(self, queue: str) -> bool | None:
        with self._lock:
            return any(queue in listener.queues for listener in self._listeners)

    def notify(self, topic: str) -> None:
        with self.transaction():
            self._after_commit.append(lambda: self._wake(lambda listener: topic in listener.topics))

    def notify_queue(self, queue: str, jobs: int = 1) -> None:
        with self.transaction():
            if jobs > 0:
                self._wake_queue(queue)

    def _wake_queue(self, queue: str) -> None:
        self._after_commit.append(lambda: self._wake(lambda listener: queue in listener.queues))

    def _wake(self, concerns: Callable[[_Listener], bool]) -> None:
        with self._lock:
            listeners = [listener for listener in self._listeners if concerns(listener)]
        for listener in listeners:
            listener.wake()

    def on_lapsed(self, callback: Callable[[JobRecord], None]) -> None:
        with self._lock:
            self._lapsed_callbacks.append(callback)

    def _may_be_claimable(self, queues: frozenset[str]) -> bool:
        """Whether a claim would find something. False while others are at work: look again later."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            known = [self._contents.queues[name] for name in queues if name in self._contents.queues]
            running = [queue.name for queue in known if queue.paused_at_ms is None]
            return any(self._is_claimable(job) for name in running for job in self._jobs(name))
        finally:
            self._lock.release()

    def _is_claimable(self, job: _Job) -> bool:
        if job.state is State.ACTIVE:
            return job.lease_end_steady_ms <= self._clock.steady_ms()
        if job.state is not State.PENDING or not self._is_due(job):
            return False
        group = self._group_of(job)
        return group is None or self._active_in(group) < group.concurrency

    def _forget(self, listener: _Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


class _Listener:
    """Woken by a flag; what only time brings it finds by looking again and again."""

    def __init__(self, storage: ModelStorage, queues: frozenset[str], topics: frozenset[str]) -> None:
        self.queues = queues
        self.topics = topics
        self._storage = storage
        self._woken = False
        self._closed = False
        self._changed = threading.Condition(threading.RLock())  # reentrant: a signal handler may call wake()

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._woken and not self._closed:
                if self._storage._may_be_claimable(self.queues):  # noqa: SLF001 - a listener is a part of its storage
                    return True
                left = _LOOK_AGAIN_S if deadline is None else min(_LOOK_AGAIN_S, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
            woken, self._woken = self._woken, False
            return woken

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._storage._forget(self)  # noqa: SLF001


def _place_in_listing(record: JobRecord, *, due: bool) -> _Place:
    if record.state is State.ACTIVE:
        return (0, "", 0, record.lease_until_ms or 0, record.id)
    if record.state in _ENDS:
        return (0, "", 0, -(record.ended_at_ms or 0), -record.id)
    if not due:
        return (2, "", 0, record.due_at_ms, record.id)
    if record.group is None:
        return (0, "", -record.priority, record.due_at_ms, record.id)
    return (1, record.group, -record.priority, record.due_at_ms, record.id)


def _own_label() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _is_spent(job: _Job) -> bool:
    return job.max_attempts is not None and job.attempts >= job.max_attempts

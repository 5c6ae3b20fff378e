"""A job, as it goes into a storage and as it comes out. All times are integer milliseconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class State(str, enum.Enum):
    """Where a job stands. The last three are ends; a retry or a removal is the only way on."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value


DedupeUntil = Literal["removed", "ended"]

# An id is an integer of SQLite's, and those have 64 bits.
LARGEST_ID = 2**63 - 1

# Where many jobs are ahead of one, nobody waits for their exact number.
MOST_AHEAD = 100_000

# The one header that is ours: for how many milliseconds a job's result is kept.
KEEP_RESULT = "litebroker-keep-result"


class JobSpec(NamedTuple):
    """A job to be added, encoded and checked. Give the fields by name.

    Attributes:
        encoding: How to read the payload: None is JSON, "bytes" is as it stands, anything else names a
            serializer. For tools; the storage does not look at it.
        priority: Higher goes first. A signed 64-bit integer.
        delay_ms: Due so long after it is added. At most one of ``delay_ms`` and ``run_at_ms``.
        run_at_ms: Due at this instant (epoch). A past one is due at once.
        dedupe_key: At most one job of the queue holds the key. Adding again returns the holder.
        dedupe_until: Whether the holder keeps its key until its row is "removed", or lets go of it as
            soon as it has "ended" (completed, failed or cancelled).
        group: A stream of its own within the queue, of which ``group_concurrency`` may be active at once.
        max_attempts: How often it may be claimed; None is without limit.
        headers: Small strings that travel with the job; tracing uses them.
        ref: The caller's own name of the job, for `find`. Not unique.
        task: What the job does, as listings show it.
        front: Goes before everything that waits in its stream now, the delayed not counted: it gets the highest
            priority there, if that is above its own, and is due a millisecond before the first.
    """

    queue: str
    payload: bytes
    encoding: str | None = None
    priority: int = 0
    delay_ms: int | None = None
    run_at_ms: int | None = None
    dedupe_key: str | None = None
    dedupe_until: DedupeUntil = "removed"
    group: str | None = None
    group_concurrency: int = 1
    max_attempts: int | None = 3
    headers: Mapping[str, str] | None = None
    ref: str | None = None
    task: str | None = None
    front: bool = False


class Added(NamedTuple):
    """What became of one JobSpec.

    Attributes:
        id: The job's id: of the new row, or of the one that holds the dedupe key.
        created: False when the dedupe key was held.
    """

    id: int
    created: bool


class Lease(NamedTuple):
    """The right to settle a job: the claim's token, which no other claim shares."""

    job_id: int
    token: int


class JobError(NamedTuple):
    """Why a job, or one of its attempts, failed.

    Attributes:
        reason: The kind: "handler" (it raised), "parse" (the payload could not be read), "lapsed" (its
            worker vanished, or its lease ran out), "timeout" (its handler took too long, and was ended), "crashed" (the
            child process that ran it died), "rejected" (buried on purpose), or an adapter's own.
        type: The exception's class name, or "".
        message: One line or more, bounded.
        stack: The traceback as text, bounded, or "".
        causes: The chain of causes, nearest first, bounded: each ``Type: message``.
    """

    reason: str
    type: str = ""
    message: str = ""
    stack: str = ""
    causes: Sequence[str] = ()


class Attempt(NamedTuple):
    """One claim of a job, once it has ended.

    Attributes:
        number: Counts from 1.
        started_at_ms: When it was claimed.
        ended_at_ms: When it ended.
        worker: ``host:pid`` of the process that claimed it; "" when that is not known any more.
        outcome: "completed", "failed", "retried" or "lapsed".
        error: ``Type: message``, or None when it completed.
    """

    number: int
    started_at_ms: int
    ended_at_ms: int
    worker: str
    outcome: str
    error: str | None


class JobRecord(NamedTuple):
    """A job as it is stored.

    Attributes:
        due_at_ms: When it is, or was, due: its place in the line of its priority.
        attempts: Claims so far, those given back not counted.
        max_attempts: None is without limit.
        token: The current lease's, or None when it is not active.
        lease_until_ms: When the lease ends, on the wall clock as it goes now; None when not active.
        claimed_at_ms: When it was claimed last, or None; claims that were given back do not count.
        ended_at_ms: When it came to its end, or None.
        encoding: As in `JobSpec`.
        error: Why it failed the last time; it stays when the job is tried again. None when it never failed.
        history: Its latest attempts that ended, oldest first; bounded.
    """

    id: int
    queue: str
    state: State
    priority: int
    due_at_ms: int
    attempts: int
    max_attempts: int | None
    created_at_ms: int
    token: int | None
    lease_until_ms: int | None
    claimed_at_ms: int | None
    ended_at_ms: int | None
    group: str | None
    dedupe_key: str | None
    ref: str | None
    task: str | None
    encoding: str | None
    headers: Mapping[str, str]
    error: JobError | None
    history: Sequence[Attempt]
    payload: bytes

    @property
    def lease(self) -> Lease:
        """The lease to settle it with. Raises ``ValueError`` when the job is not active."""
        if self.token is None:
            msg = f"job {self.id} is {self.state}, not active: there is no lease to settle"
            raise ValueError(msg)
        return Lease(self.id, self.token)

    @property
    def has_lapsed(self) -> bool:
        """Whether the last of its attempts that ended did so since its worker vanished: the job may be why."""
        return bool(self.history) and self.history[-1].outcome == "lapsed"


class Holder(NamedTuple):
    """Who has claimed a job that is active.

    Attributes:
        token: The lease's; as in `JobRecord`.
        worker: ``host:pid`` of the process that claimed it; "" when that is not known any more.
        alive: Whether that process lives: False only where it is known to be gone, and its jobs are taken back at the
            next claim; None where it cannot be told from here, so that only the end of the lease tells.
        claimed_at_ms: When it was claimed.
        lease_until_ms: When the lease ends, on the wall clock as it goes now. One in the past is taken back at the
            next claim.
        renewed_at_ms: When the lease was last extended; None when it never was since the claim.
    """

    token: int
    worker: str
    alive: bool | None
    claimed_at_ms: int
    lease_until_ms: int
    renewed_at_ms: int | None = None


class Counts(NamedTuple):
    """How many jobs of a queue are in each state. ``delayed`` are those pending that are not due yet."""

    ready: int = 0
    delayed: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def pending(self) -> int:
        return self.ready + self.delayed


class Standing(NamedTuple):
    """Where a pending job stands in its stream.

    Attributes:
        ahead: How many jobs of its stream are due and go before it, counted up to `MOST_AHEAD`; None when it is not
            due.
        concurrency: How many jobs of its group may be active at once; None without a group.
        active: How many are.
        holders: Their ids, the soonest end of lease first; a hundred at most.
    """

    ahead: int | None
    concurrency: int | None = None
    active: int = 0
    holders: tuple[int, ...] = ()


class Arrivals(NamedTuple):
    """Jobs that were added after another one.

    Attributes:
        latest: The highest id among them; where there are none, the one that was asked for.
        counts: How many of each queue are still there.
    """

    latest: int
    counts: Mapping[str, int]


class JobCopy(NamedTuple):
    """A job with all that makes it, as a tool carries it from one storage to another.

    Attributes:
        dedupe_until: As in `JobSpec`; of no meaning without a dedupe key.
        group_concurrency: That of its group; 1 when it has none.
    """

    record: JobRecord
    dedupe_until: DedupeUntil = "removed"
    group_concurrency: int = 1


class QueueInfo(NamedTuple):
    """A queue that the storage knows."""

    name: str
    paused_at_ms: int | None


@dataclass(frozen=True, slots=True)
class Keep:
    """How many ended jobs of a state are kept, and for how long. None is without limit."""

    count: int | None = None
    age_ms: int | None = None

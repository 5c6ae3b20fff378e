"""Why a job is where it is: what its storage knows of it, weighed, and said with the evidence.

`why` looks, and changes nothing; `explain` decides, and is a pure function of what was seen.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from litebroker.arguments import instant
from litebroker.jobs import MOST_AHEAD, Holder, JobRecord, Standing, State
from litebroker.results import RESULTS, Progress, read_progress
from litebroker.storage import Storage

__all__ = ["Explanation", "Reason", "ReasonCode", "Seen", "duration", "explain", "why"]

ReasonCode = Literal[
    # pending: what keeps it
    "paused",
    "backoff",
    "delayed",
    "group_full",
    "no_worker",
    "behind",
    "busy",
    "claimable",
    # active
    "leased",
    "worker_gone",
    "lease_ended",
    # ended, or gone
    "completed",
    "failed",
    "cancelled",
    "missing",
    # beside any of them
    "key_held",
    "holds_key",
    "retried",
    "progress",
    "worker_unknown",
]

# Reading one job takes several looks; it is read again when it has changed meanwhile, so often at most.
_TRIES = 3
# Those who hold a group's places, or work on the queue, are named one by one up to so many.
_NAMED = 5
_CLOCKS_APART_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is known of a job.

    Attributes:
        code: Names the kind, for programs.
        text: Says it, for people.
        facts: Its figures: numbers, strings, ids, aware `datetime`s, or lists of such mappings.
        remedy: A command of `litebroker` that changes it, or None.
    """

    code: ReasonCode
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job is where it is, at one moment.

    Attributes:
        job: The job as it was then; None when there is none of this id.
        reasons: The first is the answer. Of a pending job all that keep it from being claimed, so that the answer
            holds until the first is over, and then the next. Of any other job there is one.
        notes: What else is known and may matter.
    """

    job_id: int
    job: JobRecord | None
    reasons: Sequence[Reason]
    notes: Sequence[Reason] = ()

    @property
    def state(self) -> State | None:
        return None if self.job is None else self.job.state

    def __str__(self) -> str:
        first, *others = self.reasons
        if self.job is None:
            head = f"there is no job {self.job_id}: {first.text}"
        else:
            head = f"job {self.job_id} of queue {self.job.queue!r} is {self.job.state}: {first.text}"
        lines = [head, *(f"  and {reason.text}" for reason in others), *(f"  {note.text}" for note in self.notes)]
        lines += [f"  to change that: {it.remedy}" for it in (*self.reasons, *self.notes) if it.remedy is not None]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a storage says about one job, and around it, within a few milliseconds.

    Attributes:
        issued_at_ms: When an id like this was given out, where the id tells.
        paused_at_ms: Since when its queue is paused; None when it is not.
        standing: Of a pending job.
        holders: Who holds it, when it is active; when it is pending, those with its group's places, or else with other
            jobs of its queue: the first few.
        key_holder: The job that holds its dedupe key, be it itself.
        awaited: Whether anyone listens for jobs of its queue, as `Storage.is_awaited` says.
        progress: What its handler has said of how far it is, when it is active.
        result: What is kept of its end, when it is gone: "value", "refused" (a value that could not be kept), "failed".
    """

    now_ms: int
    job_id: int
    record: JobRecord | None
    issued_at_ms: int | None = None
    paused_at_ms: int | None = None
    standing: Standing | None = None
    holders: Mapping[int, Holder] = field(default_factory=dict)
    key_holder: JobRecord | None = None
    awaited: bool | None = None
    progress: Progress | None = None
    result: str | None = None


def why(storage: Storage, job_id: int) -> Explanation:
    """Why the job is where it is. A few short reads, and no write."""
    seen = look(storage, job_id)
    for _ in range(_TRIES - 1):
        if seen.record is None or _marks(storage.get(job_id)) == _marks(seen.record):
            break
        seen = look(storage, job_id)
    return explain(seen)


def look(storage: Storage, job_id: int) -> Seen:
    """What `explain` goes by."""
    now_ms = storage.clock.now_ms()
    record = storage.get(job_id)
    if record is None:
        issued_at_ms, result = storage.issued_at_ms(job_id), _kept_result(storage, job_id)
        return Seen(now_ms=now_ms, job_id=job_id, record=None, issued_at_ms=issued_at_ms, result=result)
    queue = record.queue
    standing = None
    around: Sequence[int] = ()
    if record.state is State.ACTIVE:
        around = [job_id]
    elif record.state is State.PENDING:
        standing = storage.standing(job_id)
        around = () if standing is None else standing.holders[:_NAMED]
        if not around:
            around = [it.id for it in storage.page(queue, State.ACTIVE, limit=_NAMED, payloads=False)]
    key_holder = None
    if record.dedupe_key is not None:
        key_holder = next(iter(storage.find(queue, dedupe_key=record.dedupe_key)), None)
    return Seen(
        now_ms=now_ms,
        job_id=job_id,
        record=record,
        issued_at_ms=storage.issued_at_ms(job_id),
        paused_at_ms=next((it.paused_at_ms for it in storage.queues() if it.name == queue), None),
        standing=standing,
        holders=storage.holders(around),
        key_holder=key_holder,
        awaited=storage.is_awaited(queue),
        progress=read_progress(storage, [job_id]).get(job_id) if record.state is State.ACTIVE else None,
    )


def _kept_result(storage: Storage, job_id: int) -> str | None:
    kept = storage.peek(RESULTS, [str(job_id)]).get(str(job_id))
    return None if kept is None else str(json.loads(kept.data.partition(b"\n")[0])[0])


def explain(seen: Seen) -> Explanation:
    """Weigh what was seen."""
    record = seen.record
    if record is None:
        return Explanation(seen.job_id, None, [_missing(seen)])
    if record.state is State.PENDING:
        reasons = _pending(seen, record)
        notes = [] if any(it.code == "backoff" for it in reasons) else _retried(seen, record)
    elif record.state is State.ACTIVE:
        reasons, notes = [_active(seen, record)], [*_progress(seen), *_worker_unknown(seen, record)]
    else:
        reasons, notes = [_ended(seen, record)], []
    return Explanation(seen.job_id, record, reasons, [*notes, *_key(seen, record)])


def duration(seconds: float) -> str:
    """A length of time, to two units: 0.4s, 12s, 3m20s, 2h05m, 3d04h."""
    if seconds < 10:  # noqa: PLR2004
        return f"{max(seconds, 0):.1f}s"
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004
        return f"{whole}s"
    if whole < 3600:  # noqa: PLR2004
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:  # noqa: PLR2004
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def _marks(record: JobRecord | None) -> object:
    """What changes when the job goes anywhere."""
    return None if record is None else (record.state, record.queue, record.token, record.attempts, record.due_at_ms)


# Pending


def _pending(seen: Seen, record: JobRecord) -> list[Reason]:
    """All that keeps it from being claimed; or that nothing does."""
    standing = seen.standing or Standing(None)
    reasons = []
    if seen.paused_at_ms is not None:
        reasons.append(_paused(seen, record.queue, seen.paused_at_ms))
    if standing.ahead is None and record.due_at_ms > seen.now_ms:
        reasons.append(_delayed(seen, record))
    if standing.concurrency is not None and standing.active >= standing.concurrency:
        reasons.append(_group_full(seen, record, standing))
    living = {job_id: holder for job_id, holder in seen.holders.items() if holder.alive is not False}
    if seen.awaited is False and not living:
        text = (
            "no worker of its queue is seen: nobody listens for its jobs, and none of them is active (a program that"
            " claims without waiting is seen only while it holds a job)"
        )
        reasons.append(Reason("no_worker", text, {"queue": record.queue}))
    if standing.ahead:
        reasons.append(_behind(record, standing.ahead))
    if not reasons:
        reasons.append(_busy(seen, record, living) if living else _claimable(seen, record))
    return reasons


def _paused(seen: Seen, queue: str, paused_at_ms: int) -> Reason:
    text = f"its queue has been paused for {_ago(seen, paused_at_ms)}"
    return Reason("paused", text, {"paused_at": instant(paused_at_ms)}, remedy=f"litebroker resume {_quoted(queue)}")


def _delayed(seen: Seen, record: JobRecord) -> Reason:
    due_in_s = (record.due_at_ms - seen.now_ms) / 1000
    facts = {"due_at": instant(record.due_at_ms), "due_in_seconds": due_in_s}
    last = record.history[-1] if record.history else None
    if last is None or last.outcome != "retried" or last.number != record.attempts:
        return Reason("delayed", f"it is due in {duration(due_in_s)}", facts)
    facts |= {"attempt": last.number, "max_attempts": record.max_attempts, "error": last.error, "worker": last.worker}
    text = f"{_attempt(last.number, record)} failed ({_short(last.error)}), and the next one is due in"
    return Reason("backoff", f"{text} {duration(due_in_s)}", facts)


def _group_full(seen: Seen, record: JobRecord, standing: Standing) -> Reason:
    named = [_named(job_id, holder) for job_id, holder in seen.holders.items()]
    more = standing.active - len(named)
    if more > 0:
        named.append(f"{more:,} more")
    held = f", held by {', '.join(named)}" if named else ""
    facts = {
        "group": record.group,
        "concurrency": standing.concurrency,
        "active": standing.active,
        "holders": _facts_of(seen.holders),
    }
    return Reason("group_full", f"its group {record.group!r} is at its limit of {standing.concurrency}{held}", facts)


def _behind(record: JobRecord, ahead: int) -> Reason:
    where = "" if record.group is None else f" of its group {record.group!r}"
    count = f"at least {ahead:,} jobs" if ahead >= MOST_AHEAD else f"{ahead:,} job{'s' * (ahead > 1)}"
    text = f"{count}{where} {'goes' if ahead == 1 else 'go'} before it"
    return Reason("behind", text, {"ahead": ahead, "at_least": ahead >= MOST_AHEAD, "priority": record.priority})


def _busy(seen: Seen, record: JobRecord, holders: Mapping[int, Holder]) -> Reason:
    workers = sorted({holder.worker or "an unknown worker" for holder in holders.values()})
    text = (
        f"it is the next of its {'queue' if record.group is None else 'group'}, has been due for"
        f" {_ago(seen, record.due_at_ms)}, and the queue's workers are at other jobs: {', '.join(workers)}"
    )
    return Reason("busy", text, {"due_at": instant(record.due_at_ms), "holders": _facts_of(holders)})


def _claimable(seen: Seen, record: JobRecord) -> Reason:
    text = f"nothing keeps it: it has been due for {_ago(seen, record.due_at_ms)}, and the next claim takes it"
    if seen.awaited:
        text += "; a worker of its queue is there"
    return Reason("claimable", text, {"due_at": instant(record.due_at_ms), "worker_seen": seen.awaited})


def _retried(seen: Seen, record: JobRecord) -> list[Reason]:
    """How its attempts went so far, where the answer does not say so."""
    if not record.history:
        return []
    last = record.history[-1]
    ended = {"lapsed": "ended with its worker or its lease"}.get(last.outcome, "failed")
    text = f"{_attempt(last.number, record)} {ended} {_ago(seen, last.ended_at_ms)} ago: {_short(last.error)}"
    facts = {
        "attempt": last.number,
        "max_attempts": record.max_attempts,
        "outcome": last.outcome,
        "error": last.error,
        "worker": last.worker,
        "ended_at": instant(last.ended_at_ms),
    }
    return [Reason("retried", text, facts)]


# Active


def _active(seen: Seen, record: JobRecord) -> Reason:
    holder = seen.holders.get(seen.job_id)
    if holder is None:
        # It went on between two looks.
        holder = Holder(record.token or 0, "", None, record.claimed_at_ms or 0, record.lease_until_ms or 0)
    worker = holder.worker or "a worker that is not known any more"
    facts = {
        "worker": holder.worker,
        "alive": holder.alive,
        "claimed_at": instant(holder.claimed_at_ms),
        "renewed_at": None if holder.renewed_at_ms is None else instant(holder.renewed_at_ms),
        "lease_until": instant(holder.lease_until_ms),
        "lease_ends_in_seconds": (holder.lease_until_ms - seen.now_ms) / 1000,
        "attempt": record.attempts,
        "max_attempts": record.max_attempts,
    }
    if holder.alive is False:
        text = f"its worker {worker} is gone, and any worker's next claim takes the job back: {_then(record)}"
        return Reason("worker_gone", text, facts)
    if holder.lease_until_ms <= seen.now_ms:
        text = (
            f"the lease of {worker} ended {_ago(seen, holder.lease_until_ms)} ago, and the next claim of the queue"
            f" takes the job back: {_then(record)}"
        )
        return Reason("lease_ended", text, facts)
    renewed = "not renewed since"
    if holder.renewed_at_ms is not None:
        renewed = f"renewed {_ago(seen, holder.renewed_at_ms)} ago"
    text = (
        f"{worker} claimed it {_ago(seen, holder.claimed_at_ms)} ago ({_attempt(record.attempts, record)}), {renewed};"
        f" the lease ends in {duration((holder.lease_until_ms - seen.now_ms) / 1000)}"
    )
    return Reason("leased", text, facts)


def _then(record: JobRecord) -> str:
    if record.max_attempts is not None and record.attempts >= record.max_attempts:
        return f"a dead letter then, since {_attempt(record.attempts, record)} was its last"
    return f"it is tried again then, after {_attempt(record.attempts, record)}"


def _progress(seen: Seen) -> list[Reason]:
    said = seen.progress
    if said is None:
        return []
    ago_s = seen.now_ms / 1000 - said.at.timestamp()
    text = f"its handler said {duration(ago_s)} ago: {said.fraction:.0%} {said.note}".rstrip()
    return [Reason("progress", text, {"fraction": said.fraction, "note": said.note, "at": said.at})]


def _worker_unknown(seen: Seen, record: JobRecord) -> list[Reason]:
    """Where only the lease tells, say so; and that nobody is seen who would take the job back."""
    holder = seen.holders.get(seen.job_id)
    notes = []
    if holder is not None and holder.alive is None and holder.lease_until_ms > seen.now_ms:
        text = "whether that worker lives cannot be told from here: only the end of its lease tells"
        notes.append(Reason("worker_unknown", text, {"worker": holder.worker}))
    over = holder is not None and (holder.alive is False or holder.lease_until_ms <= seen.now_ms)
    if over and seen.awaited is False:
        text = "no worker of its queue is seen who would take it back: nobody listens for its jobs"
        notes.append(Reason("no_worker", text, {"queue": record.queue}))
    return notes


# Ended, or gone


def _ended(seen: Seen, record: JobRecord) -> Reason:
    ended_at_ms = record.ended_at_ms or 0
    last = record.history[-1] if record.history else None
    facts: dict[str, Any] = {"ended_at": instant(ended_at_ms), "attempts": record.attempts}
    if last is not None:
        facts["worker"] = last.worker
    ago = f"{_ago(seen, ended_at_ms)} ago"
    if record.state is State.CANCELLED:
        return Reason("cancelled", f"it was cancelled {ago}, before it was claimed again", facts)
    on = f" on {last.worker}" if last is not None and last.worker else ""
    if record.state is State.COMPLETED:
        return Reason("completed", f"it was completed {ago}, by {_attempt(record.attempts, record)}{on}", facts)
    error = record.error
    if error is not None:
        facts |= {"reason": error.reason, "error_type": error.type, "error": error.message}
    return Reason(
        "failed",
        f"it became a dead letter {ago}, after {_attempt(record.attempts, record)}{on}: {_failure(record)}",
        {**facts, "max_attempts": record.max_attempts},
        remedy=f"litebroker jobs retry {record.id}",
    )


def _failure(record: JobRecord) -> str:
    error = record.error
    if error is None:
        return "no reason was given"
    what = _short(f"{error.type}: {error.message}" if error.type else error.message or error.reason)
    said = {
        "handler": "its handler raised",
        "parse": "its payload could not be read:",
        "lapsed": "its last attempt was not settled:",
        "rejected": "it was buried on purpose:",
    }.get(error.reason, f"{error.reason}:")
    return f"{said} {what}"


def _missing(seen: Seen) -> Reason:
    issued_at_ms = seen.issued_at_ms
    if issued_at_ms is None:
        return Reason("missing", "no job of this file has had such an id, or it was removed")
    if issued_at_ms > seen.now_ms + _CLOCKS_APART_MS:
        text = "its id lies in the future, so that no job has had it yet"
        return Reason("missing", text, {"issued_at": instant(issued_at_ms)})
    issued_at = instant(issued_at_ms)
    at = issued_at.isoformat(timespec="seconds")
    facts = {"issued_at": issued_at, "result": seen.result}
    if seen.result is not None:
        ended = "failed, and was removed" if seen.result == "failed" else "was completed"
        text = f"it was added {_ago(seen, issued_at_ms)} ago, at {at}, and {ended}: its result is still kept"
        return Reason("missing", text, facts)
    text = (
        f"by its id it was added {_ago(seen, issued_at_ms)} ago, at {at}, if it was of this file; it was completed"
        " (completed jobs are removed, unless the queue keeps them), or removed, purged, or dropped by the queue's"
        " retention: which, is not kept"
    )
    return Reason("missing", text, facts)


# Its dedupe key


def _key(seen: Seen, record: JobRecord) -> list[Reason]:
    holder = seen.key_holder
    if holder is None or record.dedupe_key is None:
        return []
    facts = {"dedupe_key": record.dedupe_key, "job": holder.id, "state": str(holder.state)}
    if holder.id == record.id:
        text = f"it holds the dedupe key {record.dedupe_key!r}: to add with that key adds nothing, and gives this job"
        return [Reason("holds_key", text, facts)]
    text = f"its dedupe key {record.dedupe_key!r} is held by job {holder.id}, which is {holder.state}"
    if record.state is State.FAILED:
        text += ": it cannot be tried again in this queue before that job lets go of the key"
    return [Reason("key_held", text, facts)]


# Words


def _ago(seen: Seen, at_ms: int) -> str:
    return duration((seen.now_ms - at_ms) / 1000)


def _attempt(number: int, record: JobRecord) -> str:
    return f"attempt {number}" if record.max_attempts is None else f"attempt {number} of {record.max_attempts}"


def _named(job_id: int, holder: Holder) -> str:
    gone = ", whose process is gone" if holder.alive is False else ""
    return f"job {job_id} ({holder.worker or 'unknown worker'}{gone})"


def _facts_of(holders: Mapping[int, Holder]) -> list[dict[str, Any]]:
    return [{"job": job_id, "worker": it.worker, "alive": it.alive} for job_id, it in holders.items()]


def _short(error: str | None) -> str:
    """An error in one line."""
    lines = (error or "").strip().splitlines()
    line = lines[0] if lines else "no message"
    return line if len(line) <= 200 else f"{line[:200]}..."  # noqa: PLR2004


def _quoted(name: str) -> str:
    return shlex.quote(name)

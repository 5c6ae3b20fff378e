"""RQ's jobs as rows of neutral shape, for tools that show the jobs of several frameworks side by side.

What is read comes from the tables alone: no job is unpickled, and rq need not be installed. What is changed goes
through rq's own methods, so that its registries, dependents and callbacks agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, cast

from litebroker_rq.commands import lists, sets, sorted_sets, streams
from litebroker_rq.database import Database, opened

if TYPE_CHECKING:
    from litebroker_rq.keyspace import Session

JobState = Literal["waiting", "started", "scheduled", "deferred", "finished", "failed", "canceled"]

_REGISTRIES: dict[JobState, bytes] = {
    "started": b":wip:",
    "scheduled": b":scheduled:",
    "deferred": b":deferred:",
    "finished": b":finished:",
    "failed": b":failed:",
    "canceled": b":canceled:",
}

STATES: tuple[JobState, ...] = ("waiting", *_REGISTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job of RQ.

    Attributes:
        queue: RQ's name of its queue.
        task: What it does, as rq describes it.
        attempts: Results so far; each retry has one.
        error: The last line of the last failure, or None.
        worker: The name of the worker that runs, or ran, it.
        scheduled_at: When it is to be queued; only of "scheduled" ones.
    """

    framework: str
    queue: str
    id: str
    state: JobState
    task: str
    created_at: datetime | None
    enqueued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    scheduled_at: datetime | None
    attempts: int
    error: str | None
    worker: str | None


class RQInspector:
    """Looks at, and mends, the RQ jobs of a file.

    Args:
        url: The file, or its ``sqlite:///`` URL.
        prefix: What RQ's keys begin with (RQ_KEY_PREFIX).
    """

    framework = "rq"

    def __init__(self, url: str, *, prefix: str = "rq") -> None:
        self._database: Database = opened(url)
        self._prefix = prefix.encode()

    def queues(self) -> list[str]:
        """The names of the queues that RQ knows."""
        start = self._prefix + b":queue:"
        with self._database.reading() as session:
            found = cast("list[bytes]", sets.smembers(session, [self._prefix + b":queues"]))
        return sorted(key.removeprefix(start).decode() for key in found)

    def counts(self, queue: str) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self._database.reading() as session:
            return {state: self._count(session, queue, state) for state in STATES}

    def _count(self, session: Session, queue: str, state: JobState) -> int:
        key = self._key(queue, state)
        return cast("int", lists.llen(session, [key]) if state == "waiting" else sorted_sets.zcard(session, [key]))

    def _key(self, queue: str, state: JobState) -> bytes:
        kind = b":queue:" if state == "waiting" else _REGISTRIES[state]
        return self._prefix + kind + queue.encode()

    def jobs(self, queue: str, state: JobState, *, limit: int = 100, offset: int = 0) -> list[JobRow]:
        """A page: those that wait as they will be taken, the others by the time at which their entry ends."""
        key = self._key(queue, state)
        span = [b"%d" % offset, b"%d" % (offset + limit - 1)]
        with self._database.reading() as session:
            if state == "waiting":
                found = [(ref, b"") for ref in cast("list[bytes]", lists.lrange(session, [key, *span]))]
            else:
                flat = cast("list[bytes]", sorted_sets.zrange(session, [key, *span, b"WITHSCORES"]))
                found = list(zip(flat[::2], flat[1::2], strict=True))
            rows = [self._row(session, queue, state, member, score) for member, score in found]
        return [row for row in rows if row is not None]

    def job(self, queue: str, job_id: str) -> JobRow | None:
        """The job of this id, in whatever state."""
        with self._database.reading() as session:
            row = session.find(self._prefix + b":job:" + job_id.encode(), "hash")
            if row is None:
                return None
            states = {"queued": "waiting", "stopped": "failed"}
            status = str(row.data.get("status", "queued"))
            state = cast("JobState", states.get(status, status))
            score = b""
            if state in _REGISTRIES:
                score = cast("bytes", sorted_sets.zscore(session, [self._key(queue, state), job_id.encode()]) or b"")
            return self._row(session, queue, state, job_id.encode(), score)

    def _row(self, session: Session, queue: str, state: JobState, member: bytes, score: bytes) -> JobRow | None:
        ref = member
        row = session.find(self._prefix + b":job:" + ref)
        if row is None and state == "started":  # <job id>:<execution id>
            ref = member.rpartition(b":")[0]
            row = session.find(self._prefix + b":job:" + ref)
        if row is None or row.kind != "hash":
            return None
        text: dict[str, str] = {name: value for name, value in row.data.items() if isinstance(value, str)}
        return JobRow(
            framework=self.framework,
            queue=queue,
            id=ref.decode(),
            state=state,
            task=text.get("description", "").encode("latin-1").decode("utf-8", "replace"),
            created_at=_time(text.get("created_at")),
            enqueued_at=_time(text.get("enqueued_at")),
            started_at=_time(text.get("started_at")),
            ended_at=_time(text.get("ended_at")),
            scheduled_at=datetime.fromtimestamp(float(score), timezone.utc) if state == "scheduled" and score else None,
            attempts=cast("int", streams.xlen(session, [self._prefix + b":results:" + ref])),
            error=self._error(session, ref, session.get_field(row, "exc_info")),
            worker=text.get("worker_name") or None,
        )

    def _error(self, session: Session, ref: bytes, old: bytes | None) -> str | None:
        """The last line of the newest result's traceback, or of the one that RQ before 1.12 kept with the job."""
        compressed = old
        newest = streams.xrevrange(session, [self._prefix + b":results:" + ref, b"+", b"-", b"COUNT", b"1"])
        if isinstance(newest, list) and newest:
            fields = cast("list[bytes]", cast("list[Any]", newest[0])[1])
            result = dict(zip(fields[::2], fields[1::2], strict=True))
            if b"exc_string" in result:
                import base64

                compressed = base64.b64decode(result[b"exc_string"])
        if not compressed:
            return None
        try:
            text = zlib.decompress(compressed)
        except zlib.error:
            text = compressed
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else None

    # Changes, by rq's own rules

    def retry(self, queue: str, job_id: str) -> bool:
        """Queue a failed job again. False when it is not failed."""
        from rq.exceptions import InvalidJobOperation, NoSuchJobError

        try:
            self._queue(queue).failed_job_registry.requeue(job_id)
        except (InvalidJobOperation, NoSuchJobError):
            return False
        return True

    def cancel(self, queue: str, job_id: str) -> bool:
        """Cancel a job that has not started. False when it has, or is gone."""
        return self._change(queue, job_id, {"queued", "deferred", "scheduled"}, lambda job: job.cancel())

    def delete(self, queue: str, job_id: str) -> bool:
        """Delete a job that does not run. False when it does, or is gone."""
        idle = {"queued", "deferred", "scheduled", "finished", "failed", "stopped", "canceled"}
        return self._change(queue, job_id, idle, lambda job: job.delete())

    def _change(self, queue: str, job_id: str, states: set[str], change: Callable[[Any], None]) -> bool:
        # One transaction: no worker takes the job between the look and the change.
        with self._database.writing():
            job = self._queue(queue).fetch_job(job_id)
            if job is None or str(getattr(job.get_status(), "value", job.get_status())) not in states:
                return False
            change(job)
            return True

    def _queue(self, queue: str) -> Any:
        import rq

        from litebroker_rq.client import SQLiteConnection

        return rq.Queue(queue, connection=SQLiteConnection(self._database.url))


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)

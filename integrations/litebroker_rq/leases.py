"""From a queue to the job's start: who protects a job that was popped.

With Redis, a job that a worker has popped is in no list until the worker has registered it. Here the pop is a claim of
the engine under a lease, and the lease is settled by what RQ does next anyway, in the transaction that does it:

* the job's status leaves "queued": it has started, or was failed, cancelled, scheduled;
* its hash is deleted;
* it is removed from the intermediate list, or pushed to a queue again.

If the worker dies before that, the engine takes the job back, to its old place; the next pop clears away what the dead
worker has left of it. After that, RQ's own rules hold (StartedJobRegistry, AbandonedJobError).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from litebroker import JobRecord, Lease
from litebroker_rq import processes
from litebroker_rq.naming import (
    INTERMEDIATE,
    is_job,
    is_queue,
    is_worker,
    job_key,
    prefix_of,
    started_entry,
    started_key,
)
from litebroker_rq.plain_list import PlainList

if TYPE_CHECKING:
    from litebroker_rq.keyspace import Row, Session

_LONGEST_LEASE_MS = 24 * 3600 * 1000


class Claimed(NamedTuple):
    """A job that was handed out.

    Attributes:
        protected: A claim is open, and in its table; otherwise RQ has no use for the job any more.
    """

    queue: bytes
    ref: bytes
    protected: bool


class Leases:
    """The claims that are open, in the table litebroker_rq_claims."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms

    def claim(self, session: Session, keys: list[bytes], to: bytes | None) -> Claimed | None:
        """Take the next job of the first of these queues that has one. ``to`` is the list that its id goes to."""
        jobs = session.storage.claim([key.decode() for key in keys], limit=1, lease_ms=self._lease_ms)
        if not jobs:
            return None
        session.database.heartbeats.has_claimed()
        (job,) = jobs
        queue, ref = job.queue.encode(), (job.ref or "").encode()
        self._clear_up(session, job, queue, ref)
        key = job_key(queue, ref)
        row = session.find(key)
        protected = row is not None and row.kind == "hash" and row.data.get("status") == "queued"
        if not protected:
            # Deleted or cancelled meanwhile: there is nothing to protect, and RQ will skip it.
            session.storage.complete([job.lease])
        else:
            session.write(
                "insert into litebroker_rq_claims (job_id, token, queue, ref, job_key, intermediate)"
                " values (?, ?, ?, ?, ?, ?)",
                job.id,
                job.lease.token,
                job.queue,
                ref,
                key,
                to,
            )
        return Claimed(queue, ref, protected)

    def _clear_up(self, session: Session, job: JobRecord, queue: bytes, ref: bytes) -> None:
        """If an earlier claim of the job lapsed: remove what its worker has left behind."""
        lapsed = session.select("select intermediate from litebroker_rq_claims where job_id = ?", job.id)
        if not lapsed:
            return
        ((intermediate,),) = lapsed
        session.write("delete from litebroker_rq_claims where job_id = ?", job.id)
        if intermediate is not None:
            PlainList(session, intermediate).remove(ref, limit=1, from_end=False)
            seen = session.find(intermediate + b":first_seen:" + ref)
            if seen is not None:
                session.delete(seen)
        # Otherwise RQ would take the entry for an abandoned execution, and fail the job while, or after, it runs.
        for _, member in self._executions(session, started_key(queue), ref):
            row = session.find(started_key(queue))
            if row is not None:
                _remove_member(session, row, member)
        executions = session.find(prefix_of(queue) + b":executions:" + ref)
        if executions is not None:
            session.delete(executions)

    @staticmethod
    def _executions(session: Session, key: bytes, ref: bytes) -> list[tuple[float, bytes]]:
        """The entries of a started registry that are of this job: ``ref`` and ``ref:*``."""
        row = session.find(key)
        if row is None:
            return []
        found = session.select(
            "select score, member from litebroker_rq_members where key_id = ? and (member = ?"
            " or (member >= ? and member < ?))",
            row.id,
            ref,
            ref + b":",
            ref + b";",
        )
        return [(float(score), bytes(member)) for score, member in found]

    def settle(self, session: Session, key: bytes) -> None:
        """The job of this hash is in good hands: end the claims that protect it."""
        found = session.select("select job_id, token from litebroker_rq_claims where job_key = ?", key)
        if not found:
            return
        session.must_write()
        for job_id, token in found:
            (settled,) = session.storage.complete([Lease(job_id, token)])
            if not settled:
                # The lease had ended, and the job is in its queue again. It must not run a second time.
                session.storage.remove([job_id])
            session.write("delete from litebroker_rq_claims where job_id = ?", job_id)

    def settle_all(self, session: Session) -> None:
        for (key,) in session.select("select distinct job_key from litebroker_rq_claims"):
            self.settle(session, key)

    # What RQ does, and what it means

    def on_hash(self, session: Session, row: Row, fields: list[bytes]) -> None:
        """These fields of the hash were set."""
        if b"status" in fields and is_job(row.key):
            status = row.data["status"]
            if not row.stored and status != "started":
                return  # it is new
            if status != "queued":
                self.settle(session, row.key)
            if status == "started":
                if processes.speaks_for_itself():
                    session.database.heartbeats.has_started(row.data.get("worker_name"))
                session.write(
                    "insert or replace into litebroker_rq_runs (job_key, origin, process, worker) values (?, ?, ?, ?)",
                    row.key,
                    row.data.get("origin", "").encode("latin-1"),
                    processes.own(),
                    processes.parent(),
                )
            else:
                session.write("delete from litebroker_rq_runs where job_key = ?", row.key)
        elif b"birth" in fields and is_worker(row.key):
            session.write(
                "insert or replace into litebroker_rq_workers (key, process) values (?, ?)", row.key, processes.own()
            )
            session.database.heartbeats.own(row.key)

    def on_deleted(self, session: Session, row: Row) -> None:
        if row.kind != "hash":
            return
        if is_job(row.key):
            self.settle(session, row.key)
            session.write("delete from litebroker_rq_runs where job_key = ?", row.key)
        elif is_worker(row.key):
            # Its own, when a worker signs off. Of one that is buried a work horse may still ask for the answer.
            session.write(
                "delete from litebroker_rq_answers"
                " where worker = (select process from litebroker_rq_workers where key = ? and process = ?)",
                row.key,
                processes.own(),
            )
            session.write("delete from litebroker_rq_workers where key = ?", row.key)

    def on_sorted_set(self, session: Session, key: bytes, pairs: list[tuple[float, bytes]]) -> None:
        """These members were put in: an execution that is registered may take until its score before it starts."""
        for score, member in pairs:
            entry = started_entry(key, member)
            if entry is None:
                return
            found = session.select("select job_id, token from litebroker_rq_claims where job_key in (?, ?)", *entry)
            if found:
                lease_ms = int(min(max(score * 1000 - session.now_ms, self._lease_ms), _LONGEST_LEASE_MS))
                session.storage.extend([Lease(*claim) for claim in found], lease_ms)

    def on_removed(self, session: Session, key: bytes, value: bytes) -> None:
        """This value was removed from the list."""
        queue = key.removesuffix(INTERMEDIATE)
        if queue != key and is_queue(queue):
            self.settle(session, job_key(queue, value))

    # The dead

    def expire_executions(self, session: Session, prefix: bytes, origin: bytes, ref: bytes) -> bool:
        """End the job's executions now, so that RQ's own rule for abandoned ones applies. False when none lasted."""
        key = prefix + b":wip:" + origin
        row = session.find(key)
        if row is None:
            return False
        past = session.now_ms // 1000 - 1
        lasting = [member for score, member in self._executions(session, key, ref) if score > past]
        for member in lasting:
            session.change(row)
            session.write(
                "update litebroker_rq_members set score = ? where key_id = ? and member = ?", past, row.id, member
            )
        return bool(lasting)


def _remove_member(session: Session, row: Row, member: bytes) -> None:
    session.change(row)
    session.write("delete from litebroker_rq_members where key_id = ? and member = ?", row.id, member)
    if not session.select("select 1 from litebroker_rq_members where key_id = ? limit 1", row.id):
        session.delete(row)

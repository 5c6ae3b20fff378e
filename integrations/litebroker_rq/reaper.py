"""Workers and jobs whose process is gone are noticed at once, since all of them share this machine.

On Redis a dead worker is noticed when its keys expire: 90 seconds, and up to ten minutes until the next maintenance.
Here whoever waits for a job looks every second. What becomes of the jobs is RQ's own rule, applied by RQ's own code.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from litebroker_rq import answers, clients, processes
from litebroker_rq.commands.sets import remove_members
from litebroker_rq.naming import prefix_of

if TYPE_CHECKING:
    from litebroker_rq.database import Database
    from litebroker_rq.keyspace import Session

log = logging.getLogger("litebroker_rq")

_EVERY_S = 1.0
_last: dict[int, float] = {}
_busy = threading.local()


def reap(database: Database) -> None:
    """Bury dead workers and have RQ handle the jobs that they were running; at most once a second."""
    now = time.monotonic()
    if now - _last.get(id(database), -_EVERY_S) < _EVERY_S or getattr(_busy, "reaping", False):
        return
    _last[id(database)] = now
    _busy.reaping = True
    try:
        runs = bury_dead(database)
        for prefix, origin in sorted({(prefix_of(run.job_key), run.origin) for run in runs}):
            _apply_rule(database, prefix, origin)
        _forget(database, runs)
    finally:
        _busy.reaping = False


class _Run(NamedTuple):
    """A job whose process is gone."""

    job_key: bytes
    origin: bytes
    process: str


def bury_dead(database: Database) -> list[_Run]:
    """Unregister dead workers, so that their names are free, and end the executions of dead jobs.

    Answers the jobs to whose queues RQ's rule is to be applied. They are known as dead until somebody has done so, who
    may be killed at it.
    """
    if database.in_transaction():
        return []
    with database.reading() as session:
        if not any(_dead(session)):
            return []
    with database.writing() as session:
        workers, runs = _dead(session)
        for key in workers:
            _bury_worker(session, key)
        clients.remove_dead(session)
        answers.remove_dead(session)
        for run in runs:
            prefix = prefix_of(run.job_key)
            ref = run.job_key[len(prefix) + len(b":job:") :]
            if database.leases.expire_executions(session, prefix, run.origin, ref):
                log.warning("job %s: the process that ran it is gone", ref.decode("utf-8", "replace"))
    return runs


def _forget(database: Database, runs: list[_Run]) -> None:
    if runs:
        with database.writing() as session:
            for job_key, _, process in runs:
                # By its process, as the job may have been started again by now.
                session.write("delete from litebroker_rq_runs where job_key = ? and process = ?", job_key, process)


def _dead(session: Session) -> tuple[list[bytes], list[_Run]]:
    """Keys of the workers whose processes are gone, and the jobs."""
    known = session.select("select key, process from litebroker_rq_workers")
    living = {process for _, process in known if processes.is_alive(process)}
    workers = [key for key, process in known if process not in living]
    runs = [
        _Run(job_key, origin, process)
        for job_key, origin, process, worker in session.select(
            "select job_key, origin, process, worker from litebroker_rq_runs"
        )
        # While the worker lives, it learns from waitpid() that its work horse has died, and handles that itself.
        if worker not in living and not processes.is_alive(process)
    ]
    return workers, runs


def _bury_worker(session: Session, key: bytes) -> None:
    """What RQ's `register_death` does, but for the hash, which would block the name for a minute."""
    log.warning("%s: its process is gone", key.decode("utf-8", "replace"))
    prefix = prefix_of(key)
    row = session.find(key)
    queues = b""
    if row is not None and row.kind == "hash":
        queues = session.get_field(row, "queues") or b""
    for name in [prefix + b":workers", *(prefix + b":workers:" + queue for queue in queues.split(b",") if queue)]:
        members = session.find(name)
        if members is not None and members.kind == "set":
            remove_members(session, members, [key])
    for name in (key, key + b":executions"):
        row = session.find(name)
        if row is not None:
            session.delete(row)
    session.write("delete from litebroker_rq_workers where key = ?", key)


def _apply_rule(database: Database, prefix: bytes, origin: bytes) -> None:
    """Have RQ fail or retry the jobs of this queue whose executions have ended."""
    from redis import Redis
    from rq.registry import StartedJobRegistry

    from litebroker_rq.client import pool

    registry = StartedJobRegistry(origin.decode(), connection=Redis(connection_pool=pool(database.url)))
    if registry.key.encode() != prefix + b":wip:" + origin:
        return  # the queue of an RQ with another key prefix: its own workers look after it
    try:
        registry.cleanup()
    except Exception:
        log.exception("queue %s: abandoned jobs could not be cleaned up; the next maintenance will", origin.decode())

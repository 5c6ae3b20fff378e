"""Taking jobs back: leases that ended by themselves, and those of processes that died."""

from __future__ import annotations

import logging

from litebroker.errors import StorageError
from litebroker.jobs import JobError, JobRecord
from litebroker.sqlite import machine, rows
from litebroker.sqlite import statements as sql
from litebroker.sqlite.connection import Connection, Row
from litebroker.sqlite.engine import Engine, Tx
from litebroker.sqlite.locks import bury, is_alive

log = logging.getLogger("litebroker")

# How often each process that claims or waits looks for dead ones: a file to open and a lock to try for each that
# claims. Together with the slow poll of a waiter it keeps recovery under two seconds.
CHECK_S = 0.5
_BITE = 100

_LAPSED = JobError("lapsed", message="the lease ended before the job was settled: its worker was killed, or it stalled")
_DIED = JobError("lapsed", message="the worker's process died before the job was settled")


def queue_name(engine: Engine, db: Connection, queue_id: int) -> str:
    """The name of a queue that is there."""
    name = engine.queue_names.get(queue_id)
    if name is None:
        name = str(db.rows(sql.QUEUE_NAME, {"queue": queue_id})[0][0])
    return name


def load(engine: Engine, db: Connection, row: Row) -> JobRecord:
    """A record from a row of any queue."""
    return rows.record(row, queue_name(engine, db, row[1]), steady_to_wall_ms=steady_to_wall_ms(engine))


def steady_to_wall_ms(engine: Engine) -> int:
    """What to add to a steady time to have it on the wall clock as it goes now."""
    return engine.clock.now_ms() - engine.steady_ms()


def recover_ended(engine: Engine, tx: Tx, queue: str, queue_id: int, *, now: int, steady: int) -> list[JobRecord]:
    """Take back the leases of a queue that have ended; those that failed by it."""
    failed: list[JobRecord] = []
    while True:
        lapsed = tx.db.rows(
            sql.RECOVER,
            {
                "queue": queue_id,
                "now": now,
                "steady": steady,
                "error": rows.error_text(_LAPSED),
                "message": rows.error_line(_LAPSED),
            },
        )
        failed += _sort_out(engine, tx, [(job_id, queue, state) for job_id, state in lapsed])
        if len(lapsed) < _BITE:
            return failed


def recover_process(engine: Engine, tx: Tx, process: int) -> int:
    """Take back every lease of a process, and strike it off; how many there were."""
    lapsed = tx.db.rows(
        sql.RECOVER_PROCESS,
        {
            "process": process,
            "now": engine.clock.now_ms(),
            "error": rows.error_text(_DIED),
            "message": rows.error_line(_DIED),
        },
    )
    tx.db.rows(sql.REMOVE_PROCESS, {"id": process})
    _sort_out(engine, tx, [(job_id, queue_name(engine, tx.db, queue_id), state) for job_id, queue_id, state in lapsed])
    return len(lapsed)


def give_back(engine: Engine) -> bool:
    """Give back the leases that this process still has, at its end. False, with a warning, when that failed."""
    if not engine.registered:
        return True
    try:
        with engine.transaction() as tx:
            recover_process(engine, tx, engine.process)
    except StorageError as error:
        log.warning("%s: leases could not be given back at close: %s", engine.path, error)
        return False
    return True


def is_living(engine: Engine, process: int, boot: str) -> bool | None:
    """Whether a process of this number, registered on this start of a machine, lives; None where only its lease tells.

    Dead is who holds no lock on its sidecar any more, on this start of this machine; and, on a local disk, who began
    on an earlier one.
    """
    if process == engine.process:
        return True
    here = machine.boot_id()
    if engine.sidecar is None or not here:
        return None
    if boot == here:
        return is_alive(engine.sidecar, process)
    return False if engine.local else None


def recover_dead(engine: Engine) -> None:
    """Take back what processes held that died since. At most every `CHECK_S`; an error is logged."""
    if engine.path is None or engine.sidecar is None or not engine.check_due(CHECK_S):
        return
    try:
        if engine.registered:
            engine.hold_liveness()
        for process, boot, label in engine.read(lambda db: db.rows(sql.PROCESSES)):
            if is_living(engine, process, boot) is not False:
                continue
            jobs = engine.write(lambda tx, process=process: recover_process(engine, tx, process))  # type: ignore[misc]
            bury(engine.sidecar, process)
            if jobs:
                log.info("%s: the process %s is gone: %d jobs are taken back from it", engine.path, label, jobs)
    except (StorageError, OSError) as error:
        log.warning("%s: the jobs of dead processes could not be looked after: %s", engine.path, error)


def _sort_out(engine: Engine, tx: Tx, lapsed: list[tuple[int, str, int]]) -> list[JobRecord]:
    """Wake who waits for those that are pending again; load those that failed."""
    failed: list[JobRecord] = []
    for job_id, queue, state in lapsed:
        if state == rows.READY:
            tx.wake(queue, 1)
            continue
        found = tx.db.rows(sql.GET, {"id": job_id})
        failed += [load(engine, tx.db, row) for row in found]
    if failed:
        tx.failed(failed)
    return failed

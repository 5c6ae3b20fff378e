"""Write tests/data/schema-NNNN.sql: a file of the schema's version of today, with something of everything in it.

``python -m tests.proof.keep_schema``, once for each version, when it is released. What was released is never written
again: later code has to open it. Until then, whoever edits the schema runs this.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from tests.proof import ROOT

from litebroker.jobs import JobError, JobSpec
from litebroker.schedules import ScheduleSpec
from litebroker.sqlite import SQLiteStorage, machine, schema
from litebroker.storage import ScheduleRecord

_DUE_AT_MS = 1_700_000_000_000
DATA = ROOT / "tests" / "data"


def fill(storage: SQLiteStorage) -> None:
    """Jobs in every state; one that is active, of a process that is gone; values and a schedule."""
    storage.add([JobSpec("work", b'"ready %d"' % n, ref=f"r{n}", priority=n % 2) for n in range(6)])
    storage.add([JobSpec("work", b'"later"', run_at_ms=4_000_000_000_000), JobSpec("work", b'"keyed"', dedupe_key="k")])
    storage.add([JobSpec("grouped", b'"grouped %d"' % n, group="g", group_concurrency=2) for n in range(3)])
    storage.add([JobSpec("ends", b'"end %d"' % n, headers={"a": "b"}, task="t") for n in range(3)])
    completed, failed = storage.claim(["ends"], limit=2, lease_ms=60_000)
    storage.complete([completed.lease], keep=True)
    error = JobError("handler", "ValueError", "no", "stack", ("KeyError: 1",))
    storage.fail(failed.lease, error, retry_in_ms=None)
    storage.cancel([record.id for record in storage.find("ends", ref=None, dedupe_key="none")])
    storage.put("space", "key", b"value", number=3)
    storage.put_schedule(
        ScheduleRecord(
            "ticks", "s", ScheduleSpec(every_ms=60_000), JobSpec("ticks", b'"tick"'), 1_800_000_000_000, None
        )
    )
    storage.claim(["work"], limit=1, lease_ms=60_000)


def main() -> None:
    number = len(schema.migrations())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs.db")
        storage = SQLiteStorage(path, durability="relaxed")
        fill(storage)
        with closing(sqlite3.connect(path)) as db:
            # Before the storage is closed: that would give the active job back.
            text = "\n".join(db.iterdump())
        storage.close()
    # As if it came from another machine, so that its active job has a process that is gone wherever it is opened.
    text = text.replace(machine.boot_id(), "another-start").replace(machine.process_label(), "another:1")
    (DATA / f"schema-{number:04}.sql").write_text(text + "\n")
    print(f"wrote {DATA / f'schema-{number:04}.sql'}")


if __name__ == "__main__":
    main()

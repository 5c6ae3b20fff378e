"""Who runs the same work: bare `sqlite3`, litebroker's `Queue`, and the storage beneath it.

All of them take and give values, so each pays for JSON: the reference with `json`, as one would by hand. The storage
alone gets bytes, and shows what the `Queue` adds to it.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from pathlib import Path
from typing import Any, Literal, Protocol

from litebroker import JobSpec, Queue, SQLiteStorage, Storage

Level = Literal["relaxed", "durable", "full"]

# What a power cut may take is the same on both sides of a line.
SYNCHRONOUS = {"relaxed": "normal", "durable": "full", "full": "full"}
PAYLOAD = {"to": "a@example.com", "text": "x" * 62}  # 100 bytes of JSON
ENCODED = json.dumps(PAYLOAD, separators=(",", ":")).encode()
HOUR_MS = 3_600_000
BATCH = 10_000


class Contestant(Protocol):
    def add(self) -> None:
        """One job of 100 bytes, alone."""

    def add_many(self, count: int) -> None:
        """So many in one transaction."""

    def claim(self) -> Any:
        """The next job, decoded; None when there is none."""

    def complete(self, job: Any) -> bool:
        """Whether its lease was still held."""

    def fill(self, count: int) -> None:
        """Add so many, as fast as it goes."""

    def close(self) -> None: ...


class Raw:
    """The bare statements, with SQLite's own settings but for the journal and the level of durability.

    It keeps no history, no groups, no limit of attempts, no fences: another's lease can be acknowledged.
    """

    def __init__(self, path: Path, level: Level) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute(f"pragma synchronous = {SYNCHRONOUS[level]}")
        self._db.execute(
            "create table if not exists job(id integer primary key, queue text not null, priority integer not null,"
            " due integer not null, received integer not null default 0, payload blob not null)"
        )
        self._db.execute("create index if not exists job_next on job(queue, priority desc, due, id)")

    def add(self) -> None:
        self._db.execute(
            "insert into job(queue, priority, due, payload) values('q', 0, ?, ?)", (_now_ms(), json.dumps(PAYLOAD))
        )

    def add_many(self, count: int) -> None:
        now = _now_ms()
        rows = [(now, json.dumps(PAYLOAD)) for _ in range(count)]
        self._db.execute("begin immediate")
        self._db.executemany("insert into job(queue, priority, due, payload) values('q', 0, ?, ?)", rows)
        self._db.execute("commit")

    def claim(self) -> Any:
        now = _now_ms()
        row = self._db.execute(
            "update job set due = ?, received = received + 1 where id = (select id from job where queue = 'q'"
            " and due <= ? order by priority desc, due limit 1) returning id, payload",
            (now + 30_000, now),
        ).fetchone()
        return None if row is None else (row[0], json.loads(row[1]))

    def complete(self, job: Any) -> bool:
        return self._db.execute("delete from job where id = ?", (job[0],)).rowcount == 1

    def claim_and_complete_many(self, count: int) -> int:
        """What workers do: claim a batch, and acknowledge it whole."""
        now = _now_ms()
        rows = self._db.execute(
            "update job set due = ?, received = received + 1 where id in (select id from job where queue = 'q'"
            " and due <= ? order by priority desc, due limit ?) returning id, payload",
            (now + 30_000, now, count),
        ).fetchall()
        ids = [(job_id,) for job_id, payload in rows if json.loads(payload)]
        self._db.execute("begin immediate")
        self._db.executemany("delete from job where id = ?", ids)
        self._db.execute("commit")
        return len(ids)

    def fill(self, count: int) -> None:
        for size in _bites(count):
            self.add_many(size)

    def close(self) -> None:
        self._db.close()


class Ours:
    """The direct API, as in the README."""

    def __init__(self, path: Path, level: Level) -> None:
        self.queue: Queue[dict[str, str]] = Queue("q", path, durability=level)

    def add(self) -> None:
        self.queue.add(PAYLOAD)

    def add_many(self, count: int) -> None:
        self.queue.add_many([PAYLOAD] * count)

    def claim(self) -> Any:
        jobs = self.queue.claim()
        return jobs[0] if jobs else None

    def complete(self, job: Any) -> bool:
        return self.queue.complete(job)

    def fill(self, count: int) -> None:
        fill(self.queue.storage, count)

    def close(self) -> None:
        self.queue.close()


class OursBelow:
    """The contract's verbs, which the adapters use: payloads are bytes, and nothing is decoded."""

    def __init__(self, path: Path, level: Level) -> None:
        self.storage = SQLiteStorage(path, durability=level)

    def add(self) -> None:
        self.storage.add((JobSpec(queue="q", payload=ENCODED),))

    def add_many(self, count: int) -> None:
        self.storage.add([JobSpec(queue="q", payload=ENCODED) for _ in range(count)])

    def claim(self) -> Any:
        records = self.storage.claim(("q",), limit=1, lease_ms=30_000)
        return records[0] if records else None

    def complete(self, job: Any) -> bool:
        return self.storage.complete((job.lease,))[0]

    def fill(self, count: int) -> None:
        fill(self.storage, count)

    def close(self) -> None:
        self.storage.close()


CONTESTANTS: dict[str, type[Raw | Ours | OursBelow]] = {"raw": Raw, "litebroker": Ours, "storage": OursBelow}


def fill(storage: Storage, count: int) -> None:
    """So many jobs that are due, as fast as it goes."""
    spec = JobSpec(queue="q", payload=ENCODED)
    for size in _bites(count):
        storage.add([spec] * size)


def fill_delayed(storage: Storage, count: int) -> None:
    """So many jobs of the far future, whose priorities are mixed: some above, some below those that are due."""
    numbers = itertools.count()
    for size in _bites(count):
        storage.add(
            [
                JobSpec(queue="q", payload=ENCODED, priority=number % 21 - 10, delay_ms=24 * HOUR_MS + number)
                for number in itertools.islice(numbers, size)
            ]
        )


def _bites(count: int) -> list[int]:
    return [min(BATCH, count - done) for done in range(0, count, BATCH)]


def _now_ms() -> int:
    return int(time.time() * 1000)

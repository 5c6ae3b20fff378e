"""Who runs the same work: bare `sqlite3`, litebroker, and other queues on SQLite.

All take and give values, so each pays for JSON: the reference with `json`, as one would by hand. litebroker's storage
alone gets bytes, and shows what the `Queue` adds to it. A contestant that lacks a verb lacks the method, and is left
out where it is needed. Peers are optional: `pip install --group benchmarks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from tests.benchmarks.measuring import OURS, RAW

from litebroker import JobSpec, Queue, SQLiteStorage, Storage

Level = Literal["relaxed", "durable", "full"]

# What a power cut may take is the same on both sides of a line.
SYNCHRONOUS = {"relaxed": "normal", "durable": "full", "full": "full"}
LEVELS = {"relaxed": "relaxed / NORMAL", "durable": "default / FULL", "full": "full / FULL"}
HOUR_MS = 3_600_000
BATCH = 10_000
# A payload of this size lies in a table of its own in the reference.
APART = 50_000
# After so many jobs, peers that keep what is done are told to remove it, by their own means.
TIDY = 1000


def payload(size: int) -> dict[str, str]:
    """So many bytes of JSON."""
    data = {"to": "a@example.com", "text": ""}
    return {**data, "text": "x" * (size - len(json.dumps(data)))}


class Contestant:
    """One queue on one file.

    Attributes:
        name: In the tables.
        package: What has to be installed, as pip calls it, and
        module: what it is imported as.
        how: How to install it, for pip.
        levels: At which levels it can be compared; its own default, unless it has a choice.
        acknowledges: What happens to a job whose worker is killed.
        shared: Whether several processes may claim from one file.
        payload: Of the next job that is added, as bytes in a spec where there is no such attribute.
    """

    name: ClassVar[str]
    package: ClassVar[str] = ""
    module: ClassVar[str] = ""
    how: ClassVar[str] = "--group benchmarks"
    levels: ClassVar[Sequence[Level]] = ("relaxed", "durable", "full")
    acknowledges: ClassVar[str] = "its lease ends, and it runs again"
    shared: ClassVar[bool] = True
    payload: dict[str, Any]

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        """Open it, with payloads of so many bytes."""

    @classmethod
    def missing(cls) -> bool:
        return bool(cls.module) and importlib.util.find_spec(cls.module) is None

    def add(self) -> object:
        """One job, alone."""
        raise NotImplementedError

    def claim(self) -> Any:
        """The next job, decoded; None when there is none."""
        raise NotImplementedError

    def complete(self, job: Any) -> bool:
        """Whether its lease was still held."""
        raise NotImplementedError

    def fill(self, count: int) -> None:
        """Add so many, as fast as it goes."""
        raise NotImplementedError

    def settings(self) -> str:
        """The journal mode and the level of synchronization, as found; "" where nobody can ask."""
        return ""

    def close(self) -> None:
        raise NotImplementedError


class Raw(Contestant):
    """The bare statements, with SQLite's own settings but for the journal and the level of durability.

    It keeps no history, no groups, no limit of attempts, no fences: another's lease can be acknowledged.
    """

    name = RAW
    acknowledges = "it is due again after 30 s; another's lease can be acknowledged"

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute(f"pragma synchronous = {SYNCHRONOUS[level]}")
        self._db.execute(
            "create table if not exists job(id integer primary key, queue text not null, priority integer not null,"
            " due integer not null, received integer not null default 0, payload blob)"
        )
        self._db.execute("create index if not exists job_next on job(queue, priority desc, due, id)")
        self.payload = payload(size)
        self._apart = size >= APART
        if self._apart:
            self._db.execute("create table if not exists payload(id integer primary key, payload blob not null)")

    def add(self) -> None:
        if self._apart:
            self._add_apart()
        else:
            self._db.execute(_ADD_RAW, (_now_ms(), json.dumps(self.payload)))

    def _add_apart(self) -> None:
        self._db.execute("begin immediate")
        job_id = self._db.execute(_ADD_RAW, (_now_ms(), None)).lastrowid
        self._db.execute("insert into payload values(?, ?)", (job_id, json.dumps(self.payload)))
        self._db.execute("commit")

    def add_many(self, count: int) -> None:
        now = _now_ms()
        rows = [(now, json.dumps(self.payload)) for _ in range(count)]
        self._db.execute("begin immediate")
        self._db.executemany(_ADD_RAW, rows)
        self._db.execute("commit")

    def claim(self) -> Any:
        now = _now_ms()
        row = self._db.execute(
            "update job set due = ?, received = received + 1 where id = (select id from job where queue = 'q'"
            " and due <= ? order by priority desc, due limit 1) returning id, payload",
            (now + 30_000, now),
        ).fetchone()
        if row is None:
            return None
        if self._apart:
            row = self._db.execute("select id, payload from payload where id = ?", row[:1]).fetchone()
        return row[0], json.loads(row[1])

    def complete(self, job: Any) -> bool:
        if not self._apart:
            return self._db.execute("delete from job where id = ?", (job[0],)).rowcount == 1
        self._db.execute("begin immediate")
        self._db.execute("delete from payload where id = ?", (job[0],))
        done = self._db.execute("delete from job where id = ?", (job[0],)).rowcount == 1
        self._db.execute("commit")
        return done

    def claim_and_complete_many(self, count: int) -> int:
        """What workers do: claim a batch, and acknowledge it whole."""
        now = _now_ms()
        rows = self._db.execute(
            "update job set due = ?, received = received + 1 where id in (select id from job where queue = 'q'"
            " and due <= ? order by priority desc, due limit ?) returning id, payload",
            (now + 30_000, now, count),
        ).fetchall()
        ids = [(job_id,) for job_id, data in rows if json.loads(data)]
        self._db.execute("begin immediate")
        self._db.executemany("delete from job where id = ?", ids)
        self._db.execute("commit")
        return len(ids)

    def fill(self, count: int) -> None:
        for size in [1] * count if self._apart else _bites(count):
            self.add() if self._apart else self.add_many(size)

    def settings(self) -> str:
        return found_settings(self._db)

    def close(self) -> None:
        self._db.close()


class RawWoken(Raw):
    """The same with the least that wakes another process: a byte in a FIFO after each commit."""

    name = f"{RAW} and a FIFO"

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        super().__init__(path, level, size=size)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(f"{path}.fifo")
        self._bell = os.open(f"{path}.fifo", os.O_RDWR)

    def add(self) -> None:
        super().add()
        os.write(self._bell, b"\0")

    def listen(self, handler: Callable[[dict[str, Any]], object]) -> None:
        """As `Honker.listen`."""
        while os.read(self._bell, 1):
            job = self.claim()
            handler(job[1])
            self.complete(job)

    def close(self) -> None:
        os.close(self._bell)
        super().close()


_ADD_RAW = "insert into job(queue, priority, due, payload) values('q', 0, ?, ?)"


class Ours(Contestant):
    """The direct API, as in the README."""

    name = OURS
    acknowledges = "it runs again within two seconds, and nobody else can acknowledge it"

    def __init__(self, path: Path, level: Level, *, size: int = 100, **options: Any) -> None:
        self.payload = payload(size)
        self._level = level
        with connections_made() as self._connections:
            self.queue: Queue[dict[str, str]] = Queue("q", path, durability=level, **options)
            self.queue.size()  # It opens the file at the first operation.

    def add(self) -> None:
        self.queue.add(self.payload)

    def add_many(self, count: int) -> None:
        self.queue.add_many([self.payload] * count)

    def claim(self) -> Any:
        jobs = self.queue.claim()
        return jobs[0] if jobs else None

    def complete(self, job: Any) -> bool:
        return self.queue.complete(job)

    def fill(self, count: int) -> None:
        fill(self.queue.storage, count, JobSpec(queue="q", payload=json.dumps(self.payload).encode()))

    def settings(self) -> str:
        return _with_own_sync(self._connections[-1], self._level)

    def close(self) -> None:
        self.queue.close()


class OursBelow(Contestant):
    """The contract's verbs, which the adapters use: payloads are bytes, and nothing is decoded."""

    name = "its storage"
    acknowledges = Ours.acknowledges

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        self._spec = JobSpec(queue="q", payload=json.dumps(payload(size)).encode())
        self._level = level
        with connections_made() as self._connections:
            self.storage = SQLiteStorage(path, durability=level)
            self.storage.counts("q")

    def add(self) -> None:
        self.storage.add((self._spec,))

    def add_many(self, count: int) -> None:
        self.storage.add([self._spec] * count)

    def claim(self) -> Any:
        records = self.storage.claim(("q",), limit=1, lease_ms=30_000)
        return records[0] if records else None

    def complete(self, job: Any) -> bool:
        return self.storage.complete((job.lease,))[0]

    def fill(self, count: int) -> None:
        fill(self.storage, count, self._spec)

    def settings(self) -> str:
        return _with_own_sync(self._connections[-1], self._level)

    def close(self) -> None:
        self.storage.close()


class Peer(Contestant):
    """Another queue on SQLite, through Python's own driver."""

    connections: list[sqlite3.Connection]

    def fill(self, count: int) -> None:
        """Without waiting for the disk meanwhile."""
        before = [connection.execute("pragma synchronous").fetchone()[0] for connection in self.connections]
        for connection in self.connections:
            connection.execute("pragma synchronous = off")
        for _ in range(count):
            self.add()
        for connection, level in zip(self.connections, before, strict=True):
            connection.execute(f"pragma synchronous = {level}")

    def settings(self) -> str:
        return found_settings(self.connections[-1])


class LiteQueue(Peer):
    """``done`` marks a message; `prune` removes those that are."""

    name = package = module = "litequeue"
    levels = ("relaxed",)
    acknowledges = "it stays locked until somebody calls retry"

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        self._queue = importlib.import_module(self.module).LiteQueue(path, timeout=60)
        self.connections = [self._queue.conn]
        self.payload = payload(size)
        self._done = 0

    def add(self) -> None:
        self._queue.put(json.dumps(self.payload))

    def add_many(self, count: int) -> None:
        with self._queue.transaction("IMMEDIATE"):
            for _ in range(count):
                self._queue.put(json.dumps(self.payload))

    def claim(self) -> Any:
        message = self._queue.pop()
        return None if message is None else (message, json.loads(message.data))

    def complete(self, job: Any) -> bool:
        message = job[0]
        # Its later releases number the claims.
        claim = {"claim_id": message.claim_id} if hasattr(message, "claim_id") else {}
        self._queue.done(message.message_id, **claim)
        self._done += 1
        if self._done % TIDY == 0:
            self._queue.prune()
        return True

    def close(self) -> None:
        self._queue.close()


class PersistQueue(Peer):
    """`SQLiteAckQueue`, with JSON instead of its pickle."""

    name = package = "persist-queue"
    module = "persistqueue"
    levels = ("full",)
    acknowledges = "it runs again when a process opens the file anew"
    shared = False  # A claim is a look and then a change: two processes can get the same.

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        self._empty = importlib.import_module("persistqueue.exceptions").Empty
        with connections_made() as self.connections:
            self._queue = importlib.import_module(self.module).SQLiteAckQueue(
                str(path.parent),
                db_file_name=path.name,
                multithreading=True,
                timeout=60,
                serializer=importlib.import_module("persistqueue.serializers.json"),
            )
        self.payload = payload(size)
        self._done = 0

    def add(self) -> None:
        self._queue.put(self.payload)

    def claim(self) -> Any:
        try:
            return self._queue.get(block=False, raw=True)
        except self._empty:
            return None

    def complete(self, job: Any) -> bool:
        self._queue.ack(id=job["pqid"])
        self._done += 1
        if self._done % TIDY == 0:
            self._queue.clear_acked_data(max_delete=TIDY, keep_latest=0)
        return True

    def close(self) -> None:
        self._queue.close()


class HueyStorage(Peer):
    """`huey.storage.SqliteStorage`: what `SqliteHuey` keeps its tasks in. A task is gone when it is read."""

    name = "huey, at most once"
    package = module = "huey"
    levels = ("full",)
    acknowledges = "it is lost: at most once"

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        with connections_made() as self.connections:
            self._storage = importlib.import_module("huey.storage").SqliteStorage("q", filename=str(path), timeout=60)
            self._storage.queue_size()
        self.connections = self.connections[-1:]  # It closes the one that made the tables.
        self.payload = payload(size)

    def add(self) -> None:
        self._storage.enqueue(json.dumps(self.payload).encode())

    def claim(self) -> Any:
        data = self._storage.dequeue()
        return None if data is None else json.loads(data)

    def complete(self, job: Any) -> bool:
        return True

    def close(self) -> None:
        self._storage.close()


class Honker(Contestant):
    """A queue in an extension of SQLite's, with a driver of its own.

    It is not in the group `benchmarks`: where there is no wheel for a machine, installing it takes a Rust compiler.
    """

    name = package = module = how = "honker"
    levels = ("relaxed",)
    acknowledges = "it runs again when its visibility timeout ends"

    def __init__(self, path: Path, level: Level, *, size: int = 100) -> None:
        self._db: Any = importlib.import_module(self.module).open(str(path))
        self._queue = self._db.queue("q", visibility_timeout_s=30)
        self.payload = payload(size)

    def add(self) -> None:
        self._queue.enqueue(self.payload)

    def add_many(self, count: int) -> None:
        with self._db.transaction() as transaction:
            for _ in range(count):
                self._queue.enqueue(self.payload, tx=transaction)

    def claim(self) -> Any:
        job = self._queue.claim_one("benchmark")
        if job is not None:
            _ = job.payload
        return job

    def complete(self, job: Any) -> bool:
        return bool(job.ack())

    def claim_and_complete_many(self, count: int) -> int:
        jobs = self._queue.claim_batch("benchmark", count)
        ids = [job.id for job in jobs if job.payload]
        return int(self._queue.ack_batch(ids, "benchmark"))

    def listen(self, handler: Callable[[dict[str, Any]], object]) -> None:
        """Call it with each job's payload, as soon as there is one, and complete the job; this does not end."""

        async def work() -> None:
            async for job in self._queue.claim("benchmark"):
                handler(job.payload)
                job.ack()

        asyncio.run(work())

    def fill(self, count: int) -> None:
        for size in _bites(count):
            self.add_many(size)

    def settings(self) -> str:
        # Its connection that writes is the one that has a transaction; it has others that read.
        with self._db.transaction() as transaction:
            (journal,), (level,) = (tuple(transaction.query(f"pragma {it}")[0].values()) for it in _PRAGMAS)
        return f"{journal} / {_SYNC_NAMES[int(level)]}"

    def close(self) -> None:
        self._db.close()


PEERS: Sequence[type[Contestant]] = (LiteQueue, PersistQueue, HueyStorage, Honker)
ALL: Sequence[type[Contestant]] = (Raw, Ours, OursBelow, *PEERS)
CONTESTANTS = {kind.name: kind for kind in ALL} | {RawWoken.name: RawWoken}
# What happens to a job whose worker is killed; the last two are under frameworks.
WHEN_KILLED = {kind.name: kind.acknowledges for kind in ALL} | {
    "dramatiq-sqlite": "it stays marked as consumed",
    "SqliteHuey": HueyStorage.acknowledges,
}

_PRAGMAS = ("journal_mode", "synchronous")
_SYNC_NAMES = ("OFF", "NORMAL", "FULL", "EXTRA")


def found_settings(db: sqlite3.Connection) -> str:
    """The journal mode and the level of synchronization that the connection has."""
    (journal,), (level,) = (db.execute(f"pragma {it}").fetchone() for it in _PRAGMAS)
    return f"{journal} / {_SYNC_NAMES[level]}"


def _with_own_sync(db: sqlite3.Connection, level: Level) -> str:
    """Ours waits for the disk by itself, once for all that wait: SQLite's own level does not tell it."""
    own = {"relaxed": "", "durable": ", and fdatasync before add returns", "full": ", and fdatasync after each commit"}
    return found_settings(db) + own[level]


@contextmanager
def connections_made() -> Iterator[list[sqlite3.Connection]]:
    """Those that anybody in this process opens meanwhile, through Python's own driver."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **options))
        return made[-1]

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sqlite3, "connect", connect)
        sqlite3.connect = noted  # type: ignore[assignment]
        yield made


def fill(storage: Storage, count: int, spec: JobSpec) -> None:
    """So many jobs that are due, as fast as it goes."""
    size = max(1, min(BATCH, 10_000_000 // len(spec.payload)))
    for done in range(0, count, size):
        storage.add([spec] * min(size, count - done))


def fill_delayed(storage: Storage, count: int) -> None:
    """So many jobs of the far future, whose priorities are mixed: some above, some below those that are due."""
    numbers = itertools.count()
    encoded = json.dumps(payload(100)).encode()
    for size in _bites(count):
        storage.add(
            [
                JobSpec(queue="q", payload=encoded, priority=number % 21 - 10, delay_ms=24 * HOUR_MS + number)
                for number in itertools.islice(numbers, size)
            ]
        )


def _bites(count: int) -> list[int]:
    return [min(BATCH, count - done) for done in range(0, count, BATCH)]


def _now_ms() -> int:
    return int(time.time() * 1000)

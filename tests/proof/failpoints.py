"""A process is killed while it stands inside a step: each step of each verb there is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.proof.figures import Figures
from tests.proof.standing import Child, Step, Steps, ask, content
from tests.test_storage_model import FAULTS

from litebroker.jobs import JobCopy, JobError, JobRecord, JobSpec, Keep, State
from litebroker.schedules import ScheduleSpec
from litebroker.sqlite import SQLiteStorage
from litebroker.storage import ScheduleRecord

_SCHEDULE = ScheduleRecord("work", "s", ScheduleSpec(every_ms=1000), JobSpec("work", b"tick"), 1000, None)
# What differs from run to run, and says nothing of what was done.
_VARIES = frozenset({"id", "token", "owner_token", "lease_until_ms", "turn"})
# Of these it says something whether they are there.
_PRESENT = ("_at_ms", "owner_job", "history", "error")
_SHOWN = ("litebroker_job", "litebroker_value", "litebroker_schedule", "litebroker_queue")

Before = Callable[[SQLiteStorage], Any]
Act = Callable[[SQLiteStorage, Any], object]


@dataclass(frozen=True)
class Verb:
    """A call of the contract, on the file that `prepare` makes.

    Attributes:
        before: What has to be done first, outside of its steps; its answer goes to ``act``.
        whole: It is one transaction: what others see of the jobs, values and schedules is as before, or as after.
    """

    name: str
    act: Act
    before: Before = lambda _storage: None
    whole: bool = True
    durability: str = "durable"


def job(payload: bytes, queue: str = "work", **options: Any) -> JobSpec:
    return JobSpec(queue, payload, **options)


def claimed(limit: int = 1, queue: str = "work", lease_ms: int = 60_000) -> Callable[[SQLiteStorage], list[JobRecord]]:
    return lambda storage: storage.claim([queue], limit=limit, lease_ms=lease_ms)


def lapsed(storage: SQLiteStorage) -> list[JobRecord]:
    found = storage.claim(["work"], limit=2, lease_ms=1)
    time.sleep(0.005)
    return found


def those(state: State) -> Callable[[SQLiteStorage], list[int]]:
    return lambda storage: [record.id for record in storage.page("work", state)]


def leases(records: Sequence[JobRecord]) -> list[Any]:
    return [record.lease for record in records]


def due(storage: SQLiteStorage) -> ScheduleRecord:
    storage.put_schedule(_SCHEDULE)
    return storage.list_schedules("work")[0]


def delayed_is_due(storage: SQLiteStorage) -> None:
    storage.add([job(b"soon", "later", delay_ms=1) for _ in range(3)])
    time.sleep(0.005)


def widowed(storage: SQLiteStorage) -> None:
    """Another process claims, and dies."""
    path = str(storage.path)

    def claims() -> None:
        SQLiteStorage(path, driver=storage._engine.driver).claim(["work"], limit=2, lease_ms=60_000)  # noqa: SLF001
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(ChildProcessError):
        ask(claims)
    time.sleep(0.01)


def in_a_transaction(storage: SQLiteStorage, records: list[JobRecord]) -> None:
    with storage.transaction() as transaction:
        transaction.complete(leases(records))
        transaction.add([job(b"follows"), job(b"grouped", group="g2")])
        transaction.put("s", "result", b"x", ttl_ms=60_000)


def on_the_callers_connection(storage: SQLiteStorage, records: list[JobRecord]) -> None:
    with closing(sqlite3.connect(str(storage.path), isolation_level=None)) as db:
        db.execute("begin immediate")
        bound = storage.bind(db)
        bound.complete(leases(records))
        bound.add([job(b"theirs")])
        db.execute("commit")


def removed(storage: SQLiteStorage) -> list[JobCopy]:
    """What was there, as a tool carries it."""
    copies = storage.walk_jobs()
    storage.remove([copy.record.id for copy in copies])
    return copies


def expired(storage: SQLiteStorage) -> None:
    with storage.transaction():  # Outside of one, to put the second would sweep the first if it has expired.
        for key in ("a", "b"):
            storage.put("s", key, ttl_ms=1)
    time.sleep(0.005)


def looks(storage: SQLiteStorage, _: object) -> None:
    """All that only reads."""
    ids = [record.id for record in storage.page("work", State.PENDING)]
    storage.get(ids[0])
    storage.rank(ids[0])
    storage.states(ids)
    storage.holders(ids)
    storage.standing(ids[0])
    storage.issued_at_ms(ids[0])
    storage.arrivals(None)
    storage.ended_since("work", State.FAILED, 0)
    storage.find("work", ref="j0")
    storage.counts("work")
    storage.oldest_due_at_ms("work")
    storage.queues()
    storage.walk_jobs()
    storage.walk_values()
    storage.is_awaited("work")
    storage.peek("s", ["k"])
    storage.scan("s")
    storage.size("s")
    storage.get_schedule("work", "s")
    storage.list_schedules("work")
    storage.due_schedules(["work"])


def waits(storage: SQLiteStorage, _: object) -> None:
    listener = storage.listener(["work"], ["topic"])
    storage.notify("topic")
    storage.notify_queue("work")
    listener.wait(1)
    listener.close()


def with_a_checkpoint(storage: SQLiteStorage, _: object) -> None:
    storage._engine._checkpoint_at = 1  # noqa: SLF001 - it comes every few hundred pages otherwise
    storage.add([job(b"x" * 20_000)])
    storage.add([job(b"y")])


VERBS = {
    verb.name: verb
    for verb in (
        Verb("add", lambda storage, _: storage.add([job(b"one")])),
        Verb("add, on disk", lambda storage, _: storage.add([job(b"one")]), durability="full"),
        Verb("add many", lambda storage, _: storage.add([job(b"%d" % n, ref=f"r{n}") for n in range(5)])),
        Verb("add to a new queue", lambda storage, _: storage.add([job(b"one", "new")]), whole=False),
        Verb("add with keys", lambda storage, _: storage.add([job(b"a", dedupe_key="k"), job(b"b", dedupe_key="n")])),
        Verb(
            "add to a group", lambda storage, _: storage.add([job(b"a", group="g", front=True), job(b"b", group="h")])
        ),
        Verb("add delayed", lambda storage, _: storage.add([job(b"a", delay_ms=50_000), job(b"b", run_at_ms=5)])),
        Verb("claim", lambda storage, _: storage.claim(["work"], limit=1, lease_ms=60_000), whole=False),
        Verb("claim many", lambda storage, _: storage.claim(["none", "work"], limit=5, lease_ms=60_000), claimed()),
        Verb("claim grouped", lambda storage, _: storage.claim(["grouped"], limit=5, lease_ms=60_000), claimed()),
        Verb(
            "claim what becomes due",
            lambda storage, _: storage.claim(["later"], limit=5, lease_ms=60_000),
            delayed_is_due,
            whole=False,
        ),
        Verb("claim lapsed", lambda storage, _: storage.claim(["work"], limit=5, lease_ms=60_000), lapsed, whole=False),
        Verb("claim from a dead process", lambda storage, _: storage.recover(), widowed, whole=False),
        Verb("extend", lambda storage, records: storage.extend(leases(records), 90_000), claimed(2)),
        Verb("complete", lambda storage, records: storage.complete(leases(records)), claimed()),
        Verb("complete many", lambda storage, records: storage.complete(leases(records), keep=True), claimed(3)),
        Verb("complete grouped", lambda storage, records: storage.complete(leases(records)), claimed(2, "grouped")),
        Verb(
            "fail",
            lambda storage, records: storage.fail(records[0].lease, JobError("handler"), retry_in_ms=0),
            claimed(),
        ),
        Verb(
            "fail for good",
            lambda storage, records: storage.fail(records[0].lease, JobError("handler"), retry_in_ms=None),
            claimed(),
        ),
        Verb("release", lambda storage, records: storage.release(leases(records)), claimed(2)),
        Verb("recover", lambda storage, _: storage.recover(["work"]), lapsed),
        Verb("retry", lambda storage, ids: storage.retry(ids), those(State.FAILED)),
        Verb("retry elsewhere", lambda storage, ids: storage.retry(ids, queue="grouped"), those(State.FAILED)),
        Verb("cancel", lambda storage, ids: storage.cancel(ids[:3]), those(State.PENDING)),
        Verb("reschedule", lambda storage, ids: storage.reschedule(ids[0], due_at_ms=2**42), those(State.PENDING)),
        Verb("remove", lambda storage, ids: storage.remove(ids[:3]), those(State.PENDING)),
        Verb("move", lambda storage, _: storage.move("work", "grouped")),
        Verb("move jobs", lambda storage, ids: storage.move_jobs(ids[:3], "grouped"), those(State.PENDING)),
        Verb("put jobs", lambda storage, copies: storage.put_jobs(copies), removed),
        Verb("purge", lambda storage, _: storage.purge("work", [State.PENDING, State.FAILED]), whole=False),
        Verb("prune", lambda storage, _: storage.prune("work", {State.FAILED: Keep(count=0)})),
        Verb("pause", lambda storage, _: storage.pause("work", paused=True)),
        Verb("put", lambda storage, _: storage.put("s", "k", b"new", ttl_ms=60_000)),
        Verb("put if absent", lambda storage, _: storage.put("s", "once", if_absent=True)),
        Verb(
            "put with an owner",
            lambda storage, records: storage.put("s", "mine", b"x", owner=records[0].lease),
            claimed(),
        ),
        Verb("pop", lambda storage, _: storage.pop("s", "k")),
        Verb("delete", lambda storage, _: storage.delete("s", ["k", "none"])),
        Verb("sweep", lambda storage, _: storage.sweep(), expired),
        Verb("increment", lambda storage, _: storage.increment("s", "k", 3, low=0, high=100)),
        Verb("clear", lambda storage, _: storage.clear("s")),
        Verb("put schedule", lambda storage, _: storage.put_schedule(_SCHEDULE)),
        Verb("remove schedule", lambda storage, _: storage.remove_schedule("work", "s"), due),
        Verb("fire schedule", lambda storage, record: storage.fire_schedule(record, next_at_ms=2**42), due),
        Verb("transaction", in_a_transaction, claimed()),
        Verb("look", looks),
        Verb("wait", waits),
        Verb("checkpoint", with_a_checkpoint, whole=False),
        Verb("close", lambda storage, _: storage.close(), claimed(3)),
    )
}
# What needs the one driver, or a file that is not there yet.
_STDLIB_ONLY = (Verb("bind", on_the_callers_connection, claimed()),)
FIRST_OPEN = Verb("first open", lambda storage, _: storage.open(), whole=False)


def prepare(path: Path) -> None:
    """A file with something of everything. In a process of its own."""
    storage = SQLiteStorage(path, durability="relaxed")
    storage.add([job(b"job %d" % n, ref=f"j{n}", dedupe_key="k" if n == 0 else None) for n in range(8)])
    storage.add([job(b"late", delay_ms=3_600_000)])
    storage.add([job(b"grouped %d" % n, "grouped", group="g" if n % 2 else "h") for n in range(4)])
    for record in storage.claim(["work"], limit=3, lease_ms=60_000):
        if record.ref == "j0":
            storage.release([record.lease])
        else:
            storage.fail(record.lease, JobError("handler"), retry_in_ms=None)
    (record,) = storage.claim(["work"], limit=1, lease_ms=60_000)
    storage.complete([record.lease], keep=True)
    storage.put("s", "k", b"value", number=2)
    storage.close()


@dataclass(frozen=True)
class Place:
    """Where the steps of a verb are looked for."""

    driver: str
    writes: bool = False

    def steps(self, stand_at: Step | None) -> Steps:
        steps = Steps(stand_at)
        if self.writes:
            steps.at_writes()
        else:
            steps.at_statements()
            steps.at_system_calls()
        return steps


PLACES = [Place("sqlite3")]
if find_spec("apsw") is not None:
    PLACES += [Place("apsw"), Place("apsw", writes=True)]


def _run(verb: Verb, path: Path, place: Place, stand_at: Step | None) -> list[Step]:
    """In a child: the verb, with its steps recorded, or to its stand."""
    steps = place.steps(stand_at)
    storage = SQLiteStorage(path, driver=place.driver, durability=verb.durability, busy_timeout=10)
    found = None
    if verb is not FIRST_OPEN:
        storage.open()
        found = verb.before(storage)
    steps.arm()
    verb.act(storage, found)
    steps.disarm()
    return steps.seen if stand_at is None else []


def shown(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What of the content says what was done, and is the same in every run."""
    lines = []
    for table in _SHOWN:
        for row in found.get(table, ()):
            kept = {
                name: value != "None" if name.endswith(_PRESENT) else value
                for name, value in row.items()
                if name not in _VARIES
            }
            lines.append(f"{table} {kept}")
    return sorted(lines)


def check(path: Path, driver: str) -> list[str]:
    """What is wrong with the file after the kill. In a process of its own, which goes on with the work."""
    wrong = []
    storage = SQLiteStorage(path, driver=driver, durability="relaxed", busy_timeout=5)
    if storage.execute("pragma integrity_check") != [("ok",)]:
        wrong.append("integrity_check found the file damaged")
    wrong += [what for what, statement in FAULTS.items() if storage.execute(statement)]
    began = time.monotonic()
    (added,) = storage.add([job(b"after")])
    if time.monotonic() - began > 4:
        wrong.append("the next to write had to wait for the dead")
    deadline = time.monotonic() + 10
    while any(storage.counts(queue.name).active for queue in storage.queues()):
        storage.recover()
        if time.monotonic() > deadline:
            wrong.append("the jobs of the dead were not taken back")
            break
        time.sleep(0.01)
    wanted = {int(row[0]) for row in storage.execute("select id from litebroker_job where state in (0, 1)")}
    for queue in storage.queues():
        storage.pause(queue.name, paused=False)
        while records := storage.claim([queue.name], limit=50, lease_ms=60_000):
            wanted -= {record.id for record in records}
            if not all(storage.complete([record.lease for record in records])):
                wrong.append("a job that was claimed could not be completed")
    if wanted or added.id in wanted:
        wrong.append(f"the jobs {sorted(wanted)} could not be claimed")
    storage.close()
    return wrong


class Bench:
    """One verb at one place: what it shows before and after, its steps, and a file for each of them."""

    def __init__(self, verb: Verb, place: Place, folder: Path, prepared: Path) -> None:
        self.verb, self.place, self.folder, self.prepared = verb, place, folder, prepared
        self.number = 0
        path = self._copy()
        started = ask(lambda: self._begun(path))
        path = self._copy()
        self.steps: list[Step] = [(name, count) for name, count in ask(lambda: _run(verb, path, place, None))]
        ended = ask(lambda: content(path))
        self.may_be = [shown(started), shown(ended)]
        self._clear(path)

    def _begun(self, path: Path) -> object:
        storage = SQLiteStorage(path, driver=self.place.driver)
        if self.verb is not FIRST_OPEN:
            self.verb.before(storage)
        return ask(lambda: content(path))

    def _copy(self) -> Path:
        self.number += 1
        folder = self.folder / f"{self.number}"
        folder.mkdir()
        path = folder / "jobs.db"
        if self.verb is not FIRST_OPEN:
            shutil.copy(self.prepared, path)
        return path

    def _clear(self, path: Path) -> None:
        shutil.rmtree(path.parent)

    def kill_at(self, step: Step) -> list[str] | None:
        """What was wrong afterwards; None when it did not come to this step."""
        path = self._copy()
        child = Child(lambda: _run(self.verb, path, self.place, step))
        if not child.stands():
            self._clear(path)
            return None
        seen = ask(lambda: content(path))
        child.kill()
        wrong: list[str]
        left, wrong = ask(lambda: (content(path), check(path, self.place.driver)))
        # What stands in the WAL to its end is committed, though SQLite has not told others yet.
        if seen != left and not self.place.writes:
            wrong.append("what others saw before the kill is not what was there after it")
        if self.verb.whole and shown(left) not in self.may_be:
            wrong.append(f"it happened by half: {[line for line in shown(left) if line not in self.may_be[0]]}")
        self._clear(path)
        return wrong


def benches() -> Iterator[tuple[Verb, Place]]:
    """Every verb at every place."""
    for place in PLACES:
        extra = _STDLIB_ONLY if place.driver == "sqlite3" else ()
        for verb in (*VERBS.values(), *extra, FIRST_OPEN):
            yield verb, place


def failpoints(folder: Path, seconds: float, seed: int) -> Figures:
    """Kills at steps, drawn by chance, until the time is up; every step once if it is enough."""
    figures = Figures("failpoints", seed)
    chance = random.Random(seed)
    prepared = folder / "prepared.db"
    with figures.timed():
        deadline = time.monotonic() + seconds
        ask(lambda: prepare(prepared))
        todo = list(benches())
        chance.shuffle(todo)
        for number, (verb, place) in enumerate(todo):
            name = f"{verb.name} ({place.driver}{', writes' if place.writes else ''})"
            here = folder / f"bench-{number}"
            here.mkdir()
            # The time that is left is shared among the verbs that are left.
            until = time.monotonic() + (deadline - time.monotonic()) / (len(todo) - number)
            try:
                _kill_at_all(Bench(verb, place, here, prepared), name, chance, until, figures)
            except ChildProcessError as error:  # also what the verb itself raises
                figures.wrong("unexplained", f"{name}: {error}")
            shutil.rmtree(here)
            if time.monotonic() > deadline:
                break
    return figures


def _kill_at_all(bench: Bench, name: str, chance: random.Random, until: float, figures: Figures) -> None:
    for step in chance.sample(bench.steps, len(bench.steps)):
        wrong = bench.kill_at(step)
        figures.fault("steps not reached again" if wrong is None else "kills inside a step")
        figures.jobs += 14  # as many as there are in the file
        figures.wrong("unexplained", *(f"{name}, {step[0]} ({step[1]}): {what}" for what in wrong or ()))
        if time.monotonic() > until:
            break

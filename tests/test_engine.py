"""One file in one process: threads that share transactions, what strikes in the middle, and what reaches the disk."""

# What is tested here lies beneath the verbs.
# ruff: noqa: SLF001

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import inspect
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from litebroker.errors import DatabaseBusyError, GroupConflictError, StorageError
from litebroker.jobs import JobError, JobSpec, Lease, State
from litebroker.sqlite import SQLiteStorage, engine, open_storage
from litebroker.sqlite.connection import connect
from litebroker.sqlite.engine import Engine, Tx, _Request

LIMIT = 20  # seconds for what takes milliseconds

DRIVERS = ["sqlite3", pytest.param("apsw", marks=pytest.mark.skipif(find_spec("apsw") is None, reason="no apsw"))]


class StruckError(BaseException):
    """What an asynchronous exception or a signal handler raises here."""


def job(payload: bytes = b"{}", **options: Any) -> JobSpec:
    return JobSpec(queue="work", payload=payload, **options)


def wait_until(condition: Callable[[], object], what: str = "it did not happen") -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.0005)


def stored(path: Path, driver: str = "sqlite3") -> dict[int, bytes]:
    """What another connection sees.

    It is of the same driver, as two copies of SQLite in one process drop each other's locks.
    """
    db = connect(str(path), driver, busy_timeout_ms=1000)
    try:
        return {id: payload for id, payload in db.rows("select id, payload from litebroker_job")}  # noqa: C416
    finally:
        db.close()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> bool:
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def writer_lock_is_held(path: Path) -> bool:
    with open(f"{path}-litebroker/write.lock", "rb") as file:  # noqa: PTH123
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def left_behind(of: SQLiteStorage) -> list[str]:
    """What an operation that is over has not put back."""
    found = []
    mine: Engine = of._engine
    if writer_lock_is_held(Path(str(of.path))):
        found.append("the writer lock")
    if mine._db is not None and mine._db.in_transaction:
        found.append("a transaction")
    if mine._tx is not None:
        found.append("its name")
    free: list[bool] = []

    def probe() -> None:
        for lock in (mine._lead, mine._read_lock, mine._sync_lock, mine.identities._lock):
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    names = ("the lead", "the read lock", "the sync lock", "the id lock")
    return found + [name for name, is_free in zip(names, free, strict=True) if not is_free]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(path, durability="relaxed", busy_timeout=LIMIT)
    storage.open()
    yield storage
    storage.close()


@contextlib.contextmanager
def led(storage: SQLiteStorage) -> Iterator[None]:
    """Somebody leads meanwhile, so that those who write wait and then go together."""
    mine = storage._engine
    mine._lead.acquire()
    mine._led = True
    try:
        yield
    finally:
        mine._lead.release()


# -- group commit --


def test_an_operation_that_fails_does_not_take_its_companions_with_it(storage: SQLiteStorage, path: Path) -> None:
    storage.add([job(group="g", group_concurrency=1)])
    done: dict[int, object] = {}

    def add(number: int) -> None:
        try:
            done[number] = storage.add([job(b"%d" % number, group="g", group_concurrency=2 if number == 3 else 1)])[
                0
            ].id
        except GroupConflictError as error:
            done[number] = error

    with led(storage):
        threads = [in_thread(lambda number=number: add(number)) for number in range(8)]  # type: ignore[misc]
        wait_until(lambda: len(storage._engine._waiting) == 8)
    assert joined(*threads)

    assert isinstance(done.pop(3), GroupConflictError)
    in_file = stored(path)
    assert {number: in_file[id] for number, id in done.items()} == {n: b"%d" % n for n in done}  # type: ignore[index]
    assert len(in_file) == 8


def test_an_operation_whose_companion_fails_runs_again_and_happens_once(storage: SQLiteStorage) -> None:
    runs: list[str] = []

    def count(tx: Tx) -> int:
        runs.append("count")
        tx.db.rows("update litebroker_value set number = number + 1 where key = 'k'")
        return len(runs)

    def fail(_tx: Tx) -> None:
        runs.append("fail")
        raise LookupError

    storage.put("s", "k")
    answers: list[int] = []
    with led(storage):
        first = in_thread(lambda: answers.append(storage._engine.write(count)))
        wait_until(lambda: len(storage._engine._waiting) == 1)
        second = in_thread(lambda: _ignore(storage, fail))
        wait_until(lambda: len(storage._engine._waiting) == 2)
    assert joined(first, second)

    assert runs.count("count") == 2
    assert answers == [3]  # the answer is that of the run that was committed
    assert storage.peek("s", ["k"])["k"].number == 1


def _ignore(storage: SQLiteStorage, op: Callable[[Tx], None]) -> None:
    with contextlib.suppress(LookupError):
        storage._engine.write(op)


def test_threads_that_add_at_full_durability_share_commits(path: Path) -> None:
    storage = SQLiteStorage(path, durability="full", busy_timeout=LIMIT)
    storage.add([job()])
    before = storage.transactions
    answers: dict[bytes, int] = {}
    start = threading.Barrier(32)

    def add(thread: int) -> None:
        start.wait()
        for number in range(25):
            payload = b"%d-%d" % (thread, number)
            answers[payload] = storage.add([job(payload)])[0].id

    threads = [in_thread(lambda thread=thread: add(thread)) for thread in range(32)]  # type: ignore[misc]
    assert joined(*threads)

    in_file = stored(path)
    assert len(answers) == len(set(answers.values())) == 800
    assert {in_file[id]: id for id in answers.values()} == answers  # each thread got what is its own
    assert storage.transactions - before < 400
    storage.close()


def test_threads_that_claim_and_complete_together_get_each_job_once(storage: SQLiteStorage) -> None:
    ids = {added.id for added in storage.add([job() for _ in range(600)])}
    claimed: list[int] = []
    settled: list[bool] = []

    def work() -> None:
        while found := storage.claim(["work"], limit=3, lease_ms=60_000):
            claimed.extend(record.id for record in found)
            settled.extend(storage.complete([record.lease for record in found]))

    threads = [in_thread(work) for _ in range(8)]
    assert joined(*threads)

    assert sorted(claimed) == sorted(ids)
    assert all(settled)
    assert storage.counts("work").active == 0


def test_the_threads_that_wait_do_not_wait_one_after_the_other_when_the_file_is_busy(path: Path) -> None:
    storage = SQLiteStorage(path, busy_timeout=0.4)
    storage.add([job()])
    stranger = sqlite3.connect(path, isolation_level=None)
    stranger.execute("begin immediate")
    waits: list[float] = []

    def add() -> None:
        began = time.monotonic()
        try:
            storage.add([job(), job()])
        except DatabaseBusyError:
            waits.append(time.monotonic() - began)

    with led(storage):
        threads = [in_thread(add) for _ in range(12)]
        wait_until(lambda: len(storage._engine._waiting) == 12)
    assert joined(*threads)
    stranger.execute("rollback")
    stranger.close()
    storage.add([job()])

    assert len(waits) == 12
    assert max(waits) < 2.4  # not twelve times 0.4
    assert len(stored(path)) == 2
    storage.close()


# -- what strikes in the middle --


def strike() -> None:
    raise StruckError


class Interruption:
    """Does something in this thread, once, at the n-th point in our code at which CPython would run a signal handler.

    At those it would raise what another thread has set, too: at the begin of a Python function, and the moment after a
    call of a function in C; before Python 3.11 after that of any function.
    """

    def __init__(self, at: int, do: Callable[[], object] = strike) -> None:
        self.left = at
        self.came: str | None = None
        self._do = do

    def __enter__(self) -> Interruption:  # noqa: PYI034 - typing.Self is of Python 3.11
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_exception: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if self.came is None and event in _events(code):
            self.left -= 1
            if self.left < 0:
                self.came = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name} {event}"
                self._do()


@cache
def _events(code: CodeType) -> frozenset[str]:
    # A generator's begin may be its end, at which Python swallows what is raised.
    if not ("/litebroker/" in code.co_filename or code.co_filename.endswith("contextlib.py")):
        return frozenset()
    if code.co_name == "<genexpr>":
        return frozenset()
    if sys.version_info >= (3, 11):
        return frozenset({"call", "c_return"})
    # There a profiler that raises leaves a generator without running its `finally`; what is pending does not.
    return frozenset({"c_return"} if code.co_flags & inspect.CO_GENERATOR else {"call", "c_return", "return"})


def adds_one(storage: SQLiteStorage) -> list[int]:
    return [storage.add([job(b"one")])[0].id]


def adds_two(storage: SQLiteStorage) -> list[int]:
    return [added.id for added in storage.add([job(b"first", ref="a"), job(b"second", dedupe_key="x")])]


def adds_in_a_transaction(storage: SQLiteStorage) -> list[int]:
    with storage.transaction():
        first = storage.add([job(b"first")])[0].id
        second = storage.add([job(b"second", group="g")])[0].id
    return [first, second]


def feed(storage: SQLiteStorage) -> None:
    """Something to claim; what is added meanwhile is not claimed."""
    storage.add([JobSpec(queue="feed", payload=b"{}") for _ in range(3000)])


def claims_and_completes(storage: SQLiteStorage) -> list[int]:
    found = storage.claim(["feed"], limit=2, lease_ms=60_000)
    storage.complete([record.lease for record in found])
    return []


def claims_and_fails(storage: SQLiteStorage) -> list[int]:
    for record in storage.claim(["feed"], limit=1, lease_ms=60_000):
        storage.fail(record.lease, JobError("handler"), retry_in_ms=0)
    return []


def reads(storage: SQLiteStorage) -> list[int]:
    with storage.snapshot():
        storage.counts("work")
        storage.page("work", State.PENDING, limit=2)
    return []


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "work", [adds_one, adds_two, adds_in_a_transaction, claims_and_completes, claims_and_fails, reads]
)
def test_an_exception_may_strike_at_any_point(
    path: Path, work: Callable[[SQLiteStorage], list[int]], driver: str
) -> None:
    storage = SQLiteStorage(path, durability="full", busy_timeout=LIMIT, driver=driver)
    feed(storage)
    work(storage)
    work(storage)
    acknowledged: list[int] = []
    wrong: list[object] = []

    for at in range(5000):
        interruption = Interruption(at)
        try:
            with interruption:
                ids = work(storage)
            acknowledged += ids
            if interruption.came is not None:
                wrong.append(("swallowed", interruption.came))
        except StruckError:
            pass
        if interruption.came is None:
            break
        if left := left_behind(storage):
            wrong.append((interruption.came, left))
            break

    assert wrong == []
    assert at > 20
    assert set(acknowledged) <= set(stored(path, driver))
    another = SQLiteStorage(path, busy_timeout=1, driver=driver)
    another.add([job()])
    another.close()
    storage.close()


def test_the_others_are_served_once_when_the_leader_is_struck_at_any_point(storage: SQLiteStorage) -> None:
    mine = storage._engine
    adds_two(storage)
    others = ("a", "b")
    for key in others:
        storage.put("s", key)
    wrong: list[object] = []

    def count(key: str) -> Callable[[Tx], int]:
        return lambda tx: tx.db.change("update litebroker_value set number = number + 1 where key = :key", {"key": key})

    for at in range(5000):
        interruption = Interruption(at)
        # The others stand in line already when the leader comes, and so it takes them along.
        waiting = [_Request(count(key), durable=False, single=True) for key in others]
        mine._waiting.extend(waiting)
        with contextlib.suppress(StruckError), interruption:
            storage.add([job(ref="r"), job()])
        left = left_behind(storage)
        for request in waiting:  # as their threads do
            with mine._lead:
                if not request.done:
                    mine._serve(request)
        counted = {key: value.number for key, value in storage.peek("s", others).items()}
        errors = [request.error for request in waiting if request.error]
        if left or errors or counted != dict.fromkeys(others, at + 1):
            wrong.append((interruption.came, left, errors, counted, at + 1))
            break
        if interruption.came is None:
            break

    assert wrong == []
    assert at > 50


def test_threads_struck_at_random_moments_neither_hang_nor_lose_an_add(storage: SQLiteStorage, path: Path) -> None:
    stop = threading.Event()
    acknowledged: list[list[int]] = [[] for _ in range(4)]
    caught = [0] * 4
    wrong: list[object] = []

    def work(number: int) -> None:
        while True:
            try:
                while not stop.is_set():
                    acknowledged[number] += adds_one(storage) if number & 1 else adds_in_a_transaction(storage)
                return
            except StruckError:
                if storage._engine._leading():
                    wrong.append("the lead")
                caught[number] += 1

    threads = [in_thread(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    for turn in range(300):
        number = turn % 4
        before, acks = caught[number], len(acknowledged[number])
        wait_until(lambda: len(acknowledged[number]) > acks, f"stuck after {turn}")  # noqa: B023
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threads[number].ident or 0), ctypes.py_object(StruckError)
        )
        wait_until(lambda: caught[number] > before, f"swallowed: {turn}")  # noqa: B023
    stop.set()
    assert joined(*threads)

    assert wrong == []
    assert left_behind(storage) == []
    assert {id for ids in acknowledged for id in ids} <= set(stored(path))


@contextlib.contextmanager
def alarm(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda _signum, _frame: handler())
    timer = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.parametrize("durability", ["relaxed", "durable"])
def test_a_signal_handler_that_raises_leaves_nothing_behind(path: Path, durability: str) -> None:
    storage = SQLiteStorage(path, durability=durability, busy_timeout=LIMIT)
    feed(storage)
    works = [adds_one, adds_two, adds_in_a_transaction, claims_and_completes, reads]
    chance = random.Random(7)
    armed = False
    acknowledged: list[int] = []
    wrong: list[object] = []
    struck = 0

    def handler() -> None:
        nonlocal armed
        if armed:
            armed = False
            raise StruckError

    with alarm(handler):
        for number in range(2500):
            work = works[number % len(works)]
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.choice((0.00005, 0.0002, 0.001)) * chance.random() + 1e-6)
                acknowledged += work(storage)
                armed = False
            except StruckError:
                struck += 1
            mine = storage._engine
            if mine._leading():
                wrong.append((number, work.__name__, "the lead"))
                break
            if writer_lock_is_held(path):
                wrong.append((number, work.__name__, "the writer lock"))
                break
            assert mine._db is not None
            assert not mine._db.in_transaction

    assert wrong == []
    assert left_behind(storage) == []
    assert struck > 200
    assert set(acknowledged) <= set(stored(path))
    storage.close()


def opens_anew(storage: SQLiteStorage) -> list[int]:
    handle = open_storage(str(storage.path), durability="full", busy_timeout=LIMIT)
    try:
        return adds_one(handle)
    finally:
        handle.close()


@pytest.mark.parametrize(
    "work", [adds_one, adds_two, adds_in_a_transaction, claims_and_completes, claims_and_fails, reads, opens_anew]
)
def test_a_signal_handler_may_add_jobs_at_any_point(path: Path, work: Callable[[SQLiteStorage], list[int]]) -> None:
    # All on one engine: what the handler interrupts would not end before it does, and so not let go of the file.
    storage = open_storage(path, durability="full", busy_timeout=LIMIT)
    feed(storage)
    work(storage)
    ids: list[int] = []
    wrong: list[object] = []

    def handler() -> None:
        ids.extend(adds_one(storage))
        ids.extend(adds_two(storage)[:1])
        ids.extend(adds_in_a_transaction(storage))
        ids.extend(opens_anew(storage))

    for at in range(5000):
        interruption = Interruption(at, handler)
        with interruption:
            ids += work(storage)
        if left := left_behind(storage):
            wrong.append((interruption.came, left))
            break
        if interruption.came is None:
            break

    assert wrong == []
    assert at > 20
    assert set(ids) <= set(stored(path))
    storage.close()


@pytest.mark.parametrize("durability", ["relaxed", "full"])
def test_a_signal_handler_may_add_jobs_in_the_middle_of_an_operation(path: Path, durability: str) -> None:
    storage = SQLiteStorage(path, durability=durability, busy_timeout=LIMIT)
    feed(storage)
    works = [adds_one, adds_two, adds_in_a_transaction, claims_and_completes, claims_and_fails, reads]
    chance = random.Random(11)
    errors: list[object] = []
    added: list[int] = []

    def handler() -> None:
        try:
            added.append(storage.add([job(b"signal")])[0].id)
            added.extend(two.id for two in storage.add([job(b"signal"), job(b"signal", group="h")]))
            added.extend(adds_in_a_transaction(storage))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    with alarm(handler):
        for number in range(600):
            signal.setitimer(signal.ITIMER_REAL, chance.choice((0.00005, 0.0002, 0.001)) * chance.random() + 1e-6)
            works[number % len(works)](storage)

    assert errors == []
    assert len(added) > 100
    assert set(added) <= set(stored(path))
    assert left_behind(storage) == []
    storage.close()


def test_a_keyboard_interrupt_in_a_transaction_rolls_it_back(storage: SQLiteStorage, path: Path) -> None:
    def interrupted() -> None:
        with storage.transaction():
            storage.add([job()])
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    storage.add([job(b"after")])

    assert list(stored(path).values()) == [b"after"]
    assert left_behind(storage) == []


def test_an_exception_in_a_transaction_wakes_nobody_and_syncs_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = SQLiteStorage(path, durability="full")
    storage.add([job()])
    synced = count_syncs(monkeypatch)

    with contextlib.suppress(LookupError), storage.transaction():
        storage.add([job()])
        raise LookupError

    assert len(stored(path)) == 1
    assert synced == []
    storage.close()


def test_a_thread_that_ends_inside_a_transaction_does_not_stop_the_others(storage: SQLiteStorage, path: Path) -> None:
    def begin_and_die() -> None:
        storage.transaction().__enter__()  # nobody keeps it

    thread = in_thread(begin_and_die)
    assert joined(thread)
    other = in_thread(lambda: storage.add([job()]))

    assert joined(other)
    assert len(stored(path)) == 1


def test_writing_within_a_snapshot_works_while_others_look_after_the_file(storage: SQLiteStorage, path: Path) -> None:
    storage.add([job()])

    with storage.snapshot():
        before = storage.counts("work").ready
        storage.add([job()])
        after = storage.counts("work").ready

    assert (before, after) == (1, 1)  # of one moment
    assert storage.counts("work").ready == 2


def test_a_nested_transaction_is_part_of_the_outer_one(storage: SQLiteStorage, path: Path) -> None:
    with contextlib.suppress(LookupError), storage.transaction():
        storage.add([job()])
        with storage.transaction():
            storage.add([job()])
        raise LookupError

    assert stored(path) == {}


# -- durability --


def count_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    synced: list[int] = []
    real = engine._sync_file

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(engine, "_sync_file", sync)
    return synced


def _claimed(storage: SQLiteStorage) -> Lease:
    return storage.claim(["work"], limit=1, lease_ms=60_000)[0].lease


# What each verb may lose to a power cut at "durable": nothing that cannot be done again.
VERBS: list[tuple[str, Callable[[SQLiteStorage, int], object], bool]] = [
    ("add", lambda storage, _id: storage.add([job()]), True),
    ("add many", lambda storage, _id: storage.add([job(), job()]), True),
    ("cancel", lambda storage, id: storage.cancel([id]), True),
    ("reschedule", lambda storage, id: storage.reschedule(id, due_at_ms=1), True),
    ("remove", lambda storage, id: storage.remove([id]), True),
    ("move", lambda storage, _id: storage.move("work", "elsewhere"), True),
    ("pause", lambda storage, _id: storage.pause("work", paused=True), True),
    ("purge", lambda storage, _id: storage.purge("work", [State.PENDING]), True),
    ("claim", lambda storage, _id: _claimed(storage), False),
    ("complete", lambda storage, _id: storage.complete([_claimed(storage)]), False),
    ("fail", lambda storage, _id: storage.fail(_claimed(storage), JobError("handler"), retry_in_ms=0), False),
    ("release", lambda storage, _id: storage.release([_claimed(storage)]), False),
    ("extend", lambda storage, _id: storage.extend([_claimed(storage)], 60_000), False),
]


@pytest.mark.parametrize(("verb", "run", "lasting"), VERBS, ids=[verb[0] for verb in VERBS])
def test_each_verb_waits_for_the_disk_as_its_level_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    run: Callable[[SQLiteStorage, int], object],
    lasting: bool,
) -> None:
    synced = count_syncs(monkeypatch)
    found: dict[str, int] = {}
    for durability in ("relaxed", "durable", "full"):
        storage = SQLiteStorage(tmp_path / f"{durability}.db", durability=durability)
        id = storage.add([job() for _ in range(3)])[0].id
        synced.clear()
        run(storage, id)
        found[durability] = len(synced)
        storage.close()

    assert found["relaxed"] == 0
    assert (found["durable"] > 0) == lasting
    assert found["full"] > 0


def test_a_transaction_waits_once_and_only_if_something_in_it_lasts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = SQLiteStorage(path, durability="durable")
    storage.add([job() for _ in range(5)])
    synced = count_syncs(monkeypatch)
    found = []

    with storage.transaction():
        storage.complete([_claimed(storage)])
    found.append(len(synced))
    with storage.transaction():
        storage.add([job()])
        storage.add([job()])
    found.append(len(synced))
    with storage.transaction(durable=True):
        storage.complete([_claimed(storage)])
    found.append(len(synced))
    with storage.transaction(durable=False):
        storage.add([job()])
    found.append(len(synced))

    assert found == [0, 1, 2, 2]
    storage.close()


def test_one_sync_serves_all_who_committed_before_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SQLiteStorage(path, durability="durable", busy_timeout=LIMIT)
    storage.add([job()])
    synced: list[int] = []
    real = engine._sync_file
    in_sync, go_on = threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 1:
            in_sync.set()
            assert go_on.wait(LIMIT)
        real(descriptor)

    monkeypatch.setattr(engine, "_sync_file", sync)
    first = in_thread(lambda: storage.add([job()]))
    assert in_sync.wait(LIMIT)
    committed = storage.transactions
    rest = [in_thread(lambda: storage.add([job()])) for _ in range(8)]
    wait_until(lambda: len(stored(path)) > 2)
    go_on.set()

    assert joined(first, *rest)
    assert len(stored(path)) == 10
    assert storage.transactions > committed
    assert len(synced) < 9
    storage.close()


def test_a_disk_that_does_not_confirm_is_an_error_for_each_who_waits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = SQLiteStorage(path, durability="durable", busy_timeout=LIMIT)
    storage.add([job()])
    outcomes: list[str] = []

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    def add() -> None:
        try:
            storage.add([job()])
            outcomes.append("added")
        except StorageError as error:
            outcomes.append(str(error))

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from litebroker_job").fetchall()  # keeps the WAL from being copied back
        monkeypatch.setattr(engine, "_sync_file", fail)
        with led(storage):
            threads = [in_thread(add) for _ in range(4)]
            wait_until(lambda: len(storage._engine._waiting) == 4)
        assert joined(*threads)
        monkeypatch.undo()
        add()  # the disk would confirm this one, but not what stands before it

    assert len(outcomes) == 5
    assert all("the disk did not confirm" in outcome for outcome in outcomes)
    assert storage.add([job()])[0].created
    storage.close()


def test_after_a_sync_that_failed_the_wal_is_put_into_the_file_before_anything_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = SQLiteStorage(path, durability="durable")
    storage.add([job()])
    copied: list[tuple[int, int, int]] = []

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine, "_sync_file", fail)
    (added,) = storage.add([job()])
    monkeypatch.undo()

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        copied += db.execute("pragma wal_checkpoint(passive)").fetchall()
    assert added.created
    assert copied[0][1] == copied[0][2]
    assert storage._engine._doubtful is None
    storage.close()


# -- checkpoints --

_MEGABYTE = 1_000_000


def wal_bytes(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_connection_of_ours_makes_checkpoints_by_itself(path: Path, driver: str) -> None:
    storage = SQLiteStorage(path, driver=driver)
    storage.add([job()])
    storage.counts("work")
    mine = storage._engine

    assert mine._db is not None
    assert mine._reader is not None
    assert mine._db.rows("pragma wal_autocheckpoint") == [(0,)]
    assert mine._reader.rows("pragma wal_autocheckpoint") == [(0,)]
    assert mine._db.rows("pragma journal_size_limit") == [(16 * 1024 * 1024,)]
    storage.close()


def test_the_wal_stays_small_over_many_operations(storage: SQLiteStorage, path: Path) -> None:
    largest = 0

    feed(storage)
    for number in range(8_000):
        adds_one(storage)
        if number % 3 == 0:
            claims_and_completes(storage)
        if number % 50 == 0:
            largest = max(largest, wal_bytes(path))

    assert largest < 16 * _MEGABYTE  # the checkpoint comes at about 4 MB


def test_the_wal_stays_small_with_large_payloads(storage: SQLiteStorage, path: Path) -> None:
    largest = 0

    for _ in range(60):
        storage.add([job(b"x" * 1_000_000)])
        storage.put("results", "k", b"y" * 500_000)
        for record in storage.claim(["work"], limit=1, lease_ms=60_000):
            storage.complete([record.lease])
        largest = max(largest, wal_bytes(path))

    assert largest < 20 * _MEGABYTE  # of 90


def test_the_wal_stays_small_where_an_adapter_writes_its_own_tables(storage: SQLiteStorage, path: Path) -> None:
    storage.install("own", ["create table litebroker_own(k text primary key, v blob not null) strict;"])
    largest = 0

    for number in range(150):
        with storage.transaction():
            storage.execute("insert or replace into litebroker_own values(?, ?)", (str(number % 3), b"z" * 500_000))
        largest = max(largest, wal_bytes(path))

    assert largest < 20 * _MEGABYTE


def test_a_reader_pins_the_wal_which_shrinks_once_it_is_gone(storage: SQLiteStorage, path: Path) -> None:
    storage.add([job()])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from litebroker_job").fetchall()
    for _ in range(25):
        storage.add([job(b"x" * 1_000_000)])
    pinned = wal_bytes(path)

    reader.execute("rollback")
    reader.close()
    for _ in range(3000):
        storage.add([job()])
        if wal_bytes(path) < pinned:
            break

    assert pinned > 20 * _MEGABYTE  # it could not be begun anew
    assert wal_bytes(path) <= 16 * 1024 * 1024


# The steady clock


def test_the_first_verb_of_a_storage_may_be_one_that_measures_time(tmp_path: Path) -> None:
    """The anchor of the steady clock lies in the file, which is opened by the first verb."""
    with contextlib.closing(SQLiteStorage(tmp_path / "jobs.db")) as first:
        first.add([JobSpec(queue="q", payload=b"")])
        (job,) = first.claim(["q"], limit=1, lease_ms=60_000)

        with contextlib.closing(SQLiteStorage(tmp_path / "jobs.db")) as second:
            extended = second.extend([job.lease], 60_000)

        assert extended == [True]
        assert first.extend([job.lease], 60_000) == [True]


def test_the_first_verb_of_a_storage_may_be_one_that_ages_a_value(tmp_path: Path) -> None:
    with (
        contextlib.closing(SQLiteStorage(tmp_path / "jobs.db")) as first,
        contextlib.closing(SQLiteStorage(tmp_path / "jobs.db")) as second,
    ):
        first.put("s", "k", b"1", ttl_ms=60_000)

        found = second.peek("s", ["k"])

        assert found["k"].data == b"1"
        assert 0 < (found["k"].expires_in_ms or 0) <= 60_000

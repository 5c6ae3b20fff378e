# ruff: noqa: S101 - tests, which stand here so that other storages can be held to them too
"""What the tests are made of: storages and clocks to begin with, and steps that many of them take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from litebroker.clock import Clock, SystemClock
from litebroker.jobs import JobError, JobRecord, JobSpec, Lease, State
from litebroker.storage import ScheduleRecord, ScheduleSpec, Storage
from litebroker.testing.clock import ManualClock

T = TypeVar("T")

HOUR_S = 3600.0
TEN_YEARS_S = 10 * 365.25 * 24 * HOUR_S
LEASE_MS = 30_000
LEASE_S = 30.0
# Longer than any storage may take to notice something, and the price of a test that fails.
PATIENCE_S = 10.0

ENDS = (State.COMPLETED, State.FAILED, State.CANCELLED)
ERROR = JobError("handler", "ValueError", "no such user", "Traceback ...\nValueError: no such user", ("KeyError: 7",))

ODD_TEXTS = {
    "spaces": "  a b  ",
    "quotes": 'it\'s "quoted" `so`',
    "wildcards": "100%_[a-z]*?",
    "backslash": "a\\b\\",
    "newline": "a\nb\tc",
    "unicode": "Grüße 東京 🐘",
    "right to left": "שלום",
    "sql": "'; drop table job; --",
    "json": '{"a": [1, null]}',
    "number": "00012",
    "255 characters": "x" * 255,
    "255 wide characters": "東" * 255,
}
ODD_PAYLOADS = {
    "empty": b"",
    "a zero byte": b"\x00",
    "all bytes": bytes(range(256)),
    "not UTF-8": b"\xff\xfe\x80abc",
    "a mebibyte": bytes(range(256)) * 4096,
    "looks like text": "Grüße".encode(),
}

odd_text = pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
odd_payload = pytest.mark.parametrize("payload", ODD_PAYLOADS.values(), ids=ODD_PAYLOADS)

# Ways to settle a lease, each answering whether it was current.
SETTLERS: dict[str, Callable[[Storage, Lease], bool]] = {
    "complete": lambda storage, lease: storage.complete([lease])[0],
    "complete and keep": lambda storage, lease: storage.complete([lease], keep=True)[0],
    "fail": lambda storage, lease: storage.fail(lease, ERROR, retry_in_ms=None) is not None,
    "fail and retry": lambda storage, lease: storage.fail(lease, ERROR, retry_in_ms=0) is not None,
    "release": lambda storage, lease: storage.release([lease])[0],
    "release with a delay": lambda storage, lease: storage.release([lease], delay_ms=1000)[0],
    "extend": lambda storage, lease: storage.extend([lease], LEASE_MS)[0],
}
settler = pytest.mark.parametrize("settle", SETTLERS.values(), ids=SETTLERS)


def lapse(storage: Storage, lease: Lease) -> bool:
    """End it by letting its time pass, and that of all others too."""
    clock = storage.clock
    assert isinstance(clock, ManualClock)
    clock.advance(LEASE_S)
    storage.recover()
    return storage.get(lease.job_id) is not None


ENDINGS = {**{name: settle for name, settle in SETTLERS.items() if name != "extend"}, "lapse": lapse}
ending = pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)


def spec(queue: str = "q", payload: bytes = b"x", **options: Any) -> JobSpec:
    """A job to add; where nothing else is said in the queue "q"."""
    return JobSpec(queue=queue, payload=payload, **options)


def add(storage: Storage, queue: str = "q", **options: Any) -> int:
    """Add one job; its id."""
    return storage.add([spec(queue, **options)])[0].id


def claim(storage: Storage, queue: str = "q", limit: int = 1, lease_ms: int = LEASE_MS) -> list[JobRecord]:
    """Claim from one queue."""
    return storage.claim([queue], limit=limit, lease_ms=lease_ms)


def claim_one(storage: Storage, queue: str = "q", lease_ms: int = LEASE_MS) -> JobRecord:
    """Claim a job that must be there."""
    (job,) = claim(storage, queue, lease_ms=lease_ms)
    return job


def claim_all(storage: Storage, queue: str = "q") -> list[int]:
    """The ids of all that can be claimed, in the order of claims of one job each."""
    ids = []
    while jobs := claim(storage, queue):
        ids += [job.id for job in jobs]
    return ids


def get(storage: Storage, job_id: int) -> JobRecord:
    """Look at a job that must be there."""
    job = storage.get(job_id)
    assert job is not None
    return job


def ids_of(jobs: Sequence[JobRecord]) -> list[int]:
    """The jobs by their ids, in order."""
    return [job.id for job in jobs]


def bring_to(storage: Storage, state: State, queue: str = "q", **options: Any) -> int:
    """Add a job and bring it into the state; nothing else may be claimable in its queue."""
    job_id = add(storage, queue, **options)
    if state is State.CANCELLED:
        assert storage.cancel([job_id]) == [True]
    elif state is not State.PENDING:
        lease = claim_one(storage, queue).lease
        if state is State.COMPLETED:
            assert storage.complete([lease], keep=True) == [True]
        elif state is State.FAILED:
            assert storage.fail(lease, ERROR, retry_in_ms=None) is State.FAILED
    assert get(storage, job_id).state is state
    return job_id


def in_threads(*functions: Callable[[], T]) -> list[T]:
    """Run them all at once; their answers. What one raises, rises."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], T]) -> T:
        start.wait(PATIENCE_S)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, function) for function in functions]]


def schedule(clock: ManualClock, schedule_id: str = "s", queue: str = "q", **options: Any) -> ScheduleRecord:
    """One whose next tick is now."""
    fields: dict[str, Any] = {
        "spec": ScheduleSpec(every_ms=60_000),
        "job": spec(queue, b"tick"),
        "next_at_ms": clock.now_ms(),
        "last_at_ms": None,
        **options,
    }
    return ScheduleRecord(queue=queue, id=schedule_id, **fields)


class Contract:
    """The ground of every part: a storage and its clock."""

    def make_storage(self, clock: Clock, tmp_path: Path) -> Storage:
        """An empty storage that goes by the clock. Several of one test may share the folder."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def storage(self, clock: ManualClock, tmp_path: Path) -> Iterator[Storage]:
        storage = self.make_storage(clock, tmp_path)
        yield storage
        storage.close()

    @pytest.fixture
    def live_storage(self, tmp_path: Path) -> Iterator[Storage]:
        """On the machine's own clocks, for what is about waiting."""
        storage = self.make_storage(SystemClock(), tmp_path)
        yield storage
        storage.close()

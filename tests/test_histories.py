"""Many processes at once: what they were told has an order, and two that take turns agree with the reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from tests.proof.figures import Figures
from tests.proof.histories import faults, read, record
from tests.proof.model import ApswTwoProcessesMachine, TwoProcessesMachine
from tests.test_storage_model import EXAMPLES, SETTINGS, as_test

from litebroker import JobSpec, SQLiteStorage
from litebroker.testing import ManualClock

MS = 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it stops processes")
def test_calls_that_were_made_at_once_can_be_put_in_an_order(tmp_path: Path) -> None:
    figures = Figures("histories", 1)

    record(figures, tmp_path, 3, 1)

    assert figures.found == []
    assert figures.runs > 10


def told(*lines: str) -> tuple[list[str], list[str]]:
    """The faults of a history of job 1, with times in milliseconds: ``began ended kind token pid lease answer``."""
    history = []
    for line in lines:
        if line.startswith("killed"):
            _, at, pid = line.split()
            history.append(f"killed {int(at) * MS} {pid}")
            continue
        began, ended, kind, token, pid, lease_ms, answer = line.split()
        history.append(f"begin {int(began) * MS} {kind} 1 {token} {pid}")
        history.append(f"end {int(ended) * MS} {kind} 1 {token} {pid} {lease_ms} {answer}")
    return faults(read(history))


@pytest.mark.parametrize(
    "history",
    [
        ("0 1 claim 7 70 100 1", "50 51 complete 7 70 0 1"),
        ("0 1 claim 7 70 100 1", "101 102 claim 8 80 100 1", "103 104 complete 7 70 0 0"),
        ("0 1 claim 7 70 100 1", "50 51 extend 7 70 100 1", "151 152 claim 8 80 100 1"),
        ("0 1 claim 7 70 100 1", "20 21 release 7 70 0 1", "20 22 claim 8 80 100 1"),
        ("0 1 claim 7 70 100 1", "killed 20 70", "21 22 claim 8 80 100 1"),
        ("0 50 claim 7 70 100 1", "1 2 claim 8 80 100 1", "3 4 release 8 80 0 1", "60 61 extend 7 70 100 1"),
    ],
    ids=["done", "lapsed", "renewed", "given back", "killed", "given back while another waited"],
)
def test_a_history_that_can_have_been_is_not_doubted(history: tuple[str, ...]) -> None:
    assert told(*history) == ([], [])


@pytest.mark.parametrize(
    "history",
    [
        ("0 1 claim 7 70 100 1", "50 51 claim 8 80 100 1"),
        ("0 1 claim 7 70 100 1", "50 51 extend 7 70 100 1", "120 121 claim 8 80 100 1"),
        ("0 1 claim 7 70 100 1", "110 111 claim 8 80 100 1", "115 116 complete 7 70 0 1"),
        ("0 1 claim 7 70 100 1", "50 51 complete 7 70 0 1", "60 61 claim 8 80 100 1"),
        (
            "0 50 claim 7 70 100 1",
            "1 2 claim 8 80 100 1",
            "60 61 extend 7 70 100 1",
            "62 63 extend 8 80 100 1",
        ),
    ],
    ids=["too early", "in spite of a renewal", "a late settlement", "after its end", "at once, in either order"],
)
def test_a_job_that_two_have_at_once_is_found(history: tuple[str, ...]) -> None:
    doubly, _ = told(*history)

    assert doubly


@pytest.mark.parametrize(
    "history",
    [
        ("0 1 claim 7 70 100 1", "50 51 complete 7 70 0 0"),
        ("0 1 claim 7 70 100 1", "200 201 complete 7 70 0 1"),
        ("0 1 claim 7 70 100 1", "50 51 complete 7 70 0 1", "52 53 extend 7 70 100 1"),
    ],
    ids=["refused without a reason", "accepted too late", "accepted twice"],
)
def test_an_answer_that_no_order_explains_is_found(history: tuple[str, ...]) -> None:
    _, unexplained = told(*history)

    assert unexplained


# -- what a process keeps in its memory, and another changes --


Two = tuple[ManualClock, SQLiteStorage, SQLiteStorage]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """A clock, and two storages that know of each other what lies in the file, as two processes do."""
    clock = ManualClock()
    pair = [SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed") for _ in range(2)]
    yield clock, pair[0], pair[1]
    for storage in pair:
        storage.close()


def test_a_group_that_another_process_has_made_takes_its_turns_while_others_are_always_waiting(two: Two) -> None:
    clock, one, other = two
    one.add([JobSpec("work", b"ungrouped")] * 10)
    one.claim(["work"], limit=1, lease_ms=60_000)

    other.add([JobSpec("work", b"grouped", group="g")])
    clock.advance(0.001)
    claimed = [one.claim(["work"], limit=1, lease_ms=60_000)[0].payload for _ in range(2)]

    assert sorted(claimed) == [b"grouped", b"ungrouped"]


def test_a_queue_whose_groups_another_process_has_made_goes_before_the_queues_behind_it(two: Two) -> None:
    _clock, one, other = two
    one.add([JobSpec("first", b"ungrouped"), JobSpec("second", b"later")])
    one.claim(["first"], limit=1, lease_ms=60_000)

    other.add([JobSpec("first", b"grouped", group="g")])
    claimed = one.claim(["first", "second"], limit=1, lease_ms=60_000)

    assert [record.payload for record in claimed] == [b"grouped"]


@pytest.fixture(scope="module", autouse=True)
def _other_process() -> Iterator[None]:
    yield
    TwoProcessesMachine.end()


_FEW = settings(SETTINGS, max_examples=int(EXAMPLES or 15))
TestInTwoProcesses = as_test(TwoProcessesMachine, _FEW)
TestInTwoProcessesOnApsw = pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")(
    as_test(ApswTwoProcessesMachine, settings(_FEW, max_examples=max(_FEW.max_examples // 3, 1)))
)

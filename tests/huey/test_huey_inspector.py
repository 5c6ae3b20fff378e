"""Huey's tasks as tools show and mend them."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.huey.conftest import Application, wait_until

from litebroker import JobRow, State, open_storage
from litebroker.inspection import Filter, Inspection
from litebroker_huey import SQLiteHuey


@pytest.fixture
def inspection(tmp_path: Path) -> Iterator[Inspection]:
    storage = open_storage(tmp_path / "jobs.db")
    yield Inspection(storage)
    storage.close()


def run_next(huey: SQLiteHuey) -> Any:
    return huey.execute(huey.dequeue())


def the(inspection: Inspection, name: str) -> JobRow:
    (row,) = inspection.find(name)
    return row


class Trap:
    """What nobody may unpickle."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return spring, ("unpickled",)


def spring(word: str) -> None:
    raise AssertionError(word)


def test_tasks_are_listed_and_not_unpickled(huey: SQLiteHuey, inspection: Inspection) -> None:
    @huey.task()
    def work(what: object) -> None: ...

    scheduled = work.schedule(args=(None,), delay=60)
    run_next(huey)  # which puts it into the schedule
    result = work(Trap())

    rows = inspection.jobs(Filter()).rows
    content = inspection.content(the(inspection, result.id))

    assert [(row.framework, row.queue, row.ref) for row in rows] == [
        ("huey", "huey-schedule:app", scheduled.id),
        ("huey", "huey:app", result.id),
    ]
    assert rows[1].task is not None
    assert rows[1].task.endswith("work")
    assert (content.kind, content.value) == ("pickle", None)
    assert content.size > 0


def test_a_task_is_unpickled_when_that_was_asked_for(huey: SQLiteHuey, inspection: Inspection) -> None:
    @huey.task()
    def work(number: int) -> None: ...

    result = work(4711)

    content = inspection.content(the(inspection, result.id), unpickle=True)

    assert content.kind == "pickle"
    assert "4711" in str(content.value)


def test_a_dead_letter_runs_again_and_its_result_is_the_new_one(huey: SQLiteHuey, inspection: Inspection) -> None:
    fails = True

    @huey.task()
    def work(number: int) -> int:
        if fails:
            raise ValueError("not yet")
        return number

    result = work(7)
    run_next(huey)
    row = the(inspection, result.id)
    fails = False

    outcomes = inspection.retry([row])
    run_next(huey)

    assert row.error is not None
    assert (row.state, row.error.reason, row.error.message) == (State.FAILED, "handler", "not yet")
    assert [outcome.why_not for outcome in outcomes] == [None]
    assert result.get(preserve=True) == 7
    assert huey.dead_tasks() == []


def test_a_real_consumer_runs_a_dead_letter_again(application: Application, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "jobs.db")
    inspection = Inspection(storage)
    application.task("work")("not a number of seconds", "x")
    application.start()
    wait_until(lambda: inspection.jobs(Filter(states=[State.FAILED])).rows)
    before = len(application.notes("start"))

    inspection.retry(inspection.jobs(Filter(states=[State.FAILED])).rows)

    wait_until(lambda: len(application.notes("start")) > before)
    wait_until(lambda: inspection.jobs(Filter(states=[State.FAILED])).rows)
    storage.close()


def test_a_task_that_is_cancelled_does_not_run_and_lets_go_of_its_key(huey: SQLiteHuey, inspection: Inspection) -> None:
    ran: list[int] = []

    @huey.task(dedupe_key=True)
    def work(number: int) -> None:
        ran.append(number)

    first = work(1)

    outcomes = inspection.cancel([the(inspection, first.id)])
    empty = huey.dequeue()
    second = work(1)
    run_next(huey)

    assert [outcome.why_not for outcome in outcomes] == [None]
    assert empty is None
    assert second.id != first.id
    assert ran == [1]


def test_a_scheduled_task_is_put_off_but_not_brought_forward(huey: SQLiteHuey, inspection: Inspection) -> None:
    @huey.task()
    def work() -> None: ...

    result = work.schedule(delay=60)
    run_next(huey)  # which puts it into the schedule
    row = the(inspection, result.id)
    due_at_ms = row.due_at_ms or 0

    (early,) = inspection.reschedule([row], due_at_ms - 1000)
    (late,) = inspection.reschedule([row], due_at_ms + 5000)

    assert early.why_not == "huey keeps its time with the task: it can be put off, but not be brought forward"
    assert late.why_not is None
    assert the(inspection, result.id).due_at_ms == due_at_ms + 5000


def test_a_task_moves_to_another_huey_and_to_nothing_else(
    huey: SQLiteHuey, inspection: Inspection, tmp_path: Path
) -> None:
    other = SQLiteHuey("other", filename=tmp_path / "jobs.db", read_timeout=0.05)
    ran: list[int] = []

    def work(number: int) -> None:
        ran.append(number)

    tasks = [each.task(name="work")(work) for each in (huey, other)]

    row = the(inspection, tasks[0](5).id)

    refused = [inspection.move([row], queue)[0].why_not for queue in ("emails", "huey-schedule:app")]
    (moved,) = inspection.move([row], "huey:other")
    run_next(other)

    assert refused == [
        "it waits in 'huey:app', and can go to another huey:NAME only",
        "it waits in 'huey:app', and can go to another huey:NAME only",
    ]
    assert moved.why_not is None
    assert ran == [5]
    other.storage.close()


def test_tasks_are_listed_where_huey_is_not_installed(huey: SQLiteHuey, tmp_path: Path) -> None:
    @huey.task(name="work")
    def work() -> None: ...

    result = work()
    script = """
import json, sys
sys.modules["huey"] = None
from litebroker import open_storage
from litebroker.inspection import Filter, Inspection
inspection = Inspection(open_storage(sys.argv[1]))
(row,) = inspection.jobs(Filter()).rows
print(json.dumps([row.framework, row.ref, inspection.cancel([row])[0].why_not]))
try:
    from litebroker_huey import SQLiteHuey
except ImportError as error:
    print(error)
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "jobs.db")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    row, error = done.stdout.splitlines()
    assert json.loads(row) == ["huey", result.id, None]
    assert error == "litebroker_huey needs huey: pip install 'litebroker[huey]'"

"""Dramatiq's messages as tools show and mend them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.encoder import PickleEncoder
from tests.dramatiq.conftest import Await, Run

from litebroker import State, open_storage
from litebroker.inspection import Filter, Inspection
from litebroker_dramatiq import SQLiteBroker

QUEUE = "dramatiq:default"


@pytest.fixture
def inspection(database: Path) -> Iterator[Inspection]:
    storage = open_storage(database)
    yield Inspection(storage)
    storage.close()


def test_messages_are_listed_with_what_they_say(broker: SQLiteBroker, inspection: Inspection) -> None:
    @dramatiq.actor
    def add(x: int, y: int) -> None: ...

    message = add.send(1, y=2)

    (row,) = inspection.jobs(Filter(framework="dramatiq")).rows

    assert (row.queue, row.task, row.ref, row.state) == (QUEUE, "add", message.message_id, State.PENDING)
    assert inspection.find(message.message_id) == [row]
    content = inspection.content(row)
    assert content.kind == "json"
    assert (content.value["args"], content.value["kwargs"]) == ([1], {"y": 2})


def test_a_dead_letter_runs_again_with_all_of_its_retries(
    broker: SQLiteBroker, inspection: Inspection, run: Run
) -> None:
    runs: list[int] = []

    @dramatiq.actor(max_retries=1, min_backoff=1)
    def fail() -> None:
        runs.append(1)
        raise RuntimeError("no")

    message = fail.send()
    with run(broker):
        broker.join("default", timeout=10_000)
        dead = inspection.jobs(Filter(states=[State.FAILED])).rows
        outcomes = inspection.retry(dead)
        broker.join("default", timeout=10_000)

    assert [outcome.why_not for outcome in outcomes] == [None]
    assert len(runs) == 4
    (letter,) = inspection.jobs(Filter(states=[State.FAILED])).rows
    assert letter.ref == message.message_id
    assert broker.dead_letters()[0].id == int(letter.id)


def test_a_dead_letter_runs_again_in_another_queue(broker: SQLiteBroker, inspection: Inspection, run: Run) -> None:
    runs: list[int] = []

    @dramatiq.actor(max_retries=0)
    def once() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("no")

    broker.declare_queue("other")
    once.send()
    with run(broker):
        broker.join("default", timeout=10_000)
        inspection.retry(inspection.jobs(Filter(states=[State.FAILED])).rows, queue="dramatiq:other")
        broker.join("other", timeout=10_000)

    assert len(runs) == 2
    assert inspection.jobs(Filter()).rows == []


def test_a_message_that_is_cancelled_or_put_off_does_not_run(
    broker: SQLiteBroker, inspection: Inspection, run: Run, wait_for: Await
) -> None:
    runs: list[str] = []

    @dramatiq.actor
    def note(word: str) -> None:
        runs.append(word)

    cancelled, later, moved = (note.send(word) for word in ("cancelled", "later", "moved"))
    broker.declare_queue("other")

    inspection.cancel(inspection.find(cancelled.message_id))
    inspection.reschedule(inspection.find(later.message_id), inspection.now_ms() + 3_600_000)
    inspection.move(inspection.find(moved.message_id), "dramatiq:other")
    note.send("last")
    with run(broker):
        wait_for(lambda: len(runs) == 2)

    assert sorted(runs) == ["last", "moved"]
    assert {(row.ref, row.state) for row in inspection.jobs(Filter()).rows} == {
        (cancelled.message_id, State.CANCELLED),
        (later.message_id, State.PENDING),
    }


def test_a_message_stays_in_its_namespace(database: Path, inspection: Inspection) -> None:
    broker = SQLiteBroker(database, namespace="shop")

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    rows = inspection.find(work.send().message_id)

    refused = [inspection.move(rows, queue)[0].why_not for queue in ("emails", "dramatiq:default")]
    (moved,) = inspection.move(rows, "shop:other")

    assert refused == [
        f"dramatiq has no queue '{queue}'; its queues are called like 'shop:default'"
        for queue in ("emails", "dramatiq:default")
    ]
    assert moved.why_not is None
    broker.close()


def test_a_message_of_another_encoder_is_not_read_and_runs_again_as_it_is(
    broker: SQLiteBroker, inspection: Inspection
) -> None:
    before = dramatiq.get_encoder()
    dramatiq.set_encoder(PickleEncoder())
    try:

        @dramatiq.actor
        def work() -> None: ...

        work.send()
        consumer = broker.consume("default", timeout=1000)
        proxy = next(consumer)
        assert proxy is not None
        consumer.nack(proxy)
        consumer.close()
    finally:
        dramatiq.set_encoder(before)
    (row,) = inspection.jobs(Filter()).rows

    content = inspection.content(row)
    outcomes = inspection.retry([row])

    assert content.value is None
    assert content.note == "not by Dramatiq's JSON encoder, but by another one"
    assert [outcome.why_not for outcome in outcomes] == [None]


def test_messages_are_shown_where_dramatiq_is_not_installed(broker: SQLiteBroker, database: Path) -> None:
    @dramatiq.actor
    def add(x: int, y: int) -> None: ...

    add.send(1, 2)
    script = """
import json, sys
sys.modules["dramatiq"] = None
from litebroker import open_storage
from litebroker.inspection import Filter, Inspection
inspection = Inspection(open_storage(sys.argv[1]))
(row,) = inspection.jobs(Filter()).rows
print(json.dumps([row.framework, row.task, inspection.content(row).value["args"]]))
try:
    from litebroker_dramatiq import SQLiteBroker
except ImportError as error:
    print(error)
"""

    done = subprocess.run(
        [sys.executable, "-c", script, str(database)], capture_output=True, text=True, check=True, timeout=30
    )

    row, error = done.stdout.splitlines()
    assert json.loads(row) == ["dramatiq", "add", [1, 2]]
    assert error == "litebroker_dramatiq needs Dramatiq: pip install 'litebroker[dramatiq]'"


def test_a_worker_names_itself_as_the_holder(
    broker: SQLiteBroker, inspection: Inspection, run: Run, wait_for: Await
) -> None:
    running: list[int] = []
    go_on: list[int] = []

    @dramatiq.actor
    def stay() -> None:
        running.append(1)
        wait_for(lambda: go_on)

    stay.send()
    worker: Worker
    with run(broker) as worker:
        assert worker is not None
        wait_for(lambda: running)
        (row,) = inspection.jobs(Filter(states=[State.ACTIVE])).rows
        go_on.append(1)

    assert row.worker
    assert row.alive is True

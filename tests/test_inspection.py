"""Jobs as tools see and mend them: rows, filters, pages, and why a job was left as it is."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from litebroker import RAW, JobError, JobRecord, JobSpec, Queue, State, Storage, TooLate, open_storage
from litebroker.inspection import Filter, Inspection, Mended
from litebroker.testing.clock import ManualClock
from litebroker.testing.model import ModelStorage

ERROR = JobError("handler", "ValueError", "no such user", "Traceback ...\nValueError: no such user", ("KeyError: 7",))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "model"])
def storage(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Storage]:
    storage: Storage
    if request.param == "model":
        storage = ModelStorage(clock)
    else:
        storage = open_storage(tmp_path / "jobs.db", clock=clock, durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def inspection(storage: Storage) -> Inspection:
    return Inspection(storage)


def add(storage: Storage, queue: str = "q", **options: Any) -> str:
    return str(storage.add([JobSpec(queue, options.pop("payload", b"{}"), **options)])[0].id)


def claim(storage: Storage, queue: str = "q") -> JobRecord:
    (record,) = storage.claim([queue], limit=1, lease_ms=30_000)
    return record


def fail(storage: Storage, queue: str = "q") -> str:
    record = claim(storage, queue)
    assert storage.fail(record.lease, ERROR, retry_in_ms=None) is State.FAILED
    return str(record.id)


def one_of_each(storage: Storage, queue: str = "q") -> dict[State, str]:
    """A job in each state; nothing else may be claimable in its queue."""
    ids = {}
    ids[State.FAILED] = add(storage, queue)
    fail(storage, queue)
    ids[State.COMPLETED] = add(storage, queue)
    storage.complete([claim(storage, queue).lease], keep=True)
    ids[State.CANCELLED] = add(storage, queue)
    storage.cancel([int(ids[State.CANCELLED])])
    ids[State.ACTIVE] = add(storage, queue)
    claim(storage, queue)
    ids[State.PENDING] = add(storage, queue)
    return ids


def ids(inspection: Inspection, where: Filter | None = None, **options: Any) -> list[str]:
    return [row.id for row in inspection.jobs(where or Filter(), **options).rows]


def why_not(outcomes: list[Mended]) -> list[str | None]:
    return [outcome.why_not for outcome in outcomes]


# -- looking --


def test_jobs_are_listed_queue_by_queue_those_that_run_first(storage: Storage, inspection: Inspection) -> None:
    first, second = one_of_each(storage, "a"), one_of_each(storage, "b")

    rows = inspection.jobs(Filter()).rows

    order = [State.ACTIVE, State.PENDING, State.FAILED, State.COMPLETED, State.CANCELLED]
    assert [row.id for row in rows] == [each[state] for each in (first, second) for state in order]
    assert [row.state for row in rows] == order * 2


def test_a_row_tells_what_is_known_of_a_job(storage: Storage, inspection: Inspection, clock: ManualClock) -> None:
    job_id = add(storage, priority=7, task="send", ref="mine", group="g", dedupe_key="k", payload=b"[1]")
    clock.advance(1)
    fail(storage)

    (row,) = inspection.jobs(Filter()).rows

    assert (row.framework, row.queue, row.id, row.state) == ("direct", "q", job_id, State.FAILED)
    assert (row.task, row.ref, row.priority, row.group, row.dedupe_key) == ("send", "mine", 7, "g", "k")
    assert (row.attempts, row.max_attempts, row.error) == (1, 3, ERROR)
    assert (row.created_at_ms, row.ended_at_ms) == (clock.now_ms() - 1000, clock.now_ms())
    assert row.record is not None
    assert row.record.payload == b""


def test_an_active_job_tells_who_holds_it_and_how_far_it_is(storage: Storage, inspection: Inspection) -> None:
    add(storage)
    record = claim(storage)
    report = json.dumps([0.4, "reading", 1234]).encode()
    storage.put("litebroker-progress", str(record.id), report, owner=record.lease)

    (row,) = inspection.jobs(Filter()).rows

    assert row.worker == storage.holders([record.id])[record.id].worker
    assert (row.alive, row.lease_until_ms) == (True, record.lease_until_ms)
    assert row.progress is not None
    assert (row.progress.fraction, row.progress.note) == (0.4, "reading")
    assert inspection.find(row.id) == [row]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "where", [Filter(), Filter(task="b*"), Filter(states=[State.FAILED, State.PENDING])], ids=["all", "task", "states"]
)
def test_pages_follow_each_other_without_a_gap(
    storage: Storage, inspection: Inspection, clock: ManualClock, limit: int, where: Filter
) -> None:
    for number in range(24):
        queue = "ab"[number % 2]
        add(storage, queue, task=("big", "small", "both")[number % 3], group="g" if number % 5 == 0 else None)
        if number % 4 == 0:
            fail(storage, queue)
        add(storage, queue, task="big", delay_ms=60_000 + number % 3)
        clock.advance(0.5)
    whole = ids(inspection, where)

    pages: list[list[str]] = []
    cursor = None
    while True:
        page = inspection.jobs(where, limit=limit, after=cursor)
        pages.append([row.id for row in page.rows])
        cursor = page.cursor
        if cursor is None:
            break

    assert len(whole) == len(set(whole)) >= 20
    assert [job_id for page in pages for job_id in page] == whole
    assert all(len(page) == limit for page in pages[:-1])


def test_a_page_goes_on_where_the_last_one_ended_though_that_job_is_gone(
    storage: Storage, inspection: Inspection
) -> None:
    all_ids = [add(storage) for _ in range(6)]
    page = inspection.jobs(Filter(), limit=3)

    storage.remove([int(job_id) for job_id in all_ids[:3]])

    assert ids(inspection, after=page.cursor) == all_ids[3:]


def test_jobs_are_filtered_by_what_they_are(storage: Storage, inspection: Inspection) -> None:
    direct = add(storage, "a", task="mail.send")
    dramatiq = add(storage, "a", task="mail.sort", encoding="dramatiq")
    other = add(storage, "b", task="send", encoding="own")

    assert ids(inspection, Filter(queues=["a"])) == [direct, dramatiq]
    assert ids(inspection, Filter(queues=["b", "a", "b"])) == [direct, dramatiq, other]
    assert ids(inspection, Filter(framework="dramatiq")) == [dramatiq]
    assert ids(inspection, Filter(framework="direct")) == [direct, other]
    assert ids(inspection, Filter(task="mail.send")) == [direct]
    assert ids(inspection, Filter(task="mail.*")) == [direct, dramatiq]
    brackets = add(storage, "c", task="f([1], '?')")
    assert ids(inspection, Filter(task="f([1], '?')")) == [brackets]
    assert ids(inspection, Filter(task="*[1]*")) == [brackets]
    assert ids(inspection, Filter(task="f([1], '.')")) == []
    assert ids(inspection, Filter(but_queue="a")) == [other, brackets]
    assert ids(inspection, Filter(task="none")) == []


def test_ages_count_from_the_end_or_where_there_is_none_from_the_beginning(
    storage: Storage, inspection: Inspection, clock: ManualClock
) -> None:
    old_and_dead_now = add(storage)
    old = add(storage, priority=-1)
    clock.advance(100)
    assert fail(storage) == old_and_dead_now
    young = add(storage, priority=-2)
    clock.advance(10)

    def aged(**options: int) -> list[str]:
        return ids(inspection, Filter(**options))  # type: ignore[arg-type]

    assert aged(older_than_ms=110_000) == [old]
    assert aged(older_than_ms=10_000) == [old, young, old_and_dead_now]
    assert aged(newer_than_ms=110_000) == [young, old_and_dead_now]
    assert aged(newer_than_ms=10_000) == []
    assert aged(newer_than_ms=10_001) == [young, old_and_dead_now]


def test_a_span_of_ended_jobs_is_found_among_many(storage: Storage, inspection: Inspection, clock: ManualClock) -> None:
    dead = []
    for _ in range(30):
        add(storage)
        dead.append(fail(storage))
        clock.advance(1)
    where = Filter(states=[State.FAILED], older_than_ms=10_000, newer_than_ms=20_001)

    found = ids(inspection, where)
    walked = [row.id for page in inspection.walk(where, size=4) for row in page]

    assert found == walked == dead[10:21][::-1]


def test_a_job_is_found_by_its_id_or_by_what_its_sender_calls_it(storage: Storage, inspection: Inspection) -> None:
    job_id = add(storage, ref="welcome")
    twins = [add(storage, "b", ref="twin"), add(storage, "a", ref="twin")]
    misleading = add(storage, ref=str(10**17))

    assert [row.id for row in inspection.find(job_id)] == [job_id]
    assert [row.id for row in inspection.find("welcome")] == [job_id]
    assert sorted(row.id for row in inspection.find("twin")) == sorted(twins)
    assert [row.id for row in inspection.find(str(10**17))] == [misleading]
    assert [inspection.find(name) for name in ("", "none", "-1", "1" * 40, "²")] == [[]] * 5


def test_counts_are_known_where_no_job_has_to_be_looked_at(storage: Storage, inspection: Inspection) -> None:
    one_of_each(storage, "a")
    one_of_each(storage, "b")

    assert inspection.count(Filter()) == 10
    assert inspection.count(Filter(queues=["a"], states=[State.FAILED, State.PENDING])) == 2
    assert inspection.count(Filter(but_queue="a")) == 5
    assert inspection.count(Filter(task="x")) is None


def test_payloads_are_read_as_they_were_written(storage: Storage, inspection: Inspection) -> None:
    def content(payload: bytes, encoding: str | None) -> tuple[str, int, object]:
        (row,) = inspection.find(add(storage, payload=payload, encoding=encoding))
        found = inspection.content(row)
        return found.kind, found.size, found.value

    assert content(b'{"a": [1, null]}', None) == ("json", 16, {"a": [1, None]})
    assert content("grüße".encode(), RAW.name) == ("text", 7, "grüße")
    assert content(b"\xff\x00", RAW.name) == ("base64", 2, "/wA=")
    assert content(b"anything", "own") == ("own", 8, None)
    assert content(b"{broken", None) == ("json", 7, None)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (Filter(queues=["none"]), "no queue 'none'; there are: 'q'"),
        (Filter(framework="celery"), "no framework 'celery'; there are: direct, dramatiq, huey, rq"),
    ],
)
def test_a_filter_of_what_is_not_there_is_refused(
    storage: Storage, inspection: Inspection, where: Filter, message: str
) -> None:
    add(storage)

    with pytest.raises(ValueError, match=message):
        inspection.jobs(where)


def cursor_of(*place: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "é",
        "AAAA",
        cursor_of(1, 2, 3, 4),
        cursor_of("q", "pending", "", [1]),
        cursor_of("q", "broken", "", [1, 0, 0, None, None, None]),
        cursor_of("q", "pending", "", [1, {}, 0, None, None, None]),
        cursor_of("q", "pending", "", [2**70, 0, 0, None, None, None]),
        cursor_of("q", "pending", "", [1, 0, 0, 7, None, None]),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
    ],
    ids=range(11),
)
def test_what_is_no_cursor_is_refused(storage: Storage, inspection: Inspection, cursor: str) -> None:
    add(storage)

    with pytest.raises(ValueError, match="is no cursor"):
        inspection.jobs(Filter(), after=cursor)


# -- mending --


def test_each_verb_does_what_it_says_where_the_state_allows_it(storage: Storage, inspection: Inspection) -> None:
    of = one_of_each(storage)
    rows = {state: inspection.find(job_id)[0] for state, job_id in of.items()}
    order = [State.PENDING, State.ACTIVE, State.FAILED]
    some = [rows[state] for state in order]

    assert why_not(inspection.retry(some)) == ["it is pending", "it is active", None]
    assert why_not(inspection.reschedule(some, inspection.now_ms() + 5000)) == [None, "it is active", None]
    assert why_not(inspection.cancel([*some, rows[State.COMPLETED]])) == [
        None, "it is active", None, "it is completed",
    ]  # fmt: skip
    assert why_not(inspection.remove(some)) == [None, "it is active", None]
    assert why_not(inspection.remove(some)) == ["it is gone", "it is active", "it is gone"]


def test_who_was_too_late_is_told_apart_from_who_is_refused(storage: Storage, inspection: Inspection) -> None:
    add(storage, dedupe_key="k")
    dead = fail(storage)
    add(storage, "other", dedupe_key="k")
    rows = inspection.find(dead)

    (held,) = inspection.retry(rows, queue="other")
    (done,) = inspection.retry(rows)
    (late,) = inspection.retry(rows)

    assert held.why_not == "its dedupe key 'k' is held in queue 'other'"
    assert done.why_not is None
    assert late.why_not == "it is pending"
    assert [isinstance(each.why_not, TooLate) for each in (held, late)] == [False, True]


def test_jobs_move_to_another_queue_and_dead_letters_go_on_in_one(storage: Storage, inspection: Inspection) -> None:
    add(storage)
    dead = fail(storage)
    waiting = add(storage)

    moved = inspection.move(inspection.find(waiting), "second")
    retried = inspection.retry(inspection.find(dead), queue="second")

    assert why_not([*moved, *retried]) == [None, None]
    assert sorted(ids(inspection, Filter(queues=["second"]))) == sorted([dead, waiting])


@pytest.mark.parametrize("queue", ["dramatiq:default", "huey:app", "huey-schedule:app", "rq:queue:default"])
def test_a_job_goes_to_no_queue_of_a_framework_that_it_is_not_of(
    storage: Storage, inspection: Inspection, queue: str
) -> None:
    job_id = add(storage)

    (outcome,) = inspection.move(inspection.find(job_id), queue)

    assert outcome.why_not is not None
    assert outcome.why_not.endswith("and it is one of direct")
    assert inspection.find(job_id)[0].queue == "q"


def test_only_dead_letters_are_deleted_as_such(storage: Storage, inspection: Inspection) -> None:
    of = one_of_each(storage)
    rows = [inspection.find(of[state])[0] for state in (State.COMPLETED, State.FAILED)]

    outcomes = inspection.remove_dead(rows)

    assert {outcome.row.state: outcome.why_not for outcome in outcomes} == {
        State.COMPLETED: "it is no dead letter: it is completed",
        State.FAILED: None,
    }


@pytest.mark.parametrize("verb", ["cancel", "move", "reschedule", "retry", "remove"])
def test_a_walk_reaches_all_though_they_change_on_the_way(
    storage: Storage, inspection: Inspection, clock: ManualClock, verb: str
) -> None:
    for number in range(25):
        add(storage, priority=number % 3, group="g" if number % 7 == 0 else None)
        if verb == "retry":
            fail(storage)
            clock.advance(0.001 * (number % 2))
    states = {"retry": [State.FAILED], "remove": list(State)}.get(verb, [State.PENDING])
    due_at_ms = clock.now_ms() + 60_000
    act = {
        "cancel": inspection.cancel,
        "move": lambda rows: inspection.move(rows, "target"),
        "reschedule": lambda rows: inspection.reschedule(rows, due_at_ms),
        "retry": inspection.retry,
        "remove": inspection.remove,
    }[verb]

    done: list[str] = []
    for page in inspection.walk(Filter(states=states, but_queue="target"), size=4):
        rows = [row for row in page if row.due_at_ms != due_at_ms]
        done += [outcome.row.id for outcome in act(rows) if outcome.why_not is None]

    assert len(done) == len(set(done)) == 25


def test_what_the_direct_api_added_is_what_a_tool_sees(tmp_path: Path) -> None:
    queue = Queue[Any]("emails", tmp_path / "jobs.db")
    job = queue.add({"to": "a@example.com"}, task="welcome", headers={"trace": "1"})
    inspection = Inspection(open_storage(tmp_path / "jobs.db"))

    (row,) = inspection.find(str(job.id))

    assert (row.task, inspection.content(row).value) == ("welcome", {"to": "a@example.com"})
    assert inspection.facts(row) == {"trace": "1"}
    queue.close()

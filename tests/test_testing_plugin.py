"""What users test with: the fixtures, `drain`, `assert_enqueued`, `redirected`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from litebroker import (
    AsyncContext,
    Backoff,
    Context,
    Counts,
    JobFailedError,
    NewJob,
    PayloadError,
    Queue,
    Retention,
    SQLiteStorage,
    State,
    current_job,
)
from litebroker.aio import AsyncQueue
from litebroker.testing import ManualClock, assert_enqueued, assert_not_enqueued, drain, redirected

ROOT = Path(__file__).parent.parent
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(tmp_path: Path, clock: ManualClock) -> Iterator[SQLiteStorage]:
    with_clock = SQLiteStorage(tmp_path / "jobs.db", clock=clock, durability="relaxed")
    yield with_clock
    with_clock.close()


@pytest.fixture
def queue(storage: SQLiteStorage) -> Queue[Any]:
    return Queue("emails", storage)


class Own:
    """A serializer that the queue does not have."""

    name = "own"

    def dumps(self, data: Any) -> bytes:
        return str(data).encode()

    def loads(self, payload: bytes) -> Any:
        return payload


def refuse(data: Any) -> None:
    raise ValueError(f"no mailbox {data!r}")


# drain


def test_drain_runs_the_due_jobs_in_this_thread_in_their_order(queue: Queue[Any]) -> None:
    seen: list[tuple[Any, int]] = []
    queue.add_many([1, 2, NewJob(3, priority=5)])

    drained = drain(queue, lambda data: seen.append((data, threading.get_ident())))

    here = threading.get_ident()
    assert seen == [(3, here), (1, here), (2, here)]
    assert (drained.completed, drained.attempts, drained.errors) == (3, 3, [])
    assert queue.stats() == Counts()


def test_drain_gives_the_handler_its_context_and_settles_as_that_says(queue: Queue[Any]) -> None:
    other: Queue[Any] = Queue("other", queue.storage)
    queue.add_many([1, 2])

    def handler(data: int, context: Context) -> None:
        if data == 1:
            context.complete(then=[NewJob(context.job_id, queue="other")])
        else:
            context.fail("no", retry=False)

    drained = drain(queue, handler)

    assert (drained.completed, drained.failed, drained.errors) == (1, 1, [])
    assert_enqueued(other, count=1)
    assert [job.data for job in queue.dead_letters()] == [2]


def test_drain_runs_what_the_handler_adds(queue: Queue[Any]) -> None:
    queue.add(3)

    drained = drain(queue, lambda data: data and queue.add(data - 1))

    assert drained.completed == 4


def test_drain_leaves_delayed_jobs_alone(queue: Queue[Any]) -> None:
    queue.add(1, delay=60)

    drained = drain(queue, refuse)

    assert drained.attempts == 0
    assert queue.stats() == Counts(delayed=1)


def test_drain_moves_the_clock_to_delayed_jobs_when_it_is_asked_to(queue: Queue[Any], clock: ManualClock) -> None:
    began_ms = clock.now_ms()
    seen: list[tuple[Any, float]] = []
    queue.add_many([NewJob("late", delay=3600), "now", NewJob("soon", delay=60)])

    drain(queue, lambda data: seen.append((data, (clock.now_ms() - began_ms) / 1000)), delayed=True)

    assert seen == [("now", 0), ("soon", 60), ("late", 3600)]


def test_drain_raises_what_a_handler_raises_once_its_job_is_settled(queue: Queue[Any]) -> None:
    queue.add_many(["a", "b"])

    with pytest.raises(ValueError, match="no mailbox 'a'"):
        drain(queue, refuse)

    assert queue.stats() == Counts(ready=1, delayed=1)


def test_drain_collects_errors_and_counts_retries_when_it_is_asked_to(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("emails", storage, backoff=Backoff.fixed(60))
    queue.add_many(["a", NewJob("b", attempts=1)])

    drained = drain(queue, refuse, raises=False, delayed=True)

    assert (drained.retried, drained.failed, drained.attempts) == (2, 2, 4)
    assert [str(error) for error in drained.errors].count("no mailbox 'a'") == 3
    assert [job.data for job in queue.dead_letters()] == ["a", "b"]


def test_drain_raises_for_a_payload_that_cannot_be_read(queue: Queue[Any]) -> None:
    Queue("emails", queue.storage, serializer=Own()).add(1)

    with pytest.raises(PayloadError, match="written by serializer 'own'"):
        drain(queue, refuse)

    assert queue.stats() == Counts(delayed=1)


def test_drain_never_keeps_an_interruption_to_itself(queue: Queue[Any]) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    queue.add(1)

    with pytest.raises(KeyboardInterrupt):
        drain(queue, interrupt, raises=False)


def test_drain_keeps_completed_jobs_as_the_queue_does(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("emails", storage, retention=Retention(completed=2, failed=0))
    queue.add_many([1, 2, 3])

    drain(queue, lambda _: None)

    assert queue.stats() == Counts(completed=2)


def test_drain_fires_the_schedules_that_are_due(queue: Queue[Any], clock: ManualClock) -> None:
    seen: list[Any] = []
    queue.schedule("tick", id="ticks", every=60)
    assert drain(queue, seen.append).attempts == 0

    clock.advance(60)
    drain(queue, seen.append)

    assert seen == ["tick"]


def test_drain_runs_async_handlers(queue: Queue[Any]) -> None:
    seen: list[Any] = []

    async def handler(data: Any, context: AsyncContext) -> None:
        await asyncio.sleep(0)
        seen.append((data, context.attempt, current_job() is not None))
        await context.complete(then=[data - 1] if data else [])

    queue.add(1)
    drained = drain(queue, handler)

    assert seen == [(1, 1, True), (0, 1, True)]
    assert drained.completed == 2


def test_after_drain_results_are_there(storage: SQLiteStorage) -> None:
    queue: Queue[Any] = Queue("sums", storage, results=60, backoff=Backoff.fixed(0), attempts=2)
    good, bad = queue.add_many([1, None])

    drain(queue, lambda data: data + 1, raises=False)

    assert good.result(0) == 2
    with pytest.raises(JobFailedError, match="NoneType"):
        bad.result(0)


def test_drain_works_for_a_queue_of_asyncio(storage: SQLiteStorage) -> None:
    seen: list[Any] = []

    async def handler(data: Any) -> None:
        seen.append(data)

    async def main() -> None:
        async with AsyncQueue("emails", storage) as queue:
            await queue.add(1)
            await asyncio.to_thread(drain, queue.sync, handler)
            assert_not_enqueued(queue.sync)

    asyncio.run(main())

    assert seen == [1]


def test_drain_ends_a_handler_that_never_comes_to_an_end(queue: Queue[Any]) -> None:
    queue.add(1)

    with pytest.raises(AssertionError, match="'emails' is not empty after 10 attempts"):
        drain(queue, lambda _: queue.add(1), at_most=10)


def test_drain_stops_before_a_paused_queue_and_a_job_that_waits_for_its_group(queue: Queue[Any]) -> None:
    queue.add_many([NewJob(1, group="g"), NewJob(2, group="g"), NewJob(3, delay=60)])
    (held,) = queue.claim(lease=3600)

    drained = drain(queue, lambda _: None, delayed=True)
    queue.complete(held)
    queue.pause()
    paused = drain(queue, refuse, delayed=True)

    assert drained.completed == 1
    assert paused.attempts == 0
    assert queue.stats() == Counts(ready=1)


def test_drain_says_that_only_a_manual_clock_can_be_moved(tmp_path: Path) -> None:
    with Queue("emails", tmp_path / "jobs.db") as queue, pytest.raises(TypeError, match="has a SystemClock: open it"):
        drain(queue, refuse, delayed=True)


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="this system does not list descriptors")
def test_drain_leaves_nothing_open(queue: Queue[Any]) -> None:
    def drain_often(times: int) -> int:
        for _ in range(times):
            queue.add(1)
            drain(queue, lambda _: None)
        return len(list(DESCRIPTORS.iterdir()))

    before = drain_often(3)

    # The engine opens and closes one or two of its own meanwhile.
    assert drain_often(20) < before + 10


# assert_enqueued


def test_assert_enqueued_gives_the_jobs_that_are_as_described(queue: Queue[Any]) -> None:
    job = queue.add({"to": "a@example.com"}, delay=60, priority=5, task="greet", headers={"x": "1", "y": "2"})
    queue.add({"to": "b@example.com"}, group="g", dedupe_key="k", ref="r")

    (first,) = assert_enqueued(
        queue, {"to": "a@example.com"}, delay=timedelta(minutes=1), priority=5, task="greet", headers={"x": "1"}
    )
    (second,) = assert_enqueued(queue, lambda data: data["to"].startswith("b"), delay=None, group="g")

    assert first.id == job.id
    assert (second.dedupe_key, second.ref) == ("k", "r")
    assert_enqueued(queue, dedupe_key="k", ref="r", count=1)
    assert_enqueued(queue, count=2)
    assert_not_enqueued(queue, {"to": "c@example.com"})
    assert_not_enqueued(queue, task="other")


def test_assert_enqueued_knows_the_time_at_which_a_job_is_to_run(queue: Queue[Any]) -> None:
    run_at = datetime(2030, 1, 1, tzinfo=timezone.utc)
    queue.add(1, run_at=run_at)

    assert_enqueued(queue, run_at=run_at)
    assert_not_enqueued(queue, run_at=run_at + timedelta(seconds=1))


def test_assert_enqueued_lists_what_is_there(queue: Queue[Any]) -> None:
    queue.add({"to": "a@example.com"}, delay=60, priority=5, task="greet", headers={"x": "1"})
    queue.add("b")

    with pytest.raises(AssertionError) as caught:
        assert_enqueued(queue, {"to": "c@example.com"}, task="greet")

    assert str(caught.value).splitlines() == [
        "queue 'emails' has no pending job with data={'to': 'c@example.com'}, task='greet'; pending are 2:",
        "  data='b'",
        "  data={'to': 'a@example.com'}, delay=60, priority=5, task='greet', headers={'x': '1'}",
    ]


def test_assert_enqueued_says_how_many_there_are(queue: Queue[Any]) -> None:
    queue.add_many([1] * 30)

    with pytest.raises(AssertionError, match=r"has 30 pending jobs with data=1, not 2; pending are 30:(?s:.*)10 more$"):
        assert_enqueued(queue, 1, count=2)


def test_assert_not_enqueued_fails_when_there_is_one(queue: Queue[Any]) -> None:
    queue.add(1)

    with pytest.raises(AssertionError, match="has 1 pending job, not 0; pending are 1"):
        assert_not_enqueued(queue)


def test_assert_enqueued_says_what_has_become_of_the_jobs(queue: Queue[Any]) -> None:
    queue.add(1, attempts=1)
    drain(queue, refuse, raises=False)

    with pytest.raises(AssertionError, match="has no pending job with data=1; nothing is pending, 1 failed"):
        assert_enqueued(queue, 1)


def test_assert_enqueued_lives_with_payloads_that_it_cannot_read(queue: Queue[Any]) -> None:
    Queue("emails", queue.storage, serializer=Own()).add(1)

    with pytest.raises(AssertionError, match=r"data=<not to be read: the payload was written by serializer 'own'"):
        assert_enqueued(queue, 1)


@pytest.mark.parametrize(
    ("description", "error", "why"),
    [
        ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=timezone.utc)}, ValueError, "exclude each other"),
        ({"delay": -1}, ValueError, "delay=-1"),
        ({"run_at": datetime(2030, 1, 1)}, ValueError, "no time zone"),  # noqa: DTZ001 (that is what is wrong)
        ({"count": -1}, ValueError, "count=-1"),
        ({"tsk": "greet"}, TypeError, "tsk"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(
    queue: Queue[Any], description: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        assert_enqueued(queue, **description)


# redirected


def test_a_redirected_queue_has_its_jobs_elsewhere_and_makes_no_file(storage: SQLiteStorage, tmp_path: Path) -> None:
    own = tmp_path / "own.db"
    queue: Queue[Any] = Queue("emails", own)

    with redirected(queue, to=storage):
        queue.add(1)
        assert_enqueued(Queue("emails", storage), 1)
        queue.close()
        drain(queue, lambda _: None)
        queue.add(2)

    assert not own.exists()
    assert queue.storage.location == str(own)
    assert storage.counts("emails").pending == 1
    queue.close()


def test_a_worker_of_a_redirected_queue_ends_with_the_redirection(storage: SQLiteStorage, tmp_path: Path) -> None:
    queue: Queue[Any] = Queue("emails", tmp_path / "own.db")
    ran = threading.Event()

    with redirected(queue, to=storage):
        queue.add(1)
        worker = queue.process(lambda _: ran.set())
        assert ran.wait(20)

    assert worker.closed
    assert storage.counts("emails") == Counts()


def test_results_of_a_redirected_queue_are_waited_for_where_they_are(storage: SQLiteStorage, tmp_path: Path) -> None:
    queue: Queue[Any] = Queue("sums", tmp_path / "own.db", results=60)

    with redirected(queue, to=storage):
        drained = queue.add(1)
        drain(queue, lambda data: data + 1)
        worked = queue.add(2)
        queue.process(lambda data: data + 1)

        assert drained.result(0) == 2
        assert worked.result(20) == 3

    queue.add(1)
    queue.process(lambda data: data + 10)
    assert queue.add(2).result(20) == 12
    queue.close()


@pytest.mark.parametrize(
    "call",
    [lambda it: drain(it, print), assert_enqueued, lambda it: redirected(it, to=SQLiteStorage(":memory:")).__enter__()],
)
def test_what_is_no_queue_is_refused(call: Any) -> None:
    with pytest.raises(TypeError, match="'emails' is no Queue"):
        call("emails")


# The plugin


TESTS = """
from litebroker import Queue
from litebroker.testing import assert_enqueued, drain

emails = Queue("emails", "never-made.db")


def test_queue(litebroker_queue, litebroker_clock, tmp_path):
    litebroker_queue.add(1, delay=60)
    litebroker_clock.advance(60)
    seen = []
    assert drain(litebroker_queue, seen.append).completed == 1
    assert seen == [1]
    assert litebroker_queue.storage.location.startswith(str(tmp_path))


def test_it_is_new_each_time(litebroker_queue):
    assert litebroker_queue.size() == 0


def test_redirect(litebroker_redirect, litebroker_storage):
    litebroker_redirect(emails)
    emails.add(1)
    assert litebroker_storage.counts("emails").pending == 1


def test_redirected_again(litebroker_redirect):
    litebroker_redirect(emails)
    assert emails.size() == 0


def test_message(litebroker_queue):
    litebroker_queue.add("b")
    assert_enqueued(litebroker_queue, "a")
"""


def installed(folder: Path) -> dict[str, str]:
    """An environment in which Python finds litebroker as pip installs it: with its entry points."""
    metadata = folder / "litebroker-0.dist-info"
    metadata.mkdir()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"^\[project\.entry-points\.pytest11\]\n((?:\S.*\n)+)", text, re.MULTILINE)
    assert section
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: litebroker\nVersion: 0\n", encoding="utf-8")
    lines = section[1].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{lines}", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])}


def test_pytest_finds_the_fixtures_by_itself_and_shows_where_a_test_failed(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "test_own.py").write_text(TESTS, encoding="utf-8")

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py"],
        cwd=tmp_path,
        env=installed(tmp_path / "site"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert "4 passed" in run.stdout, run.stdout + run.stderr
    assert "1 failed" in run.stdout
    assert "queue 'test' has no pending job with data='a'; pending are 1:" in run.stdout
    assert "enqueued.py" not in run.stdout  # the test's own line is shown, not ours
    assert not (tmp_path / "never-made.db").exists()


def test_a_project_that_does_not_use_the_fixtures_does_not_pay_for_them(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n\ndef test_it():\n    assert 'litebroker_pytest' in sys.modules\n"
        "    assert not {'litebroker', 'croniter', 'sqlite3'} & set(sys.modules)\n",
        encoding="utf-8",
    )

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_other.py"],
        cwd=tmp_path,
        env=installed(tmp_path / "site"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert "1 passed" in run.stdout, run.stdout


def test_a_job_in_drain_is_active_while_its_handler_runs(queue: Queue[Any]) -> None:
    job = queue.add(1)
    states: list[State] = []

    def handler(_: Any) -> None:
        found = queue.get(job.id)
        assert found is not None
        states.append(found.state)

    drain(queue, handler)

    assert states == [State.ACTIVE]

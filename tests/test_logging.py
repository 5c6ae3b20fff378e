"""Log lines name their job, and say what becomes of it."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from litebroker import Backoff, Counts, Queue, SQLiteStorage, current_job
from litebroker.logs import JobFilter, JSONFormatter
from litebroker.testing import ManualClock, drain

LIMIT = 30


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    with Queue("emails", tmp_path / "jobs.db", durability="relaxed", backoff=Backoff.fixed(90)) as queue:
        yield queue


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What has been logged since, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def run_one(queue: Queue[Any], handler: Callable[..., object]) -> None:
    """Until it has been settled."""
    worker = queue.process(handler)
    ends_at = time.monotonic() + LIMIT
    while queue.stats().ready or queue.stats().active:
        assert time.monotonic() < ends_at
        time.sleep(0.002)
    worker.close()


def refuse(_: Any) -> None:
    raise ValueError("no such mailbox")


def test_a_failure_says_when_the_next_attempt_follows(queue: Queue[Any], caplog: pytest.LogCaptureFixture) -> None:
    job = queue.add(1, task="greet")

    run_one(queue, refuse)

    (record,) = caplog.records
    assert record.getMessage() == (
        f"job {job.id} of queue 'emails', attempt 1, handler: ValueError: no such mailbox;"
        " attempt 2 of 3 follows in 90 s"
    )
    assert {name: getattr(record, name) for name in ("queue", "job_id", "attempt", "task")} == {
        "queue": "emails",
        "job_id": job.id,
        "attempt": 1,
        "task": "greet",
    }
    assert record.exc_info


def test_the_last_failure_says_that_the_job_is_a_dead_letter(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue.add(1, attempts=1)

    run_one(queue, refuse)

    (record,) = caplog.records
    assert record.getMessage().endswith("no such mailbox; no attempt is left: a dead letter after 1")
    assert queue.stats() == Counts(failed=1)


def test_attempts_without_limit_are_not_counted_down(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with Queue("emails", tmp_path / "jobs.db", attempts=None, backoff=Backoff.fixed(0.25)) as queue:
        queue.add(1)
        run_once(queue)

    assert caplog.records[0].getMessage().endswith("; attempt 2 follows in 0.25 s")


def run_once(queue: Queue[Any]) -> None:
    ran = threading.Event()

    def handler(_: Any) -> None:
        if ran.is_set():
            return
        ran.set()
        raise ValueError("once")

    worker = queue.process(handler)
    assert ran.wait(LIMIT)
    worker.close()


def test_a_handler_that_settled_its_job_before_it_raised_promises_nothing(
    queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue.add(1)

    def handler(_: Any, context: Any) -> None:
        context.complete()
        raise ValueError("afterwards")

    run_one(queue, handler)

    assert caplog.records[0].getMessage().endswith("handler: ValueError: afterwards")


def test_the_lines_of_a_handler_carry_its_job(queue: Queue[Any], lines: Callable[[], list[dict[str, Any]]]) -> None:
    job = queue.add(1, task="greet")

    run_one(queue, lambda _: logging.getLogger("shop").info("hello %s", "a", extra={"customer": 7, "odd": {1}}))
    logging.getLogger("shop").info("outside")

    inside, outside = lines()
    assert {**inside, "time": "", "thread": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "shop",
        "message": "hello a",
        "pid": os.getpid(),
        "thread": "",
        "queue": "emails",
        "job_id": str(job.id),
        "attempt": 1,
        "task": "greet",
        "customer": 7,
        "odd": "{1}",
    }
    assert "job_id" not in outside


def test_json_has_the_error_with_its_stack_in_one_line(
    queue: Queue[Any], lines: Callable[[], list[dict[str, Any]]]
) -> None:
    job = queue.add(1)

    run_one(queue, refuse)

    (line,) = lines()
    assert (line["job_id"], line["attempt"], line["level"]) == (str(job.id), 1, "ERROR")
    assert (line["error"]["type"], line["error"]["message"]) == ("ValueError", "no such mailbox")
    assert "in refuse" in line["error"]["stack"]
    assert line["time"].endswith("+00:00")


def test_json_takes_what_cannot_be_printed(lines: Callable[[], list[dict[str, Any]]]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no")

    logging.getLogger("shop").info("a\nb\udc80", extra={"odd": Odd(), "plain": [1, None]}, stack_info=True)

    (line,) = lines()
    assert line["message"] == "a\nb\udc80"
    assert line["odd"] == "<its str() raised RuntimeError>"
    assert line["plain"] == [1, None]
    assert line["stack"].startswith("Stack")


def test_a_format_of_text_can_name_the_job(queue: Queue[Any]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(queue)s/%(job_id)s/%(attempt)s %(message)s"))
    handler.addFilter(JobFilter(default="-"))
    logger = logging.getLogger("shop")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    job = queue.add(1)

    run_one(queue, lambda _: logger.info("inside"))
    logger.info("outside")
    logger.removeHandler(handler)

    assert stream.getvalue().splitlines() == [f"emails/{job.id}/1 inside", "-/-/- outside"]


def test_a_job_that_is_run_inside_of_a_handler_does_not_take_its_place(tmp_path: Path) -> None:
    storage = SQLiteStorage(tmp_path / "jobs.db", clock=ManualClock())
    outer: Queue[Any] = Queue("outer", storage)
    inner: Queue[Any] = Queue("inner", storage)
    outer.add(1)
    inner.add(2)
    seen: list[str | None] = []

    def see() -> None:
        job = current_job()
        seen.append(job and job.queue)

    def handler(_: Any) -> None:
        see()
        drain(inner, lambda _: see())
        see()

    drain(outer, handler)
    storage.close()

    assert seen == ["outer", "inner", "outer"]


HANDLERS = """
import logging

def handle(data):
    logging.getLogger("shop").warning("handles %s", data)
    if data == "bad":
        raise ValueError("no such mailbox")
"""


def test_the_worker_command_logs_json_when_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(HANDLERS, encoding="utf-8")
    with Queue("emails", tmp_path / "jobs.db") as queue:
        job = queue.add("bad", attempts=1)
        command = [sys.executable, "-m", "litebroker", "worker", "tasks:handle", "--queue", "emails"]
        with subprocess.Popen(
            [*command, "--db", "jobs.db", "--log-format", "json"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr
            lines = []
            for text in process.stderr:
                lines.append(json.loads(text))
                if "error" in lines[-1]:
                    process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 0

    assert [line["message"].partition(" ")[0] for line in lines[:2]] == ["works", "handles"]
    by_message = {line["message"].partition(" ")[0]: line for line in lines}
    assert "job_id" not in by_message["works"]
    assert by_message["handles"]["job_id"] == by_message["job"]["job_id"] == str(job.id)
    assert by_message["job"]["message"].endswith("a dead letter after 1")

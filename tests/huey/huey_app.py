"""The application of the consumers that tests start. What its tasks do, they note in a file, a line each."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import os
import sys

if "greenlet" in sys.argv:
    from gevent import monkey

    monkey.patch_all()

import json
import signal
import time
from pathlib import Path
from typing import Any

from huey.api import crontab

from litebroker_huey import SQLiteHuey

options: dict[str, Any] = json.loads(os.environ.get("HUEY_OPTIONS", "{}"))
huey = SQLiteHuey("app", filename=os.environ["HUEY_FILE"], **options)


def note(*words: object) -> None:
    line = f"{' '.join(map(str, words))}\n".encode()
    file = os.open(os.environ["HUEY_FILE"] + ".notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def notes(*first: str) -> list[list[str]]:
    """The notes that begin so."""
    try:
        text = Path(os.environ["HUEY_FILE"] + ".notes").read_text()
    except FileNotFoundError:
        return []
    lines = [line.split() for line in text.splitlines()]
    return [line for line in lines if line[: len(first)] == list(first)]


@huey.task()
def work(number: int, seconds: float = 0.0) -> int:
    note("start", number, os.getpid())
    time.sleep(seconds)
    note("done", number, os.getpid())
    return number


@huey.task()
def count_up(number: int, seconds: float) -> None:
    """Keeps the processor busy, and the GIL."""
    note("start", number, os.getpid())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    note("done", number, os.getpid())


@huey.task(retries=2, retry_delay=1)
def flaky(number: int) -> int:
    note("start", number, os.getpid())
    if len(notes("start", str(number))) == 1:
        raise ValueError("not yet")
    note("done", number, os.getpid())
    return number


@huey.task()
@huey.lock_task("the-lock")
def locked(number: int, seconds: float = 0.0) -> int:
    note("start", number, os.getpid())
    time.sleep(seconds)
    note("done", number, os.getpid())
    return number


@huey.task()
def deadly() -> None:
    note("start", "deadly", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


@huey.task()
def leave(number: int) -> None:
    note("start", number, os.getpid())
    sys.exit(3)


@huey.task(max_receives=1)
def once(number: int, seconds: float) -> None:
    note("start", number, os.getpid())
    time.sleep(seconds)
    note("done", number, os.getpid())


@huey.task()
def add(*numbers: int) -> int:
    return sum(numbers)


@huey.task()
def total(numbers: list[int]) -> int:
    return sum(numbers)


if os.environ.get("HUEY_PERIODIC"):

    @huey.periodic_task(crontab())
    def each_minute() -> None:
        note("tick", int(time.time() // 60))


if not os.environ.get("HUEY_OLD_RELEASE"):

    @huey.task()
    def new_task(number: int) -> int:
        note("done", number, os.getpid())
        return number

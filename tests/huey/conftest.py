"""Real consumers, started as users start them, and what their tasks noted."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huey")

from litebroker_huey import SQLiteHuey

WORKER_TYPES = ["thread", "process", "greenlet"]


def wait_until(what: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Look until it is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


class Application:
    """`huey_app` on a file of its own: its huey in this process, and consumers in processes of theirs."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.file = str(folder / "jobs.db")
        self.options = options
        self.consumers: list[subprocess.Popen[bytes]] = []
        self.huey = SQLiteHuey("app", filename=self.file, **options)

    def task(self, name: str) -> Any:
        """A task of the application, as a producer without its code would enqueue it."""
        return _task(self.huey, name)

    def start(
        self, kind: str = "thread", workers: int = 2, *arguments: str, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start `huey_consumer`, as from the command line."""
        if kind == "greenlet":
            pytest.importorskip("gevent")
        log = (self.folder / f"consumer-{len(self.consumers)}.log").open("wb")
        with log:
            consumer = subprocess.Popen(
                [
                    *(sys.executable, "-m", "huey.bin.huey_consumer", "tests.huey.huey_app.huey"),
                    *("--worker-type", kind, "--workers", str(workers), *arguments),
                ],
                env={
                    **os.environ,
                    "HUEY_FILE": self.file,
                    "HUEY_OPTIONS": json.dumps(self.options),
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.consumers.append(consumer)
        return consumer

    def kill(self, consumer: subprocess.Popen[bytes]) -> None:
        """``kill -9`` to the consumer and its worker processes, all at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(consumer.pid, signal.SIGKILL)
        consumer.wait(10)

    def notes(self, *first: str) -> list[list[str]]:
        """What tasks noted, of those notes that begin so."""
        try:
            text = Path(f"{self.file}.notes").read_text()
        except FileNotFoundError:
            return []
        lines = [line.split() for line in text.splitlines()]
        return [line for line in lines if line[: len(first)] == list(first)]

    def done(self) -> Counter[str]:
        """How often each number was done."""
        return Counter(line[1] for line in self.notes("done"))

    def log(self) -> str:
        """What all consumers logged."""
        return "".join(file.read_text() for file in sorted(self.folder.glob("consumer-*.log")))

    def is_drained(self) -> bool:
        return not (self.huey.pending_count() or self.huey.scheduled_count() or self.huey.inflight_count())

    def close(self) -> None:
        for consumer in self.consumers:
            self.kill(consumer)
        self.huey.storage.close()


def _task(huey: SQLiteHuey, name: str) -> Any:
    """A task class of this name, registered as `huey_app` does it."""
    known = huey._registry._registry.get(f"tests.huey.huey_app.{name}")  # noqa: SLF001 - huey has no other way
    if known is not None:
        return known.wrapper

    def function(*_: object, **__: object) -> None:
        raise AssertionError("it runs in a consumer")

    function.__module__ = "tests.huey.huey_app"
    wrapper = huey.task(name=name, max_receives=1 if name == "once" else None)(function)
    wrapper.task_class.wrapper = wrapper
    return wrapper


@pytest.fixture
def new_application(tmp_path: Path) -> Iterator[Callable[..., Application]]:
    made: list[Application] = []

    def new(**options: Any) -> Application:
        made.append(Application(tmp_path, **options))
        return made[-1]

    yield new
    for application in made:
        application.close()


@pytest.fixture
def application(new_application: Callable[..., Application]) -> Application:
    return new_application()


@pytest.fixture
def huey(tmp_path: Path) -> Iterator[SQLiteHuey]:
    """A huey whose tasks this process runs by itself."""
    huey = SQLiteHuey("app", filename=tmp_path / "jobs.db", read_timeout=0.05)
    yield huey
    huey.storage.close()

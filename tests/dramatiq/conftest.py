"""Brokers on a file of each test's own, workers in threads, and the real ``dramatiq`` command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import dramatiq
import pytest
from dramatiq import Worker

from litebroker_dramatiq import SQLiteBroker


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def broker(database: Path) -> Iterator[SQLiteBroker]:
    broker = SQLiteBroker(database)
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


class Run(Protocol):
    def __call__(
        self, broker: SQLiteBroker, *, threads: int = ..., queues: set[str] | None = ...
    ) -> contextlib.AbstractContextManager[Worker]: ...


@pytest.fixture
def run() -> Run:
    """A worker in this process, while the block lasts."""

    @contextlib.contextmanager
    def run(broker: SQLiteBroker, *, threads: int = 4, queues: set[str] | None = None) -> Iterator[Worker]:
        worker = Worker(broker, worker_threads=threads, worker_timeout=100, queues=queues)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()

    return run


class Await(Protocol):
    def __call__(self, condition: Callable[[], Any], *, within: float = ...) -> Any: ...


@pytest.fixture
def wait_for() -> Await:
    """Ask until the answer is true, or fail; answers what was true."""

    def wait_for(condition: Callable[[], Any], *, within: float = 15.0) -> Any:
        deadline = time.monotonic() + within
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"still not so after {within} s"
            time.sleep(0.005)
        return answer

    return wait_for


@dataclass
class App:
    """A module of actors in a folder, and processes that use it.

    ``app.log`` in the folder is what its actors write: ``note(text)`` appends a line.
    """

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "jobs.db"

    def write(self, source: str) -> None:
        head = f"""
            import os, sys, time
            import dramatiq
            from litebroker_dramatiq import *

            def note(text):
                with open({str(self.folder / "app.log")!r}, "a") as log:
                    log.write(f"{{text}}\\n")
        """
        (self.folder / "app.py").write_text(textwrap.dedent(head) + textwrap.dedent(source))

    def notes(self) -> list[str]:
        log = self.folder / "app.log"
        return log.read_text().splitlines() if log.exists() else []

    def worker(self, *options: str, **environment: str) -> Process:
        """The real command."""
        command = [sys.executable, "-m", "dramatiq", "app", "--path", str(self.folder), *options]
        return self.start(command, **environment)

    def python(self, source: str) -> Process:
        """A script that has the module at hand."""
        return self.start([sys.executable, "-c", "from app import *\n" + textwrap.dedent(source)])

    def start(self, command: Sequence[str], **environment: str) -> Process:
        output = self.folder / f"output-{len(self.processes)}.txt"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                # On a hangup, the command starts the `python` of PATH.
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                },
                start_new_session=True,
            )
        self.processes.append(Process(process, output))
        return self.processes[-1]

    def __post_init__(self) -> None:
        self.processes: list[Process] = []


@dataclass
class Process:
    """A process and all that it starts."""

    popen: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """To it alone."""
        self.popen.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def wait(self, seconds: float = 30) -> int:
        return self.popen.wait(seconds)

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(tmp_path)
    yield app
    for process in app.processes:
        process.signal_all(9)
        process.popen.wait(10)

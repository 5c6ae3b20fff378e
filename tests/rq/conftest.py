"""A database, connections to it, and real `rq` processes on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rq

from litebroker_rq import SQLiteConnection, connect


def wait_until(condition: Callable[[], object], *, seconds: float = 20.0, what: str = "it") -> None:
    """Until the condition holds; the test fails when it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not come within {seconds} s")
        time.sleep(0.02)


def failure(job: rq.job.Job) -> str:
    """The traceback of the job's newest result."""
    result = job.latest_result()
    assert result is not None
    return str(result.exc_string)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def connection(path: Path) -> SQLiteConnection:
    return connect(path)


@pytest.fixture
def queue(connection: SQLiteConnection) -> rq.Queue:
    return rq.Queue(connection=connection)


class Processes:
    """`rq` and Python processes on the database, which do not outlive the test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {
            **os.environ,
            "RQ_CONNECTION_CLASS": "litebroker_rq.SQLiteConnection",
            "RQ_REDIS_URL": f"sqlite:///{path}",
            "PYTHONWARNINGS": "ignore",
        }

    def rq(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of rq."""
        return self.python("-m", "rq.cli", *arguments)

    def script(self, source: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a script."""
        return self.python("-c", source, *arguments)

    def python(self, *arguments: str) -> subprocess.Popen[str]:
        log = (self._path.parent / f"log-{len(self._started)}.txt").open("w", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            cwd=self._path.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        log.close()
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], *, seconds: float = 40.0) -> int:
        """Wait for its end; its status."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {seconds} s:\n{self.log(process)}")

    def run(self, *arguments: str) -> str:
        """Run a command of rq to its end; what it said."""
        process = self.rq(*arguments)
        status = self.finish(process)
        assert status == 0, self.log(process)
        return self.log(process)

    def log(self, process: subprocess.Popen[str]) -> str:
        number = self._started.index(process)
        return (self._path.parent / f"log-{number}.txt").read_text(encoding="utf-8")

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL, to this process alone."""
        process.kill()
        process.wait()

    def kill_all(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL, to the process and to all work horses of it."""
        members = descendants(process.pid)
        for pid in [process.pid, *members]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                self.kill_all(process)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        children = [child for child, parent in parents if parent == current]
        found += children
        waiting += children
    return found


@pytest.fixture
def processes(path: Path) -> Iterator[Processes]:
    running = Processes(path)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A worker that works in this process takes the signals for itself, and does not give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

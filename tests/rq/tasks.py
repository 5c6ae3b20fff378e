"""What the workers of these tests run. It is imported by their processes, as `tests.rq.tasks`."""

from __future__ import annotations

import os
import time
from pathlib import Path


def nothing() -> None:
    pass


def add(x: int, y: int) -> int:
    return x + y


def fail() -> None:
    raise ValueError("as it was told")


def large(size: int) -> bytes:
    return b"x" * size


def process() -> int:
    return os.getpid()


def note(path: str, word: str) -> None:
    """Append a line, whole or not at all."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{word}\n".encode())
    os.close(file)


def note_and_wait(path: str, word: str, gate: str) -> str:
    """Say that it has begun, and wait for a file to appear."""
    note(path, word)
    end = time.monotonic() + 30
    while not Path(gate).exists():
        if time.monotonic() > end:
            raise TimeoutError(gate)
        time.sleep(0.01)
    return word

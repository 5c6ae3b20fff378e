"""The fault of SQLite up to 3.51.2 by which a checkpoint that meets a committing writer can corrupt the WAL.

It is met by checkpoints that run beside commits; ours are made under the lock that our writers hold, so that the two
never meet. Here several processes write as fast as they can, checkpoint every few pages, and begin and end all the
time, so that the WAL starts anew thousands of times, while readers look: at any moment the file has to be whole.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.proof.figures import Figures

from litebroker import SQLiteStorage

_PROGRAM = """
import os, sys, time
from litebroker import JobSpec, SQLiteStorage
from litebroker.sqlite import engine
engine._CHECKPOINT_PAGES, engine._FEWEST_PAGES = 12, 3
checkpoints = 0
real = engine.Engine._checkpoint_if_due
def counted(self, db, pages):
    global checkpoints
    before = self._dirty_pages
    real(self, db, pages)
    checkpoints += self._dirty_pages == 0
engine.Engine._checkpoint_if_due = counted
end, number = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    storage = SQLiteStorage(sys.argv[1], durability="relaxed", busy_timeout=60)
    storage._engine._checkpoint_at = 4
    for _ in range(50):
        storage.add([JobSpec("work", b"x" * (number % 7) * 900)])
        number += 1
        records = storage.claim(["work"], limit=2, lease_ms=60_000)
        storage.complete([record.lease for record in records[1:]])
        storage.release([record.lease for record in records[:1]])
    storage.close()
print(number, checkpoints)
"""
_READER = """
import sys, time
from litebroker import SQLiteStorage
storage = SQLiteStorage(sys.argv[1], durability="relaxed", busy_timeout=60)
end, looks = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    with storage.snapshot():
        assert storage.execute("pragma quick_check") == [("ok",)]
        counts = storage.counts("work")
    looks += 1
    time.sleep(0.01)
print(looks, 0)
"""


def wal_reset(folder: Path, seconds: float, seed: int) -> Figures:
    """Rounds of some seconds on a file each."""
    figures = Figures("WAL resets", seed)
    with figures.timed():
        deadline = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < deadline - 1:
            number += 1
            here = folder / str(number)
            here.mkdir()
            _round(figures, here / "jobs.db", min(10.0, max(1.0, deadline - time.monotonic())))
            shutil.rmtree(here)
    return figures


def _round(figures: Figures, path: Path, seconds: float) -> None:
    programs = [_PROGRAM, _PROGRAM, _PROGRAM, _READER]
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)
        for program in programs
    ]
    try:
        said = [process.communicate(timeout=seconds + 60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, words in zip(started, said, strict=True):
        if process.returncode:
            figures.wrong("unexplained", f"a process ended with {process.returncode}")
            continue
        number, checkpoints = map(int, words.split())
        figures.fault("looks" if process is started[-1] else "checkpoints", checkpoints or number)
        figures.jobs += number if process is not started[-1] else 0
    with closing(SQLiteStorage(path)) as storage:
        if storage.execute("pragma integrity_check") != [("ok",)]:
            figures.wrong("unexplained", "integrity_check found the file damaged")

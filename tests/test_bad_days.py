"""Days on which everything goes wrong, in short; `python -m tests.proof --only "bad days"` has more of each."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from tests.proof.bad_days import SCENARIOS, cut_wal, pinned
from tests.proof.figures import Figures

from litebroker import DatabaseUnavailableError, JobSpec, Queue, SQLiteStorage, StorageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and stops processes")

SHORT = [name for name in SCENARIOS if name not in {"50 processes", "backlog", "cut WAL", "no descriptors", "pinned"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_on_a_bad_day_no_job_is_lost_and_none_is_done_twice(name: str, path: Path) -> None:
    figures = Figures(name, 1)

    SCENARIOS[name](figures, path, 1.0)

    assert figures.found == []
    assert figures.jobs > 0
    assert figures.faults


@pytest.mark.slow
def test_without_descriptors_calls_are_refused_with_an_error_of_ours(path: Path) -> None:
    figures = Figures("no descriptors", 1)

    SCENARIOS["no descriptors"](figures, path, 1.0)

    assert figures.found == []
    assert figures.faults["calls refused for want of descriptors"] > 0


def test_a_wal_that_was_cut_short_gives_a_whole_beginning(path: Path) -> None:
    figures = Figures("cut", 7)

    cut_wal(figures, path, 0.4)

    assert figures.found == []
    assert figures.faults["WALs cut short"] >= 1


def test_the_wal_is_bounded_again_when_the_reader_that_pinned_it_has_gone(path: Path) -> None:
    figures = Figures("pinned", 1)

    pinned(figures, path, 20, jobs=3000)

    assert figures.found == []


def test_a_folder_that_is_gone_is_said_and_work_goes_on_when_it_is_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "data", tmp_path / "away"
    folder.mkdir()
    storage = SQLiteStorage(folder / "jobs.db")
    storage.add([JobSpec("work", b"{}")])
    storage._engine._looked_at = -10  # noqa: SLF001 - it looks once a second

    folder.rename(away)
    with pytest.raises(DatabaseUnavailableError, match="deleted while it was in use"):
        storage.add([JobSpec("work", b"{}")])
    away.rename(folder)

    storage.add([JobSpec("work", b"{}")])
    assert storage.counts("work").pending == 2
    assert not away.exists()
    storage.close()


def test_a_worker_outlives_a_folder_that_is_gone_for_a_while(tmp_path: Path) -> None:
    folder, away = tmp_path / "data", tmp_path / "away"
    folder.mkdir()
    errors: list[BaseException] = []
    told, ran = threading.Event(), threading.Event()

    def on_error(error: BaseException, _context: object) -> None:
        errors.append(error)
        told.set()

    queue: Queue[int] = Queue("work", folder / "jobs.db", on_error=on_error)
    worker = queue.process(lambda _data: ran.set())
    folder.rename(away)
    assert told.wait(20)
    away.rename(folder)
    queue.add(1)

    assert ran.wait(20)
    assert worker.close(20)
    assert all(isinstance(error, StorageError) for error in errors)
    queue.close()


def test_a_fork_bomb_of_readers_leaves_no_descriptor_open(path: Path) -> None:
    storage = SQLiteStorage(path)
    storage.add([JobSpec("work", b"{}")])
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if storage.counts("work").pending == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
    storage.counts("work")

    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    storage.close()

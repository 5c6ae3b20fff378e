"""Backups of a file in use, the way back, and the space of what is gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import comes_true

from litebroker import (
    DatabaseBusyError,
    DatabaseCorruptError,
    ForeignDatabaseError,
    JobSpec,
    Queue,
    SQLiteStorage,
    State,
    StorageError,
)
from litebroker.cli import main
from litebroker.sqlite.backup import back_up, restore

# Adds jobs one by one, and says which number it has come to, until it is killed.
WRITER = """
    import sys
    from litebroker import Queue
    queue = Queue("work", sys.argv[1])
    for number in range(10**9):
        queue.add(number)
        print(number, flush=True)
"""
# Has the file open, and a job claimed, until it is killed.
HOLDER = """
    import sys, time
    from litebroker import Queue
    queue = Queue("work", sys.argv[1])
    print(queue.claim(lease=3600), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture
def storage(path: str) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(path, durability="relaxed")
    yield storage
    storage.close()


def save(path: str, target: str, *, driver: str = "sqlite3", overwrite: bool = False) -> None:
    back_up(path, target, driver=driver, overwrite=overwrite, on_step=lambda _left, _total: None)


def bring_back(backup: str, path: str, **options: Any) -> int:
    return restore(backup, path, driver="sqlite3", on_step=lambda _left, _total: None, **options).requeued


@contextlib.contextmanager
def running(script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LITEBROKER_URL", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert isinstance(end.value.code, int)
        return end.value.code, *capfd.readouterr()

    return run


# -- backup --


def test_a_backup_of_a_file_in_use_has_all_that_was_added_before_it(path: str, tmp_path: Path) -> None:
    with running(WRITER, path) as writer:
        assert writer.stdout
        added = -1
        for _ in range(50):
            added = int(writer.stdout.readline())

        for number in range(5):
            save(path, f"{path}.backup{number}")

        later = int(writer.stdout.readline())
    for number in range(5):
        with contextlib.closing(SQLiteStorage(f"{path}.backup{number}")) as copy:
            payloads = [job.payload for job in copy.page("work", State.PENDING, limit=10**6)]
        assert payloads == [b"%d" % count for count in range(len(payloads))]
        assert added < len(payloads)
    assert later > added


def test_a_backup_is_one_file_and_can_be_opened_as_it_is(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x")] * 3)
    (tmp_path / "backups").mkdir()
    target = tmp_path / "backups" / "one.db"

    save(path, str(target))

    assert names_in(tmp_path / "backups") == ["one.db"]
    with sqlite3.connect(f"file:{target}?mode=ro&immutable=1", uri=True) as db:
        assert db.execute("select count(*) from litebroker_job").fetchone() == (3,)
    db.close()


def test_a_backup_leaves_the_file_as_it_is_though_nobody_else_has_it_open(path: str, tmp_path: Path) -> None:
    with running(WRITER, path) as writer:
        assert writer.stdout
        writer.stdout.readline()
    before = {name: (tmp_path / name).stat() for name in ("jobs.db", "jobs.db-wal")}

    save(path, f"{path}.backup")

    after = {name: (tmp_path / name).stat() for name in before}
    assert [(it.st_size, it.st_mtime_ns) for it in after.values()] == [
        (it.st_size, it.st_mtime_ns) for it in before.values()
    ]


def test_a_backup_may_be_read_by_whom_the_file_may(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x")])
    Path(path).chmod(0o640)

    save(path, f"{path}.backup")

    assert Path(f"{path}.backup").stat().st_mode & 0o777 == 0o640


def test_a_backup_does_not_hold_writers_off(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x" * 5000)] * 3000)
    steps: list[int] = []

    def on_step(left: int, _total: int) -> None:
        storage.add([JobSpec("other", b"x")])
        steps.append(left)

    back_up(path, f"{path}.backup", driver="sqlite3", on_step=on_step)

    assert len(steps) > 2
    assert storage.counts("other").ready == len(steps)
    with contextlib.closing(SQLiteStorage(f"{path}.backup")) as copy:
        assert copy.counts("other").ready == 0
        assert copy.counts("work").ready == 3000


@pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")
def test_a_backup_can_be_made_through_apsw(path: str) -> None:
    with contextlib.closing(SQLiteStorage(path, driver="apsw")) as storage:
        storage.add([JobSpec("work", b"x")] * 100)
        save(path, f"{path}.backup", driver="apsw")

    with contextlib.closing(SQLiteStorage(f"{path}.backup", driver="apsw")) as copy:
        assert copy.counts("work").ready == 100


def test_a_backup_that_was_interrupted_leaves_nothing(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x" * 5000)] * 2000)
    before = names_in(tmp_path)

    def stop(_left: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(path, f"{path}.backup", driver="sqlite3", on_step=stop)

    assert names_in(tmp_path) == before


def test_a_backup_replaces_nothing_unasked(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x")])
    backup = f"{path}.backup"
    Path(backup).write_text("mine")

    with pytest.raises(StorageError, match="there is a file already"):
        save(path, backup)

    assert Path(backup).read_text() == "mine"


def test_a_backup_replaces_the_one_before_when_asked(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x")])
    save(path, f"{path}.backup")
    storage.add([JobSpec("work", b"x")])

    save(path, f"{path}.backup", overwrite=True)

    with contextlib.closing(SQLiteStorage(f"{path}.backup")) as copy:
        assert copy.counts("work").ready == 2


def test_a_backup_never_goes_onto_a_database_in_use(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x")])
    other = str(tmp_path / "other.db")
    with Queue[Any]("work", other) as queue:
        queue.add("theirs")
        with running(HOLDER, other) as holder:
            assert holder.stdout
            holder.stdout.readline()

            with pytest.raises(DatabaseBusyError, match=f"it is in use, by process {holder.pid}"):
                save(path, other, overwrite=True)

        assert queue.stats().active == 1


@pytest.mark.parametrize("target", ["jobs.db", "nowhere/jobs.db", ".", "stale.db"])
def test_a_backup_goes_to_no_bad_place(storage: SQLiteStorage, path: str, tmp_path: Path, target: str) -> None:
    storage.add([JobSpec("work", b"x")])
    (tmp_path / "stale.db-wal").write_bytes(b"of some other database")

    with pytest.raises(StorageError):
        save(path, str(tmp_path / target), overwrite=True)

    assert storage.counts("work").ready == 1
    assert not [name for name in names_in(tmp_path) if "partial" in name]


@pytest.mark.parametrize(
    "name", ["link", "second", "jobs.db-wal", "jobs.db-shm", "jobs.db-journal", "wal", "jobs.db-litebroker/x"]
)
def test_a_backup_replaces_no_part_of_the_database(path: str, tmp_path: Path, name: str) -> None:
    with running(WRITER, path) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.kill()  # and leaves a WAL with jobs in it
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "second").hardlink_to(path)
    (tmp_path / "wal").hardlink_to(f"{path}-wal")
    before = names_in(tmp_path)

    with pytest.raises(StorageError, match="give another path"):
        save(path, str(tmp_path / name), overwrite=True)

    assert names_in(tmp_path) == before
    with contextlib.closing(SQLiteStorage(path)) as storage:
        assert storage.counts("work").ready >= 1


def test_a_backup_gets_no_name_that_is_another_database_s(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x")])
    (tmp_path / "other.db").write_bytes(b"")

    with pytest.raises(StorageError, match="SQLite would take it for a part of"):
        save(path, str(tmp_path / "other.db-wal"))


def test_a_database_is_not_restored_from_a_second_name_of_its_own(path: str, tmp_path: Path) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([JobSpec("work", b"x")])
    (tmp_path / "second").hardlink_to(path)

    with pytest.raises(StorageError, match="the database itself"):
        bring_back(str(tmp_path / "second"), path, overwrite=True)


def test_a_stranger_s_database_is_not_backed_up(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "theirs.db") as db:
        db.execute("create table users(name text)")
    db.close()

    with pytest.raises(ForeignDatabaseError):
        save(str(tmp_path / "theirs.db"), str(tmp_path / "copy.db"))


def test_a_damaged_file_is_not_backed_up(path: str, tmp_path: Path) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([JobSpec("work", b"x" * 500)] * 1000)
    spoil(path)

    with pytest.raises(DatabaseCorruptError):
        save(path, str(tmp_path / "copy.db"))

    assert not (tmp_path / "copy.db").exists()


def spoil(path: str) -> None:
    """Overwrite a few pages in the middle."""
    with Path(path).open("r+b") as file:
        file.seek(Path(path).stat().st_size // 2 & ~4095)
        file.write(os.urandom(3 * 4096))


# -- restore --


def test_a_backup_comes_back_as_a_database_to_work_on(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"%d" % number) for number in range(10)])
    save(path, f"{path}.backup")
    target = str(tmp_path / "new.db")

    bring_back(f"{path}.backup", target)

    with contextlib.closing(SQLiteStorage(target)) as restored:
        claimed = restored.claim(["work"], limit=10, lease_ms=60_000)
        assert [job.payload for job in claimed] == [b"%d" % number for number in range(10)]
        assert all(restored.complete([job.lease for job in claimed]))


def test_a_file_in_use_is_never_restored_onto(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"1")] * 3)
    save(path, f"{path}.backup")
    storage.close()
    with running(HOLDER, path) as holder:
        assert holder.stdout
        holder.stdout.readline()

        status, _, error = command("restore", f"{path}.backup", "--db", path, "--force")

        assert status == 1
        assert f"it is in use, by process {holder.pid}" in error
        with contextlib.closing(SQLiteStorage(path)) as again:
            assert again.counts("work").active == 1


def test_a_file_in_use_is_noticed_where_the_system_tells_nothing(
    storage: SQLiteStorage, path: str, tmp_path: Path
) -> None:
    # Of this process's own connection /proc is not asked, so that SQLite's locks alone have to tell.
    storage.add([JobSpec("work", b"x")])
    save(path, f"{path}.backup")
    storage.add([JobSpec("work", b"x")])

    with pytest.raises(DatabaseBusyError, match="it is in use"):
        bring_back(f"{path}.backup", path, overwrite=True)

    assert storage.counts("work").ready == 2


def test_a_file_that_nobody_uses_is_replaced_when_asked(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x")])
    save(path, f"{path}.backup")
    storage.add([JobSpec("work", b"x")])
    storage.close()

    with pytest.raises(StorageError, match="there is a file already"):
        bring_back(f"{path}.backup", path)
    bring_back(f"{path}.backup", path, overwrite=True)

    with contextlib.closing(SQLiteStorage(path)) as again:
        assert again.counts("work").ready == 1


def test_what_is_no_sound_backup_replaces_nothing(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x" * 500)] * 1000)
    save(path, f"{path}.backup")
    spoil(f"{path}.backup")
    (tmp_path / "text").write_text("no database at all, but longer than a header is, which takes a hundred bytes" * 9)
    storage.close()

    for backup in (f"{path}.backup", str(tmp_path / "text"), str(tmp_path / "missing")):
        with pytest.raises(StorageError):
            bring_back(backup, path, overwrite=True)

    with contextlib.closing(SQLiteStorage(path)) as again:
        assert again.counts("work").ready == 1000


def test_active_jobs_become_pending_when_asked_and_the_attempt_does_not_count(
    storage: SQLiteStorage, path: str, tmp_path: Path
) -> None:
    storage.add([JobSpec("work", b"x", group="g", max_attempts=1), JobSpec("work", b"y", max_attempts=1)])
    storage.claim(["work"], limit=2, lease_ms=3_600_000)
    save(path, f"{path}.backup")

    requeued = bring_back(f"{path}.backup", str(tmp_path / "new.db"), requeue_active=True)

    assert requeued == 2
    with contextlib.closing(SQLiteStorage(tmp_path / "new.db")) as restored:
        assert [job.attempts for job in restored.claim(["work"], limit=5, lease_ms=1000)] == [1, 1]


def test_active_jobs_stay_with_their_leases_when_not_asked(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x")])
    storage.claim(["work"], limit=1, lease_ms=1500)
    save(path, f"{path}.backup")

    bring_back(f"{path}.backup", str(tmp_path / "new.db"))

    with contextlib.closing(SQLiteStorage(tmp_path / "new.db")) as restored:
        assert comes_true(lambda: restored.claim(["work"], limit=1, lease_ms=60_000))
        ((attempt,),) = [copy.record.history for copy in restored.walk_jobs()]
        assert attempt.outcome == "lapsed"


def test_on_another_machine_they_are_taken_back_at_once(storage: SQLiteStorage, path: str, tmp_path: Path) -> None:
    storage.add([JobSpec("work", b"x")])
    storage.claim(["work"], limit=1, lease_ms=3_600_000)
    save(path, f"{path}.backup")
    bring_back(f"{path}.backup", str(tmp_path / "new.db"))
    with sqlite3.connect(tmp_path / "new.db") as db:
        db.execute("update litebroker_process set boot = 'another'")
        db.execute("update litebroker_boot set id = 'another'")
    db.close()

    with contextlib.closing(SQLiteStorage(tmp_path / "new.db")) as restored:
        assert comes_true(lambda: restored.claim(["work"], limit=1, lease_ms=60_000))


def test_jobs_of_rq_come_back_whole(path: str, tmp_path: Path) -> None:
    rq = pytest.importorskip("rq")
    import litebroker_rq

    source = rq.Queue("high", connection=litebroker_rq.connect(path))
    job = source.enqueue(len, "four")
    save(path, f"{path}.backup")
    bring_back(f"{path}.backup", str(tmp_path / "new.db"), requeue_active=True)
    connection = litebroker_rq.connect(str(tmp_path / "new.db"))

    rq.SimpleWorker([rq.Queue("high", connection=connection)], connection=connection).work(burst=True)

    assert rq.job.Job.fetch(job.id, connection=connection).return_value() == 4
    assert len(source) == 1


# -- the commands --


def test_backup_and_restore_tell_what_they_did(
    storage: SQLiteStorage, path: str, tmp_path: Path, command: Command
) -> None:
    storage.add([JobSpec("work", b"x")])
    storage.claim(["work"], limit=1, lease_ms=3_600_000)

    backup = command("backup", "b.db", "--db", path, "--json")
    restored = command("restore", "b.db", "--db", "new.db", "--requeue-active")

    assert backup[0] == restored[0] == 0
    assert json.loads(backup[1])["bytes"] == (tmp_path / "b.db").stat().st_size
    assert restored[1].endswith("checked; 1 active jobs are pending again\n")


def test_a_file_that_is_not_there_is_not_backed_up(command: Command) -> None:
    status, _, error = command("backup", "b.db", "--db", "none.db")

    assert (status, error) == (1, "Error: none.db: there is no such file\n")


def test_a_backup_command_that_is_killed_leaves_no_backup(
    storage: SQLiteStorage, path: str, tmp_path: Path, command: Command
) -> None:
    storage.add([JobSpec("work", b"x" * 100_000)] * 600)
    process = subprocess.Popen(
        [sys.executable, "-m", "litebroker", "backup", "b.db", "--db", path],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert comes_true(lambda: process.poll() is not None or any("partial" in name for name in names_in(tmp_path)))

    process.send_signal(signal.SIGKILL)
    process.wait()

    target = tmp_path / "b.db"
    assert not target.exists() or process.returncode == 0
    assert command("backup", "b.db", "--force", "--db", path)[0] == 0


def test_migrate_says_that_there_is_nothing_to_do(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"x")])

    assert command("migrate", "--db", path) == (0, f"{path}: schema 1, nothing to do\n", "")


def test_migrate_makes_the_tables_of_a_file_that_has_none(tmp_path: Path, command: Command) -> None:
    sqlite3.connect(tmp_path / "jobs.db").close()
    (tmp_path / "jobs.db").touch()

    status, out, _ = command("migrate", "--db", "jobs.db", "--json")

    assert status == 0
    assert json.loads(out) == {"database": "jobs.db", "from": 0, "to": 1, "components": []}


def test_migrate_leaves_a_newer_file_alone(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"x")])
    storage.close()
    with sqlite3.connect(path) as db:
        db.execute("update litebroker_meta set value = '99' where key = 'schema'")
    db.close()

    status, _, error = command("migrate", "--db", path)

    assert status == 1
    assert "a newer litebroker made it" in error


# -- vacuum --


def test_a_drained_file_gives_its_space_back(storage: SQLiteStorage, path: str) -> None:
    storage.add([JobSpec("work", b"x" * 1000)] * 5000)
    storage.purge("work", [State.PENDING])

    before, after = storage.vacuum()

    assert before.size > 5_000_000
    assert Path(path).stat().st_size == after.size < 200_000


def test_a_large_file_is_not_written_anew_unasked(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"x" * 5000)] * 2000)
    storage.add([JobSpec("gone", b"x" * 5000)] * 200)
    storage.purge("gone", [State.PENDING])

    refused = command("vacuum", "--db", path)
    full = command("vacuum", "--full", "--db", path, "--json")

    assert refused[0] == 1
    assert "--full" in refused[2]
    assert full[0] == 0
    assert json.loads(full[1])["after"]["free"] == 0
    assert storage.counts("work").ready == 2000


def test_a_file_that_was_prepared_gives_back_in_bites_while_others_write(
    storage: SQLiteStorage, path: str, tmp_path: Path
) -> None:
    storage.add([JobSpec("work", b"x" * 5000)] * 2000)
    storage.add([JobSpec("gone", b"x" * 5000)] * 1000)
    storage.vacuum(full=True, incremental=True)
    storage.purge("gone", [State.PENDING])
    bites: list[int] = []
    done = threading.Event()
    added = []

    def write() -> None:
        while not done.is_set():
            added.extend(storage.add([JobSpec("other", b"x")]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        before, after = storage.vacuum(on_bite=lambda left, _total: bites.append(left))
    finally:
        done.set()
        writer.join()

    assert len(bites) > 5
    assert before.free > 5_000_000
    assert after.free < 100_000
    assert storage.counts("work").ready == 2000
    assert storage.counts("other").ready == len(added)


@pytest.mark.parametrize("full", [False, True], ids=["as it is", "full"])
def test_vacuum_takes_turns_with_threads_that_write(storage: SQLiteStorage, full: bool) -> None:
    storage.add([JobSpec("work", b"x")])
    done = threading.Event()
    errors: list[Exception] = []

    def write() -> None:
        try:
            while not done.is_set():
                storage.add([JobSpec("other", b"x")])
        except Exception as error:  # noqa: BLE001 (the test tells)
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(20):
            storage.vacuum(full=full)
    finally:
        done.set()
        for writer in writers:
            writer.join()

    assert errors == []
    assert storage.counts("work").ready == 1


def test_vacuum_is_no_part_of_a_transaction(storage: SQLiteStorage) -> None:
    with storage.transaction(), pytest.raises(StorageError, match="call it outside"):
        storage.vacuum(full=True)


def test_vacuum_leaves_a_file_without_free_space_alone(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"x")])

    status, out, _ = command("vacuum", "--db", path)

    assert status == 0
    assert "nothing to give back" in out

"""The file itself: what is there instead of it, what becomes of it, and what is left when a day goes badly."""

# ruff: noqa: SLF001 - the schema's migration is stopped halfway.

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import litebroker.sqlite
from litebroker.errors import (
    DatabaseBusyError,
    DatabaseCorruptError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ForeignDatabaseError,
    SchemaError,
    SchemaTooNewError,
    StorageClosedError,
    StorageError,
)
from litebroker.jobs import JobSpec, State
from litebroker.sqlite import SQLiteStorage, machine
from litebroker.sqlite.connection import connect
from litebroker.sqlite.schema import PAGE_BYTES
from litebroker.testing import ManualClock

LIMIT = 20

DRIVERS = ["sqlite3", pytest.param("apsw", marks=pytest.mark.skipif(find_spec("apsw") is None, reason="no apsw"))]
ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")


def job(payload: bytes = b"{}", **options: Any) -> JobSpec:
    return JobSpec(queue="work", payload=payload, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def digest(folder: Path) -> dict[str, str]:
    """Every file below, and what is in it."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def count(path: Path, driver: str = "sqlite3") -> int:
    """How many jobs another connection sees; of the same driver, while the storage is open."""
    with contextlib.closing(connect(str(path), driver, busy_timeout_ms=1000)) as db:
        return int(db.rows("select count(*) from litebroker_job")[0][0])


def make(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def python(script: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        **options,
    )


# -- what is there instead --


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_folder_that_does_not_exist_is_named_and_not_made(tmp_path: Path, driver: str) -> None:
    storage = SQLiteStorage(tmp_path / "no" / "jobs.db", driver=driver)

    with pytest.raises(DatabaseUnavailableError, match=r"the folder .* does not exist: make it first"):
        storage.add([job()])

    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailableError, match="this is a folder"):
        SQLiteStorage(tmp_path).open()

    assert list(tmp_path.iterdir()) == []
    assert not Path(f"{tmp_path}-litebroker").exists()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("content", [b"no database, but a text that is longer than its header\n" * 50, b"a short text"])
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(path: Path, content: bytes, driver: str) -> None:
    path.write_bytes(content)
    before = digest(path.parent)

    with pytest.raises(ForeignDatabaseError, match="not an SQLite database"):
        SQLiteStorage(path, driver=driver).add([job()])

    assert digest(path.parent) == before


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_empty_file_becomes_a_database(path: Path, driver: str) -> None:
    path.touch()

    with contextlib.closing(SQLiteStorage(path, driver=driver)) as storage:
        assert storage.add([job()])[0].created

    assert count(path) == 1


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_applications_database_is_refused_and_left_as_it_is(path: Path, journal: str, driver: str) -> None:
    make(path, f"pragma journal_mode = {journal}", "create table orders(id)", "insert into orders values(1)")
    before = digest(path.parent)

    with pytest.raises(ForeignDatabaseError, match=r"orders.*shared=True"):
        SQLiteStorage(path, driver=driver).add([job()])

    assert digest(path.parent) == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["jobs.db"]


def test_a_database_marked_as_another_applications_is_refused(path: Path) -> None:
    make(path, "pragma application_id = 252006673", "pragma user_version = 1")

    with pytest.raises(ForeignDatabaseError, match="application_id 0xf055111"):
        SQLiteStorage(path).open()


@pytest.mark.parametrize("driver", DRIVERS)
def test_jobs_live_beside_other_tables_where_that_is_asked_for(path: Path, driver: str) -> None:
    make(path, "create table orders(id)", "insert into orders values(1)")

    with contextlib.closing(SQLiteStorage(f"sqlite:///{path}?shared=1", driver=driver)) as storage:
        storage.add([job()])
    with contextlib.closing(SQLiteStorage(path, driver=driver)) as storage:  # now it has jobs, too
        found = storage.counts("work").ready

    assert found == 1
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("select * from orders").fetchall() == [(1,)]


@pytest.mark.parametrize("use", ["select * from orders", "insert into orders values(2)"])
def test_a_shared_file_is_opened_though_somebody_uses_it_meanwhile(path: Path, use: str) -> None:
    make(path, "create table orders(id)", "insert into orders values(1)")
    user = sqlite3.connect(path, isolation_level=None)
    user.execute("begin" if use.startswith("select") else "begin immediate")
    user.execute(use).fetchall()
    script = """
import sys
from litebroker.sqlite import SQLiteStorage
storage = SQLiteStorage(sys.argv[1], shared=True)
print("begin", flush=True)
storage.open()
print("open", flush=True)
"""
    with python(script, path) as child:
        assert child.stdout
        assert child.stdout.readline() == "begin\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.3)  # it waits, and does not fail
        user.execute("rollback")
        user.close()

        assert child.stdout.readline() == "open\n"


def test_a_newer_file_is_refused_and_left_as_it_is(path: Path) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    make(path, "update litebroker_meta set value = '99' where key = 'schema'", "pragma wal_checkpoint(truncate)")
    before = path.read_bytes()

    with pytest.raises(SchemaTooNewError, match="schema 99"):
        SQLiteStorage(path).add([job()])

    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("drop index litebroker_job_ready", "litebroker_job_ready is missing"),
        ("drop index litebroker_job_dedupe", "litebroker_job_dedupe is missing"),
        ("drop table litebroker_schedule", "litebroker_schedule is missing"),
        ("alter table litebroker_job add column extra text", "litebroker_job is not as this version made it"),
        ("update litebroker_meta set value = 'x' where key = 'schema'", "schema"),
    ],
)
def test_a_file_whose_tables_were_changed_is_refused(path: Path, change: str, said: str) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    make(path, change)

    with pytest.raises(SchemaError, match=said):
        SQLiteStorage(path).add([job()])

    assert count(path) == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_damaged_page_is_a_clear_error_and_nothing_is_made_anew(path: Path, driver: str) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job(b"%04d" % number * 100) for number in range(2000)])
    with contextlib.closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("select rootpage from sqlite_master where name = 'litebroker_job_ready'").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE_BYTES)
        file.write(b"\xff" * PAGE_BYTES)
    before = path.read_bytes()

    storage = SQLiteStorage(path, driver=driver)
    with pytest.raises(DatabaseCorruptError, match="restore a backup"):
        storage.claim(["work"], limit=1, lease_ms=1000)
    with pytest.raises(DatabaseCorruptError):
        storage.add([job()])
    storage.close()

    assert len(path.read_bytes()) == len(before)
    assert path.read_bytes()[(root - 1) * PAGE_BYTES : root * PAGE_BYTES] == b"\xff" * PAGE_BYTES


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("text", "damaged"),
    [(b"litebroker_job_ready", b"\xff" * 20), (b"a queue", b"\xff" * 7), (b'{"a header', b'["a header')],
)
def test_damaged_text_is_a_clear_error(path: Path, driver: str, text: bytes, damaged: bytes) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([JobSpec("a queue", b"x", headers={"a header": "x"})])
    path.write_bytes(path.read_bytes().replace(text, damaged))

    storage = SQLiteStorage(path, driver=driver)
    with pytest.raises(DatabaseCorruptError, match="restore a backup"):
        storage.page("a queue", State.PENDING, limit=1) or storage.queues()
    storage.close()


def test_a_damaged_header_is_a_clear_error(path: Path) -> None:
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    with path.open("r+b") as file:
        file.write(b"\0" * 100)
    before = path.read_bytes()

    with pytest.raises(StorageError, match="not an SQLite database"):
        SQLiteStorage(path).open()

    assert path.read_bytes() == before


# -- rights --

AS_NOBODY = """
import os, sys
from litebroker.errors import StorageError
from litebroker.sqlite import SQLiteStorage
from litebroker.jobs import JobSpec
spec = JobSpec(queue="work", payload=b"{}")
SQLiteStorage(":memory:").add([spec])  # all that is imported late, while it can be read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    print(SQLiteStorage(sys.argv[1]).add([spec])[0].created)
except StorageError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that others can reach, as pytest's own cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
        Path(folder).chmod(0o777)


def as_somebody_else(path: Path) -> str:
    """What an add says in a process without any rights of root's."""
    with python(AS_NOBODY, path) as child:
        assert child.stdout
        return child.stdout.read()


def test_a_file_that_may_not_be_written_is_named(open_folder: Path) -> None:
    path = open_folder / "jobs.db"
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    path.chmod(0o444)

    said = as_somebody_else(path)

    assert said.startswith("DatabaseReadOnlyError")
    assert "check the rights on the file" in said
    assert count(path) == 1


def test_a_folder_that_may_not_be_written_is_named(open_folder: Path) -> None:
    path = open_folder / "jobs.db"
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    path.chmod(0o666)
    open_folder.chmod(0o555)

    said = as_somebody_else(path)

    assert said.startswith("DatabaseReadOnlyError")
    assert "folder" in said


@ROOT
def test_locks_of_somebody_else_are_named(open_folder: Path) -> None:
    path = open_folder / "jobs.db"
    with contextlib.closing(SQLiteStorage(path)) as storage:
        storage.add([job()])
    path.chmod(0o666)

    said = as_somebody_else(path)

    assert said.startswith("DatabaseReadOnlyError")
    assert "-litebroker" in said


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("this root may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@ROOT
def test_a_file_system_that_became_read_only_is_named_and_work_goes_on_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as folder:
        with contextlib.closing(SQLiteStorage(folder / "jobs.db")) as storage:
            storage.add([job()])
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        storage = SQLiteStorage(folder / "jobs.db")
        with pytest.raises(DatabaseReadOnlyError):
            storage.add([job()])
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)

        storage.add([job()])

        assert count(folder / "jobs.db") == 2
        storage.close()


# -- no space --


@ROOT
@pytest.mark.parametrize("durability", ["relaxed", "full"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_full_disk_is_said_and_work_goes_on_when_there_is_space_again(
    tmp_path: Path, driver: str, durability: str
) -> None:
    with mounted(tmp_path / "disk", "size=3m") as folder:
        path = folder / "jobs.db"
        storage = SQLiteStorage(path, durability=durability, driver=driver)
        ballast = folder / "ballast"
        ballast.write_bytes(b"x" * 1_000_000)
        stored: list[int] = []

        def fill(*specs: JobSpec) -> None:
            while True:
                stored.extend(added.id for added in storage.add(specs))

        with pytest.raises(DatabaseFullError, match="make room"):
            fill(job(b"x" * 20_000), job(b"x" * 20_000))
        with pytest.raises(DatabaseFullError):
            fill(job(b"x" * 20_000))
        readable = storage.counts("work").ready

        ballast.unlink()
        stored += [added.id for added in storage.add([job(b"x" * 20_000)])]
        claimed = storage.claim(["work"], limit=1000, lease_ms=60_000)
        settled = storage.complete([record.lease for record in claimed])
        storage.close()

        assert readable == len(stored) - 1
        assert sorted(record.id for record in claimed) == sorted(stored)
        assert all(settled)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_file_that_may_not_grow_is_full_and_loses_nothing(path: Path, driver: str) -> None:
    storage = SQLiteStorage(path, driver=driver)
    storage.add([job()])
    mine = storage._engine._db
    assert mine
    mine.rows("pragma max_page_count = 100")

    stored = 1

    def fill() -> None:
        nonlocal stored
        while True:
            storage.add([job(b"x" * 10_000), job(b"x" * 10_000)])
            stored += 2

    with pytest.raises(DatabaseFullError):
        fill()
    mine.rows("pragma max_page_count = 100000")
    storage.add([job()])

    assert count(path, driver) == stored + 1
    storage.close()


# -- deleted, replaced, moved --


def until_noticed(work: Callable[[], object]) -> StorageError:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            work()
        except StorageError as error:
            return error
        time.sleep(0.01)
    pytest.fail("it was not noticed")


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_deleted_file_is_not_made_anew_and_work_goes_on_when_it_is_back(path: Path, driver: str) -> None:
    storage = SQLiteStorage(path, driver=driver)
    added = [storage.add([job()])[0].id]

    path.rename(path.parent / "away")
    error = until_noticed(lambda: added.append(storage.add([job()])[0].id))
    with pytest.raises(DatabaseUnavailableError, match="deleted while it was in use"):
        storage.counts("work")
    remade = path.exists()
    (path.parent / "away").rename(path)
    added.append(storage.add([job()])[0].id)

    assert isinstance(error, DatabaseUnavailableError)
    assert not remade
    assert {record.id for record in storage.page("work", State.PENDING, limit=10_000)} == set(added)
    storage.close()


def test_a_replaced_file_is_opened_and_its_wal_is_not_touched(path: Path) -> None:
    storage = SQLiteStorage(path)
    storage.add([job(b"old", group="g")])
    storage.claim(["work"], limit=1, lease_ms=60_000)
    for file in list(path.parent.iterdir()):
        if file.is_file():
            file.rename(file.parent / f"{file.name}.old")
    script = """
import sys
from litebroker.sqlite import SQLiteStorage
from litebroker.jobs import JobSpec
storage = SQLiteStorage(sys.argv[1])
for line in sys.stdin:
    storage.add([JobSpec(queue="other" if line == "1\\n" else "work", payload=line.encode())])
    print("added", flush=True)
"""
    with python(script, path) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write("1\n")
        child.stdin.flush()
        assert child.stdout.readline() == "added\n"
        deadline = time.monotonic() + LIMIT
        while storage.counts("other").ready != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.stdin.write("2\n")
        child.stdin.flush()
        assert child.stdout.readline() == "added\n"
        storage.add([job(b"3")])
        found = {record.payload for record in storage.page("work", State.PENDING)}
        storage.close()
        child.stdin.close()

    assert found == {b"2\n", b"3"}
    assert count(path) == 3


def test_a_path_is_fixed_when_the_storage_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    storage = SQLiteStorage("jobs.db")
    monkeypatch.chdir(tmp_path / "b")

    storage.add([job()])

    assert count(tmp_path / "a" / "jobs.db") == 1
    assert list((tmp_path / "b").iterdir()) == []
    storage.close()


def test_a_link_to_the_file_is_as_good_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked" / "link.db"
    link.symlink_to(tmp_path / "real" / "jobs.db")

    with (
        contextlib.closing(SQLiteStorage(tmp_path / "real" / "jobs.db", durability="full")) as one,
        contextlib.closing(SQLiteStorage(link, durability="full")) as other,
    ):
        one.add([job()])
        other.add([job()])
        found = one.counts("work").ready

    assert found == 2
    assert sorted(file.name for file in (tmp_path / "linked").iterdir()) == ["link.db"]  # one folder of locks


def test_the_folder_of_locks_may_vanish_while_processes_run(path: Path) -> None:
    storage, other = SQLiteStorage(path), SQLiteStorage(path)
    storage.add([job() for _ in range(4)])
    held = storage.claim(["work"], limit=1, lease_ms=60_000)
    other.claim(["work"], limit=1, lease_ms=60_000)
    with contextlib.closing(storage.listener(["work"])) as listener:
        shutil.rmtree(f"{path}-litebroker")

        storage.add([job()])
        claimed = other.claim(["work"], limit=1, lease_ms=60_000)
        assert listener.wait(LIMIT)

    assert len(claimed) == 1
    assert storage.complete([record.lease for record in held]) == [True]
    deadline = time.monotonic() + LIMIT
    live = Path(f"{path}-litebroker") / "live"
    while not live.is_dir() or len(list(live.iterdir())) < 2:  # each makes its own anew
        assert time.monotonic() < deadline
        storage.recover()
        other.recover()
        time.sleep(0.02)
    storage.close()
    other.close()


# -- a file system that does not lock --


MOUNTS = """\
22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:50 / /mnt/nfs rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2
24 22 0:51 / /mnt/with\\040blank rw - cifs //server/share rw
25 23 0:52 / /mnt/nfs/local rw - xfs /dev/vdb rw
26 22 0:53 / /mnt/ssh rw - fuse.sshfs user@host: rw
27 22 0:54 / /mnt/usb rw - fuseblk /dev/sdb rw
28 22 0:55 / /mnt/host rw - 9p share rw
29 22 0:56 / /mnt/nfsother rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/mnt/nfs/jobs", "nfs4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/with blank", "cifs"),
        ("/mnt/nfs/local/jobs", None),
        ("/mnt/ssh", "fuse.sshfs"),
        ("/mnt/usb", None),
        ("/mnt/host/x", "9p"),
        ("/mnt/nfsother", None),
        ("/home", None),
    ],
)
def test_the_kind_of_a_file_system_is_read_from_the_list_of_mounts(
    monkeypatch: pytest.MonkeyPatch, folder: str, kind: str | None
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_options: MOUNTS)

    assert machine.network_file_system(Path(folder)) == kind


def test_a_network_file_system_is_refused_unless_the_user_insists(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {path.parent} rw - nfs4 server:/export rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_options: lines)

    with pytest.raises(DatabaseUnavailableError, match=r"nfs4 file system.*network=True"):
        SQLiteStorage(path).add([job()])
    before = list(path.parent.iterdir())
    monkeypatch.undo()
    with contextlib.closing(SQLiteStorage(path, network=True)) as storage:
        created = storage.add([job()])[0].created

    assert before == []
    assert created


def test_this_machines_own_disk_is_local(path: Path) -> None:
    assert machine.network_file_system(path.parent) is None


# -- busy --

HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("begin immediate")
print("held", flush=True)
sys.stdin.readline()
db.execute("rollback")
"""


def test_a_stranger_who_holds_the_write_lock_is_waited_for(path: Path) -> None:
    storage = SQLiteStorage(path, busy_timeout=LIMIT)
    storage.add([job()])
    with python(HOLDER, path) as stranger:
        assert stranger.stdout
        assert stranger.stdin
        assert stranger.stdout.readline() == "held\n"
        threading.Timer(0.3, stranger.stdin.close).start()

        added = storage.add([job()])

    assert added[0].created
    storage.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_stranger_who_holds_the_write_lock_for_too_long_is_an_error_in_time(path: Path, driver: str) -> None:
    storage = SQLiteStorage(path, busy_timeout=0.3, driver=driver)
    storage.add([job()])
    with python(HOLDER, path) as stranger:
        assert stranger.stdout
        assert stranger.stdin
        assert stranger.stdout.readline() == "held\n"
        began = time.monotonic()
        with pytest.raises(DatabaseBusyError, match="raise busy_timeout"):
            storage.add([job()])
        took = time.monotonic() - began
        readable = storage.counts("work").ready
        stranger.stdin.close()
        stranger.wait(LIMIT)

    storage.add([job()])

    assert 0.25 < took < 3
    assert readable == 1
    assert storage.counts("work").ready == 2
    storage.close()


def test_a_stopped_process_that_holds_the_turn_is_an_error_in_time_and_then_work_goes_on(path: Path) -> None:
    storage = SQLiteStorage(path, busy_timeout=0.3)
    storage.add([job()])
    holder = """
import sys
from litebroker.sqlite import SQLiteStorage
from litebroker.jobs import JobSpec
with SQLiteStorage(sys.argv[1]).transaction() as storage:
    storage.add([JobSpec(queue="work", payload=b"holder")])
    print("held", flush=True)
    sys.stdin.readline()
"""
    with python(holder, path) as other:
        assert other.stdout
        assert other.stdin
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DatabaseBusyError, match="look for a stopped one"):
            storage.add([job()])
        took = time.monotonic() - began
        readable = storage.counts("work").ready
        other.send_signal(signal.SIGCONT)
        other.stdin.close()
        other.wait(LIMIT)

        storage.add([job()])

    assert 0.25 < took < 3
    assert readable == 1
    assert count(path) == 3
    storage.close()


# -- beginnings --


OPEN_AT_ONCE = """
import sys
from litebroker.sqlite import SQLiteStorage
from litebroker.jobs import JobSpec
spec = [JobSpec(queue="work", payload=b"{}")]
print("ready", flush=True)
for path in sys.stdin:
    storage = SQLiteStorage(path.strip(), durability="relaxed")
    storage.add(spec)
    print("added", flush=True)
    storage.close()
"""


def test_many_processes_may_open_a_new_file_at_the_same_instant(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(python(OPEN_AT_ONCE)) for _ in range(8)]
        for child in children:
            assert child.stdout
            assert child.stdout.readline() == "ready\n"

        for number in range(20):
            path = tmp_path / f"{number}.db"
            for child in children:
                assert child.stdin
                child.stdin.write(f"{path}\n")
            for child in children:
                assert child.stdin
                child.stdin.flush()
            for child in children:
                assert child.stdout
                assert child.stdout.readline() == "added\n"
            assert count(path) == 8

        for child in children:
            assert child.stdin
            child.stdin.close()


MIGRATE_TO = """
import os, signal, sys
from litebroker.sqlite import schema
from litebroker.sqlite.connection import connect
db = connect(sys.argv[1], "sqlite3", busy_timeout_ms=10_000)
schema.use_wal(db, sys.argv[1])
real, left = type(db).rows, int(sys.argv[2])
def rows(self, sql, params=()):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return real(self, sql, params)
type(db).rows = rows
schema.migrate(db, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_migration_killed_between_any_two_statements_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    from litebroker.sqlite import schema

    statements = len(schema.statements(schema.migrations()[0]))
    found = []
    for killed_before in range(0, statements + 6, 3):
        path = tmp_path / f"{killed_before}.db"
        with python(MIGRATE_TO, path, killed_before) as child:
            assert child.wait(LIMIT) == -signal.SIGKILL
        with contextlib.closing(sqlite3.connect(path)) as db:
            tables = {name for (name,) in db.execute("select name from sqlite_master where name like 'litebroker%'")}
        found.append(bool(tables))
        assert not tables or len(tables) > 15
        with contextlib.closing(SQLiteStorage(path)) as storage:
            assert storage.add([job()])[0].created

    assert found[0] is False
    assert found[-1] is True
    assert found == sorted(found)


# -- clocks --


@pytest.mark.parametrize("step_s", [3600, -3600, 10 * 365 * 86400, -10 * 365 * 86400])
def test_a_step_of_the_wall_clock_neither_ends_nor_stalls_a_lease_or_a_value(path: Path, step_s: int) -> None:
    clock = ManualClock()
    with contextlib.closing(SQLiteStorage(path, clock=clock)) as storage:
        storage.add([job()])
        (record,) = storage.claim(["work"], limit=1, lease_ms=30_000)
        storage.put("s", "k", b"v", ttl_ms=30_000)
        storage._engine._registered = False  # or it would be given back

    clock.step(step_s)
    with contextlib.closing(SQLiteStorage(path, clock=clock)) as storage:
        clock.advance(29)
        early = (storage.claim(["work"], limit=1, lease_ms=1000), storage.peek("s", ["k"]))
        clock.advance(2)
        late = (storage.claim(["work"], limit=1, lease_ms=1000), storage.peek("s", ["k"]))

    assert early[0] == []
    assert early[1]["k"].expires_in_ms == 1000
    assert [again.id for again in late[0]] == [record.id]
    assert late[1] == {}


# -- closed --


def test_a_closed_storage_says_so_and_may_be_closed_again(path: Path) -> None:
    storage = SQLiteStorage(path)
    storage.add([job()])
    storage.close()
    storage.close()

    with pytest.raises(StorageClosedError):
        storage.add([job()])
    with pytest.raises(StorageClosedError):
        storage.counts("work")


# -- descriptors --


def descriptors(path: Path) -> dict[str, int]:
    """How many descriptors of this process lead to each of the database's files."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(entry.readlink())
            if target.startswith(str(path)):
                name = target[len(str(path)) :].partition("/")[0]
                found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_descriptor_leads_to_the_database_but_sqlites_own(path: Path, driver: str) -> None:
    storage = SQLiteStorage(path, durability="full", driver=driver)
    verbs: list[Callable[[], object]] = [
        lambda: storage.add([job(), job(group="g")]),
        lambda: storage.claim(["work"], limit=1, lease_ms=1000),
        storage.recover,
        lambda: storage.counts("work"),
        lambda: storage.page("work", State.PENDING),
        lambda: storage.put("s", "k", b"v", ttl_ms=1000),
        lambda: storage.peek("s", ["k"]),
        lambda: storage.purge("work", [State.PENDING]),
        lambda: storage.listener(["work"]).close(),
    ]

    for verb in verbs:
        verb()
        # One for each of the two connections on the file; both share the process's one -shm, as SQLite does it.
        assert descriptors(path).get("", 0) <= 2
        assert descriptors(path).get("-shm", 0) <= 1
        assert descriptors(path).get("-wal", 0) <= 3  # and the one that is synced

    storage.close()
    assert descriptors(path) == {}


def test_no_code_of_ours_opens_the_database_by_itself() -> None:
    found = set()
    for file in Path(litebroker.sqlite.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in {"open", "os.open", "io.open"}:
                    found.add((file.name, function.name, ast.unparse(call.args[0])))

    # The locks' own files, in their folder; and a backup's copy, before and after a connection has it open.
    found = {entry for entry in found if entry[0] != "locks.py"}
    found -= {("backup.py", "_partial", "path"), ("backup.py", "_sync", "path")}
    found -= {("crossing.py", "_lock", "path")}  # in a child, once and for good: it is never closed
    assert {(file, function) for file, function, _path in found} == {("engine.py", "_wal_descriptor")}
    assert sorted(what for _file, _function, what in found) == [
        "f'{self.path}-wal'",
        "os.path.dirname(os.path.abspath(str(self.path)))",
    ]


@pytest.mark.skipif(find_spec("apsw") is None, reason="apsw is not installed")
def test_two_copies_of_sqlite_in_one_process_never_have_the_same_file_open(path: Path) -> None:
    import apsw

    if not apsw.using_amalgamation:
        pytest.skip("this apsw shares Python's SQLite")
    one = SQLiteStorage(path, driver="apsw")
    one.add([job()])

    with pytest.raises(DatabaseUnavailableError, match="driver='apsw'"):
        SQLiteStorage(path, driver="sqlite3").add([job()])
    with contextlib.closing(sqlite3.connect(path)) as db, pytest.raises(ValueError, match="driver='apsw'"):
        one.bind(db)
    one.close()
    with contextlib.closing(SQLiteStorage(path, driver="sqlite3")) as other:
        assert other.counts("work").ready == 1

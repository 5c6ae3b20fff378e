"""What a storage is after a fork, on both sides. Each scene is a process of its own, as pytest has threads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from litebroker.jobs import JobRecord, JobSpec
from litebroker.sqlite import SQLiteStorage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

LIMIT = 30

BEGINNING = """
import json, os, signal, sys, threading, time
from litebroker.errors import *
from litebroker.jobs import JobSpec
from litebroker.sqlite import SQLiteStorage, open_storage

path = sys.argv[1]

def job(payload=b"{}", **options):
    return JobSpec(queue="work", payload=payload, **options)

def say(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())

def try_to_add(storage):
    try:
        storage.add([job()])
    except StorageError as error:
        say(type(error).__name__)

def child(work):
    # Runs work in a forked child; True if it ended well in time.
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            say("child", type(error).__name__, str(error))
        finally:
            os._exit(code)
    return ended(pid)

def ended(pid):
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return status == 0
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    say("hung")
    return False

"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def scene(script: str, path: Path, *, code: int = 0) -> list[Any]:
    """What the script says, line by line, and so do its children."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGINNING + script, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def ids(path: Path) -> set[int]:
    storage = SQLiteStorage(path)
    found = {int(id) for (id,) in storage.execute("select id from litebroker_job")}
    storage.close()
    return found


@pytest.mark.parametrize("durability", ["relaxed", "full"])
def test_a_storage_goes_on_in_the_parent_and_in_the_child(path: Path, durability: str) -> None:
    said = scene(
        f"""
storage = SQLiteStorage(path, durability={durability!r})
say(storage.add([job()])[0].id)
ok = child(lambda: [say(storage.add([job()])[0].id) for _ in range(3)])
say(storage.add([job()])[0].id)
say(ok)
""",
        path,
    )

    assert said.pop() == [True]
    assert {id for (id,) in said} == ids(path)
    assert len(said) == 5


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "storage.close(); sys.exit(0)"])
def test_forks_among_writing_threads_neither_hang_nor_lose_a_commit(path: Path, end: str) -> None:
    said = scene(
        f"""
storage = SQLiteStorage(path, durability="full")
storage.add([job()])
stop = False

def write():
    while not stop:
        say(*[added.id for added in storage.add([job(), job()])])

def read():
    while not stop:
        storage.counts("work")

threads = [threading.Thread(target=write, daemon=True) for _ in range(3)] + [threading.Thread(target=read, daemon=True)]
for thread in threads:
    thread.start()
pids = []
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        say(storage.add([job()])[0].id)
        (one,) = storage.claim(["work"], limit=1, lease_ms=60_000)
        assert storage.release([one.lease]) == [True]
        {end}
    pids.append(pid)
    time.sleep(0.005)
fine = [ended(pid) for pid in pids]
stop = True
for thread in threads:
    thread.join()
say("fine", all(fine))
""",
        path,
    )

    assert said[-1] == ["fine", True]
    acknowledged = [id for line in said[:-1] for id in line]
    assert len(acknowledged) == len(set(acknowledged)) > 100
    assert set(acknowledged) <= ids(path)


def test_a_fork_between_a_commit_and_its_sync_does_not_make_the_add_fail(path: Path) -> None:
    said = scene(
        """
from litebroker.sqlite.engine import Engine
storage = SQLiteStorage(path, durability="full")
storage.add([job()])
committed, forked = threading.Event(), threading.Event()
real = Engine._sync

def sync(self, sequence):
    committed.set()
    forked.wait(10)
    real(self, sequence)

Engine._sync = sync
thread = threading.Thread(target=lambda: say(storage.add([job()])[0].created))
thread.start()
committed.wait(10)
fine = child(lambda: None)  # all connections are closed for it, and so SQLite has removed the WAL
forked.set()
thread.join()
say(fine)
""",
        path,
    )

    assert said == [[True], [True]]
    assert len(ids(path)) == 2


def test_a_thread_that_forks_is_no_different(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
say(storage.add([job()])[0].id)
thread = threading.Thread(target=lambda: say(child(lambda: say(storage.add([job()])[0].id))))
thread.start()
thread.join()
""",
        path,
    )

    assert said.pop() == [True]
    assert {id for (id,) in said} == ids(path)
    assert len(said) == 2


def test_a_child_is_another_holder(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job() for _ in range(4)])

def claim():
    (one,) = storage.claim(["work"], limit=1, lease_ms=60_000)
    say(one.token >> 38)

claim()
child(claim)
claim()
""",
        path,
    )

    (first,), (in_child,), (again,) = said
    assert first == again != in_child


@pytest.mark.parametrize(
    "end", ["os._exit(0)", "sys.exit(0)", "storage.close(); os._exit(0)", "os.kill(os.getpid(), 9)"]
)
def test_the_parents_leases_stay_when_a_child_ends(path: Path, end: str) -> None:
    said = scene(
        f"""
storage = SQLiteStorage(path)
storage.add([job() for _ in range(2)])
(mine,) = storage.claim(["work"], limit=1, lease_ms=300_000)
pid = os.fork()
if pid == 0:
    storage.claim(["work"], limit=1, lease_ms=300_000)
    {end}
ended(pid)
other = SQLiteStorage(path)
taken = []
deadline = time.monotonic() + 10
while not taken and time.monotonic() < deadline:  # the child's, which is dead
    taken = other.claim(["work"], limit=2, lease_ms=60_000)
    time.sleep(0.01)
say(len(taken), taken[0].id != mine.id, storage.complete([mine.lease]))
""",
        path,
    )

    assert said == [[1, True, [True]]]


def test_a_child_that_lives_on_does_not_keep_its_dead_parent_alive(path: Path) -> None:
    script = """
storage = SQLiteStorage(path)
storage.add([job()])
storage.claim(["work"], limit=1, lease_ms=300_000)
pid = os.fork()
if pid == 0:
    storage.add([job(delay_ms=300_000)])
    say("child", os.getpid())
    sys.stdin.read()
    os._exit(0)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BEGINNING + script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout
        _word, child = json.loads(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        storage = SQLiteStorage(path)
        deadline = time.monotonic() + 10
        taken: list[JobRecord] = []
        while not taken and time.monotonic() < deadline:
            taken = storage.claim(["work"], limit=1, lease_ms=1000)
            time.sleep(0.01)
        os.kill(child, 0)  # it is there still

        assert len(taken) == 1
        storage.close()
        assert parent.stdin
        parent.stdin.close()


def test_a_fork_inside_a_transaction_is_an_error_in_the_child_and_nothing_to_the_parent(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job()])
with storage.transaction():
    storage.add([job()])
    pid = os.fork()
    if pid == 0:
        try:
            storage.add([job()])
            say("added")
        except DatabaseUnavailableError as error:
            say("refused", str(error))
        try:
            SQLiteStorage(path).counts("work")
            say("read")
        except DatabaseUnavailableError as error:
            say("refused", str(error))
        sys.exit(0)
    fine = ended(pid)
    storage.add([job()])
say("fine", fine, storage.counts("work").ready)
""",
        path,
    )

    # Nor through a new connection: it would commit to what the parent may throw away.
    assert [words[0] for words in said[:2]] == ["refused", "refused"]
    assert "fork before the transaction, or after it" in said[0][1]
    assert said[2:] == [["fine", True, 3]]
    assert len(ids(path)) == 3


def test_a_fork_while_another_thread_is_in_a_transaction_waits_for_its_end(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job()])
inside = threading.Event()

def transact():
    with storage.transaction():
        storage.add([job()])
        inside.set()
        time.sleep(0.2)
        storage.add([job()])

thread = threading.Thread(target=transact)
thread.start()
inside.wait()
say(child(lambda: say(storage.counts("work").ready)))
thread.join()
""",
        path,
    )

    assert said == [[3], [True]]


def test_a_fork_does_not_deadlock_with_threads_that_use_two_storages(path: Path) -> None:
    said = scene(
        """
one, two = SQLiteStorage(path, durability="relaxed"), SQLiteStorage(path + "2", durability="relaxed")
for storage in (one, two):
    storage.add([job()])
stop = False

def work(outer, inner):
    while not stop:
        with outer.transaction():
            outer.add([job()])
            inner.counts("work")
        with inner.snapshot():
            inner.counts("work")
            outer.add([job()])
            inner.add([job()])

threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in ((one, two), (one, one), (two, two))]
for thread in threads:
    thread.start()
fine = [child(lambda: [storage.add([job()]) for storage in (one, two)]) for _ in range(6)]
stop = True
for thread in threads:
    thread.join(10)
say(all(fine), [thread.is_alive() for thread in threads])
""",
        path,
    )

    assert said == [[True, [False, False, False]]]


def test_a_database_in_memory_cannot_be_carried_through_a_fork(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(":memory:")
storage.add([job()])

def use():
    try:
        storage.add([job()])
    except DatabaseUnavailableError as error:
        say(str(error))

say(child(use), storage.counts("work").ready)
""",
        path,
    )

    assert "through a fork" in said[0][0]
    assert said[1] == [True, 1]


def test_leases_are_given_back_at_close_though_there_was_a_fork(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job()])
storage.claim(["work"], limit=1, lease_ms=300_000)
fine = child(lambda: None)
storage.close()
say(fine, len(SQLiteStorage(path).claim(["work"], limit=1, lease_ms=1000)))
""",
        path,
    )

    assert said == [[True, 1]]


def test_each_side_has_listeners_of_its_own(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job(delay_ms=300_000)])
listener = storage.listener(["work"], ["topic"])

def listen():
    own = storage.listener(["work"], ["topic"])
    listener.close()  # the parent's
    say("child listens")
    say("child", own.wait(10))
    own.close()

pid = os.fork()
if pid == 0:
    listen()
    sys.exit(0)
time.sleep(0.3)
storage.notify("topic")
fine = ended(pid)
say("parent", listener.wait(10), fine)
while listener.wait(0):
    pass
other = SQLiteStorage(path)
threading.Timer(0.1, lambda: other.notify("topic")).start()
say("again", listener.wait(10))
""",
        path,
    )

    assert said == [["child listens"], ["child", True], ["parent", True, True], ["again", True]]


def test_a_file_deleted_around_a_fork_is_not_made_anew(path: Path) -> None:
    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job()])

def use():
    os.rename(path, path + ".away")
    try:
        storage.add([job()])
    except DatabaseUnavailableError as error:
        say(str(error))
    say(os.path.exists(path))

say(child(use))
try:
    storage.add([job()])
except DatabaseUnavailableError as error:
    say(str(error))
os.rename(path + ".away", path)
say(storage.add([job()])[0].created)
""",
        path,
    )

    assert "deleted while it was in use" in said[0][0]
    assert said[1:3] == [[False], [True]]
    assert "deleted while it was in use" in said[3][0]
    assert said[4] == [True]
    assert len(ids(path)) == 2


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("drop index litebroker_job_ready", ["SchemaError"]),
        ("alter table litebroker_job add column extra text", ["SchemaError"]),
        ("create table litebroker_own(id)", []),
    ],
)
def test_a_child_looks_again_at_tables_that_were_changed_meanwhile(path: Path, change: str, refused: list[str]) -> None:
    said = scene(
        f"""
import sqlite3
storage = SQLiteStorage(path)
storage.add([job()])

def use():
    other = sqlite3.connect(path)
    other.execute({change!r})
    other.close()
    try_to_add(storage)

child(use)
""",
        path,
    )

    assert said == [[name] for name in refused]


def test_a_child_looks_at_a_file_that_took_the_place_of_the_one_in_use(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"{path}.other")) as db:
        db.execute("create table theirs(id)")

    said = scene(
        """
storage = SQLiteStorage(path)
storage.add([job()])

def use():
    for end in ("-wal", "-shm"):  # else SQLite takes them for the new file's, and reads the old tables
        if os.path.exists(path + end):
            os.unlink(path + end)
    os.replace(path + ".other", path)
    try_to_add(storage)

child(use)
""",
        path,
    )

    assert said == [["ForeignDatabaseError"]]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_child_made_by_subprocess_inherits_no_descriptor(path: Path) -> None:
    storage = SQLiteStorage(path, durability="full")
    storage.add([JobSpec(queue="work", payload=b"{}")])
    storage.claim(["work"], limit=1, lease_ms=1000)
    listener = storage.listener(["work"])
    look = """
import os
for fd in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{fd}"):
        print(os.readlink(f"/proc/self/fd/{fd}"))
"""

    done = subprocess.run(
        [sys.executable, "-c", look], check=True, capture_output=True, text=True, close_fds=False, timeout=LIMIT
    )

    listener.close()
    storage.close()
    assert "jobs.db" not in done.stdout


def test_a_child_refuses_a_file_that_a_newer_version_has_taken_over_meanwhile(path: Path) -> None:
    said = scene(
        """
import sqlite3
storage = SQLiteStorage(path)
storage.add([job()])

def use():
    with sqlite3.connect(path) as newer:  # a migration that changes rows alone
        newer.execute("update litebroker_meta set value = 99 where key = 'schema'")
    newer.close()
    try:
        storage.add([job()])
    except SchemaTooNewError as error:
        say(str(error))

say(child(use))
""",
        path,
    )

    assert "99" in said[0][0]
    assert said[1] == [True]


# Connections that stay open in the parent, as it does its child's work on the file

STAYING = """
os.register_at_fork(before=lambda: storage.stay_open_at_fork())
storage = SQLiteStorage(path)
said = [storage.add([job()])[0].id]

def descriptors():
    return sum(os.path.realpath(f"/proc/self/fd/{name}") == path for name in os.listdir("/proc/self/fd"))

def open_and_close_elsewhere():
    script = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('select 1 from litebroker_job').fetchall()"
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script, path])
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing stays open")


@linux
def test_what_stays_open_at_a_fork_is_not_opened_again(path: Path) -> None:
    said = scene(
        STAYING
        + """
during = []
os.register_at_fork(after_in_parent=lambda: during.append(descriptors()))
before = descriptors()
child(lambda: None)
say(before, during.pop())
with storage.transaction():
    say(storage.stay_open_at_fork())
storage.close()
say(storage.stay_open_at_fork())
""",
        path,
    )

    (before, during), in_transaction, closed = said
    assert before == during > 0
    assert in_transaction == closed == [False]


@linux
@pytest.mark.parametrize(("end", "code"), [("storage.close()", 0), ("os.kill(os.getpid(), 9)", -9)])
@pytest.mark.parametrize("generations", [1, 2])
def test_a_child_loses_no_commit_though_its_parent_and_all_others_close_the_file(
    path: Path, end: str, code: int, generations: int
) -> None:
    # SQLite's notes say that the child has locks, which are its parent's. The last one to close deletes the WAL.
    said = scene(
        STAYING
        + f"""
heard, go_on = os.pipe()
forked = [os.fork() == 0]
while all(forked) and len(forked) < {generations}:
    forked.append(os.fork() == 0)
if all(forked):
    os.close(go_on)
    said.append(storage.add([job()])[0].id)
    os.read(heard, 1)  # until all its forebears have closed the file
    said.append(storage.add([job()])[0].id)
    open_and_close_elsewhere()
    said.append(storage.add([job()])[0].id)
    say(*said)
    os._exit(0)
elif forked[0]:
    os._exit(0)
else:
    if {generations} == 2:
        os.wait()
    while storage.counts("work").ready < 2:
        time.sleep(0.001)
    {end}
""",
        path,
        code=code,
    )

    (added,) = said
    assert len(added) == 4
    assert set(added) == ids(path)


@linux
def test_a_child_writes_beside_the_parent_whose_connection_stayed_open(path: Path) -> None:
    said = scene(
        STAYING
        + """
def add():
    say(*[storage.add([job()])[0].id for _ in range(200)])

stop = False
def write():
    while not stop:
        say(storage.add([job()])[0].id)

threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads:
    thread.start()
fine = [child(add) for _ in range(5)]
stop = True
for thread in threads:
    thread.join()
say(*said)
say("fine", all(fine))
""",
        path,
    )

    assert said.pop() == ["fine", True]
    added = [id for line in said for id in line]
    assert len(added) == len(set(added)) > 1000
    assert set(added) == ids(path)


@linux
def test_a_grandchild_that_closes_all_descriptors_uses_the_file_anew(path: Path) -> None:
    said = scene(
        STAYING
        + """
def be_a_daemon():
    pid = os.fork()
    if pid == 0:
        os.closerange(3, 256)
        files = [open("/dev/null") for _ in range(20)]  # they have the numbers now
        say(*[storage.add([job()])[0].id for _ in range(5)])
        open_and_close_elsewhere()
        say(storage.add([job()])[0].id)
        os._exit(0)
    os.waitpid(pid, 0)
    say(storage.add([job()])[0].id)

say("fine", child(be_a_daemon))
say(storage.add([job()])[0].id)
""",
        path,
    )

    said.remove(["fine", True])
    assert sorted(map(len, said)) == [1, 1, 1, 5]
    assert {id for line in said for id in line} < ids(path)


@linux
def test_a_child_that_closes_its_parents_descriptors_says_that_it_cannot_use_the_file(path: Path) -> None:
    said = scene(
        STAYING
        + """
def use():
    os.closerange(3, 256)
    files = [open("/dev/null") for _ in range(20)]
    try:
        storage.add([job()])
    except DatabaseUnavailableError as error:
        say(str(error))

say(child(use))
""",
        path,
    )

    assert "has closed descriptors" in said[0][0]
    assert said[1] == [True]


@linux
def test_a_child_whose_forebears_left_the_file_before_it_could_lock_it_says_so(path: Path) -> None:
    said = scene(
        STAYING
        + """
from litebroker.sqlite import crossing
real = crossing.take_locks

def too_late():
    os.read(heard, 1)
    real()

crossing.take_locks = too_late
heard, go_on = os.pipe()

def let_go():
    storage.close()
    os.write(go_on, b"x")

os.register_at_fork(after_in_parent=let_go)

def use():
    try:
        SQLiteStorage(path).add([job()])
    except DatabaseUnavailableError as error:
        say(str(error))

say(child(use))
""",
        path,
    )

    assert "start it again" in said[0][0]
    assert said[1] == [True]

"""What the doctor finds, and says to do; and whether queues are within limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from litebroker import JobError, JobSpec, Queue, SQLiteStorage
from litebroker.cli import main
from litebroker.sqlite import processes
from litebroker.sqlite.doctor import Finding, examine
from litebroker.sqlite.location import Options

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells of other processes")

# Each says "ready" once it has done what it is there for, and then does nothing more until it is killed.
READS = """
    import sqlite3, sys
    db = sqlite3.connect(sys.argv[1], isolation_level=None)
    db.execute("begin")
    db.execute("select * from litebroker_job").fetchall()
"""
WRITES = """
    import sqlite3, sys
    db = sqlite3.connect(sys.argv[1], isolation_level=None)
    db.execute("begin immediate")
"""
OPENS_IT_ITSELF = """
    import sqlite3, sys
    db = sqlite3.connect(sys.argv[1], isolation_level=None)
    db.execute("select * from litebroker_job").fetchall()
    file = open(sys.argv[1], "rb")
"""
COPIES = """
    import sys
    file = open(sys.argv[1], "rb")
"""
USES = """
    import sqlite3, sys
    db = sqlite3.connect(sys.argv[1], isolation_level=None)
    db.execute("select * from litebroker_job").fetchall()
"""
BUSY = """
    import sys, threading
    from litebroker import Queue
    queue = Queue("work", sys.argv[1], durability="relaxed")
    def work():
        while True:
            queue.add_many([1] * 20)
            for job in queue.claim(limit=20):
                queue.complete(job)
    threading.Thread(target=work, daemon=True).start()
"""
CLAIMS = """
    import sys
    from litebroker import Queue
    queue = Queue("work", sys.argv[1])
    assert len(queue.claim(limit=3, lease=3600)) == 3
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture
def storage(path: str) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(path, durability="relaxed")
    storage.add([JobSpec("work", b"1")] * 3)
    yield storage
    storage.close()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITEBROKER_URL", "jobs.db")

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert isinstance(end.value.code, int)
        return end.value.code, *capfd.readouterr()

    return run


@contextlib.contextmanager
def running(script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    code = f'{textwrap.dedent(script)}\nprint("ready", flush=True)\nsys.stdin.read()\n'
    with subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def examined(path: str, *, full: bool = False, **options: Any) -> list[Finding]:
    return list(examine(path, Options(**options), full=full))


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.needs_action]


def test_a_sound_file_needs_no_action(storage: SQLiteStorage, path: str) -> None:
    findings = examined(path)

    assert not wrong(findings)
    assert {finding.check for finding in findings} == {
        "file", "file system", "disk", "sidecars", "processes", "descriptors", "sqlite", "schema", "journal",
        "durability", "wal", "space", "integrity", "clock", "holders",
    }  # fmt: skip


def test_a_look_changes_nothing(path: str, tmp_path: Path) -> None:
    with running(CLAIMS.replace("queue.claim", "queue.add_many([1, 2, 3]) and queue.claim"), path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {file: (tmp_path / file).stat() for file in ("jobs.db", "jobs.db-wal")}
    assert before["jobs.db-wal"].st_size > 0

    examined(path)

    after = {file: (tmp_path / file).stat() for file in before}
    assert [(it.st_size, it.st_mtime_ns) for it in after.values()] == [
        (it.st_size, it.st_mtime_ns) for it in before.values()
    ]


def test_what_it_finds_is_printed_with_what_to_do(storage: SQLiteStorage, path: str, command: Command) -> None:
    os.link(path, f"{path}.link")

    status, out, error = command("doctor")

    assert (status, error) == (1, "")
    assert "error    file         it has 2 names (hard links)" in out
    assert "-> use one of them only" in out


def test_a_probe_gets_json_and_an_exit_status(storage: SQLiteStorage, command: Command) -> None:
    status, out, _ = command("doctor", "--json")

    assert status == 0
    found = json.loads(out)
    assert found["ok"]
    assert all(finding["severity"] in {"ok", "note"} for finding in found["findings"])


def test_a_file_that_is_not_there_is_an_error(command: Command) -> None:
    assert command("doctor") == (1, "", "Error: jobs.db: there is no such file\n")


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_both_drivers_can_look(storage: SQLiteStorage, path: str, driver: str) -> None:
    if driver == "apsw":
        pytest.importorskip("apsw")
        storage.close()

    assert not wrong(examined(path, driver=driver, durability="full"))


@linux
def test_who_reads_for_long_is_named(storage: SQLiteStorage, path: str) -> None:
    with running(READS, path) as reader:
        (finding,) = wrong(examined(path))

    assert finding.check == "wal"
    assert "a read transaction has been open" in finding.found
    assert f"in {reader.pid} (" in finding.found


@linux
def test_who_writes_for_long_is_named(storage: SQLiteStorage, path: str) -> None:
    with running(WRITES, path) as writer:
        found = [finding.found for finding in wrong(examined(path))]

    assert [line for line in found if "a write transaction has been open" in line and f"in {writer.pid} (" in line]


@linux
def test_who_writes_all_the_time_but_shortly_is_not(storage: SQLiteStorage, path: str) -> None:
    with running(BUSY, path), running(BUSY, path):
        for _ in range(3):
            assert not wrong(examined(path))


@linux
def test_a_descriptor_that_would_drop_locks_is_named(storage: SQLiteStorage, path: str) -> None:
    with running(OPENS_IT_ITSELF, path) as process:
        (finding,) = wrong(examined(path))

    assert (finding.check, finding.severity) == ("descriptors", "error")
    assert finding.found.startswith(f"{process.pid} (")
    assert "drops SQLite's locks" in finding.advice


@linux
def test_so_is_one_of_the_process_that_looks(storage: SQLiteStorage, path: str) -> None:
    # In a process of its own, since closing it drops the locks.
    script = f"""
        {OPENS_IT_ITSELF}
        from litebroker.sqlite.doctor import examine
        from litebroker.sqlite.location import Options
        for finding in examine(sys.argv[1], Options()):
            if finding.needs_action:
                print(finding.found)
    """
    lines = [line.strip() for line in script.splitlines()[:-4]]

    told = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, textwrap.dedent("\n".join(script.splitlines()[-4:]))]), path],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert told.stdout.startswith(f"this process has {path} or its -shm open beside SQLite (descriptor ")


@linux
def test_a_reader_through_sqlite_is_not_taken_for_one(storage: SQLiteStorage, path: str) -> None:
    with running(USES.replace("sys.argv[1],", "f'file:{sys.argv[1]}?mode=ro', uri=True,"), path):
        assert not wrong(examined(path))


@linux
def test_whoever_copies_a_file_in_use_is_told_better(storage: SQLiteStorage, path: str) -> None:
    with running(COPIES, path):
        (finding,) = wrong(examined(path))

    assert (finding.check, finding.severity) == ("descriptors", "warning")
    assert "`litebroker backup`" in finding.advice


@linux
def test_who_works_on_a_deleted_file_is_named(storage: SQLiteStorage, path: str) -> None:
    storage.close()
    with running(USES, path) as process:
        Path(path).unlink()
        with contextlib.closing(SQLiteStorage(path)) as new:
            new.add([JobSpec("work", b"1")])

            found = wrong(examined(path))

    assert [finding for finding in found if finding.found.startswith(f"{process.pid} (") and "lost" in finding.advice]


@linux
def test_openers_are_this_process_and_the_others(storage: SQLiteStorage, path: str) -> None:
    with running(USES, path) as process:
        found = processes.openers(path)

    assert {opener.pid for opener in found.processes} == {os.getpid(), process.pid}
    assert all(opener.connected and not opener.strange for opener in found.processes)


def test_a_damaged_file_is_found(storage: SQLiteStorage, path: str, command: Command) -> None:
    storage.add([JobSpec("work", b"1" * 500)] * 1000)
    storage.close()
    with Path(path).open("r+b") as file:
        file.seek(Path(path).stat().st_size // 2 & ~4095)
        file.write(os.urandom(3 * 4096))

    status, out, error = command("doctor")

    assert (status, error) == (1, "")
    assert "error    integrity" in out
    assert "restore a backup" in out


def test_with_full_indexes_are_checked_too(storage: SQLiteStorage, path: str) -> None:
    (finding,) = [finding for finding in examined(path, full=True) if finding.check == "integrity"]

    assert finding.found == "the whole file, and its indexes"


def test_a_look_at_a_large_file_ends_in_time(path: str) -> None:
    with contextlib.closing(SQLiteStorage(path, durability="relaxed")) as storage:
        for _ in range(10):
            storage.add([JobSpec("work", b"1" * 50_000)] * 400)

        (finding,) = [finding for finding in examined(path) if finding.check == "integrity"]

    assert finding.severity in {"ok", "note"}
    if finding.severity == "note":
        assert "--full" in finding.advice


def test_text_is_no_database(path: str) -> None:
    Path(path).write_text("no database, though it is longer than a header, which takes a hundred bytes" * 9)

    assert [finding.check for finding in wrong(examined(path))] == ["database"]


def test_a_stranger_s_database_is_none_of_ours(path: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table users(name text)")
    db.close()

    (finding,) = [finding for finding in wrong(examined(path)) if finding.check == "schema"]

    assert "belongs to some other application" in finding.found


def test_a_newer_schema_is_named(storage: SQLiteStorage, path: str) -> None:
    storage.close()
    with sqlite3.connect(path) as db:
        db.execute("update litebroker_meta set value = '99' where key = 'schema'")
    db.close()

    (finding,) = wrong(examined(path))

    assert finding.check == "schema"
    assert "a newer litebroker made it" in finding.found


def test_a_journal_of_another_mode_is_not_to_be_deleted(storage: SQLiteStorage, path: str) -> None:
    Path(f"{path}-journal").write_bytes(b"")

    (finding,) = wrong(examined(path))

    assert finding.check == "sidecars"
    assert "do not delete it" in finding.advice


def test_a_wall_clock_that_is_behind_is_found(storage: SQLiteStorage, path: str) -> None:
    (copy, *_) = storage.walk_jobs()
    hour = 3600 * 1_000_000 << 12
    storage.put_jobs([copy._replace(record=copy.record._replace(id=copy.record.id + hour))])

    (finding,) = wrong(examined(path))

    assert finding.check == "clock"
    assert "behind the time at which the latest job was added" in finding.found


def test_jobs_of_a_process_that_died_are_found(storage: SQLiteStorage, path: str) -> None:
    with running(CLAIMS, path) as worker:
        assert not wrong(examined(path))
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    found = wrong(examined(path))

    assert [finding.check for finding in found] == ["holders"], found
    assert found[0].found.startswith("3 jobs are held by processes that are gone: ")
    assert f":{worker.pid} (3)" in found[0].found


def test_leases_that_ended_long_ago_are_found(storage: SQLiteStorage, path: str) -> None:
    storage.claim(["work"], limit=2, lease_ms=60_000)
    storage.extend([job.lease for job in storage.claim(["work"], limit=1, lease_ms=1)], 1)
    with sqlite3.connect(path) as db:
        db.execute("update litebroker_job set lease_until_ms = lease_until_ms - 100000 where state = 1")
    db.close()

    (finding,) = wrong(examined(path))

    assert finding.found.startswith("3 leases ended more than 5 s ago")


# -- check --


def test_queues_within_limits_are_one_line(storage: SQLiteStorage, command: Command) -> None:
    status, out, error = command("check", "--max-age", "1h", "--max-failed", "0", "--max-ready", "3")

    assert (status, error) == (0, "")
    assert out.startswith("ok: 3 ready, the oldest for ")
    assert out.endswith("s; 0 failed\n")
    assert out.count("\n") == 1


def test_a_job_that_waits_too_long_is_told(storage: SQLiteStorage, command: Command) -> None:
    ((job_id, _),) = storage.add([JobSpec("late", b"1")])
    storage.reschedule(job_id, due_at_ms=int(time.time() * 1000) - 90_000)

    status, out, _ = command("check", "--max-age", "60")

    assert status == 1
    assert out.startswith("not ok: 'late': a job waits for 1m3")


def test_dead_letters_are_counted(storage: SQLiteStorage, command: Command) -> None:
    (job,) = storage.claim(["work"], limit=1, lease_ms=60_000)
    storage.fail(job.lease, JobError("handler"), retry_in_ms=None)

    assert command("check", "--max-failed", "1")[0] == 0
    status, out, _ = command("check", "--max-failed", "0", "--json")

    assert status == 1
    assert json.loads(out)["wrong"] == ["'work': 1 failed"]


def test_only_the_queues_that_are_named_count(storage: SQLiteStorage, command: Command) -> None:
    with Queue[Any]("other", storage) as queue:
        queue.add(1)

    assert command("check", "--max-ready", "1", "--queue", "other")[0] == 0
    assert command("check", "--max-ready", "1")[0] == 1


def test_a_paused_queue_is_not_late(storage: SQLiteStorage, command: Command) -> None:
    storage.pause("work", paused=True)

    assert command("check", "--max-age", "0")[0] == 0


def test_a_check_needs_a_limit_and_queues_that_there_are(storage: SQLiteStorage, command: Command) -> None:
    nothing = command("check")
    unknown = command("check", "--max-failed", "0", "--queue", "wrok")

    assert (nothing[0], unknown[0]) == (2, 1)
    assert "which limits?" in nothing[2]
    assert "there is no queue 'wrok'; there are: 'work'" in unknown[2]


# -- completion --


def test_bash_completes_commands(tmp_path: Path) -> None:
    (tmp_path / "litebroker").write_text(f'#!/bin/sh\nexec {sys.executable} -m litebroker "$@"\n')
    (tmp_path / "litebroker").chmod(0o755)
    script = (
        'eval "$(litebroker completion bash)"; COMP_WORDS=(litebroker back); COMP_CWORD=1;'
        ' _litebroker_completion litebroker; echo "${COMPREPLY[@]}"; complete -p litebroker'
    )

    shell = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert shell.stderr == ""
    assert shell.stdout.splitlines()[0] == "backup"
    assert "_litebroker_completion" in shell.stdout.splitlines()[1]


def test_zsh_gets_a_script_and_the_words_with_their_help(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _, script, _ = command("completion", "zsh")
    monkeypatch.setenv("_LITEBROKER_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", "litebroker mig")
    monkeypatch.setenv("COMP_CWORD", "1")

    status, out, _ = command()

    assert script.startswith("#compdef litebroker")
    assert status == 0
    assert out.splitlines()[:2] == ["plain", "migrate"]

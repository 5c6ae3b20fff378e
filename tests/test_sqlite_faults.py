"""What SQLite does not forgive: checkpoints beside commits, and locks that a stranger's close drops."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.proof.failpoints import VERBS, prepare, widowed
from tests.proof.standing import ask
from tests.proof.wal_reset import wal_reset

from litebroker import Queue, SQLiteStorage

ROOT = Path(__file__).parent.parent
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs /proc/locks")


@pytest.mark.slow
def test_a_wal_that_starts_anew_all_the_time_leaves_the_file_whole(tmp_path: Path) -> None:
    figures = wal_reset(tmp_path, 2, 1)

    assert figures.found == []
    assert figures.faults["checkpoints"] > 20
    assert figures.faults["looks"] > 2


# -- no connection of ours checkpoints by itself --

# Each connection that is made while these run is kept, and asked at the end.
KEEP = """
import json, os, sqlite3, sys
kept = []
def hook(event, arguments):
    if event == "sqlite3.connect/handle":
        kept.append(arguments[0])
sys.addaudithook(hook)
"""
TELL = """
found = []
for connection in kept:
    try:
        file = connection.execute("pragma database_list").fetchall()[0][2]
        found.append((os.path.basename(file), connection.execute("pragma wal_autocheckpoint").fetchone()[0]))
    except sqlite3.ProgrammingError:
        pass
print(json.dumps(found), flush=True)
os._exit(0)
"""
PROGRAMS = {
    "litebroker": """
from litebroker import Queue
queue = Queue("work", "jobs.db")
queue.add(1)
queue.stats()
queue.complete(queue.claim()[0])
queue.get(1)
""",
    "dramatiq": """
import dramatiq
from litebroker_dramatiq import SQLiteBroker
broker = SQLiteBroker("jobs.db")
dramatiq.set_broker(broker)
@dramatiq.actor
def work(): pass
work.send()
worker = dramatiq.Worker(broker, worker_timeout=50)
worker.start()
broker.join("default", timeout=20_000)
""",
    "huey": """
from litebroker_huey import SQLiteHuey
huey = SQLiteHuey("app", filename="jobs.db")
@huey.task()
def work(): return 1
result = work()
huey.execute(huey.dequeue())
result.get()
""",
    "rq": """
import rq
from litebroker_rq import connect
queue = rq.Queue(connection=connect("jobs.db"))
queue.enqueue("time.time")
rq.SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="ERROR")
""",
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if find_spec(name) is not None])
def test_no_connection_of_ours_checkpoints_by_itself(name: str, tmp_path: Path) -> None:
    program = KEEP + PROGRAMS[name] + TELL

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=True
    )

    found = [pages for file, pages in json.loads(done.stdout.splitlines()[-1]) if file == "jobs.db"]
    assert found
    assert set(found) == {0}


# -- nothing we do drops SQLite's locks --


def held(path: Path) -> set[str]:
    """On which of the database's files this process has locks of the kind that a close of any descriptor drops."""
    inodes = {}
    for name in ("", "-shm"):
        with suppress(FileNotFoundError):
            inodes[os.stat(f"{path}{name}").st_ino] = name or "the file"  # noqa: PTH116 - as the engine does it
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "POSIX" and words[4] == str(os.getpid()):
            inode = int(words[5].split(":")[2])
            found |= {inodes[inode]} if inode in inodes else set()
    return found


def drops(path: Path, do: Callable[[], object]) -> set[str]:
    """What it drops of the locks of a connection that is open meanwhile."""
    with closing(SQLiteStorage(path)) as keeper:
        keeper.open()
        before = held(path)
        do()
        return before - held(path) | ({"no lock was held"} if not before else set())


@NEEDS_PROC
def test_a_close_of_any_descriptor_is_what_this_would_find(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    found = ask(lambda: sorted(drops(path, path.read_bytes)))

    assert found == ["the file"]


@NEEDS_PROC
@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS.values() if verb.before is not widowed], ids=lambda it: it.name
)
def test_no_verb_drops_sqlites_locks(verb: Any, tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    def calls() -> None:
        storage = SQLiteStorage(path, durability=verb.durability)
        verb.act(storage, verb.before(storage))
        storage.close()

    ask(lambda: prepare(path))
    assert ask(lambda: sorted(drops(path, calls))) == []


@NEEDS_PROC
@pytest.mark.skipif(find_spec("click") is None, reason="needs click")
def test_no_command_drops_sqlites_locks(tmp_path: Path) -> None:
    from litebroker.cli.app import litebroker, run

    path = tmp_path / "jobs.db"
    with closing(Queue("work", path)) as queue:
        queue.add_many([1, 2, 3])
        queue.add(4, delay=3600)
    arguments = {
        "add": ["work", "5"],
        "backup": [str(tmp_path / "backup.db")],
        "check": ["--max-ready", "1000"],
        "dead": ["list"],
        "import": [str(tmp_path / "exported.ndjson")],
        "jobs": ["list"],
        "pause": ["work"],
        "purge": ["--queue", "work", "--state", "failed", "--yes"],
        "resume": ["work"],
        "schedules": ["list"],
        "why": ["1"],
    }
    export = [sys.executable, "-m", "litebroker", "export", "--db", str(path)]
    (tmp_path / "exported.ndjson").write_bytes(subprocess.run(export, capture_output=True, check=True).stdout)
    # These start others, or work on no file, or on another one.
    left_out = {"completion", "restore", "rq", "worker"}
    names = [name for name in litebroker.list_commands(None) if name not in left_out]  # type: ignore[arg-type]

    def found(name: str) -> dict[str, Any]:
        status: list[int] = []
        dropped = drops(path, lambda: status.append(run([name, *arguments.get(name, []), "--db", str(path)])))
        return {"dropped": sorted(dropped), "status": status}

    outcomes = {name: ask(lambda name=name: found(name)) for name in names}  # type: ignore[misc]

    assert {name: outcome["dropped"] for name, outcome in outcomes.items() if outcome["dropped"]} == {}
    ended = {name: outcome["status"] for name, outcome in outcomes.items()}
    assert {name: status for name, status in ended.items() if status not in ([0], [1])} == {}
    assert {"add", "stats", "queues", "backup", "export", "pause"} <= {name for name, it in ended.items() if it == [0]}


@NEEDS_PROC
@pytest.mark.skipif(find_spec("click") is None, reason="needs click")
@pytest.mark.parametrize(
    "command", [["add", "work", "--file"], ["import"], ["export", "--force", "--output"]], ids=lambda it: it[0]
)
@pytest.mark.parametrize("part", ["", "-wal", "-shm"])
def test_a_command_that_is_given_the_database_in_place_of_another_file_does_not_open_it(
    command: list[str], part: str, tmp_path: Path
) -> None:
    from litebroker.cli.app import run

    path = tmp_path / "jobs.db"
    with closing(Queue("work", path)) as queue:
        queue.add(1)
    status: list[int] = []

    def runs() -> list[str]:
        return sorted(drops(path, lambda: status.append(run([*command, f"{path}{part}", "--db", str(path)]))))

    assert ask(lambda: [runs(), status]) == [[], [1]]


# Which functions open files, of those that could be given the database's: each refuses it before.
_OPENS = {
    "core/litebroker/cli/add.py": {"add"},
    "core/litebroker/cli/transfer.py": {"_output", "_refuse_database", "import_"},
    "core/litebroker/sqlite/crossing.py": {"_lock"},  # in a forked child, and it is never closed
    "core/litebroker/sqlite/backup.py": {"_partial", "_sync"},
    "core/litebroker/sqlite/engine.py": {"_wal_descriptor"},
}
# These open files of the folder beside the database, of /proc, of the package, or of a demonstration.
_OTHERS = {
    "child",
    "app",
    "demo",
    "locks",
    "machine",
    "processes",
    "schema",
    "stamp",
    "wakeup",
    "database",
    "supervisor",
}


def test_no_other_code_opens_files_that_could_be_the_database() -> None:
    found: dict[str, set[str]] = {}
    for file in [*(ROOT / "core").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]:
        if file.stem in _OTHERS:
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(map(_opens, ast.walk(function))):
                found.setdefault(str(file.relative_to(ROOT)), set()).add(function.name)

    assert {
        file: names - _OPENS.get(file, set()) for file, names in found.items() if names - _OPENS.get(file, set())
    } == {}


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    copies = {"shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"}
    methods = {"read_bytes", "read_text", "write_bytes", "write_text"}
    return called in {"open", "os.open", "io.open", *copies} or called.rpartition(".")[2] in methods

"""Names and payloads are data: none becomes SQL, a path, a line of a log, or code that runs."""

from __future__ import annotations

import ast
import logging
import os
import pickle
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from litebroker import (
    Backoff,
    JobError,
    JobSpec,
    PayloadError,
    Queue,
    ScheduleRecord,
    ScheduleSpec,
    SQLiteStorage,
    State,
    Storage,
)

ROOT = Path(__file__).parent.parent
DRIVERS = ["sqlite3", pytest.param("apsw", marks=pytest.mark.skipif(find_spec("apsw") is None, reason="no apsw"))]

HOSTILE = [
    "'; drop table litebroker_job; --",
    '" or ""="',
    "%_\\'",
    "../../../evil",
    "/etc/evil",
    "-rf",
    "a\nb",
    "$(touch evil)",
    "\u202e\u0007",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder / "jobs.db"


# -- no SQL from input --


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("text", HOSTILE)
def test_names_keys_and_texts_are_data_to_every_verb(text: str, driver: str, path: Path) -> None:
    with closing(SQLiteStorage(path, driver=driver, durability="relaxed")) as storage:
        spec = JobSpec(
            text, text.encode(), text, group=text, ref=text, task=text, dedupe_key=text, headers={text: text}
        )
        (added,) = storage.add([spec])
        (record,) = storage.claim([text], limit=1, lease_ms=60_000)
        storage.fail(record.lease, JobError(text, text, text, text, (text,)), retry_in_ms=None)
        storage.put(text, text, b"x", number=1)
        storage.put_schedule(ScheduleRecord(text, text, ScheduleSpec(every_ms=1000), spec, 1, None))
        storage.notify(text)
        storage.notify_queue(text)

        (found,) = storage.page(text, State.FAILED)
        assert (found.queue, found.group, found.ref, found.task, found.dedupe_key) == (text,) * 5
        assert (dict(found.headers), found.encoding, found.payload) == ({text: text}, text, text.encode())
        assert found.error == JobError(text, text, text, text, (text,))
        assert [job.id for job in storage.find(text, ref=text)] == [added.id]
        assert [job.id for job in storage.find(text, dedupe_key=text)] == [added.id]
        assert storage.increment(text, text, 2) == 3
        assert [key for key, _ in storage.scan(text)] == [text]
        assert storage.get_schedule(text, text) is not None
        assert storage.move(text, "other") == 0
        assert storage.retry([added.id], queue=text) == [True]
        assert storage.purge(text, [State.PENDING]) == 1
        assert [queue.name for queue in storage.queues()].count(text) == 1
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["data"]


# What may stand in a statement that is put together: names of columns and tables of our own making.
_STATEMENTS = ("rows", "change", "many", "execute", "executemany")


def test_no_statement_of_the_engine_is_put_together_where_it_is_run() -> None:
    found = []
    for file in (ROOT / "core" / "litebroker" / "sqlite").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in _STATEMENTS and call.args and isinstance(call.args[0], (ast.JoinedStr, ast.BinOp)):
                values = [ast.unparse(part) for part in ast.walk(call.args[0]) if isinstance(part, ast.FormattedValue)]
                found.append((file.name, ast.unparse(call.args[0]), values))

    # A pragma takes no parameters, and a copy's name is not the user's; each is a constant of the module, or a number.
    assert [(file, values) for file, _text, values in found if file not in _MADE_OF_CONSTANTS] == []


# Looked at: what is put in there is a constant of the same module, a whole number, or what SQLite itself has answered.
_MADE_OF_CONSTANTS = {"backup.py", "connection.py", "schema.py", "upkeep.py"}


@pytest.mark.skipif(find_spec("rq") is None, reason="needs rq")
@pytest.mark.parametrize("text", HOSTILE)
def test_names_are_data_to_rqs_commands(text: str, path: Path) -> None:
    from litebroker_rq import connect

    connection = connect(path)
    connection.set(text, text)
    connection.hset(text + "h", text, text)
    connection.rpush("rq:queue:" + text, text)
    connection.zadd(text + "z", {text: 1})
    connection.sadd(text + "s", text)

    assert connection.get(text) == text.encode()
    assert connection.hgetall(text + "h") == {text.encode(): text.encode()}
    assert connection.lrange("rq:queue:" + text, 0, -1) == [text.encode()]
    assert connection.zrange(text + "z", 0, -1) == [text.encode()]
    assert connection.smembers(text + "s") == {text.encode()}
    assert connection.exists(text) == 1
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["data"]


# -- no paths from input --


@pytest.mark.parametrize("name", HOSTILE)
def test_who_waits_for_a_queue_makes_files_beside_the_database_only(name: str, path: Path) -> None:
    with closing(SQLiteStorage(path)) as storage, closing(storage.listener([name], [name])):
        storage.notify_queue(name)
        storage.notify(name)

    assert [entry.name for entry in path.parent.parent.iterdir()] == ["data"]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["jobs.db", "jobs.db-litebroker"]


@pytest.mark.skipif(find_spec("click") is None, reason="needs click")
@pytest.mark.parametrize("name", HOSTILE[:6])
def test_a_queues_name_is_no_path_and_no_option_to_the_commands(name: str, path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "litebroker", *arguments, "--db", str(path)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'core'}"}
        return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)

    with closing(Queue(name, path)) as queue:
        queue.add({"to": "a@example.com"})
    ends = [
        run(*command) for command in (["stats", f"--queue={name}"], ["queues"], ["jobs", "list", f"--queue={name}"])
    ]

    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 3
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["jobs.db", "jobs.db-litebroker"]


# -- files are the user's --


@pytest.mark.skipif(os.name == "nt", reason="needs a umask")
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o007])
def test_files_are_made_with_the_users_umask(mask: int, path: Path) -> None:
    before = os.umask(mask)
    try:
        with closing(SQLiteStorage(path)) as storage, closing(storage.listener(["work"], ["topic"])):
            storage.add([JobSpec("work", b"{}")])
            storage.claim(["work"], limit=1, lease_ms=60_000)
            made = {str(entry): stat.S_IMODE(entry.lstat().st_mode) for entry in path.parent.rglob("*")}
    finally:
        os.umask(before)

    assert len(made) > 5
    assert {name: oct(mode) for name, mode in made.items() if mode & mask} == {}


@pytest.mark.skipif(os.name == "nt", reason="needs a umask")
def test_what_is_made_beside_a_file_for_a_group_is_for_the_group_too(path: Path) -> None:
    path.touch()
    path.chmod(0o660)
    before = os.umask(0o007)
    try:
        with closing(SQLiteStorage(path)) as storage, closing(storage.listener(["work"])):
            storage.add([JobSpec("work", b"{}")])
            storage.claim(["work"], limit=1, lease_ms=60_000)
            modes = {str(entry): stat.S_IMODE(entry.lstat().st_mode) for entry in path.parent.rglob("*")}
    finally:
        os.umask(before)

    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o060 != 0o060} == {}


# -- logs and errors hold no payloads --

SECRET = "correct-horse-battery"


class _Refuses:
    """A serializer that cannot read what it wrote."""

    name = "refuses"

    def dumps(self, data: Any) -> bytes:
        return repr(data).encode()

    def loads(self, payload: bytes) -> Any:
        raise ValueError(f"cannot read {len(payload)} bytes")


def test_workers_do_not_log_payloads(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def fail(_data: object) -> None:
        raise RuntimeError("the mail server is down")

    with closing(Queue("work", path, attempts=2, backoff=Backoff.fixed(0))) as queue:
        queue.add({"password": SECRET})
        _run(queue, fail)
    with closing(Queue("unreadable", path, serializer=_Refuses(), attempts=1)) as queue:
        queue.add({"password": SECRET})
        _run(queue, fail)
    with closing(Queue("broken", path, attempts=1)) as queue:
        queue.storage.add([JobSpec("broken", f'{{"password": "{SECRET}'.encode(), max_attempts=1)])
        _run(queue, fail)

    assert "the mail server is down" in caplog.text
    assert "cannot read" in caplog.text
    assert SECRET not in caplog.text


def _run(queue: Queue[Any], handler: Any) -> None:
    """Until its job has failed for good."""
    worker = queue.process(handler)
    with closing(queue.storage.listener(topics=["never"])) as pause:
        for _ in range(500):
            if queue.stats().failed:
                break
            pause.wait(0.02)
    assert worker.close(20)
    assert queue.stats().failed == 1


@pytest.mark.parametrize(
    "data",
    [{"password": SECRET, "rate": float("nan")}, {"password": SECRET, 1: 2}, {"password": SECRET, "o": object()}],
)
def test_a_payload_that_is_refused_is_not_quoted(data: object, path: Path) -> None:
    with closing(Queue("work", path)) as queue, pytest.raises(PayloadError) as refused:
        queue.add(data)

    assert SECRET not in str(refused.value)


def test_a_payload_that_is_too_large_is_not_quoted(path: Path) -> None:
    with closing(Queue("work", path, max_payload_bytes=10)) as queue, pytest.raises(PayloadError) as refused:
        queue.add({"password": SECRET})

    assert SECRET not in str(refused.value)


# -- what is unpickled --


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[tuple[bytes, Path]]:
    target = tmp_path / "exploded"
    yield pickle.dumps(Bomb(target)), target
    assert not target.exists()


def test_the_engine_unpickles_nothing(bomb: tuple[bytes, Path], path: Path) -> None:
    payload, _ = bomb
    with closing(Queue("work", path)) as queue:
        queue.storage.add(
            [JobSpec("work", payload, encoding, max_attempts=1) for encoding in (None, "pickle", "bytes")]
        )

        seen = [job.data for job in queue.claim(limit=3)]
        failed = queue.storage.page("work", State.FAILED)

    assert seen == [payload]  # as the bytes that it is
    assert [record.error.reason for record in failed if record.error] == ["parse", "parse"]


@pytest.mark.skipif(find_spec("dramatiq") is None, reason="needs dramatiq")
def test_dramatiqs_messages_are_json(bomb: tuple[bytes, Path], path: Path) -> None:
    from litebroker_dramatiq import SQLiteBroker

    payload, _ = bomb
    broker = SQLiteBroker(path)
    broker.declare_queue("default")
    storage: Storage = broker.storage
    storage.add([JobSpec(broker.engine_queue("default"), payload)])
    consumer = broker.consume("default", timeout=100)

    assert next(consumer) is None
    (letter,) = broker.dead_letters()
    assert letter.reason == "parse"
    consumer.close()
    broker.close()


def test_adapters_do_not_log_what_they_cannot_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("dramatiq")
    pytest.importorskip("huey")
    from litebroker_dramatiq import SQLiteBroker
    from litebroker_huey import SQLiteHuey

    caplog.set_level(logging.INFO)
    broker = SQLiteBroker(path)
    broker.declare_queue("default")
    broker.storage.add([JobSpec(broker.engine_queue("default"), f'{{"args": ["{SECRET}"'.encode())])
    consumer = broker.consume("default", timeout=100)
    assert next(consumer) is None
    consumer.close()
    broker.close()
    huey = SQLiteHuey("app", filename=path, read_timeout=0.05)
    huey.storage.enqueue(SECRET.encode())
    assert huey.dequeue() is None
    huey.storage.close()

    assert len(caplog.records) >= 2
    assert SECRET not in caplog.text


@pytest.mark.skipif(find_spec("huey") is None, reason="needs huey")
def test_huey_with_a_signing_serializer_unpickles_nothing_that_others_wrote(
    bomb: tuple[bytes, Path], path: Path
) -> None:
    from huey.serializer import SignedSerializer

    from litebroker_huey import SQLiteHuey

    payload, _ = bomb
    huey = SQLiteHuey("app", filename=path, serializer=SignedSerializer(secret=SECRET), read_timeout=0.05)
    huey.storage.enqueue(payload)

    assert huey.dequeue() is None
    assert [dead.reason for dead in huey.dead_tasks()] == ["parse"]
    huey.storage.close()


@pytest.mark.skipif(find_spec("rq") is None, reason="needs rq")
def test_rq_with_its_serializer_of_json_unpickles_nothing(path: Path) -> None:
    import rq
    from rq.serializers import JSONSerializer

    from litebroker_rq import connect

    connection = connect(path)
    queue = rq.Queue(connection=connection, serializer=JSONSerializer)
    job = queue.enqueue("operator.add", 1, 2)
    worker = rq.SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
    worker.work(burst=True, logging_level="ERROR")

    assert job.return_value() == 3
    stored = connection.hget(job.key, "data")
    assert isinstance(stored, bytes)
    assert zlib.decompress(stored).startswith(b'["operator.add"')

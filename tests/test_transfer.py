"""Jobs that go from one file to another as lines of JSON: nothing is lost, changed or added twice on the way."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from huey import signals
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.waiting import LIMIT, comes_true

from litebroker import JobError, JobSpec, Queue, ScheduleRecord, ScheduleSpec, SQLiteStorage, State, Storage, ndjson
from litebroker.cli import main
from litebroker.jobs import Attempt, JobCopy, JobRecord
from litebroker.testing import ManualClock
from litebroker.testing.model import ModelStorage
from litebroker.transfer import TransferError, export_lines, import_lines
from litebroker_dramatiq import SQLiteBroker
from litebroker_huey import SQLiteHuey

ERROR = JobError("handler", "ValueError", "no such user", "Traceback ...", ("KeyError: 7",))
HEADER = b'{"kind":"litebroker","version":1,"export":"0123"}\n'
JOB = {"kind": "job", "id": "77", "queue": "q", "state": "pending", "created_at_ms": 1, "due_at_ms": 1, "payload": "x"}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "source.db", durability="relaxed")
    yield storage
    storage.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SQLiteStorage]:
    storage = SQLiteStorage(tmp_path / "target.db", durability="relaxed")
    yield storage
    storage.close()


def lines_of(storage: Storage, **options: Any) -> list[bytes]:
    return b"".join(export_lines(storage, **options)).splitlines(keepends=True)


def carry(source: Storage, target: Storage) -> None:
    import_lines(target, lines_of(source))


def fill(storage: Storage) -> None:
    """One job of each state, and of each kind of fields."""
    storage.add(
        [
            JobSpec(
                "mail",
                b'{"to": "\xc3\xbc"}',
                priority=-7,
                delay_ms=60_000,
                dedupe_key="welcome:42",
                dedupe_until="ended",
                group="tenant-9",
                group_concurrency=2,
                max_attempts=None,
                headers={"traceparent": "00-af", "ü": "東"},
                ref="message-1",
                task="app.send",
                encoding="mine",
            ),
            JobSpec("binary", b"\xff\x00\xfe", encoding="bytes"),
            JobSpec("empty", b""),
            JobSpec("odd", 'a "quoted"\n\u2028 line'.encode()),
        ]
    )
    for state in ("completed", "failed", "retried", "cancelled"):
        ((job_id, _),) = storage.add([JobSpec("ends", state.encode(), task=state)])
        if state == "cancelled":
            storage.cancel([job_id])
            continue
        (job,) = storage.claim(["ends"], limit=1, lease_ms=60_000)
        if state == "completed":
            storage.complete([job.lease], keep=True)
        else:
            storage.fail(job.lease, ERROR, retry_in_ms=None if state == "failed" else 0)


def test_jobs_of_every_state_come_over_as_they_are(source: SQLiteStorage, target: SQLiteStorage) -> None:
    fill(source)

    carry(source, target)

    assert target.walk_jobs() == source.walk_jobs()
    assert len(target.walk_jobs()) == 8


def test_jobs_go_between_different_storages(source: SQLiteStorage) -> None:
    model = ModelStorage()
    fill(source)

    carry(source, model)

    assert lines_of(model)[1:] == lines_of(source)[1:]  # but for the export's name


def test_an_active_job_comes_over_as_if_it_had_not_been_claimed(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")])
    source.claim(["q"], limit=1, lease_ms=60_000)

    carry(source, target)

    (copy,) = target.walk_jobs()
    assert (copy.record.state, copy.record.attempts, copy.record.claimed_at_ms) == (State.PENDING, 0, None)


def test_jobs_are_claimed_in_the_same_order(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"%d" % number, priority=number % 3) for number in range(20)])

    carry(source, target)

    claimed = [storage.claim(["q"], limit=20, lease_ms=60_000) for storage in (source, target)]
    assert [job.id for job in claimed[0]] == [job.id for job in claimed[1]]


def test_schedules_come_over_and_one_that_is_there_stays(source: SQLiteStorage, target: SQLiteStorage) -> None:
    cron = ScheduleRecord("q", "daily", ScheduleSpec(cron="0 6 * * *", tz="Europe/Berlin"), JobSpec("q", b"a"), 9, 7)
    every = ScheduleRecord("q", "often", ScheduleSpec(every_ms=5000), JobSpec("q", b"\xff", priority=3), 8, None)
    source.put_schedule(cron)
    source.put_schedule(every)
    target.put_schedule(every._replace(next_at_ms=1))

    imported = import_lines(target, lines_of(source))

    assert target.list_schedules() == [cron, every._replace(next_at_ms=1)]
    assert imported.schedules == 1


def test_values_come_over_with_what_is_left_of_their_time(tmp_path: Path) -> None:
    clock = ManualClock()
    source = SQLiteStorage(tmp_path / "source.db", clock=clock)
    target = SQLiteStorage(tmp_path / "target.db", clock=clock)
    source.put("results", "a", b"\xff", number=7, ttl_ms=60_000)
    source.put("results", "b", b"text")
    clock.advance(10)
    lines = lines_of(source)
    clock.advance(1000)

    import_lines(target, lines)

    assert target.scan("results") == [("a", (b"\xff", 7, 50_000)), ("b", (b"text", 0, None))]
    source.close()
    target.close()


def test_a_paused_queue_is_paused_there(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")])
    source.pause("q", paused=True)

    carry(source, target)

    assert target.claim(["q"], limit=1, lease_ms=1000) == []


def test_only_some_queues_can_be_exported(source: SQLiteStorage, target: SQLiteStorage) -> None:
    fill(source)
    source.put("results", "a")

    import_lines(target, lines_of(source, queues=["mail", "empty"]))

    assert {copy.record.queue for copy in target.walk_jobs()} == {"mail", "empty"}
    assert target.size("results") == 0


def test_large_payloads_come_over_in_pages_of_a_few(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"%d" % number * 700_000) for number in range(10, 25)])

    pieces = list(export_lines(source))
    import_lines(target, b"".join(pieces).splitlines(keepends=True))

    assert target.walk_jobs() == source.walk_jobs()
    assert len(pieces) > 2


@settings(max_examples=40)
@given(
    some.builds(
        JobRecord,
        id=some.integers(1, 2**63 - 1),
        queue=some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        state=some.just(State.FAILED),
        priority=some.integers(-(2**63), 2**63 - 1),
        due_at_ms=some.integers(0, 10**13),
        attempts=some.integers(0, 2**31 - 1),
        max_attempts=some.none() | some.integers(1, 2**31 - 1),
        created_at_ms=some.integers(0, 10**13),
        token=some.none(),
        lease_until_ms=some.none(),
        claimed_at_ms=some.none() | some.integers(0, 10**13),
        ended_at_ms=some.integers(0, 10**13),
        headers=some.dictionaries(some.text(some.characters(exclude_categories=["Cs"])), some.just("x"), max_size=3),
        error=some.none() | some.builds(JobError, causes=some.tuples(some.just("c"))),
        history=some.lists(
            some.builds(Attempt, number=some.integers(1, 9), started_at_ms=some.just(1), ended_at_ms=some.just(2)),
            max_size=2,
        ),
        payload=some.binary(),
    )
)
def test_whatever_a_job_is_its_line_says_it_exactly(record: JobRecord) -> None:
    record = record._replace(
        group=None, dedupe_key=None, encoding=None, ref=None, task=None, history=record.history or ()
    )
    copy = JobCopy(record)

    line = ndjson.job_line(copy)

    assert line.isascii()
    assert line.count(b"\n") == 1
    assert ndjson.parsed(line) == copy


def test_an_export_while_workers_run_has_every_job_once_that_they_have_not_ended(source: SQLiteStorage) -> None:
    with Queue[int]("work", source) as queue:
        ids = {job.id for job in queue.add_many(range(3000))}
        ended: set[int] = set()
        worker = queue.process(lambda _data, context: ended.add(context.job.id), concurrency=2)

        exported = [int(line["id"]) for line in map(json.loads, lines_of(source)) if line["kind"] == "job"]
        ended_meanwhile = set(ended)
        worker.close()

    assert len(set(exported)) == len(exported)
    assert ids <= {*exported, *ended_meanwhile}


def test_results_come_over_with_the_jobs_that_they_are_of(source: SQLiteStorage, target: SQLiteStorage) -> None:
    with Queue[int]("work", source, results=3600) as queue:
        job = queue.add(20)
        with contextlib.closing(queue.process(lambda data: data + 1)):
            assert queue.result(job, timeout=LIMIT) == 21

    carry(source, target)

    with Queue[int]("work", target, results=3600) as queue:
        assert queue.result(job.id, timeout=LIMIT) == 21


# -- again, and again --


def test_the_same_file_twice_adds_nothing(source: SQLiteStorage, target: SQLiteStorage) -> None:
    fill(source)
    lines = lines_of(source)
    import_lines(target, lines)

    again = import_lines(target, lines)

    assert (again.jobs, again.skipped, again.resumed, again.complete) == (0, 0, len(lines), True)
    assert target.walk_jobs() == source.walk_jobs()


def test_jobs_that_have_run_since_are_not_added_again(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")] * 5)
    lines = lines_of(source)
    import_lines(target, lines)
    target.complete([job.lease for job in target.claim(["q"], limit=3, lease_ms=60_000)])

    import_lines(target, lines)

    assert target.counts("q").pending == 2


def test_afresh_adds_again_what_is_gone(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")] * 5)
    lines = lines_of(source)
    import_lines(target, lines)
    target.complete([job.lease for job in target.claim(["q"], limit=3, lease_ms=60_000)])

    imported = import_lines(target, lines, afresh=True)

    assert (imported.jobs, imported.skipped) == (3, 2)


def test_two_exports_of_one_file_do_not_double_its_jobs(source: SQLiteStorage, target: SQLiteStorage) -> None:
    fill(source)
    carry(source, target)
    source.add([JobSpec("new", b"x")])

    imported = import_lines(target, lines_of(source))

    assert (imported.jobs, imported.skipped) == (1, 8)


def test_a_wrong_line_is_named_and_those_before_it_are_in(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")] * 2500)
    lines = lines_of(source)
    broken = [*lines[:2100], b"{}\n", *lines[2101:]]

    with pytest.raises(TransferError, match=r"^line 2101: kind=None is not known; the lines before it are in") as error:
        import_lines(target, broken)

    assert error.value.line == 2101
    assert target.counts("q").pending == 2100 - 2  # the header and the queue


def test_a_file_that_was_mended_goes_on_where_it_stopped(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")] * 50)
    lines = lines_of(source)
    with pytest.raises(TransferError):
        import_lines(target, [*lines[:20], b"oops\n", *lines[21:]])
    target.complete([job.lease for job in target.claim(["q"], limit=10, lease_ms=60_000)])

    imported = import_lines(target, lines)

    assert (imported.resumed, imported.jobs, imported.complete) == (20, 32, True)
    assert target.counts("q").pending == 40


def test_a_file_that_was_changed_before_that_is_refused(source: SQLiteStorage, target: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x")] * 50)
    lines = lines_of(source)
    with pytest.raises(TransferError):
        import_lines(target, [*lines[:20], b"oops\n"])

    with pytest.raises(TransferError, match="that are not those of this file"):
        import_lines(target, lines[:1] + lines[2:])

    assert target.counts("q").pending == 18


def test_an_export_that_was_cut_is_not_complete(source: SQLiteStorage, target: SQLiteStorage) -> None:
    fill(source)
    lines = lines_of(source)

    imported = import_lines(target, lines[:-1])

    assert not imported.complete
    assert import_lines(target, lines).complete


@pytest.mark.parametrize("kept", range(1, 12))
def test_an_export_goes_on_behind_any_line(source: SQLiteStorage, target: SQLiteStorage, kept: int) -> None:
    fill(source)
    source.put("results", "a", b"1")
    source.put("results", "b", b"2")
    lines = lines_of(source)
    assert len(lines) > 12
    cut = lines[:kept]

    rest = lines_of(source, after=cut[-1])
    begun_anew = json.loads(rest[0])["kind"] == "litebroker"
    import_lines(target, rest if begun_anew else cut + rest)

    assert target.walk_jobs() == source.walk_jobs()
    assert target.size("results") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 77}, "id=77 is of a wrong type"),
        ({"id": "-1"}, "id='-1' is no job's"),
        ({"id": str(2**63)}, "is no job's"),
        ({"state": "active"}, "state='active': it is one of pending"),
        ({"state": "done"}, "state='done'"),
        ({"state": "failed"}, "failed has an ended_at_ms"),
        ({"ended_at_ms": 5}, "pending has no ended_at_ms"),
        ({"queue": ""}, "queue='': a name is not empty"),
        ({"queue": "a\0b"}, "has no NUL"),
        ({"queue": "\ud800"}, "half a surrogate pair"),
        ({"priority": 2**63}, "priority=9223372036854775808 is out of range"),
        ({"priority": True}, "priority=True is of a wrong type"),
        ({"priority": 1.5}, "priority=1.5 is of a wrong type"),
        ({"max_attempts": 0}, "max_attempts=0 is out of range"),
        ({"due_at_ms": 10**17}, "due_at_ms=100000000000000000 is out of range"),
        ({"colour": "red"}, "'colour' is not known"),
        ({"payload_base64": "eA=="}, "one of payload and payload_base64"),
        ({"payload": None}, "payload=None is of a wrong type"),
        ({"payload": "\udfff"}, "half a surrogate pair"),
        ({"headers": {"a": 1}}, "takes strings"),
        ({"dedupe_until": "never"}, "dedupe_until='never'"),
        ({"error": {"type": "x"}}, "'reason' is missing"),
        ({"history": [1]}, "takes objects"),
        ({"history": [{"number": 1}]}, "is missing"),
        ({"kind": "jbo"}, "kind='jbo' is not known"),
    ],
)
def test_a_line_that_makes_no_job_is_refused(target: SQLiteStorage, change: dict[str, object], message: str) -> None:
    line = json.dumps({**JOB, **change}).encode() + b"\n"

    with pytest.raises(TransferError) as error:
        import_lines(target, [HEADER, line])

    assert message in str(error.value)
    assert error.value.line == 2
    assert target.walk_jobs() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b"\xff\n", "not JSON"),
        (b'{"kind":"end"} x\n', "more behind it"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b'{"kind":"value","space":"s","key":"k","data_base64":"*"}\n', "not base64"),
        (b'{"kind":"schedule","queue":"q","id":"i","next_at_ms":1,"cron":"x","payload":""}\n', "cron"),
        (b'{"kind":"schedule","queue":"q","id":"i","next_at_ms":1,"payload":""}\n', "exactly one of every_ms and cron"),
        (b'{"kind":"end"}\n{"kind":"end"}\n', "line 3: it stands behind the end"),
    ],
)
def test_a_line_that_is_nothing_is_refused(target: SQLiteStorage, line: bytes, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        import_lines(target, [HEADER, *line.splitlines(keepends=True)])


@pytest.mark.parametrize(
    "first", [b"", b"\n", json.dumps(JOB).encode(), b'{"kind":"litebroker","version":2,"export":"x"}']
)
def test_a_file_that_is_no_export_is_refused(target: SQLiteStorage, first: bytes) -> None:
    with pytest.raises(TransferError, match="line 1: "):
        import_lines(target, [first] if first else [])


# -- the commands --


class Command:
    """Runs the command in this process, or starts one of its own."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "litebroker", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
        )

    def __call__(self, *args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert isinstance(end.value.code, int)
        return end.value.code, *self._capture.readouterr()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LITEBROKER_URL", raising=False)
    return Command(tmp_path, capfd)


def test_an_export_goes_through_a_pipe_into_an_import(
    command: Command, source: SQLiteStorage, target: SQLiteStorage
) -> None:
    fill(source)
    litebroker = f"{sys.executable} -m litebroker"

    shell = subprocess.run(
        ["bash", "-c", f"{litebroker} export --db source.db | {litebroker} import - --db target.db"],
        cwd=command.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT,
    )

    assert shell.stdout == "added 8 jobs, 0 schedules, 0 values\n"
    assert target.walk_jobs() == source.walk_jobs()


def test_an_import_that_was_killed_goes_on_and_runs_no_job_twice(
    command: Command, source: SQLiteStorage, target: SQLiteStorage
) -> None:
    source.add([JobSpec("q", b"%d" % number) for number in range(6000)])
    lines = lines_of(source)
    (command.folder / "jobs.ndjson").write_bytes(b"".join(lines))
    first = command.start("import", "-", "--db", "target.db")
    assert first.stdin
    first.stdin.write(b"".join(lines[:3500]))
    first.stdin.flush()
    assert comes_true(lambda: target.counts("q").pending >= 2000)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    ran = target.claim(["q"], limit=1500, lease_ms=60_000)
    target.complete([job.lease for job in ran])

    status, out, _ = command("import", "jobs.ndjson", "--db", "target.db", "--json")

    rest = [copy.record.payload for page in _pages(target) for copy in page]
    assert status == 0
    assert json.loads(out)["complete"]
    assert sorted([*rest, *(job.payload for job in ran)], key=int) == [b"%d" % number for number in range(6000)]


def _pages(storage: SQLiteStorage) -> Iterator[list[JobCopy]]:
    after = None
    while page := storage.walk_jobs(after=after):
        yield page
        after = page[-1].record.id


def test_an_export_that_was_interrupted_is_resumed(
    command: Command, source: SQLiteStorage, target: SQLiteStorage
) -> None:
    source.add([JobSpec("q", b"%d" % number) for number in range(2000)])
    assert command("export", "-o", "jobs.ndjson", "--db", "source.db")[0] == 0
    file = command.folder / "jobs.ndjson"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])

    cut = command("import", "jobs.ndjson", "--db", "target.db")
    resumed = command("export", "-o", "jobs.ndjson", "--resume", "--db", "source.db")
    again = command("import", "jobs.ndjson", "--db", "target.db")

    assert cut[0] == 1
    assert "line" in cut[2]
    assert resumed[0] == again[0] == 0
    assert target.counts("q").pending == 2000


@pytest.mark.parametrize("kept", [0, 1, 2, 5, 6, 7, 12])
def test_an_export_that_was_cut_anywhere_is_resumed(
    command: Command, source: SQLiteStorage, target: SQLiteStorage, kept: int
) -> None:
    fill(source)
    source.put("results", "a", b"1")
    file = command.folder / "jobs.ndjson"
    file.write_bytes(b"".join(lines_of(source)[:kept]) + b'{"kind":"jo')

    resumed = command("export", "-o", "jobs.ndjson", "--resume", "--db", "source.db")
    imported = command("import", "jobs.ndjson", "--db", "target.db")

    assert (resumed[0], imported[:2]) == (0, (0, "added 8 jobs, 0 schedules, 1 values\n"))
    assert target.walk_jobs() == source.walk_jobs()


def test_a_finished_export_is_left_as_it_is(command: Command, source: SQLiteStorage) -> None:
    fill(source)
    assert command("export", "-o", "jobs.ndjson", "--db", "source.db")[0] == 0
    before = (command.folder / "jobs.ndjson").read_bytes()

    assert command("export", "-o", "jobs.ndjson", "--resume", "--db", "source.db")[0] == 0

    assert (command.folder / "jobs.ndjson").read_bytes() == before


def test_an_export_is_not_resumed_as_another_one(command: Command, source: SQLiteStorage) -> None:
    fill(source)
    assert command("export", "-o", "jobs.ndjson", "--queue", "mail", "--db", "source.db")[0] == 0
    (command.folder / "text").write_text("no export\nat all\n")

    other = command("export", "-o", "jobs.ndjson", "--resume", "--db", "source.db")
    text = command("export", "-o", "text", "--resume", "--db", "source.db")

    assert other[0] == text[0] == 1
    assert "this is an export of 'mail'" in other[2]
    assert (command.folder / "text").read_text() == "no export\nat all\n"


def test_an_import_says_that_the_export_was_cut(command: Command, source: SQLiteStorage) -> None:
    fill(source)
    (command.folder / "jobs.ndjson").write_bytes(b"".join(lines_of(source)[:-1]))

    status, out, error = command("import", "jobs.ndjson", "--db", "target.db")

    assert (status, out) == (1, "added 8 jobs, 0 schedules, 0 values\n")
    assert "its last line is missing" in error


def test_lines_can_be_checked_without_importing_any(command: Command, source: SQLiteStorage) -> None:
    fill(source)
    lines = lines_of(source)
    (command.folder / "good.ndjson").write_bytes(b"".join(lines))
    (command.folder / "bad.ndjson").write_bytes(b"".join([*lines[:3], b"?\n", *lines[3:]]))

    good = command("import", "good.ndjson", "--check", "--db", "target.db")
    bad = command("import", "bad.ndjson", "--check", "--db", "target.db")

    assert good[:2] == (0, "all lines are right: 8 jobs, 0 schedules, 0 values\n")
    assert bad[0] == 1
    assert "line 4: not JSON" in bad[2]
    assert "nothing was imported" in bad[2]
    assert not (command.folder / "target.db").exists()


def test_an_export_replaces_no_file_unasked_and_never_the_database(command: Command, source: SQLiteStorage) -> None:
    fill(source)
    (command.folder / "mine").write_text("mine")

    refused = command("export", "-o", "mine", "--db", "source.db")
    database = command("export", "-o", "source.db", "--force", "--db", "source.db")
    forced = command("export", "-o", "mine", "--force", "--db", "source.db")

    assert (refused[0], database[0], forced[0]) == (1, 1, 0)
    assert "this is the database itself" in database[2]
    assert len(source.walk_jobs()) == 8


@pytest.mark.parametrize("option", ["--force", "--resume"])
@pytest.mark.parametrize("name", ["second", "source.db-wal", "source.db-litebroker/x", "other.db"])
def test_an_export_goes_onto_no_database_and_no_part_of_one(
    command: Command, source: SQLiteStorage, name: str, option: str
) -> None:
    fill(source)
    with contextlib.closing(SQLiteStorage(command.folder / "other.db")) as other:
        other.add([JobSpec("q", b"x")])
    (command.folder / "second").hardlink_to(command.folder / "source.db")

    status, _out, err = command("export", "-o", name, option, "--db", "source.db")

    assert status == 1
    assert "give another path" in err
    assert len(source.walk_jobs()) == 8
    with contextlib.closing(SQLiteStorage(command.folder / "other.db")) as other:
        assert other.counts("q").ready == 1


def test_a_reader_who_leaves_early_ends_an_export_quietly(command: Command, source: SQLiteStorage) -> None:
    source.add([JobSpec("q", b"x" * 1000)] * 2000)

    pipeline = f"{sys.executable} -m litebroker export --db source.db | head -n 1 > first; exit ${{PIPESTATUS[0]}}"
    shell = subprocess.run(
        ["bash", "-c", pipeline], cwd=command.folder, capture_output=True, check=False, timeout=LIMIT
    )

    assert (shell.returncode, shell.stderr) == (141, b"")


def test_progress_is_shown_in_a_terminal_only_and_never_among_the_lines(
    command: Command, source: SQLiteStorage
) -> None:
    fill(source)
    terminal, process_side = pty.openpty()

    with subprocess.Popen(
        [sys.executable, "-m", "litebroker", "export", "--db", "source.db"],
        cwd=command.folder,
        stdout=subprocess.PIPE,
        stderr=process_side,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        out, _ = process.communicate(timeout=LIMIT)
    shown = os.read(terminal, 100_000)
    os.close(terminal)
    os.close(process_side)

    assert b"exporting" in shown
    assert [json.loads(line)["kind"] for line in out.splitlines()][-1] == "end"


def test_an_unknown_queue_is_no_export(command: Command, source: SQLiteStorage) -> None:
    fill(source)

    status, out, error = command("export", "--queue", "male", "--db", "source.db")

    assert (status, out) == (1, "")
    assert "there is no queue 'male'" in error


# -- frameworks --


def test_a_message_of_dramatiq_runs_from_the_other_file(command: Command) -> None:
    ran: list[str] = []

    def broker_on(path: Path) -> tuple[SQLiteBroker, Any]:
        broker = SQLiteBroker(path)
        return broker, dramatiq.actor(broker=broker, actor_name="say", queue_name="words")(ran.append)

    broker, say = broker_on(command.folder / "source.db")
    say.send("now")
    say.send_with_options(args=("later",), delay=100)
    broker.close()
    assert command("export", "-o", "jobs.ndjson", "--db", "source.db")[0] == 0
    assert command("import", "jobs.ndjson", "--db", "target.db")[0] == 0

    broker, _ = broker_on(command.folder / "target.db")
    worker = dramatiq.Worker(broker, worker_timeout=50)
    worker.start()

    assert comes_true(lambda: len(ran) == 2)
    assert sorted(ran) == ["later", "now"]
    worker.stop()
    broker.close()


def test_a_task_of_huey_runs_from_the_other_file(command: Command) -> None:
    ran: list[str] = []

    def huey_on(path: Path) -> tuple[Any, Any]:
        def say(word: str) -> str:
            ran.append(word)
            return word

        huey = SQLiteHuey("shop", filename=str(path))
        return huey, huey.task(name="say")(say)

    huey, say = huey_on(command.folder / "source.db")
    result = say("now")
    say.schedule(("later",), delay=0.1)
    assert command("export", "-o", "jobs.ndjson", "--db", "source.db")[0] == 0
    assert command("import", "jobs.ndjson", "--db", "target.db")[0] == 0
    assert len(huey) > 0

    there, _ = huey_on(command.folder / "target.db")
    done: list[str] = []
    there.signal(signals.SIGNAL_COMPLETE)(lambda _signal, task: done.append(task.id))
    consumer = there.create_consumer(workers=1, periodic=False, initial_delay=0.01, scheduler_interval=1)
    consumer.start()

    assert comes_true(lambda: len(done) == 2)
    assert sorted(ran) == ["later", "now"]
    assert there.result(result.id) == "now"
    consumer.stop(graceful=True)


def test_a_file_with_jobs_of_rq_is_not_exported_by_halves(command: Command) -> None:
    rq = pytest.importorskip("rq")
    import litebroker_rq

    connection = litebroker_rq.connect(str(command.folder / "source.db"))
    rq.Queue("high", connection=connection).enqueue(print, "x")
    with Queue[Any]("mine", command.folder / "source.db") as queue:
        queue.add({"a": 1})

    everything = command("export", "--db", "source.db")
    high = command("export", "--queue", "rq:queue:high", "--db", "source.db")
    mine = command("export", "--queue", "mine", "--db", "source.db")

    assert everything[0] == high[0] == 1
    assert "litebroker backup" in everything[2]
    assert "litebroker backup" in high[2]
    assert mine[0] == 0
    assert len(mine[1].splitlines()) == 4


def test_what_copies_or_deletes_jobs_leaves_those_of_rq_alone_in_the_same_words(command: Command) -> None:
    rq = pytest.importorskip("rq")
    import litebroker_rq

    database = command.folder / "source.db"
    rq.Queue("high", connection=litebroker_rq.connect(str(database))).enqueue(print, "x")
    words = (
        "queue 'rq:queue:high' is RQ's, which keeps most of a job in tables of its own: `litebroker backup` copies all"
        " of it, and `litebroker rq empty high` deletes its jobs"
    )

    exported = command("export", "--queue", "rq:queue:high", "--db", "source.db")
    purged = command("purge", "--queue", "rq:queue:high", "--state", "all", "--yes", "--db", "source.db")
    with contextlib.closing(SQLiteStorage(database)) as storage, pytest.raises(TransferError) as refused:
        list(export_lines(storage))

    assert exported[0] == purged[0] == 1
    assert words in exported[2]
    assert words in purged[2]
    assert str(refused.value) == words

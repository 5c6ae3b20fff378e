"""`litebroker jobs` and `litebroker dead` as users run them: real files, terminals, pipes and frameworks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import rq
from dramatiq import Worker
from tests.rq import tasks

from litebroker import Counts, Job, JobError, NewJob, Queue, Retention, State
from litebroker.cli import main
from litebroker_dramatiq import SQLiteBroker
from litebroker_rq import connect

LIMIT = 30

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command in this process: exit status, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        assert isinstance(end.value.code, int)
        out, err = capfd.readouterr()
        assert "Traceback (most" not in err
        return end.value.code, out, err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITEBROKER_URL", "jobs.db")
    monkeypatch.delenv("COLUMNS", raising=False)
    with Path(os.devnull).open() as nothing:  # Nobody can be asked there.
        monkeypatch.setattr("sys.stdin", nothing)
        yield run


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue[Any]]:
    with Queue[Any]("work", tmp_path / "jobs.db", retention=Retention(failed=None)) as queue:
        yield queue


def dead_letters(queue: Queue[Any], count: int = 1, **options: Any) -> list[Job[Any]]:
    queue.add_many([NewJob(number, **options) for number in range(count)])
    jobs = queue.claim(limit=count, lease=60)
    for job in jobs:
        queue.fail(job, ValueError(f"no {job.data}"), retry=False)
    return jobs


def ids(run: Run, *args: object) -> list[str]:
    status, out, _ = run(*args, "--json")
    assert status == 0
    return [job["id"] for job in json.loads(out)["jobs"]]


def state(queue: Queue[Any], job: Job[Any]) -> State | None:
    found = queue.get(job.id)
    return None if found is None else found.state


# -- listing --


def test_jobs_are_listed_as_a_table(run: Run, queue: Queue[Any]) -> None:
    (dead,) = dead_letters(queue, task="mail.send")
    later = queue.add(2, delay=3600)

    status, out, err = run("jobs", "list")

    head, first, second = out.splitlines()
    assert (status, err) == (0, "")
    assert head.split() == ["id", "queue", "state", "task", "framework", "attempts", "age", "note"]
    assert first.split()[:5] == [str(later.id), "work", "pending", "direct", "0/3"]
    assert "due in 59m" in first or "due in 1h00m" in first
    assert second.split()[:6] == [str(dead.id), "work", "failed", "mail.send", "direct", "1/3"]
    assert second.rstrip().endswith("ValueError: no 0")


def test_a_listing_in_json_is_one_line_and_its_ids_are_text(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1, priority=5, task="t", ref="r", group="g", dedupe_key="k")

    status, out, err = run("jobs", "list", "--json")

    assert (status, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    (row,) = found["jobs"]
    assert (found["next"], row["id"], row["state"], row["framework"]) == (None, str(job.id), "pending", "direct")
    assert [row[name] for name in ("priority", "task", "ref", "group", "dedupe_key")] == [5, "t", "r", "g", "k"]
    assert row["created_at"].endswith("+00:00")


def test_a_listing_goes_on_at_its_cursor(run: Run, queue: Queue[Any]) -> None:
    jobs = queue.add_many(range(5))

    _, out, err = run("jobs", "list", "--limit", 2)
    cursor = err.split()[-1]
    rest = ids(run, "jobs", "list", "--after", cursor)

    assert [line.split()[0] for line in out.splitlines()[1:]] == [str(job.id) for job in jobs[:2]]
    assert err.startswith("there may be more: --after ")
    assert rest == [str(job.id) for job in jobs[2:]]


def test_a_listing_is_filtered(run: Run, queue: Queue[Any], tmp_path: Path) -> None:
    (dead,) = dead_letters(queue, task="mail.send")
    waiting = queue.add(1, task="mail.sort")
    with Queue[Any]("other", tmp_path / "jobs.db") as other_queue:
        other = other_queue.add(1)

    assert ids(run, "jobs", "list", "--queue", "other") == [str(other.id)]
    assert ids(run, "jobs", "list", "--state", "failed") == [str(dead.id)]
    assert ids(run, "jobs", "list", "--task", "mail.*") == [str(waiting.id), str(dead.id)]
    assert ids(run, "jobs", "list", "--older-than", "1h") == []
    assert ids(run, "jobs", "list", "--newer-than", "1h", "--state", "pending", "--queue", "work") == [str(waiting.id)]
    assert ids(run, "jobs", "list", "--framework", "rq") == []
    assert ids(run, "dead", "list") == [str(dead.id)]


def test_dead_letters_are_listed_with_their_reason(run: Run, queue: Queue[Any]) -> None:
    (dead,) = dead_letters(queue)
    queue.add(1)

    status, out, _ = run("dead", "list")

    head, row = out.splitlines()
    assert status == 0
    assert head.split() == ["id", "queue", "task", "framework", "reason", "attempts", "age", "error"]
    assert row.split()[:4] == [str(dead.id), "work", "direct", "rejected"]


@pytest.mark.parametrize("args", [["jobs", "list"], ["dead", "list"]])
def test_a_filter_that_matches_nothing_says_so_beside_the_output(run: Run, queue: Queue[Any], args: list[str]) -> None:
    queue.add(1)

    status, out, err = run(*args, "--task", "none")

    assert (status, out) == (0, "")
    assert err in {"no job matches\n", "no dead letter matches\n"}


# -- showing --


def test_all_of_a_job_is_shown(run: Run, queue: Queue[Any]) -> None:
    job = queue.add({"to": "a@example.com"}, headers={"trace": "77"}, task="welcome", attempts=2)
    (claimed,) = queue.claim(limit=1, lease=60)
    queue.fail(claimed, ValueError("first"), retry_in=0)
    (claimed,) = queue.claim(limit=1, lease=60)

    status, out, err = run("jobs", "show", job.id)

    assert (status, err) == (0, "")
    assert f"job {job.id}\n" in out
    assert f":{os.getpid()}, alive" in out
    for part in (
        "state       active",
        "2 of 2",
        "trace  77",
        '"to": "a@example.com"',
        "1. retried",
        "ValueError: first",
    ):
        assert part in out


def test_all_of_a_job_is_shown_as_json(run: Run, queue: Queue[Any]) -> None:
    (dead,) = dead_letters(queue)

    status, out, _ = run("dead", "show", dead.id, "--json")

    found = json.loads(out)
    assert status == 0
    assert (found["id"], found["state"]) == (str(dead.id), "failed")
    assert found["payload"] == {"kind": "json", "size": 1, "value": 0, "note": None}
    assert [each["outcome"] for each in found["history"]] == ["failed"]
    assert found["error"]["type"] == "ValueError"
    assert "ValueError: no 0" in found["error"]["stack"]


def test_a_job_is_shown_by_the_name_that_its_sender_gave_it(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1, ref="invoice-7")
    queue.add(1, ref="twice")
    queue.add(1, ref="twice")

    named, twice = run("jobs", "show", "invoice-7"), run("jobs", "show", "twice")

    assert named[0] == 0
    assert f"job {job.id}\n" in named[1]
    assert twice[:2] == (1, "")
    assert twice[2].startswith("2 jobs are called twice: give one of ")


def test_what_is_not_there_is_named_and_the_rest_is_shown(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1)

    jobs = run("jobs", "show", "12", job.id, "nonsense")
    dead = run("dead", "show", job.id)

    assert (jobs[0], jobs[2]) == (1, "there is no job 12\nthere is no job nonsense\n")
    assert f"job {job.id}\n" in jobs[1]
    assert dead == (1, "", f"job {job.id} is no dead letter: it is pending\n")


@pytest.mark.parametrize("command", [("jobs", "show"), ("dead", "requeue"), ("why",)], ids=" ".join)
def test_more_digits_than_an_id_has_are_the_name_of_no_job(run: Run, queue: Queue[Any], command: tuple[str]) -> None:
    queue.add(1)

    status, _, err = run(*command, "9" * 5000)

    assert (status, err.count("\n")) == (1, 1)
    assert "no job" in err


def test_what_a_terminal_would_obey_is_shown_harmless(run: Run, queue: Queue[Any]) -> None:
    job = queue.add("\x1b[2J\x9b31m", task="\x1b]0;title\x07", headers={"a": "\x1b[0m"})

    shown, listed = run("jobs", "show", job.id), run("jobs", "list")

    assert not {"\x1b", "\x9b", "\x07"} & set(shown[1] + listed[1])


# -- mending single jobs --


def test_jobs_are_mended_by_their_ids_and_those_that_cannot_be_are_named(run: Run, queue: Queue[Any]) -> None:
    (dead,) = dead_letters(queue)
    waiting = queue.add(1)

    status, out, err = run("jobs", "retry", dead.id, waiting.id, 12)

    assert (status, out) == (1, "1 job queued again\n")
    assert err == f"there is no job 12\njob {waiting.id}: it is pending\n"
    assert state(queue, dead) is State.PENDING


def test_each_outcome_is_a_line_of_json(run: Run, queue: Queue[Any]) -> None:
    (dead,) = dead_letters(queue)
    waiting = queue.add(1)

    status, out, _ = run("jobs", "cancel", waiting.id, dead.id, "--json")

    assert status == 1
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": str(waiting.id), "queue": "work", "done": True, "why_not": None},
        {"id": str(dead.id), "queue": "work", "done": False, "why_not": "it is failed"},
    ]


def test_jobs_are_cancelled_rescheduled_moved_and_removed(run: Run, queue: Queue[Any]) -> None:
    jobs = queue.add_many(range(4))
    before = time.time()

    statuses = [
        run("jobs", "cancel", jobs[0].id)[0],
        run("jobs", "reschedule", jobs[1].id, "--delay", "1h")[0],
        run("jobs", "move", jobs[2].id, "--to", "other")[0],
        run("jobs", "remove", jobs[3].id)[0],
    ]

    assert statuses == [0] * 4
    assert state(queue, jobs[0]) is State.CANCELLED
    put_off = queue.get(jobs[1].id)
    assert put_off is not None
    assert 3590 < put_off.due_at.timestamp() - before < 3630
    assert ids(run, "jobs", "list", "--queue", "other") == [str(jobs[2].id)]
    assert state(queue, jobs[3]) is None


@pytest.mark.parametrize("command", [("jobs", "retry"), ("dead", "requeue")], ids=" ".join)
def test_a_dead_letter_may_go_on_in_another_queue(run: Run, queue: Queue[Any], command: tuple[str, str]) -> None:
    first, second = dead_letters(queue, 2)

    requeued = run(*command, first.id, "--to", "slow")
    purged = run("dead", "purge", second.id)

    assert requeued == (0, "1 job queued again in slow\n", "")
    assert purged == (0, "1 dead letter deleted\n", "")
    assert ids(run, "jobs", "list") == [str(first.id)]
    assert ids(run, "jobs", "list", "--queue", "slow") == [str(first.id)]


def test_purging_leaves_what_is_no_dead_letter(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1)

    assert run("dead", "purge", job.id) == (
        1,
        "0 dead letters deleted\n",
        f"job {job.id}: it is no dead letter: it is pending\n",
    )
    assert state(queue, job) is State.PENDING


# -- mending all of a kind --


def test_all_of_a_filter_are_mended(run: Run, queue: Queue[Any]) -> None:
    dead_letters(queue, 450, task="mail.send")
    (other,) = dead_letters(queue, task="other")

    status, out, err = run("dead", "requeue", "--all", "--task", "mail.*", "--yes")

    assert (status, out, err) == (0, "450 jobs queued again\n", "")
    assert queue.stats().pending == 450
    assert state(queue, other) is State.FAILED


def test_a_queue_is_moved_job_by_job_in_its_order(run: Run, queue: Queue[Any], tmp_path: Path) -> None:
    jobs = queue.add_many([NewJob(number, priority=number % 3) for number in range(30)])
    expected = [job.data for job in sorted(jobs, key=lambda job: -job.priority)]

    status, out, _ = run("jobs", "move", "--queue", "work", "--all", "--to", "other", "--yes")

    with Queue[Any]("other", tmp_path / "jobs.db") as other:
        assert (status, out) == (0, "30 jobs moved to other\n")
        assert [job.data for job in other.claim(limit=30, lease=60)] == expected


def test_all_are_put_off_once_each(run: Run, queue: Queue[Any]) -> None:
    queue.add_many([NewJob(number, priority=number % 3) for number in range(700)])

    status, out, _ = run("jobs", "reschedule", "--all", "--delay", "1h", "--yes")

    assert (status, out) == (0, "700 jobs rescheduled\n")
    assert queue.stats().delayed == 700


def test_only_idle_jobs_are_removed(run: Run, queue: Queue[Any]) -> None:
    dead_letters(queue, 2)
    queue.add_many(range(2))
    (active,) = queue.claim(limit=1, lease=60)

    first = run("jobs", "remove", "--all", "--state", "failed", "--yes")
    second = run("jobs", "remove", "--all", "--yes")

    assert (first[1], second[1]) == ("2 jobs removed\n", "1 job removed\n")
    assert ids(run, "jobs", "list") == [str(active.id)]


def test_all_is_not_done_where_nobody_can_be_asked(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1)

    status, out, err = run("jobs", "cancel", "--all")

    assert (status, out) == (2, "")
    assert "give --yes, since nobody can be asked here: Cancel 1 job?" in err
    assert state(queue, job) is State.PENDING


def test_a_question_says_how_many_go_where(run: Run, queue: Queue[Any]) -> None:
    queue.add_many([1, 2])

    _, _, err = run("jobs", "move", "--all", "--to", "other")

    assert "Move 2 jobs to 'other'?" in err


def test_a_rate_holds_the_work_back(run: Run, queue: Queue[Any]) -> None:
    dead_letters(queue, 6)
    began = time.monotonic()

    status, out, _ = run("dead", "requeue", "--all", "--yes", "--rate", "20/s")

    assert (status, out) == (0, "6 jobs queued again\n")
    assert time.monotonic() - began >= 0.25


def test_a_command_that_fails_midway_tells_how_far_it_came(queue: Queue[Any], run: Run, tmp_path: Path) -> None:
    jobs = queue.add_many([{"n": number} for number in range(250)])
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        db.execute(
            "create trigger refuse before update on litebroker_job"
            f" when new.id = {jobs[-1].id} begin select raise(abort, 'no'); end"
        )
        db.commit()

    status, out, err = run("jobs", "cancel", "--all", "--yes")

    assert (status, out) == (1, "200 jobs cancelled\n")
    assert err.endswith(": no\n")
    assert queue.stats() == Counts(ready=50, cancelled=200)


def test_an_interrupted_command_tells_how_far_it_came(queue: Queue[Any], tmp_path: Path) -> None:
    dead_letters(queue, 100)
    process = subprocess.Popen(
        [sys.executable, "-m", "litebroker", "dead", "requeue", "--all", "--yes", "--rate", "10/s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "LITEBROKER_URL": "jobs.db"},
    )
    ends_at = time.monotonic() + LIMIT
    while queue.stats().pending < 3 and time.monotonic() < ends_at:
        time.sleep(0.01)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)

    assert (process.returncode, err.strip()) == (130, "")
    assert out.endswith(" jobs queued again\n")
    told, done = int(out.split()[0]), queue.stats().pending
    assert told <= done <= told + 1  # It may have been interrupted between doing one and counting it.
    assert done < 100


def test_all_jobs_of_rq_are_put_off_once_each(run: Run, tmp_path: Path) -> None:
    queue = rq.Queue(connection=connect(tmp_path / "jobs.db"))
    for _ in range(5):
        queue.enqueue(tasks.nothing)

    status, out, _ = run("jobs", "reschedule", "--all", "--delay", "90s", "--yes")

    assert (status, out) == (0, "5 jobs rescheduled\n")
    assert (len(queue), len(queue.scheduled_job_registry)) == (0, 5)


def test_a_pipe_that_closes_early_does_not_keep_jobs_from_being_mended(queue: Queue[Any], tmp_path: Path) -> None:
    dead_letters(queue, 300)
    ours, theirs = os.pipe()
    os.close(ours)

    done = subprocess.run(
        [sys.executable, "-m", "litebroker", "dead", "requeue", "--all", "--yes", "--json", "--db", "jobs.db"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        timeout=LIMIT,
        check=False,
    )
    os.close(theirs)

    assert (done.returncode, done.stderr) == (141, b"")
    assert queue.stats().pending == 300


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["jobs", "retry"], 2, "which? Give ids of jobs, or --all"),
        (["jobs", "retry", "1", "--all"], 2, "give ids, or --all with what to filter by, and not both"),
        (["jobs", "cancel", "1", "--queue", "work"], 2, "give ids, or --all with what to filter by, and not both"),
        (["jobs", "remove", "1", "--state", "failed"], 2, "give ids, or --all with what to filter by, and not both"),
        (["jobs", "remove", "--all", "--state", "active"], 2, "active jobs are not removed"),
        (["jobs", "list", "--state", "broken"], 2, "'broken' is not one of 'pending'"),
        (["jobs", "list", "--queue", "none"], 1, "there is no queue 'none'; there are: 'work'"),
        (["dead", "purge", "--all", "--queue", "none", "--yes"], 1, "there is no queue 'none'; there are: 'work'"),
        (["jobs", "list", "--framework", "celery"], 2, "there is no framework 'celery'"),
        (["jobs", "list", "--after", "x"], 2, "'x' is no cursor"),
        (["jobs", "list", "--older-than", "soon"], 2, "'soon' is no length of time"),
        (["jobs", "list", "--older-than", "2h", "--newer-than", "1h"], 2, "nothing is older than 7200 s and newer"),
        (["jobs", "reschedule", "1"], 2, "when? Give --delay or --run-at, and not both"),
        (["jobs", "move", "--queue", "a", "--to", "a", "--all"], 2, "--queue and --to are both 'a'"),
        (["jobs", "move", "1"], 2, "Missing option '--to'"),
        (["dead", "requeue", "--all", "--rate", "fast"], 2, "'fast' is no rate"),
        (["dead", "requeue", "--all", "--rate", "0/s"], 2, "'0/s' is no rate"),
        (["dead", "requeue", "1", "--to", ""], 2, "queue's name is empty"),
        (["jobs", "move", "1", "--to", "x" * 300], 2, "queue's name"),
        (["jobs", "list", "--db", "missing.db"], 1, "there is no such file"),
        (["jobs", "list", "--db", "foreign.db"], 1, "foreign.db"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    run: Run, queue: Queue[Any], args: list[str], status: int, message: str
) -> None:
    (Path.cwd() / "foreign.db").write_bytes(b"not a database, but long enough to be one" * 100)
    queue.add(1)

    ended, out, err = run(*args)

    assert (ended, out) == (status, "")
    assert message in err
    assert queue.stats().pending == 1


# -- terminals --


def in_terminal(folder: Path, *args: object, columns: int, answer: str = "", **environment: str) -> tuple[int, str]:
    """What the command prints in a terminal that is so wide, and how it ends."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "litebroker", *map(str, args)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**kept, "LITEBROKER_URL": "jobs.db", "COLUMNS": str(columns), "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    if answer:
        os.write(ours, f"{answer}\n".encode())
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # how a terminal ends on Linux
        pass
    os.close(ours)
    return process.wait(LIMIT), b"".join(parts).decode()


def test_a_narrow_terminal_has_the_cells_below_each_other(queue: Queue[Any], tmp_path: Path) -> None:
    (dead,) = dead_letters(queue)

    status, text = in_terminal(tmp_path, "jobs", "list", columns=40, NO_COLOR="1")

    lines = text.splitlines()
    assert status == 0
    assert str(dead.id) in lines[0]
    assert "  note       ValueError: no 0" in lines
    assert max(map(len, lines)) <= 40


def test_a_note_is_cut_to_what_the_terminal_has_left(queue: Queue[Any], tmp_path: Path) -> None:
    job = queue.add(1)
    (claimed,) = queue.claim(limit=1, lease=60)
    queue.fail(claimed, TalkativeError("a very long explanation " * 20), retry=False)

    _, text = in_terminal(tmp_path, "jobs", "list", columns=120, NO_COLOR="1")

    row = text.splitlines()[1]
    assert row.startswith(str(job.id))
    assert row.rstrip().endswith("…")
    assert len(row) <= 120
    assert "\x1b[3" not in text  # no colour


class TalkativeError(Exception):
    """An error with a long message."""


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 0), ("n", 1, 3)])
def test_on_a_terminal_it_asks(queue: Queue[Any], tmp_path: Path, answer: str, status: int, left: int) -> None:
    dead_letters(queue, 3)

    ended, text = in_terminal(tmp_path, "dead", "purge", "--all", columns=100, answer=answer)

    assert ended == status
    assert "Delete 3 dead letters?" in text
    assert queue.stats().failed == left


# -- other frameworks --


def test_jobs_of_all_frameworks_stand_in_one_list(run: Run, queue: Queue[Any], tmp_path: Path) -> None:
    queue.add(1)
    broker = SQLiteBroker(tmp_path / "jobs.db")

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    message = work.send()
    job = rq.Queue(connection=connect(tmp_path / "jobs.db")).enqueue(tasks.nothing)

    _, out, _ = run("jobs", "list", "--json")

    listed = {(each["framework"], each["queue"], each["ref"]) for each in json.loads(out)["jobs"]}
    assert listed == {
        ("direct", "work", None),
        ("dramatiq", "dramatiq:default", message.message_id),
        ("rq", "rq:queue:default", job.id),
    }
    broker.close()


def test_a_dead_letter_of_dramatiq_runs_again(run: Run, tmp_path: Path) -> None:
    broker = SQLiteBroker(tmp_path / "jobs.db")
    runs: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=0)
    def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("not yet")

    message = work.send()
    worker = Worker(broker, worker_threads=1)
    worker.start()
    try:
        broker.join("default", timeout=LIMIT * 1000)
        shown = run("dead", "show", message.message_id)
        requeued = run("dead", "requeue", message.message_id)
        broker.join("default", timeout=LIMIT * 1000)
    finally:
        worker.stop()

    assert shown[0] == 0
    assert "RuntimeError: not yet" in shown[1]
    assert requeued[:2] == (0, "1 job queued again\n")
    assert len(runs) == 2
    broker.close()


def test_dead_letters_of_rq_are_those_of_its_registry(run: Run, tmp_path: Path) -> None:
    queue = rq.Queue(connection=connect(tmp_path / "jobs.db"))
    jobs = [queue.enqueue(tasks.fail) for _ in range(2)]
    rq.SimpleWorker([queue], connection=queue.connection).work(burst=True, logging_level="CRITICAL")

    listed = ids(run, "dead", "list")
    requeued = run("dead", "requeue", jobs[0].id)
    purged = run("dead", "purge", "--all", "--yes")

    assert sorted(listed) == sorted(job.id for job in jobs)
    assert requeued[:2] == (0, "1 job queued again\n")
    assert purged[:2] == (0, "1 dead letter deleted\n")
    assert queue.job_ids == [jobs[0].id]
    assert queue.failed_job_registry.get_job_ids() == []


def test_a_pickle_is_read_only_when_that_was_asked_for(run: Run, tmp_path: Path) -> None:
    job = rq.Queue(connection=connect(tmp_path / "jobs.db")).enqueue(tasks.add, 1, 2)

    closed, opened = run("jobs", "show", job.id), run("jobs", "show", job.id, "--unpickle")

    assert "a pickle, which runs what it likes when it is read" in closed[1]
    assert "tests.rq.tasks.add" in opened[1]
    assert "(1, 2)" in opened[1]
    assert opened[2] == "a pickle runs what it holds when it is read: this trusts whoever could add jobs\n"


def test_a_pickle_of_the_application_is_read_in_its_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("class Order:\n    def __repr__(self):\n        return 'Order 7'\n")
    script = "import rq, shop; from litebroker_rq import connect\n"
    script += "print(rq.Queue(connection=connect('jobs.db')).enqueue(print, shop.Order()).id)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=LIMIT
    )

    shown = run("jobs", "show", done.stdout.strip(), "--unpickle")

    assert shown[0] == 0
    assert "Order 7" in shown[1]


def test_an_error_of_an_attempt_that_lapsed_is_shown(run: Run, queue: Queue[Any]) -> None:
    job = queue.add(1)
    (claimed,) = queue.claim(limit=1, lease=60)
    queue.fail(claimed, JobError("lapsed", message="the worker vanished"), retry=False)

    _, out, _ = run("dead", "list")

    assert str(job.id) in out
    assert "the worker vanished" in out


def test_a_watch_shows_how_far_a_job_is(run: Run, queue: Queue[Any]) -> None:
    queue.add(1)
    (job,) = queue.claim()
    report = json.dumps([0.4, "reading", 0]).encode()
    queue.storage.put("litebroker-progress", str(job.id), report, owner=job.record.lease)

    status, out, _ = run("jobs", "list", "--state", "active", "--watch", "--count", "2", "--interval", "100ms")
    _, as_json, _ = run("jobs", "list", "--watch", "--count", "2", "--interval", "100ms", "--json")

    assert status == 0
    assert [line.count("40% reading") for line in out.splitlines()] == [0, 1, 1]
    assert [json.loads(line)["jobs"][0]["progress"]["fraction"] for line in as_json.splitlines()] == [0.4, 0.4]

"""See and steer queues by the command line: stats and queues, pause, resume, purge, schedules, why."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import rq
from dramatiq import Worker as DramatiqWorker
from tests.test_cli import Command, Here, in_terminal
from tests.waiting import LIMIT, comes_true

from litebroker import RAW, Counts, Group, JobSpec, Queue, Retention, State
from litebroker.cli import main
from litebroker.cli.watch import Flow
from litebroker_dramatiq import SQLiteBroker
from litebroker_huey import SQLiteHuey
from litebroker_rq import connect

NO_JOBS = {"pending": 0, "ready": 0, "delayed": 0, "active": 0, "completed": 0, "failed": 0, "cancelled": 0}


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    (tmp_path / "tasks.py").write_text("def run(data):\n    pass\n")
    command = Command(tmp_path)
    yield command
    command.close()


@pytest.fixture
def here(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """The command in this process: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert isinstance(end.value.code, int)
        return end.value.code, *capfd.readouterr()

    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("LITEBROKER_URL", "jobs.db")
    monkeypatch.delenv("COLUMNS", raising=False)
    return run


@pytest.fixture
def queue(command: Command) -> Iterator[Queue[Any]]:
    with Queue("work", command.database) as queue:
        yield queue


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def answers(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The queue "work" of each look, as it comes."""
    assert process.stdout
    for line in process.stdout:
        for found in json.loads(line)["queues"]:
            if found["name"] == "work":
                yield found


# Rates


def test_rates_are_told_from_what_came_and_went_between_two_looks(queue: Queue[Any]) -> None:
    queue.add_many(range(3))
    flow = Flow(queue.storage)
    first = flow.rates({"work": queue.stats()})
    queue.add_many(range(7))
    flow.note()
    jobs = queue.claim(8)
    for job in jobs[:4]:
        queue.complete(job)
    for job in jobs[4:6]:
        queue.fail(job, "broken", retry=False)
    queue.fail(jobs[6], "broken", retry_in=3600)

    rates = flow.rates({"work": queue.stats()})["work"]

    assert first == {}
    assert rates.added / rates.failed == pytest.approx(7 / 2)
    assert rates.completed / rates.failed == pytest.approx(4 / 2)


def test_what_is_added_while_it_is_counted_does_not_look_completed(queue: Queue[Any]) -> None:
    queue.add(0)
    flow = Flow(queue.storage)
    flow.rates({"work": queue.stats()})
    flow.note()
    queue.add_many(range(6))  # a moment after the note, and before the count

    at_once = flow.rates({"work": queue.stats()})["work"]
    flow.note()
    queue.complete(queue.claim()[0])
    afterwards = flow.rates({"work": queue.stats()})["work"]

    assert (at_once.added, at_once.completed) == (0, 0)
    assert afterwards.added > 0
    assert afterwards.completed / afterwards.added == pytest.approx(1 / 6)


def test_jobs_that_are_kept_when_completed_count_alike(command: Command) -> None:
    with Queue("work", command.database, retention=Retention(completed=None)) as queue:
        queue.add_many(range(6))
        flow = Flow(queue.storage)
        flow.rates({"work": queue.stats()})
        jobs = queue.claim(5)
        for job in jobs[:3]:
            queue.complete(job)
        queue.fail(jobs[3], "broken", retry=False)
        queue.cancel(queue.list(State.PENDING)[0])

        rates = flow.rates({"work": queue.stats()})["work"]

    assert rates.completed / rates.failed == pytest.approx(3)
    assert rates.added == 0


def test_a_job_that_comes_and_goes_between_two_looks_counts_where_a_sample_has_seen_it(queue: Queue[Any]) -> None:
    queue.add(0)
    flow = Flow(queue.storage)
    flow.rates({"work": queue.stats()})
    for number in range(4):
        queue.add(number)
        flow.wait(0.001)  # It looks at the end of its time, too.
        queue.complete(queue.claim()[0])
    queue.fail(queue.claim()[0], "broken", retry=False)

    rates = flow.rates({"work": queue.stats()})["work"]

    assert rates.added / rates.failed == pytest.approx(4)
    assert rates.completed / rates.failed == pytest.approx(4)


def test_dead_letters_that_retention_drops_do_not_count_as_completed(command: Command) -> None:
    with Queue("work", command.database, retention=Retention(failed=1)) as queue:
        queue.add_many(range(5))
        flow = Flow(queue.storage)
        for job in queue.claim(2):
            queue.fail(job, "broken", retry=False)
        flow.wait(0.01)
        flow.rates({"work": queue.stats()})
        queue.fail(queue.claim()[0], "broken", retry=False)

        rates = flow.rates({"work": queue.stats()})["work"]

        assert queue.stats().failed == 1
    assert rates.completed == 0
    assert rates.failed > 0


@pytest.mark.parametrize("name", ["stats", "queues"])
def test_a_watch_in_a_pipe_gives_a_line_of_json_for_each_look(command: Command, queue: Queue[Any], name: str) -> None:
    queue.add("there before")
    process = command.start(name, "--watch", "--interval", "0.2", "--json")
    looks = answers(process)
    first = next(looks)
    queue.add_many(range(3))
    added = next(look for look in looks if look["added_per_second"])
    for job in queue.claim(2):
        queue.complete(job)
    completed = next(look for look in looks if look["completed_per_second"])
    queue.fail(queue.claim()[0], "broken", retry=False)
    failed = next(look for look in looks if look["failed_per_second"])
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)

    assert first["pending"] == 1
    assert first["added_per_second"] is None
    assert (added["pending"], added["completed_per_second"], added["failed_per_second"]) == (4, 0, 0)
    assert (completed["pending"], completed["added_per_second"]) == (2, 0)
    assert (failed["failed"], failed["completed_per_second"]) == (1, 0)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_a_watch_in_a_pipe_repeats_plain_lines(command: Command, queue: Queue[Any]) -> None:
    queue.add(1)

    result = command("stats", "--watch", "--interval", "0.1", "--count", "2")

    head, first, second = lines_of(result.stdout)
    assert " ".join(head[:9]) == "time queue ready delayed active completed failed cancelled oldest"
    assert head[9:] == ["added/s", "done/s", "failed/s"]
    assert first[1:7] == ["work", "1", "0", "0", "0", "0"]
    assert second[-3:] == ["0.0", "0.0", "0.0"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", second[0])
    assert result.returncode == 0


def test_a_watch_ends_when_its_reader_does(command: Command, queue: Queue[Any]) -> None:
    queue.add(1)
    process = command.start("stats", "--watch", "--interval", "0.1")
    assert process.stdout
    process.stdout.readline()

    process.stdout.close()

    assert process.wait(LIMIT) == 141
    assert process.stderr
    assert process.stderr.read() == ""


def test_a_watch_shows_queues_that_come_into_being_meanwhile(command: Command, queue: Queue[Any]) -> None:
    queue.storage.queues()
    process = command.start("queues", "--watch", "--interval", "0.1", "--json")
    assert process.stdout
    first = json.loads(process.stdout.readline())

    queue.add(1)

    assert first["queues"] == []
    assert next(answers(process))["pending"] == 1


@pytest.mark.parametrize(("columns", "shown"), [(160, "added/s  done/s  failed/s"), (40, "  added/s    0.0")])
def test_a_watch_in_a_terminal_is_one_table_that_fits(
    command: Command, queue: Queue[Any], columns: int, shown: str
) -> None:
    queue.add(1)

    screen = in_terminal(command, "stats", "--watch", "--interval", "0.1", "--count", "2", columns=columns)

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "\n")
    assert shown in plain
    assert "every 0.1s; Ctrl-C ends it" in plain
    assert max(len(line) for line in plain.splitlines()) <= columns


# queues


def test_queues_shows_what_each_is_at_and_who_works_on_it(here: Here, command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(3))
    queue.schedule("tick", id="hourly", every=3600)
    other: Queue[Any] = Queue("other", queue.storage)
    other.add(1)
    other.pause()
    queue.claim()

    status, stdout, _ = here("queues")

    head, work_last, other_last = lines_of(stdout)[0], lines_of(stdout)[2], lines_of(stdout)[1]
    assert status == 0
    assert head == ["queue", "pending", "active", "failed", "oldest", "schedules", "state", "workers"]
    assert [*work_last[:4], *work_last[5:]] == ["work", "2", "1", "0", "1", "running", "1", "at", "work"]
    assert other_last[:4] == ["other", "1", "0", "0"]
    assert other_last[-4] == "paused"
    assert other_last[-2:] == ["none", "seen"]


def test_queues_as_json(here: Here, queue: Queue[Any]) -> None:
    queue.schedule("tick", id="hourly", every=3600)
    queue.add(1)
    queue.claim()

    status, stdout, _ = here("queues", "--json")

    (found,) = json.loads(stdout)["queues"]
    (process,) = found.pop("processes")
    assert status == 0
    assert process.endswith(f":{os.getpid()}")
    assert found.pop("next_schedule_at").endswith("+00:00")
    assert found == {
        "name": "work",
        "state": "running",
        "paused_at": None,
        **NO_JOBS,
        "active": 1,
        "oldest_due_for_seconds": None,
        "listening": False,
        "processes_gone": [],
        "schedules": 1,
    }


def test_a_worker_that_waits_is_seen_to_listen(here: Here, command: Command, queue: Queue[Any]) -> None:
    queue.add(1)
    worker = command.start("worker", "tasks:run", "--queue", "work")
    assert comes_true(lambda: queue.stats() == Counts())

    _, stdout, _ = here("queues")
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=LIMIT)

    assert lines_of(stdout)[1][-1] == "listening"
    assert lines_of(here("queues")[1])[1][-2:] == ["none", "seen"]


def test_queues_fits_a_narrow_terminal(command: Command, queue: Queue[Any]) -> None:
    queue.add(1)

    screen = in_terminal(command, "queues", columns=40, NO_COLOR="1")

    assert max(len(line) for line in screen.splitlines()) <= 40
    assert "  workers    none seen" in screen


def test_a_file_without_queues_says_so(here: Here, command: Command, queue: Queue[Any]) -> None:
    queue.storage.queues()

    assert here("queues")[1] == f"{command.database} has no queues yet\n"
    assert here("schedules", "list")[1] == f"{command.database} has no schedules\n"


# pause, resume


def test_a_pause_lasts_until_the_queue_is_resumed(here: Here, command: Command, queue: Queue[Any]) -> None:
    queue.add(1)
    Queue("other", queue.storage).add(1)

    status, stdout, stderr = here("pause", "work", "other")

    assert (status, stderr) == (0, "")
    assert stdout.splitlines() == [
        "queue 'work' is paused: what runs goes on, and nothing new is claimed",
        "queue 'other' is paused: what runs goes on, and nothing new is claimed",
    ]
    assert queue.claim() == []
    assert re.fullmatch(r"queue 'work' goes on, after \d\.\ds\n", here("resume", "work")[1])
    assert len(queue.claim()) == 1


def test_a_pause_holds_the_jobs_of_every_framework(here: Here, command: Command) -> None:
    broker = SQLiteBroker(command.database)
    dramatiq.set_broker(broker)
    ran: list[str] = []

    @dramatiq.actor
    def say(what: str) -> None:
        ran.append(what)

    say.send("dramatiq")
    huey = SQLiteHuey("shop", filename=str(command.database))
    huey.task()(ran.append)("huey")
    connection = connect(str(command.database))
    of_rq = rq.Queue("default", connection=connection)
    of_rq.enqueue("operator.add", 1, 2)
    names = ["dramatiq:default", "huey:shop", "rq:queue:default"]

    here("pause", *names)
    taken_from_huey = huey.dequeue()
    rq.SimpleWorker([of_rq], connection=connection).work(burst=True, logging_level="ERROR")
    worker = DramatiqWorker(broker, worker_threads=1, worker_timeout=10)
    worker.start()
    listening = comes_true(lambda: broker.storage.is_awaited("dramatiq:default") is True)
    held = [broker.storage.counts(name).pending for name in names]
    here("resume", *names)
    resumed = comes_true(lambda: ran == ["dramatiq"])
    rq.SimpleWorker([of_rq], connection=connection).work(burst=True, logging_level="ERROR")
    task = huey.dequeue()
    worker.stop()
    broker.close()

    assert taken_from_huey is None
    assert listening
    assert held == [1, 1, 1]
    assert resumed
    assert of_rq.count == 0
    assert task is not None
    huey.storage.close()


def test_what_was_so_already_is_said(here: Here, queue: Queue[Any]) -> None:
    queue.add(1)
    not_paused = here("resume", "work")
    here("pause", "work")

    paused = here("pause", "work")

    assert not_paused[:2] == (0, "queue 'work' was not paused\n")
    assert paused[0] == 0
    assert re.fullmatch(r"queue 'work' was paused already, for \d\.\ds\n", paused[1])


def test_pause_and_resume_as_json(here: Here, queue: Queue[Any]) -> None:
    queue.add(1)

    found = [json.loads(here(name, "work", "--json")[1]) for name in ("pause", "pause", "resume", "resume")]

    assert [(it["paused"], it["changed"], it["paused_at"] is None) for it in found] == [
        (True, True, False),
        (True, False, False),
        (False, True, True),
        (False, False, True),
    ]


def test_none_is_paused_when_one_is_not_there(here: Here, queue: Queue[Any]) -> None:
    queue.add(1)

    status, stdout, stderr = here("pause", "work", "wrok")

    assert (status, stdout) == (1, "")
    assert stderr.endswith("there is no queue 'wrok'; there are: 'work'\n")
    assert not queue.paused
    assert len(queue.storage.queues()) == 1


# purge


def fill(queue: Queue[Any]) -> None:
    """A job in each state, and a second one that failed."""
    for _ in range(2):
        queue.add(1)
        queue.fail(queue.claim()[0], "broken", retry=False)
    queue.cancel(queue.add(1))
    queue.add(1)
    queue.claim()
    queue.add(1)
    queue.add(1, delay=60)
    queue.add(1, group="g")


def test_a_purge_deletes_the_jobs_of_the_states_that_are_named(here: Here, queue: Queue[Any]) -> None:
    fill(queue)

    status, stdout, _ = here("purge", "--queue", "work", "--state", "failed", "--state", "cancelled", "--yes")

    assert (status, stdout) == (0, "3 jobs of queue 'work' deleted\n")
    assert queue.stats() == Counts(ready=2, delayed=1, active=1)


def test_a_purge_of_all_leaves_what_is_active(here: Here, queue: Queue[Any]) -> None:
    fill(queue)

    status, stdout, _ = here("purge", "--queue", "work", "--state", "all", "--yes", "--json")

    assert status == 0
    assert json.loads(stdout) == {"queue": "work", "deleted": 6}
    assert queue.stats() == Counts(active=1)


def test_a_purge_without_anybody_to_ask_deletes_nothing(command: Command, queue: Queue[Any]) -> None:
    fill(queue)

    result = command("purge", "--queue", "work", "--state", "failed")

    assert result.returncode == 2
    assert "give --yes" in result.stderr
    assert queue.stats().failed == 2


@pytest.mark.parametrize(("answer", "left", "status"), [("n", 2, 1), ("y", 0, 0)])
def test_a_purge_asks_first(command: Command, queue: Queue[Any], answer: str, left: int, status: int) -> None:
    fill(queue)

    found, screen = converse(command, "purge", "--queue", "work", "--state", "failed", answer=answer)

    assert "Delete the jobs that are failed: 2 of queue 'work'?" in screen
    assert found == status
    assert queue.stats().failed == left


def test_a_purge_that_finds_nothing_says_so(here: Here, queue: Queue[Any]) -> None:
    queue.add(1)

    status, stdout, stderr = here("purge", "--queue", "work", "--state", "failed")

    assert (status, stdout) == (0, "")
    assert stderr == "queue 'work' has no jobs that are failed: nothing to delete\n"


def test_a_purge_shows_in_a_terminal_how_far_it_is(command: Command, queue: Queue[Any]) -> None:
    queue.storage.add([JobSpec("work", b"1")] * 12_000)

    status, screen = converse(command, "purge", "--queue", "work", "--state", "pending", answer="y")

    assert status == 0
    assert "deleting from 'work'" in screen
    assert "100%" in screen
    assert queue.size() == 0


def test_a_queue_of_rq_is_left_to_rq(here: Here, command: Command) -> None:
    connection = connect(str(command.database))
    rq.Queue("default", connection=connection).enqueue("tasks.run", 1)

    status, _, stderr = here("purge", "--queue", "rq:queue:default", "--state", "pending", "--yes")

    assert status == 1
    assert "litebroker rq empty default" in stderr
    assert rq.Queue("default", connection=connection).count == 1


# schedules


def test_schedules_are_listed_with_their_next_and_last_times(here: Here, queue: Queue[Any]) -> None:
    queue.schedule({"report": 1}, id="daily", cron="0 6 * * *", tz="Europe/Berlin", task="report")
    queue.schedule("tick", id="often", every=timedelta(milliseconds=1))
    assert comes_true(lambda: bool(queue.claim()))
    queue.pause()

    status, stdout, _ = here("schedules", "list")

    head, daily, often = stdout.splitlines()
    assert status == 0
    assert head.split() == ["schedule", "queue", "when", "next", "last", "task"]  # and no framework, where none has one
    assert " ".join(daily.split()[:9]) == "daily work cron 0 6 * * * Europe/Berlin"
    assert re.search(r"in (\d+h\d\dm|\d+m\d\ds) +never +report$", daily.rstrip())
    assert re.search(r"often +work +every 0:00:00.001000 +due for .*s, paused +.*s ago", often)


def test_schedules_as_json(here: Here, queue: Queue[Any]) -> None:
    queue.schedule({"report": 1}, id="daily", every=60, priority=3)
    Queue("other", queue.storage).schedule(1, id="x", cron="0 6 * * *")

    listed = [json.loads(line) for line in here("schedules", "list", "--queue", "work", "--json")[1].splitlines()]
    shown = json.loads(here("schedules", "show", "daily", "--json")[1])

    job = shown.pop("job")
    assert [it["id"] for it in listed] == ["daily"]
    assert 59 < listed[0]["next_in_seconds"] <= 60
    assert (shown["every_seconds"], shown["cron"], shown["last_at"], shown["paused"]) == (60.0, None, None, False)
    assert (job["payload"], job["priority"], job["max_attempts"], job["encoding"]) == ({"report": 1}, 3, 3, "json")


def test_a_schedule_s_serializer_is_no_framework(here: Here, queue: Queue[Any]) -> None:
    Queue("other", queue.storage, serializer=RAW).schedule(b"x", id="x", every=60)

    head = here("schedules", "list")[1].splitlines()[0]
    (listed,) = map(json.loads, here("schedules", "list", "--json")[1].splitlines())

    assert "framework" not in head
    assert listed["framework"] == "direct"


def test_one_schedule_is_shown_with_the_job_that_it_adds(here: Here, queue: Queue[Any]) -> None:
    queue.schedule({"report": 1}, id="daily", every=60, dedupe_key="k", headers={"a": "b"})

    status, stdout, _ = here("schedules", "show", "daily")

    shown = dict(line.split(maxsplit=1) for line in stdout.splitlines())
    assert status == 0
    assert shown["when"] == "every 0:01:00"
    assert shown["last"] == "never"
    assert (shown["dedupe_key"], shown["headers"], shown["payload"]) == ("k", '{"a": "b"}', '{"report": 1}')


def test_a_payload_that_is_no_text_is_shown_by_its_size(here: Here, queue: Queue[Any]) -> None:
    raw = queue.storage
    Queue("other", raw).schedule(1, id="x", every=60)
    record = raw.list_schedules()[0]
    raw.put_schedule(record._replace(job=record.job._replace(payload=b"\x80\x04K\x01.", encoding="pickle")))

    shown = json.loads(here("schedules", "show", "x", "--json")[1])

    assert shown["job"]["payload_bytes"] == 5
    assert "payload" not in shown["job"]


def test_running_a_schedule_now_adds_its_job_and_leaves_its_next_tick(here: Here, queue: Queue[Any]) -> None:
    before = queue.schedule({"report": 1}, id="daily", every=3600, priority=3)

    status, stdout, stderr = here("schedules", "run-now", "daily")

    (job,) = queue.claim()
    after = queue.get_schedule("daily")
    assert (status, stderr) == (0, "")
    assert stdout == f"{job.id}\n"
    assert (job.data, job.priority) == ({"report": 1}, 3)
    assert after is not None
    assert (after.next_at, after.last_at) == (before.next_at, None)


def test_running_a_schedule_now_adds_nothing_while_its_dedupe_key_is_held(here: Here, queue: Queue[Any]) -> None:
    queue.schedule(1, id="daily", every=3600, dedupe_key="k", dedupe_until="ended")
    here("schedules", "run-now", "daily")
    (holder,) = queue.find(dedupe_key="k")

    status, stdout, stderr = here("schedules", "run-now", "daily", "--json")

    assert status == 0
    assert json.loads(stdout) == {"id": str(holder.id), "queue": "work", "added": False}
    assert stderr == f"job {holder.id} holds the schedule's dedupe key: nothing was added\n"
    assert queue.size() == 1


def test_running_a_schedule_of_a_paused_queue_says_that_it_waits(here: Here, queue: Queue[Any]) -> None:
    queue.schedule(1, id="daily", every=3600)
    queue.pause()

    status, _, stderr = here("schedules", "run-now", "daily")

    assert status == 0
    assert stderr == "queue 'work' is paused: the job waits until it is resumed\n"
    assert queue.size() == 1


def test_a_removed_schedule_is_gone_and_its_jobs_stay(here: Here, queue: Queue[Any]) -> None:
    queue.schedule(1, id="daily", every=3600)
    here("schedules", "run-now", "daily")

    status, stdout, _ = here("schedules", "remove", "daily", "--yes")

    assert (status, stdout) == (0, "schedule 'daily' of queue 'work' removed\n")
    assert queue.schedules() == []
    assert queue.size() == 1


def test_a_schedule_is_not_removed_unasked(command: Command, queue: Queue[Any]) -> None:
    queue.schedule(1, id="daily", every=3600)

    unasked = command("schedules", "remove", "daily")
    refused, screen = converse(command, "schedules", "remove", "daily", answer="n")

    assert unasked.returncode == 2
    assert refused == 1
    assert "Remove schedule 'daily' of queue 'work' (every 1:00:00)?" in screen
    assert len(queue.schedules()) == 1


def test_a_schedule_of_several_queues_has_to_be_told_apart(here: Here, queue: Queue[Any]) -> None:
    other: Queue[Any] = Queue("other", queue.storage)
    for each in (queue, other):
        each.schedule(1, id="daily", every=3600)

    refused = here("schedules", "run-now", "daily")
    status, _, _ = here("schedules", "run-now", "daily", "--queue", "other")

    assert refused[0] == 1
    assert "several queues have a schedule 'daily': 'other', 'work'; say which: --queue NAME" in refused[2]
    assert status == 0
    assert (other.size(), queue.size()) == (1, 0)


def test_the_schedule_of_a_dramatiq_actor_runs_at_once(here: Here, command: Command) -> None:
    broker = SQLiteBroker(command.database)
    dramatiq.set_broker(broker)
    ran: list[str] = []

    @dramatiq.actor(every=timedelta(hours=1), schedule_args=("all",))
    def report(what: str) -> None:
        ran.append(what)

    worker = DramatiqWorker(broker, worker_threads=1, worker_timeout=100)
    worker.start()
    try:
        assert comes_true(lambda: bool(broker.storage.list_schedules()))
        listed = here("schedules", "list")[1].splitlines()[1].split()
        for _ in range(2):
            here("schedules", "run-now", "report")
        done = comes_true(lambda: len(ran) == 2)
        removed = here("schedules", "remove", "report", "--yes")
    finally:
        worker.stop()
        broker.close()

    assert done
    assert ran == ["all", "all"]
    assert listed[:3] == ["report", "dramatiq:default", "every"]
    assert listed[-2:] == ["report", "dramatiq"]
    assert "puts it back" in removed[2]


def test_hueys_periodic_tasks_are_said_to_be_elsewhere(here: Here, command: Command) -> None:
    huey = SQLiteHuey("shop", filename=str(command.database))
    huey.task()(print).schedule(("x",), delay=60)
    huey.enqueue(huey.task(name="again")(print).s("y"))
    huey.storage.close()

    status, _, stderr = here("schedules", "list")

    assert status == 0
    assert "not listed: the periodic tasks of huey:shop" in stderr


# why


def test_why_gives_one_answer_with_its_evidence(here: Here, queue: Queue[Any]) -> None:
    job = queue.add(1, delay=3600)
    queue.pause()

    status, stdout, stderr = here("why", str(job.id))

    lines = stdout.splitlines()
    assert (status, stderr) == (0, "")
    assert lines[0].startswith(f"job {job.id} of queue 'work' is pending: its queue has been paused for ")
    assert lines[1].startswith("  and it is due in ")
    assert lines[-1] == "  to change that: litebroker resume work"


def test_why_as_json_has_ids_as_strings(here: Here, queue: Queue[Any]) -> None:
    holder = queue.add(1, group=Group("g"), ref="first")
    job = queue.add(2, group=Group("g"), dedupe_key="k")
    queue.claim()

    answer = json.loads(here("why", str(job.id), "--json")[1])

    (reason,) = answer["reasons"]
    assert (answer["id"], answer["queue"], answer["state"], answer["why"]) == (
        str(job.id),
        "work",
        "pending",
        "group_full",
    )
    assert [(it["job"], it["alive"]) for it in reason["holders"]] == [(str(holder.id), True)]
    assert answer["notes"][0]["job"] == str(job.id)


def test_why_tells_who_holds_a_dedupe_key(here: Here, queue: Queue[Any]) -> None:
    job = queue.add(1, dedupe_key="welcome:42", delay=60)

    status, stdout, _ = here("why", "--queue", "work", "--dedupe-key", "welcome:42")
    free = here("why", "--queue", "work", "--dedupe-key", "welcome:43")

    assert status == 0
    assert stdout.startswith(f"job {job.id} of queue 'work' is pending: it is due in ")
    assert free[0] == 1
    assert free[2] == "Error: no job of 'work' holds the dedupe key 'welcome:43': it is free\n"


def test_why_finds_a_job_by_the_name_that_it_was_given(here: Here, queue: Queue[Any]) -> None:
    queue.add(1, ref="order-7")
    Queue("other", queue.storage).add(2, ref="order-7", delay=60)

    status, stdout, _ = here("why", "order-7")

    first, second = stdout.split("\n\n")
    assert status == 0
    assert "of queue 'other' is pending: it is due in" in first
    assert "of queue 'work' is pending: no worker" in second
    assert len(here("why", "order-7", "--queue", "work", "--json")[1].splitlines()) == 1


def test_why_finds_jobs_by_the_ids_of_their_frameworks(here: Here, command: Command) -> None:
    broker = SQLiteBroker(command.database)
    dramatiq.set_broker(broker)

    @dramatiq.actor
    def say(what: str) -> None:
        pass

    message = say.send_with_options(args=("x",), delay=60_000)
    broker.close()
    huey = SQLiteHuey("shop", filename=str(command.database))
    task = huey.task()(print).schedule(("x",), delay=60)
    huey.storage.close()
    job = rq.Queue("default", connection=connect(str(command.database))).enqueue("tasks.run", 1)

    found = [json.loads(here("why", str(each), "--json")[1]) for each in (message.message_id, task.id, job.id)]

    assert [it["ref"] for it in found] == [message.message_id, task.id, job.id]
    assert [it["why"] for it in found] == ["delayed", "no_worker", "no_worker"]


def test_why_answers_for_jobs_that_rq_keeps_elsewhere(here: Here, command: Command) -> None:
    connection = connect(str(command.database))
    queue = rq.Queue("default", connection=connection)
    failed = queue.enqueue("operator.truediv", 1, 0)
    done = queue.enqueue("operator.add", 1, 2)
    rq.SimpleWorker([queue], connection=connection).work(burst=True, logging_level="CRITICAL")
    scheduled = queue.enqueue_in(timedelta(minutes=5), "operator.add", 1, 2)
    late = queue.enqueue_at(datetime.now(timezone.utc) - timedelta(minutes=5), "operator.add", 1, 2)
    deferred = queue.enqueue("operator.add", 1, 2, depends_on=queue.enqueue("operator.add", 1, 2))

    told = [here("why", job.id)[1] for job in (failed, done, scheduled, late, deferred)]
    plain = json.loads(here("why", scheduled.id, "--json")[1])

    assert re.search(r"is failed: it ended \d+\.\ds ago: ZeroDivisionError: division by zero\n", told[0])
    assert told[0].endswith(f"  to change that: litebroker jobs retry {failed.id}\n")
    assert re.search(r"is completed: it ended \d+\.\ds ago\n$", told[1])
    assert re.search(r"is scheduled: rq's scheduler puts it into its queue in [45]m\d\ds\n$", told[2])
    assert re.search(r"is scheduled: its time came 5m\d\ds ago, and no scheduler of rq's has put it", told[3])
    assert told[4].endswith("is deferred: it waits for the jobs that it depends on\n")
    assert (plain["id"], plain["state"], plain["why"]) == (scheduled.id, "pending", "scheduled")
    assert plain["reasons"][0]["due_at"].endswith("+00:00")


def test_why_says_who_runs_a_job_of_rq(here: Here, command: Command) -> None:
    (command.folder / "rq_tasks.py").write_text(
        "import os, time\ndef wait():\n    open('began', 'w')\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    queue = rq.Queue("default", connection=connect(str(command.database)))
    job = queue.enqueue("rq_tasks.wait")
    worker = command.start("rq", "worker", "--burst", "default")
    assert comes_true((command.folder / "began").exists)

    plain = json.loads(here("why", job.id, "--json")[1])
    (command.folder / "go").touch()
    worker.communicate(timeout=LIMIT)

    assert (plain["state"], plain["why"]) == ("active", "active")
    assert plain["reasons"][0]["worker"]
    assert re.search(r" has it for \d+\.\ds now$", plain["reasons"][0]["text"])


def test_why_of_a_job_that_is_gone_ends_with_1(here: Here, queue: Queue[Any]) -> None:
    job = queue.add(1)
    queue.complete(queue.claim()[0])

    status, stdout, stderr = here("why", str(job.id))
    as_json = here("why", str(job.id), "--json")

    assert (status, stdout) == (1, "")
    assert stderr.startswith(f"there is no job {job.id}: by its id it was added 0.")
    assert (as_json[0], json.loads(as_json[1])["why"]) == (1, "missing")


def test_why_does_not_hand_a_terminal_what_it_would_obey(here: Here, command: Command) -> None:
    with Queue("\x1b[31m", command.database) as queue:
        job = queue.add(1, dedupe_key="\x1b]0;title\x07")

    _, stdout, _ = here("why", str(job.id))

    assert "\x1b" not in stdout


# What is wrong


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stats", "--interval", "1"], "need --watch"),
        (["queues", "--count", "1"], "need --watch"),
        (["stats", "--watch", "--interval", "0.01"], "0.1s is the shortest"),
        (["stats", "--watch", "--interval", "soon"], "'soon' is no length of time"),
        (["stats", "--watch", "--count", "0"], "--count"),
        (["pause"], "Missing argument 'QUEUE...'"),
        (["purge", "--state", "failed"], "Missing option '--queue'"),
        (["purge", "--queue", "work"], "Missing option '--state'"),
        (["purge", "--queue", "work", "--state", "active"], "'active' is not one of"),
        (["purge", "--queue", "work", "--state", "broken"], "'broken' is not one of"),
        (["schedules", "show"], "Missing argument 'ID'"),
        (["schedules", "rename"], "No such command 'rename'"),
        (["why"], "give a job's id"),
        (["why", "1", "--dedupe-key", "k"], "give a job's id"),
        (["why", "--dedupe-key", "k"], "needs --queue"),
    ],
)
def test_a_wrong_command_line_ends_with_2(here: Here, queue: Queue[Any], args: list[str], message: str) -> None:
    queue.add(1)

    status, stdout, stderr = here(*args)

    assert message in stderr
    assert (status, stdout) == (2, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stats", "--watch", "--queue", "other"], "no queue 'other'; there are: 'work'"),
        (["queues", "--queue", "other"], "no queue 'other'; there are: 'work'"),
        (["resume", "other"], "no queue 'other'"),
        (["purge", "--queue", "other", "--state", "failed"], "no queue 'other'"),
        (["schedules", "list", "--queue", "other"], "no queue 'other'"),
        (["schedules", "show", "other"], "has no schedule 'other'; there are: 'daily'"),
        (["schedules", "run-now", "daily", "--queue", "other"], "no queue 'other'"),
        (["schedules", "remove", "other", "--yes"], "has no schedule 'other'; there are: 'daily'"),
        (["why", "17a"], "no job is named '17a'"),
        (["why", str(2**64)], f"no job is named '{2**64}'"),
        (["why", "1", "--queue", "other"], "no queue 'other'"),
        *(
            ([*args, "--db", database], message)
            for args in (["queues"], ["pause", "work"], ["purge", "--queue", "work", "--state", "all"], ["why", "1"])
            for database, message in (("missing.db", "no such file"), ("tasks.py", "not an SQLite database"))
        ),
    ],
)
def test_what_is_refused_ends_with_1_and_one_line(
    here: Here, command: Command, queue: Queue[Any], args: list[str], message: str
) -> None:
    queue.schedule(1, id="daily", every=3600)

    status, stdout, stderr = here(*args)

    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert (status, stdout) == (1, "")
    assert not (command.folder / "missing.db").exists()


def converse(command: Command, *args: str, answer: str) -> tuple[int, str]:
    """Run the command in a terminal, and answer its question: its exit status, and what the screen showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "litebroker", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=command.folder,
        env={**command.environment, "LITEBROKER_URL": "jobs.db", "COLUMNS": "100", "TERM": "xterm-256color"},
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    parts = []
    ends_at = time.monotonic() + LIMIT
    try:
        while time.monotonic() < ends_at and (part := os.read(ours, 65536)):
            parts.append(part)
    except OSError:  # Linux says so that the other end is closed.
        pass
    os.close(ours)
    status = process.wait(LIMIT)
    return status, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())

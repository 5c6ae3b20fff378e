"""The `litebroker` command as users run it: real processes, signals, pipes and terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from tests.waiting import LIMIT, comes_true

from litebroker import Counts, Group, Queue
from litebroker.cli import app, main
from litebroker.results import kept_for_ms

# Each handler writes a line for each start and each end of a job to the file "log"; a short line gets there whole.
# "gated" waits for a file of its payload's name.
TASKS = """
import os, time
from litebroker import Queue, RAW

log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tell(*words):
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())

def run(data):
    tell("ran", data)

def run_many(data):
    tell("ran", *data)

def who(data, context):
    tell(data, os.getpid(), context.attempt)

def gated(data, context):
    tell("began", data, os.getpid(), context.attempt)
    while not os.path.exists(f"open.{data}"):
        if context.cancelled.wait(0.01):
            tell("cancelled", data)
            return
    tell("ended", data)

def deaf(data):
    tell("began", data)
    time.sleep(120)

async def run_async(data):
    tell("ran", data)

THING = 5
"""


class Command:
    """Runs the command in a folder of its own, and leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "jobs.db"
        self.environment = {k: v for k, v in os.environ.items() if k not in {"LITEBROKER_URL", "COLUMNS", "NO_COLOR"}}
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(self, *args: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, **environment)
        stdout, stderr = process.communicate(stdin, timeout=LIMIT)
        assert "Traceback" not in stderr
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(self, *args: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "litebroker", *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**self.environment, "LITEBROKER_URL": "jobs.db", **environment},
        )
        self._processes.append(process)
        return process

    def told(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def pids(self) -> set[int]:
        return {int(line.split()[2]) for line in self.told() if line.startswith("began")}

    def open(self, *names: object) -> None:
        for name in names:
            (self.folder / f"open.{name}").touch()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    (tmp_path / "tasks.py").write_text(TASKS)
    command = Command(tmp_path)
    yield command
    command.close()


@pytest.fixture
def queue(command: Command) -> Iterator[Queue[Any]]:
    with Queue("work", command.database) as queue:
        yield queue


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """The command in this process, for the many that end before they have begun: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        assert isinstance(end.value.code, int)
        return end.value.code, *capfd.readouterr()

    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("LITEBROKER_URL", "jobs.db")
    return run


def lives(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def in_terminal(command: Command, *args: object, columns: int, **environment: str) -> str:
    """What the command prints in a terminal that is so wide."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "litebroker", *map(str, args)],
        stdout=theirs,
        cwd=command.folder,
        env={
            **command.environment,
            "LITEBROKER_URL": "jobs.db",
            "COLUMNS": str(columns),
            "TERM": "xterm-256color",
            **environment,
        },
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # Linux says so that the other end is closed.
        pass
    os.close(ours)
    assert process.wait(LIMIT) == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


# Where, and what is wrong


@pytest.mark.parametrize("module", ["click", "rich"])
def test_without_click_or_rich_it_says_what_to_install(module: str) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; from litebroker.cli import main; main()"

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "litebroker: the command needs click and rich: pip install 'litebroker[cli]'\n"


def test_a_database_has_to_be_named(command: Command) -> None:
    result = command("stats", LITEBROKER_URL="")

    assert result.returncode == 2
    assert "--db" in result.stderr
    assert "LITEBROKER_URL" in result.stderr


def test_the_database_named_last_is_taken(command: Command) -> None:
    command("add", "work", "1", LITEBROKER_URL="environment.db")
    command("--db", "group.db", "add", "work", "1", LITEBROKER_URL="environment.db")
    command("--db", "group.db", "add", "work", "1", "--db", "sqlite:///command.db", LITEBROKER_URL="environment.db")

    sizes = {}
    for name in ("environment", "group", "command"):
        with Queue("work", command.folder / f"{name}.db") as queue:
            sizes[name] = queue.size()
    assert sizes == {"environment": 1, "group": 1, "command": 1}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["queue"], "No such command 'queue'. Did you mean 'queues'?"),
        (["rq", "info", "--db", ":memory:"], "names no file"),
        (["rq", "info", "--db", "redis://localhost"], "litebroker_rq takes a path"),
        (["add"], "Missing argument 'QUEUE'"),
        (["add", "work"], "give the payload as JSON"),
        (["add", "work", "1", "--file", "tasks.py"], "give the payload as JSON"),
        (["add", "work", "hello"], "'hello' is not JSON"),
        (["add", "work", "NaN"], "'NaN' is not JSON"),
        (["add", "work", "[" * 100_000], "[...' is not JSON (nested too deep)"),
        (["add", "", "1"], "queue's name is empty"),
        (["add", "work", "1", "--delay", "soon"], "'soon' is no length of time"),
        (["add", "work", "1", "--delay", "99999d"], "longer than a century"),
        (["add", "work", "1", "--run-at", "tomorrow"], "'tomorrow' is no date and time"),
        (["add", "work", "1", "--run-at", "2030-01-31T06:00:00"], "has no time zone"),
        (["add", "work", "1", "--run-at", "2030-01-31T06:00:00Z", "--delay", "5"], "exclude each other"),
        (["add", "work", "1", "--priority", str(2**63)], "--priority"),
        (["add", "work", "1", "--dedupe-key", "k" * 100_000], "100,000 bytes"),
        (["add", "work", "-", "--dedupe-key", "k"], "one job's"),
        (["add", "work", "1", "--dedupe-until", "ended"], "needs --dedupe-key"),
        (["add", "work", "1", "--group-concurrency", "2"], "needs --group"),
        (["add", "work", "1", "--header", "tenant"], "write NAME=VALUE"),
        (["add", "work", "1", "--db", "redis://localhost"], "write it as sqlite:///"),
        (["add", "work", "1", "--db", "sqlite:///a.db?colour=red"], "no option 'colour'"),
        (["add", "work", "1", "--db", ":memory:"], "would be gone"),
        (["add", "work", "--file", "missing.ndjson"], "does not exist"),
    ],
)
def test_a_wrong_command_line_ends_with_2(here: Here, args: list[str], message: str) -> None:
    status, stdout, stderr = here(*args)

    assert message in stderr
    assert (status, stdout) == (2, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["worker", "tasks"], "write MODULE:HANDLER"),
        (["worker", "tasks.py:run", "--queue", "work"], "tasks:run"),
        (["worker", "missing:run", "--queue", "work"], "no module 'missing'"),
        (["worker", "tasks:missing", "--queue", "work"], "has no 'missing'"),
        (["worker", "tasks:THING", "--queue", "work"], "cannot be called"),
        (["worker", "tasks:tell", "--queue", ""], "queue's name is empty"),
        (["worker", "tasks:run"], "Give --queue NAME"),
        (["worker", "tasks:run", "--queue", "work", "--concurrency", "0"], "--concurrency"),
        (["worker", "tasks:run", "--queue", "work", "--durability", "eternal"], "--durability"),
    ],
)
def test_a_worker_that_cannot_be_ends_with_2(command: Command, args: list[str], message: str) -> None:
    result = command(*args)

    assert message in result.stderr
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["add", "work", "1", "--db", "missing/jobs.db"], "make it first"),
        (["add", "work", "1", "--db", "/"], "this is a folder"),
        (["add", "work", "1", "--db", "tasks.py"], "not an SQLite database"),
        (["add", "work", '"\\ud800"'], "surrogate"),
        (["add", "work", "1e999"], "JSON cannot hold"),
        (["add", "work", json.dumps("x" * 100), "--max-payload-bytes", "100"], "over the limit of 100"),
        (["add", "work", "1", "--group", "one", "--group-concurrency", "5"], "group 'one' has concurrency 2, not 5"),
        (["stats", "--db", "missing.db"], "no such file"),
        (["stats", "--queue", "other"], "no queue 'other'; there are: 'work'"),
    ],
)
def test_what_is_refused_ends_with_1(
    here: Here, command: Command, queue: Queue[Any], args: list[str], message: str
) -> None:
    queue.add("there before", group=Group("one", 2))

    status, stdout, stderr = here(*args)

    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert (status, stdout) == (1, "")
    assert queue.size() == 1
    assert not (command.folder / "missing.db").exists()


def test_a_worker_does_not_start_on_a_file_that_is_no_database(command: Command) -> None:
    result = command("worker", "tasks:run", "--queue", "work", "--db", "tasks.py")

    assert result.returncode == 1
    assert "not an SQLite database" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_error_in_the_module_names_its_line(command: Command) -> None:
    (command.folder / "broken.py").write_text("import os\n\nos.environ['NOT_SET']\n")

    result = command("worker", "broken:run", "--queue", "work")

    assert result.returncode == 1
    assert "importing broken failed: KeyError: 'NOT_SET'" in result.stderr
    assert "broken.py, line 3)" in result.stderr


def test_a_package_that_the_module_misses_is_not_taken_for_the_module(command: Command) -> None:
    (command.folder / "needy.py").write_text("import not_installed\n")

    result = command("worker", "needy:run", "--queue", "work")

    assert result.returncode == 1
    assert "importing needy failed: ModuleNotFoundError: No module named 'not_installed'" in result.stderr


# add


def test_add_prints_the_id_of_its_job(command: Command, queue: Queue[Any]) -> None:
    options = ["--priority", -3, "--attempts", 7, "--group", "g", "--header", "tenant=a=b", "--task", "t", "--ref", "r"]
    options += ["--keep-result", "1h"]

    result = command("add", "work", '{"to": "a@example.com"}', "--run-at", "2099-01-31T06:00:00Z", *options)

    job = queue.get(int(result.stdout))
    assert job is not None
    assert job.data == {"to": "a@example.com"}
    assert job.due_at.isoformat() == "2099-01-31T06:00:00+00:00"
    assert (job.priority, job.max_attempts, job.group, job.task, job.ref) == (-3, 7, "g", "t", "r")
    assert job.headers == {"tenant": "a=b"}
    assert kept_for_ms(job.record.headers) == 3_600_000
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1500ms", 1.5), ("5m", 300), ("0.5h", 1800), ("2d", 172_800)]
)
def test_a_delay_may_have_a_unit(command: Command, queue: Queue[Any], text: str, seconds: float) -> None:
    result = command("add", "work", "1", "--delay", text)

    job = queue.get(int(result.stdout))
    assert job is not None
    assert (job.due_at - job.created_at).total_seconds() == pytest.approx(seconds, abs=0.01)


def test_a_held_key_gives_its_holder(command: Command, queue: Queue[Any]) -> None:
    holder = queue.add(1, dedupe_key="once")

    plain = command("add", "work", "2", "--dedupe-key", "once")
    as_json = command("add", "work", "2", "--dedupe-key", "once", "--json")

    assert (plain.returncode, plain.stdout) == (0, f"{holder.id}\n")
    assert "nothing was added" in plain.stderr
    assert json.loads(as_json.stdout) == {"id": str(holder.id), "queue": "work", "added": False}
    assert queue.size() == 1


@pytest.mark.parametrize("args", [["-"], ["--file", "-"], ["--file", "payloads"]])
def test_each_line_of_a_file_is_a_job(command: Command, queue: Queue[Any], args: list[str]) -> None:
    lines = '\ufeff{"a": 1}\r\n\n  \n"ü"\n[3]'
    (command.folder / "payloads").write_text(lines, newline="")

    result = command("add", "work", *args, stdin=lines)

    jobs = [queue.get(int(line)) for line in result.stdout.split()]
    assert [job and job.data for job in jobs] == [{"a": 1}, "ü", [3]]
    assert (result.returncode, result.stderr) == (0, "")


def test_no_line_is_no_job(command: Command, queue: Queue[Any]) -> None:
    result = command("add", "work", "-")

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("bad", ["nonsense", "NaN", '"\\ud800"', "1e999", '"\udcff"', "[" * 10_000])
def test_a_bad_line_is_named_and_the_lines_before_its_batch_are_added(
    command: Command, queue: Queue[Any], bad: str
) -> None:
    lines = [*map(str, range(1, 1200)), bad, *map(str, range(1201, 1500))]
    (command.folder / "payloads").write_text("\n".join(lines), errors="surrogateescape")

    result = command("add", "work", "--file", "payloads")

    assert result.returncode == 1
    assert result.stderr.startswith("Error: line 1200: ")
    assert result.stderr.endswith("; the lines before 1001 were added, and nothing from there on\n")
    assert len(result.stdout.split()) == queue.size() == 1000


def test_a_line_that_is_too_long_is_named(command: Command, queue: Queue[Any]) -> None:
    result = command("add", "work", "-", stdin="1\n" + json.dumps("x" * 2**20) + "\n")

    assert result.returncode == 1
    assert "line 2: the payload takes 1,048,578 bytes" in result.stderr


def test_a_line_is_added_when_it_comes(command: Command, queue: Queue[Any]) -> None:
    process = command.start("add", "work", "-")
    assert process.stdin
    assert process.stdout

    process.stdin.write('"first"\n"sec')
    process.stdin.flush()
    first = queue.get(int(process.stdout.readline()))

    assert first is not None
    assert first.data == "first"
    rest, _ = process.communicate('ond"\n', LIMIT)
    second = queue.get(int(rest))
    assert second is not None
    assert second.data == "second"
    assert process.returncode == 0


def test_an_interrupt_ends_with_130(command: Command, queue: Queue[Any]) -> None:
    process = command.start("add", "work", "-")
    assert process.stdin
    assert process.stdout
    process.stdin.write("1\n")
    process.stdin.flush()
    process.stdout.readline()

    process.send_signal(signal.SIGINT)

    assert process.wait(LIMIT) == 130
    assert process.stderr
    assert "Traceback" not in process.stderr.read()
    assert queue.size() == 1


def test_who_reads_no_further_does_not_keep_jobs_from_being_added(command: Command, queue: Queue[Any]) -> None:
    process = command.start("add", "work", "-")
    assert process.stdout
    process.stdout.close()

    _, stderr = process.communicate("1\n" * 5000, LIMIT)

    assert (process.returncode, stderr) == (141, "")
    assert queue.size() == 5000


# stats


@pytest.fixture
def queues(queue: Queue[Any]) -> None:
    """Two ready, one delayed, active and failed each; and a paused queue whose name a terminal would obey."""
    queue.add_many(range(4))
    queue.add("later", delay=3600)
    (job,) = queue.claim()
    queue.fail(job, "no", retry=False)
    queue.claim()
    Queue("[red]\x1b", queue.storage).pause()


def test_stats_counts_each_queue(command: Command, queues: None) -> None:
    result = command("stats")

    head, paused, work = result.stdout.splitlines()
    assert " ".join(head.split()) == "queue ready delayed active completed failed cancelled oldest"
    assert paused.startswith("'[red]\\x1b' (paused ")
    assert paused.split()[3:] == ["0"] * 6
    assert work.split()[:-1] == ["work", "2", "1", "1", "0", "1", "0"]
    assert (result.returncode, result.stderr) == (0, "")


def test_stats_as_json(command: Command, queues: None) -> None:
    result = command("stats", "--json", "--queue", "work", "--queue", "[red]\x1b")

    found = json.loads(result.stdout)
    assert found["database"] == str(command.database)
    paused, work = found["queues"]
    assert paused.pop("paused_at").endswith("+00:00")
    assert 0 < work.pop("oldest_due_for_seconds") < LIMIT
    nothing = {"pending": 0, "ready": 0, "delayed": 0, "active": 0, "completed": 0, "failed": 0, "cancelled": 0}
    assert paused == {"name": "[red]\x1b", **nothing, "oldest_due_for_seconds": None}
    some = {"pending": 3, "ready": 2, "delayed": 1, "active": 1, "failed": 1}
    assert work == {"name": "work", **nothing, **some, "paused_at": None}


def test_stats_of_one_queue(command: Command, queues: None) -> None:
    result = command("stats", "--queue", "work")

    assert [line.split()[0] for line in result.stdout.splitlines()] == ["queue", "work"]


def test_stats_of_a_file_without_queues(command: Command, queue: Queue[Any]) -> None:
    queue.size()

    result = command("stats")

    assert (result.returncode, result.stdout) == (0, f"{command.database} has no queues yet\n")


def test_stats_fits_a_narrow_terminal(command: Command, queues: None) -> None:
    text = in_terminal(command, "stats", "--queue", "work", columns=40, NO_COLOR="1")

    lines = ["work", "ready 2", "delayed 1", "active 1", "completed 0", "failed 1", "cancelled 0", "oldest"]
    found = [" ".join(line.split()) for line in text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()]
    assert found[:-1] == lines[:-1]
    assert found[-1].startswith(lines[-1])
    assert max(map(len, text.splitlines())) <= 40


def test_to_look_into_an_empty_file_makes_no_database_of_it(command: Command) -> None:
    command.database.touch()

    done = command("stats")

    assert done.returncode == 1
    assert "the file is empty" in done.stderr
    assert command.database.stat().st_size == 0


def test_a_terminal_of_80_columns_gets_a_table(command: Command, queues: None) -> None:
    text = in_terminal(command, "stats", "--queue", "work", columns=80)

    assert text.splitlines()[0].startswith("\x1b[1mqueue  ready  ")
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_gets_no_colour_that_it_does_not_want(
    command: Command, queues: None, variable: str, value: str
) -> None:
    text = in_terminal(command, "stats", "--queue", "work", columns=80, **{variable: value})

    assert "queue" in text
    assert "\x1b[3" not in text


def test_a_table_that_nobody_reads_is_no_error(command: Command, queues: None) -> None:
    process = command.start("stats")
    assert process.stdout
    process.stdout.close()

    _, stderr = process.communicate(timeout=LIMIT)

    assert (process.returncode, stderr) == (141, "")


# worker


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """Stop a worker that has nothing to do. What it logged."""
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT)
    assert "Traceback" not in stderr
    assert process.returncode == 0, stderr
    return stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_runs_jobs_until_a_signal_and_finishes_what_runs(
    command: Command, queue: Queue[Any], number: signal.Signals
) -> None:
    queue.add_many(["a", "b", "c"])
    process = command.start("worker", "tasks:gated", "--queue", "work", "--concurrency", 2)
    assert comes_true(lambda: len(command.told()) == 2)

    process.send_signal(number)

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    command.open("a", "b", "c")
    _, log = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert sorted(line.split()[:2] for line in command.told()) == [
        ["began", "a"],
        ["began", "b"],
        ["ended", "a"],
        ["ended", "b"],
    ]
    assert queue.stats() == Counts(ready=1)
    lines = log.splitlines()
    assert f"works on queue 'work' of {command.database}: tasks:gated, 2 threads" in lines[0]
    assert [line.partition("] ")[2] for line in lines[1:]] == ["stopping: waits for the jobs that run", "stopped"]


def test_a_signal_that_comes_twice_at_once_counts_once(command: Command, queue: Queue[Any]) -> None:
    queue.add("a")
    process = command.start("worker", "tasks:gated", "--queue", "work")
    assert comes_true(lambda: len(command.told()) == 1)

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    command.open("a")
    assert process.wait(LIMIT) == 0
    assert command.told()[-1] == "ended a"


def test_a_second_signal_cancels_what_runs(command: Command, queue: Queue[Any]) -> None:
    queue.add("a")
    process = command.start("worker", "tasks:gated", "--queue", "work")
    assert comes_true(lambda: len(command.told()) == 1)
    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.8)

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 0
    assert command.told()[-1] == "cancelled a"


def test_a_stop_waits_no_longer_than_it_may(command: Command, queue: Queue[Any]) -> None:
    queue.add("a")
    process = command.start("worker", "tasks:gated", "--queue", "work", "--stop-timeout", "100ms")
    assert comes_true(lambda: len(command.told()) == 1)

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 0
    assert command.told()[-1] == "cancelled a"


@pytest.mark.slow
def test_a_handler_that_does_not_heed_is_left_and_its_job_runs_again(command: Command, queue: Queue[Any]) -> None:
    queue.add("a")
    process = command.start("worker", "tasks:deaf", "--queue", "work", "--stop-timeout", "0")
    assert comes_true(lambda: command.told() == ["began a"])

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=LIMIT)

    assert process.returncode == 3
    assert log.splitlines()[-1].endswith("stopped, and left jobs unfinished: they will be run again")
    assert comes_true(lambda: [job.data for job in queue.claim()] == ["a"])


def test_a_worker_serves_several_queues(command: Command, queue: Queue[Any]) -> None:
    queue.add(1)
    Queue("other", queue.storage).add(2)

    process = command.start("worker", "tasks:run", "--queue", "work", "--queue", "other")

    assert comes_true(lambda: sorted(command.told()) == ["ran 1", "ran 2"])
    log = end(process)
    assert "queue 'work'" in log
    assert "queue 'other'" in log


def test_threads_that_compute_leave_a_worker_its_turns(command: Command, queue: Queue[Any]) -> None:
    (command.folder / "app.py").write_text(TASKS + "import sys\ndef turn(_):\n    tell(sys.getswitchinterval())\n")
    queue.add(1)

    process = command.start("worker", "app:turn", "--queue", "work")

    assert comes_true(lambda: bool(command.told()))
    assert float(command.told()[0]) == pytest.approx(0.0005)
    end(process)


@pytest.mark.parametrize("options", [[], ["--isolate"]])
def test_a_worker_runs_an_async_handler(command: Command, queue: Queue[Any], options: list[str]) -> None:
    queue.add("a")

    process = command.start("worker", "tasks:run_async", "--queue", "work", *options)

    assert comes_true(lambda: command.told() == ["ran a"])
    end(process)


def test_a_worker_hands_over_batches(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(4))

    process = command.start("worker", "tasks:run_many", "--queue", "work", "--batch", 3)

    assert comes_true(lambda: queue.stats() == Counts())
    assert sorted(command.told(), key=len) == ["ran 3", "ran 0 1 2"]
    assert "in batches of up to 3" in end(process)


def test_a_queue_that_the_module_declares_brings_its_settings(command: Command) -> None:
    declared = "queue = Queue('own', 'app.db', on_error=lambda error, context: tell('told', error))\nqueue.add(1)\n"
    (command.folder / "app.py").write_text(TASKS + "def fail(data):\n    raise ValueError(data)\n" + declared)

    process = command.start("worker", "app:fail", LITEBROKER_URL="other.db")

    assert comes_true(lambda: command.told() == ["told 1"])
    assert f"queue 'own' of {command.folder / 'app.db'}" in end(process)
    assert not (command.folder / "other.db").exists()


@pytest.mark.parametrize(
    ("declared", "args", "message"),
    [
        ("a = Queue('a', 'app.db'); b = Queue('b', 'app.db')", [], "declares: 'a', 'b'"),
        ("a = Queue('a', 'app.db'); b = Queue('a', 'app.db')", ["--queue", "a"], "declares queue 'a' twice"),
        ("a = Queue('a', 'app.db')", ["--lease", "5"], "leave out --lease"),
        ("a = Queue('a', 'app.db')", ["--db", "other.db"], "leave out --db"),
    ],
)
def test_what_a_module_declares_is_not_contradicted(
    command: Command, declared: str, args: list[str], message: str
) -> None:
    (command.folder / "app.py").write_text(TASKS + declared)

    result = command("worker", "app:run", *args)

    assert message in result.stderr
    assert result.returncode == 2


def test_the_database_of_a_declared_queue_may_be_named_again(command: Command) -> None:
    (command.folder / "app.py").write_text(TASKS + "queue = Queue('work', 'app.db')\nqueue.add(1)\n")

    process = command.start("worker", "app:run", "--db", "app.db")

    assert comes_true(lambda: command.told() == ["ran 1"])
    end(process)


def test_a_worker_whose_queue_is_closed_by_its_handler_ends(command: Command) -> None:
    closing = "import threading\ndef close(data):\n    threading.Thread(target=queue.close).start()\n"
    (command.folder / "app.py").write_text(TASKS + closing + "queue = Queue('work', 'app.db')\nqueue.add(1)\n")

    result = command("worker", "app:close")

    assert "closed by something in this process" in result.stderr
    assert result.returncode == 1


# worker --processes


def test_a_killed_process_is_replaced_and_its_jobs_are_run(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(2))
    process = command.start("worker", "tasks:gated", "--queue", "work", "--processes", 2)
    assert comes_true(lambda: len(command.pids()) == 2)
    killed = min(command.pids())

    os.kill(killed, signal.SIGKILL)

    assert comes_true(lambda: any(line.split()[-1] == "2" for line in command.told()))
    assert len(command.pids()) == 3
    command.open(0, 1)
    assert comes_true(lambda: queue.stats() == Counts())
    log = end(process)
    assert "was killed by SIGKILL; it is started again in 0.1 s" in log
    assert log.count(" started: pid ") == 3
    assert not any(map(lives, command.pids()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_stop_together_and_finish_what_runs(
    command: Command, queue: Queue[Any], number: signal.Signals
) -> None:
    queue.add_many(range(3))
    process = command.start("worker", "tasks:gated", "--queue", "work", "--processes", 3)
    assert comes_true(lambda: len(command.pids()) == 3)

    # A service manager sends it to all of them.
    for pid in (*command.pids(), process.pid):
        os.kill(pid, number)

    assert not comes_true(lambda: process.poll() is not None, limit=0.3)
    command.open(0, 1, 2)
    assert process.wait(LIMIT) == 0
    assert sum(line.startswith("ended") for line in command.told()) == 3
    assert queue.stats() == Counts()
    assert not any(map(lives, command.pids()))


def test_a_second_signal_hurries_all_processes(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(2))
    process = command.start("worker", "tasks:gated", "--queue", "work", "--processes", 2)
    assert comes_true(lambda: len(command.pids()) == 2)
    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.8)

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 0
    assert sorted(command.told()[-2:]) == ["cancelled 0", "cancelled 1"]


def test_a_third_signal_kills_the_processes(command: Command, queue: Queue[Any]) -> None:
    queue.add("a")
    process = command.start("worker", "tasks:deaf", "--queue", "work", "--processes", 2)
    assert comes_true(lambda: command.told() == ["began a"])

    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        comes_true(lambda: process.poll() is not None, limit=0.8)

    _, log = process.communicate(timeout=LIMIT)
    assert process.returncode == 3
    assert "was killed by SIGKILL" in log
    assert comes_true(lambda: [job.data for job in queue.claim()] == ["a"])


def test_processes_do_not_outlive_a_supervisor_that_is_killed(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(2))
    process = command.start("worker", "tasks:gated", "--queue", "work", "--processes", 2)
    assert comes_true(lambda: len(command.pids()) == 2)
    command.open(0, 1)

    process.kill()

    assert comes_true(lambda: not any(map(lives, command.pids())))
    assert queue.stats() == Counts()


def test_a_command_line_that_cannot_work_is_tried_once(command: Command) -> None:
    result = command("worker", "tasks:missing", "--queue", "work", "--processes", 4)

    assert result.returncode == 2
    assert result.stderr.count("has no 'missing'") == 1
    assert result.stderr.count(" started: pid ") == 1


def test_a_process_that_keeps_dying_is_started_ever_later(command: Command, queue: Queue[Any]) -> None:
    (command.folder / "app.py").write_text("import os\ndef die(_):\n    os._exit(9)\n")
    queue.add_many(range(20))

    process = command.start("worker", "app:die", "--queue", "work", "--processes", 2)

    assert process.stderr
    pauses: dict[str, list[str]] = {"1": [], "2": []}
    for line in process.stderr:
        if "ended with status 9" in line:
            words = line.partition("] ")[2].split()
            pauses[words[1]].append(words[-2])
        if min(map(len, pauses.values())) == 3:
            break
    assert pauses["1"][:3] == pauses["2"][:3] == ["0.1", "0.2", "0.4"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)


# worker --isolate

CHILDREN = """
import logging, os, time

def run(data, context):
    if data == "crash":
        os._exit(9)
    if data == "spin":
        while True:
            pass
    logging.getLogger("app").info("ran %s in %d, attempt %d", data, os.getpid(), context.attempt)

unnamed = lambda data: None
"""


def test_a_crash_in_a_child_process_fails_its_own_job_only(command: Command, queue: Queue[Any]) -> None:
    (command.folder / "app.py").write_text(CHILDREN)
    queue.add("crash", attempts=1)
    queue.add_many(range(5))

    process = command.start("worker", "app:run", "--queue", "work", "--processes", 2, "--isolate")

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    log = end(process)
    assert "works on queue 'work'" in log
    assert "app:run, 2 processes" in log
    assert "crashed: ProcessDiedError: the process that ran it ended with status 9" in log
    # In the format of the command, too.
    assert len(re.findall(r"INFO    \[\d+\] ran \d in \d+, attempt 1", log)) == 5
    assert str(process.pid) not in re.findall(r"ran \d in (\d+)", log)


def test_a_time_limit_ends_a_job_in_its_child_process(command: Command, queue: Queue[Any]) -> None:
    (command.folder / "app.py").write_text(CHILDREN)
    queue.add("spin", attempts=1)
    queue.add("after")

    process = command.start("worker", "app:run", "--queue", "work", "--time-limit", "500ms", "--log-format", "json")

    assert comes_true(lambda: queue.stats() == Counts(failed=1))
    log = end(process)
    assert "timeout: TimeLimitError: the handler took longer than 0.5 s" in log
    assert all(json.loads(line)["pid"] for line in log.splitlines())
    (dead,) = queue.dead_letters()
    assert dead.error is not None
    assert "in run" in dead.error.stack


def test_child_processes_are_replaced_after_so_many_jobs(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(6))

    process = command.start("worker", "tasks:who", "--queue", "work", "--recycle-after", 2, "--recycle-mb", 1000)

    assert comes_true(lambda: len(command.told()) == 6)
    end(process)
    assert len({line.split()[1] for line in command.told()}) == 3


def test_a_second_signal_reaches_child_processes(command: Command, queue: Queue[Any]) -> None:
    queue.add_many(range(2))
    process = command.start("worker", "tasks:gated", "--queue", "work", "--processes", 2, "--isolate")
    assert comes_true(lambda: len(command.pids()) == 2)
    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.8)

    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 0
    assert sorted(command.told()[-2:]) == ["cancelled 0", "cancelled 1"]
    assert not any(map(lives, command.pids()))


@pytest.mark.slow
def test_a_child_process_that_does_not_heed_the_second_signal_ends_with_its_parent(
    command: Command, queue: Queue[Any]
) -> None:
    (command.folder / "app.py").write_text(
        "import os\nfrom tasks import deaf, tell\n"
        "def stay(data):\n    tell('began', data, os.getpid())\n    deaf(data)\n"
    )
    queue.add("a")
    process = command.start("worker", "app:stay", "--queue", "work", "--isolate")
    assert comes_true(lambda: len(command.told()) == 2)

    process.send_signal(signal.SIGTERM)
    assert not comes_true(lambda: process.poll() is not None, limit=0.8)
    process.send_signal(signal.SIGTERM)

    assert process.wait(LIMIT) == 3
    (pid,) = {int(line.split()[2]) for line in command.told() if len(line.split()) == 3}
    assert comes_true(lambda: not lives(pid))


@pytest.mark.parametrize(
    ("handler", "options", "message"),
    [
        ("run", ["--time-limit", "5", "--concurrency", "4"], "--concurrency 4 counts threads"),
        ("run", ["--time-limit", "0"], "time_limit=0.0 has to be more than 0"),
        ("run", ["--recycle-mb", "0"], "0 is not in the range"),
        ("unnamed", ["--isolate"], "cannot be given to a child process"),
    ],
)
def test_what_child_processes_cannot_do_is_refused(
    here: Here, command: Command, handler: str, options: list[str], message: str
) -> None:
    (command.folder / "app.py").write_text(CHILDREN)

    status, _, errors = here("worker", f"app:{handler}", "--queue", "work", *options)

    assert status == 2
    assert message in errors


# The demonstration


def demonstrate(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "litebroker.demo", "--jobs", "100"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_demonstration_loses_nothing() -> None:
    result = demonstrate()

    assert result.returncode == 0, result.stderr
    figures = {name: line for line in result.stdout.splitlines()[-5:] for name in [" ".join(line.split()[:2])]}
    assert figures["jobs added"].split()[2] == "100"
    assert figures["jobs run"].split()[2] == "100"
    assert figures["jobs lost"].split()[2] == "0"
    assert 0 < float(figures["taken over"].split()[3]) < 5


def test_the_demonstration_tells_of_a_job_that_is_lost(tmp_path: Path) -> None:
    # A queue that answers for a job and does not keep it.
    (tmp_path / "sitecustomize.py").write_text(
        "from litebroker import Queue\n"
        "add = Queue.add\n"
        "def forget(queue, data):\n"
        "    job = add(queue, data)\n"
        "    if data == 99:\n"
        "        queue.remove(job)\n"
        "    return job\n"
        "Queue.add = forget\n"
    )

    result = demonstrate(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    assert result.returncode == 1, result.stderr
    assert "jobs lost             1\n" in result.stdout


# Help


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands beneath it, groups too, and how each is called."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        found = group.get_command(ctx, name)
        assert found is not None
        yield (*path, name), found
        if isinstance(found, click.Group):
            yield from commands(found, *path, name)


COMMANDS = dict(commands(app.litebroker))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_in_one_style(here: Here, path: tuple[str, ...]) -> None:
    status, stdout, stderr = here(*path, "--help")

    assert (status, stderr) == (0, "")
    assert stdout.startswith(f"Usage: litebroker {' '.join(path)} [OPTIONS]")
    # A value is named for what it is, and a length of time has one name.
    assert not re.search(r"\b(TEXT|INTEGER|TIME|PATH)\b", stdout)
    # No first sentence of a command is cut.
    assert "..." not in re.sub(r"^Usage:.*", "", stdout)
    assert path == ("completion",) or "--db PATH_OR_URL" in stdout


# RQ's own commands


def test_rq_s_help_needs_no_database(command: Command) -> None:
    pytest.importorskip("rq")

    answer = command("rq", "worker", "--help", LITEBROKER_URL="")

    assert answer.returncode == 0
    assert "--burst" in answer.stdout


def test_rq_s_commands_run_on_the_file(command: Command) -> None:
    pytest.importorskip("rq")

    answer = command("rq", "info", "--only-queues", "--db", "other.db")

    assert answer.returncode == 0
    assert "0 queues, 0 jobs total" in answer.stdout
    assert (command.folder / "other.db").exists()
    assert not command.database.exists()


def test_what_rq_refuses_is_told_as_rq_does(command: Command) -> None:
    pytest.importorskip("rq")

    answer = command("rq", "no-such-command")

    assert answer.returncode == 2
    assert "No such command 'no-such-command'" in answer.stderr


# A job that ends its process at once


def test_a_process_that_its_first_job_ends_is_started_again(command: Command, queue: Queue[Any]) -> None:
    (command.folder / "hard.py").write_text("import os\n\ndef run(data):\n    os._exit(1)\n")
    queue.add(1, attempts=2)

    process = command.start("worker", "hard:run", "--queue", "work", "--processes", "2")

    ends_at = time.monotonic() + LIMIT
    while not queue.dead_letters() and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert [job.error.reason for job in queue.dead_letters() if job.error] == ["lapsed"]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0

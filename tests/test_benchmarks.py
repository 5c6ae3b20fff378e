"""The benchmark's own logic, and that every work runs on everyone who is installed. Nothing here is a timing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks import ROOT, __main__, profiling, report, single
from tests.benchmarks.contestants import ALL, Contestant, Ours, Raw
from tests.benchmarks.measuring import OURS, RAW, Bench, Entry, Line, Sample, Series, Turn, compared

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """The least of everything."""
    return Bench(folder=tmp_path, rounds=1, turn_s=0.001, scale=0.001)


def series(*rates: float) -> Series:
    return Series([Sample(rate, 1e6 / rate) for rate in rates])


def failed(why: str) -> Series:
    found = Series()
    found.failure = why
    return found


def a_line(**options: Any) -> Line:
    found = {RAW: series(100.0, 100.0), OURS: series(80.0, 80.0), "a < b & c": series(20.0, 20.0)}
    return compared("add", "add, 100 B", "relaxed / NORMAL", found, **options)


# -- figures --


def test_a_ratio_is_the_median_of_those_of_turns_that_followed_each_other() -> None:
    ours, raw = series(10, 50, 90), series(10, 200, 180)

    # The ratio of the medians is 50 to 180.
    assert ours.ratio_to(raw) == 0.5


def test_a_turn_ends_after_its_calls_and_counts_the_operations_that_they_did() -> None:
    calls: list[str] = []

    def once() -> int:
        calls.append("once")
        return 100

    found = Turn(once, before=lambda: calls.append("before"), calls=3).take(seconds=60)

    assert calls == ["before", "once", "once", "once"]
    assert found.rate > 0


def test_contestants_take_turns_in_another_order_each_time(bench: Bench) -> None:
    order: list[str] = []

    def turn(name: str) -> Turn:
        def once() -> int:
            order.append(name)
            return 1

        return Turn(once, calls=1)

    found = bench.take_turns({name: turn(name) for name in "abc"}, turns=2)

    assert ["".join(order[start : start + 3]) for start in (0, 3, 6)] == ["cab", "abc", "bca"]
    assert [len(it) for it in found.values()] == [2, 2, 2]  # The first was to warm up.


def test_who_fails_is_reported_and_the_others_go_on(bench: Bench) -> None:
    def once() -> int:
        raise ValueError("out\nof order")

    found = bench.take_turns({"bad": Turn(once), "good": Turn(lambda: 1, calls=1)})

    assert found["bad"].failure == "ValueError: out of order"
    assert (found["good"].failure, len(found["good"])) == ("", 5)


@pytest.mark.parametrize(
    ("wanted", "text", "reached"),
    [
        ({"at_least": 0.7}, "0.7 of raw sqlite3", True),
        ({"at_least": 0.9}, "0.9 of raw sqlite3", False),
        ({"at_most": 1.3}, "at most 1.3 x the cost", True),
        ({"at_most": 1.2}, "at most 1.2 x the cost", False),
        ({"at_least": 0.7, "rate": 81}, "0.7 of raw sqlite3 and 81/s", False),
        ({}, "", None),
    ],
)
def test_a_line_says_what_is_to_be_reached_and_whether_it_was(
    wanted: dict[str, float], text: str, reached: bool | None
) -> None:
    line = a_line(**wanted)

    assert (line.wanted, line.reached) == (text, reached)


def test_without_the_base_a_ratio_is_neither_reached_nor_not() -> None:
    line = compared("add", "add", "", {RAW: failed("no"), OURS: series(1.0)}, at_least=0.7)

    assert line.reached is None
    assert "not measured" in report.figures([line])


def test_figures_that_are_measured_again_replace_the_earlier() -> None:
    earlier, later = a_line(), a_line(at_least=0.7)
    other = Line(work="loop", title="loop", entries={})

    assert __main__.merged([earlier, other], [later]) == [later, other]


def test_lines_come_back_from_json() -> None:
    line = a_line(at_least=0.7)

    assert Line.from_json(report.as_json({}, [line])["lines"][0]) == line


# -- reports --


def test_the_table_has_a_column_for_everything_and_names_what_was_not_reached() -> None:
    lines = [a_line(at_least=0.9), Line(work="x", title="a | b", entries={OURS: Entry(text="1 ms")})]

    heads, _rule, first, second = report.figures(lines).splitlines()

    assert len({len(line) for line in (heads, first, second)}) == 1
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells == [
        *("add, 100 B", "relaxed / NORMAL", "100/s raw sqlite3", "80/s", "0.80", "10000 / 12500"),
        *("a < b & c 20/s: 4.00 x", "0.9 of raw sqlite3", "**not reached**"),
    ]
    assert "a \\| b" in second


def test_failures_stand_below_the_table() -> None:
    line = compared("add", "add", "full", {RAW: series(1), OURS: series(1), "peer": failed("OSError: gone")})

    assert "* add [full]: peer failed: OSError: gone" in report.markdown({}, [line])


def test_the_chart_is_well_formed_and_has_a_bar_for_each() -> None:
    root = ET.fromstring(report.svg([a_line()]))  # noqa: S314 (our own)

    assert root.tag == f"{SVG}svg"
    assert [bar.get("class") for bar in root.iter(f"{SVG}rect")] == ["back", "ours", "base", "peer"]
    widths = [float(bar.get("width", "")) for bar in root.iter(f"{SVG}rect")][1:]
    assert widths == pytest.approx([0.8 * max(widths), max(widths), 0.2 * max(widths)])
    assert "a < b & c" in [text.text for text in root.iter(f"{SVG}text")]


def test_the_docs_get_tables_and_chart_between_their_markers(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"# Before\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")

    report.into_docs(document, {"Python": "3"}, [a_line()])

    text = document.read_text()
    assert text.startswith(f"# Before\n\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\n\nAfter.\n")
    assert "old" not in text
    assert "* Python: 3" in text
    assert report.CHART in text
    ET.fromstring((tmp_path / report.CHART).read_text())  # noqa: S314 (our own)


def test_docs_without_markers_are_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Other")

    with pytest.raises(ValueError, match="has not the markers"):
        report.into_docs(document, {}, [])

    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks.md"]


def test_the_project_s_own_document_has_the_markers() -> None:
    text = __main__.DOCUMENT.read_text(encoding="utf-8")

    assert text.index(report.BEGIN) < text.index(report.END)


# -- contestants --

INSTALLED = [kind for kind in ALL if not kind.missing()]


@pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.name)
def test_a_contestant_gives_each_job_once(kind: type[Contestant], tmp_path: Path) -> None:
    it = kind(tmp_path / "jobs.db", kind.levels[0])
    it.fill(3)
    it.add()

    jobs = [it.claim() for _ in range(5)]

    assert [job is not None for job in jobs] == [True] * 4 + [False]
    assert all(it.complete(job) for job in jobs[:4])
    assert it.claim() is None
    it.close()


@pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.name)
def test_a_contestant_says_how_it_keeps_its_jobs(kind: type[Contestant], tmp_path: Path) -> None:
    level = kind.levels[-1]
    it = kind(tmp_path / "jobs.db", level)
    it.fill(1)

    found = it.settings()

    it.close()
    assert found.startswith("wal / ")
    # What waits for the disk waits for it in the end: by SQLite's own level, or by itself.
    assert ("FULL" in found or "fdatasync" in found) == (level != "relaxed")


@pytest.mark.parametrize("size", [100, 200_000])
def test_the_reference_s_large_payloads_lie_apart_and_come_back(size: int, tmp_path: Path) -> None:
    it = Raw(tmp_path / "jobs.db", "relaxed", size=size)
    it.add()

    _id, data = job = it.claim()

    assert len(str(data)) == size
    assert it.complete(job)
    it.close()


class Absent(Raw):
    name = module = "no_such_queue_here"


class Broken(Raw):
    name = "broken"

    def add(self) -> None:
        raise OSError("it broke")


class Stillborn(Raw):
    name = "stillborn"

    def __init__(self, path: Path, level: Any, *, size: int = 100) -> None:
        raise RuntimeError("it did not open")


def test_who_is_absent_is_left_out_and_who_breaks_is_named(bench: Bench) -> None:
    kinds = (Raw, Ours, Absent, Broken, Stillborn)

    line = single.compare(bench, "add", "add", "relaxed", lambda it: Turn(lambda: it.add() or 1), kinds=kinds)

    assert list(line.entries) == [RAW, OURS, "broken", "stillborn"]
    assert dict(line.failures()) == {"broken": "OSError: it broke", "stillborn": "RuntimeError: it did not open"}
    assert line.entries[RAW].times is not None
    assert list(bench.folder.iterdir()) == []


# -- works --

SLOW = {"processes", "wakeup", "writers", "dramatiq", "huey", "rq"}


# The frameworks' own measurements leave a server's pipe to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "work", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in __main__.WORKS]
)
def test_a_work_runs_on_everyone_who_is_installed(work: str, bench: Bench) -> None:
    if work in __main__.absent():
        pytest.skip(f"{work} is not installed")

    lines = list(__main__.measure(bench, [work]))

    assert lines
    assert [failure for line in lines for failure in line.failures()] == []
    assert all(line.entries[OURS].text for line in lines)
    assert all(line.base in line.entries or not line.base for line in lines)
    assert list(bench.folder.iterdir()) == []


def test_a_work_that_raises_is_named_and_the_next_one_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(_bench: Bench) -> Any:
        raise ModuleNotFoundError("a framework is missing")

    monkeypatch.setitem(__main__.WORKS, "add", raising)

    lines = list(__main__.measure(bench, ["add", "retention"]))

    assert [dict(line.failures()) for line in lines] == [{OURS: "ModuleNotFoundError: a framework is missing"}, {}]


@pytest.mark.parametrize("work", profiling.WORKS)
def test_the_profile_s_parts_are_within_the_whole(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    found = profiling.shares(work, jobs=50)

    assert min(found.statements, found.commits) > 0
    assert found.statements + found.commits + found.checkpoints + found.python >= found.total
    assert profiling.functions(work, 50, 3)
    assert list(tmp_path.iterdir()) == []


# -- the command --


def benchmarks(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments, "--folder", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    files = {name: tmp_path / f"found.{name}" for name in ("json", "markdown", "svg")}
    asked = [part for name, file in files.items() for part in (f"--{name}", str(file))]

    with benchmarks(tmp_path, "retention", "--quick", *asked) as first:
        said, _ = first.communicate(timeout=50)
    with benchmarks(tmp_path, "--from", str(files["json"])) as second:
        again, _ = second.communicate(timeout=50)

    assert (first.returncode, second.returncode) == (0, 0), said
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files.values())
    # What it found is said again, without being measured again.
    assert said.endswith(again)
    assert report.figures([]) not in again


def members(session: int) -> list[str]:
    """The processes of a session, but for those that are gone and were not waited for yet."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().rpartition(")")
            state, _parent, _group, its_session = fields.split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    with benchmarks(tmp_path, "processes") as command:
        until = time.monotonic() + 50
        while len(members(command.pid)) < 3:  # It, and processes that share the work.
            assert time.monotonic() < until
            time.sleep(0.01)

        os.kill(command.pid, number)
        command.communicate(timeout=50)

    assert command.returncode == 130
    assert members(command.pid) == []
    assert list(tmp_path.iterdir()) == []

"""The campaign in its short form, and that it finds what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.proof import ROOT, report
from tests.proof.figures import Figures
from tests.proof.fleets import FLEETS, Fleet
from tests.proof.kills import kills
from tests.proof.ledger import Account, DeadLetter, Ledger
from tests.proof.processes import Herd, members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

RUNNABLE = [fleet for fleet in FLEETS.values() if fleet.can_run]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fleet", RUNNABLE, ids=lambda fleet: fleet.name)
def test_workers_killed_at_random_moments_lose_no_job_and_hold_none_twice(fleet: Fleet, tmp_path: Path) -> None:
    figures = kills(fleet, tmp_path, seconds=3, seed=1)

    assert figures.found == []
    assert figures.faults["kills"] >= 1
    assert figures.runs >= figures.jobs - figures.dead > 0


# -- the ledger's account --

SECOND = 1_000_000_000


def account(folder: Path, *lines: str) -> Account:
    (folder / "ledger").write_text("\n".join(lines) + "\n")
    return Account(folder)


def test_a_job_that_was_acknowledged_and_never_ran_to_its_end_is_lost(tmp_path: Path) -> None:
    told = account(tmp_path, "try a", "add a", "try b", "add b", "start b b1 5 77 1", "kill 77 9", "try c")

    assert [line[0] for line in told.judge({}, set()).lost] == ["a", "b"]


def test_a_dead_letter_with_its_reason_is_not_lost(tmp_path: Path) -> None:
    told = account(tmp_path, "try a", "add a", "start a a1 5 77 1", "kill 77 9")

    verdict = told.judge({"a": DeadLetter("lapsed", (77,))}, set())

    assert (verdict.lost, verdict.unexplained) == ([], [])


def test_a_dead_letter_of_a_process_that_was_not_killed_is_unexplained(tmp_path: Path) -> None:
    told = account(tmp_path, "try a", "add a", "start a a1 5 77 1", "kill 77 9")

    assert len(told.judge({"a": DeadLetter("lapsed", (78,))}, set()).unexplained) == 1


def test_a_run_that_begins_before_the_other_process_was_killed_is_a_double_lease(tmp_path: Path) -> None:
    told = account(tmp_path, "try a", "add a", "start a a1 5 77 1", "start a a2 8 78 1", "kill 77 9", "end a a2 12")

    assert len(told.judge({}, set()).doubly_leased) == 1


def test_a_job_that_ran_again_though_nobody_was_killed_is_unexplained(tmp_path: Path) -> None:
    told = account(tmp_path, "try a", "add a", "start a a1 5 77 1", "end a a1 6", "start a a2 8 77 1", "end a a2 9")

    verdict = told.judge({}, set())

    assert (verdict.lost, verdict.doubly_leased, len(verdict.unexplained)) == ([], [], 1)


def test_what_nobody_added_is_unexplained(tmp_path: Path) -> None:
    told = account(tmp_path, "start a a1 5 77 1", "end a a1 6")

    assert len(told.judge({}, set()).unexplained) == 1


# -- processes --

FAMILY = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=-1)"


def test_of_what_was_started_nothing_outlives_the_campaign_though_it_be_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from tests.proof.processes import Herd\n"
        f"herd = Herd(pathlib.Path({str(tmp_path)!r}), {{}})\n"
        f"print(herd.start([sys.executable, '-c', {FAMILY!r}]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as campaign:
        assert campaign.stdout
        session = int(campaign.stdout.readline())
        deadline = time.monotonic() + 20
        while len(members(session)) < 2:
            assert time.monotonic() < deadline

        campaign.kill()

        while members(session):
            assert time.monotonic() < deadline


STANDS = """
import sys
from tests.proof.standing import Child, Steps
steps = Steps(("here", 1))
steps.arm()
child = Child(lambda: steps.reach("here"))
assert child.stands()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_that_stands_in_a_step_does_not_outlive_the_campaign() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as campaign:
        assert campaign.stdout
        child = Path("/proc", campaign.stdout.readline().strip(), "stat")
        assert child.read_text().rpartition(")")[2].split()[0] == "T"

        campaign.kill()

        deadline = time.monotonic() + 20
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}:
            assert time.monotonic() < deadline


def test_a_run_that_begins_between_the_note_of_a_kill_and_the_kill_is_explained(tmp_path: Path) -> None:
    told = account(
        tmp_path, "try a", "add a", "kill 77 4", "start a a1 5 77 1", "gone 77 6", "start a a2 8 78 1", "end a a2 9"
    )

    verdict = told.judge({}, set())

    assert (verdict.doubly_leased, verdict.unexplained) == ([], [])


def test_a_kill_is_noted_before_it_strikes(tmp_path: Path) -> None:
    herd = Herd(tmp_path, {})
    process = herd.start([sys.executable, "-c", "import sys, time; time.sleep(60)"])
    began = time.monotonic_ns()

    assert herd.kill([process.pid], Ledger(tmp_path)) == 1
    process.wait()
    herd.close()

    (word, pid, at), (then, _, gone) = (line.split() for line in (tmp_path / "ledger").read_text().splitlines())
    assert (word, int(pid), then) == ("kill", process.pid, "gone")
    assert began <= int(at) < int(gone) <= time.monotonic_ns()


# -- the command and its report --


def test_the_command_runs_a_part_and_records_its_figures(tmp_path: Path) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    command = [sys.executable, "-m", "tests.proof", "--minutes", "0.02", "--only", "kills: claims", "--seed", "5"]

    done = subprocess.run(
        [*command, "--record", record, "--report", page, "--folder", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert (found["part"], found["seed"], found["lost"]) == ("kills: claims", 5, 0)
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")
    assert "| kills: claims |" in page.read_text()
    assert "old" not in page.read_text()
    assert sorted(tmp_path.iterdir()) == [page, record]


def test_figures_are_added_up_and_written_between_the_marks() -> None:
    one, two = Figures("a", 1, jobs=2), Figures("a", 2, jobs=3, lost=1)
    one.fault("kills", 4)
    two.fault("stops", 7)

    text = report.table([one, two, Figures("b", 3)])

    assert "| a | 0.0 | 4 | 5 | 0 | 0 | 1 | 0 | 0 | 7 stops |" in text
    assert "| **all** | 0.0 | 4 | 5 | 0 | 0 | 1 | 0 | 0 | 7 stops |" in text

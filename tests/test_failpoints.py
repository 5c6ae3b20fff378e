"""Processes that are killed inside a step: a sample of what `python -m tests.proof` goes through."""

from __future__ import annotations

import inspect
import os
import random
import sys
from pathlib import Path

import pytest
from tests.proof import failpoints
from tests.proof.adapters import WAYS, Way, WayBench, spread
from tests.proof.failpoints import FIRST_OPEN, PLACES, VERBS, Bench, Place, Verb, prepare
from tests.proof.standing import ask

from litebroker.storage import Jobs, Schedules, Tools, Values

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and stops processes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12 warns of forks beside threads
]

# How many steps of each verb are tried.
_SAMPLE = int(os.environ.get("LITEBROKER_FAILPOINTS", "1"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "jobs.db"
    ask(lambda: prepare(path))
    return path


@pytest.mark.parametrize("place", [PLACES[0], *PLACES[2:]], ids=str)
@pytest.mark.parametrize("verb", [*VERBS.values(), FIRST_OPEN], ids=lambda verb: verb.name)
def test_a_process_that_is_killed_inside_any_step_leaves_all_or_nothing_and_holds_nobody_up(
    verb: Verb, place: Place, prepared: Path, tmp_path: Path
) -> None:
    at = Bench(verb, place, tmp_path, prepared)

    steps = random.Random(verb.name).sample(at.steps, min(_SAMPLE, len(at.steps)))
    wrong = {step: found for step in steps if (found := at.kill_at(step))}

    assert wrong == {}
    assert at.steps or (place.writes and verb.name in {"look", "wait"})


def test_every_verb_of_the_contract_is_killed() -> None:
    source = inspect.getsource(failpoints)
    verbs = {name for part in (Jobs, Tools, Values, Schedules) for name in vars(part) if not name.startswith("_")}

    assert sorted(name for name in verbs if f".{name}(" not in source) == []


def test_the_steps_of_a_commit_are_found(prepared: Path, tmp_path: Path) -> None:
    at = Bench(VERBS["transaction"], PLACES[0], tmp_path, prepared)

    names = [name for name, _ in at.steps]

    assert names.index("before begin immediate") < names.index("before commit") < names.index("after commit")


def test_a_verb_that_is_left_half_done_is_found(prepared: Path, tmp_path: Path) -> None:
    halves = Verb("halves", lambda storage, _: (storage.pop("s", "k"), storage.put("s", "other")))
    at = Bench(halves, PLACES[0], tmp_path, prepared)

    found = [at.kill_at(step) for step in at.steps]

    assert any(wrong and "by half" in wrong[0] for wrong in found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.name)
def test_a_worker_that_is_killed_inside_any_step_of_an_adapter_loses_no_job(way: Way, tmp_path: Path) -> None:
    at = WayBench(way, tmp_path)

    steps = spread(at.steps, random.Random(1))[: 2 * _SAMPLE]
    wrong = {step: found for step in steps if (found := at.kill_at(step))}

    assert wrong == {}
    assert any("before" in name for name, _ in at.steps)
    assert any(way.package in name for name, _ in at.steps)

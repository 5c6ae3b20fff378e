"""A job's way through each adapter, with its worker killed while it stands inside any step of it.

The steps are the SQL statements, what changes files, and the begin and end of each function of the adapter: after the
claim, before the acknowledgement, between the result and that, within a retry, a follow-up or a move from the schedule.
"""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.proof.figures import Figures
from tests.proof.ledger import Ledger, PlannedError
from tests.proof.standing import Child, Step, Steps, ask
from tests.test_storage_model import FAULTS

from litebroker.sqlite import SQLiteStorage

_LIMIT_S = 15


@dataclass(frozen=True)
class Way:
    """Attributes.

    fill: Puts its jobs into the file.
    work: Works until nothing is left.
    dead: The names of the jobs that became dead letters, with their reasons.
    package: Whose functions' begins and ends are steps.
    """

    name: str
    package: str
    fill: Callable[[Path], None]
    work: Callable[[Path], None]
    dead: Callable[[Path], dict[str, str]]


def _do(folder: Path, key: str) -> str:
    """What each job does: note it, and raise if it is one that does."""
    ledger = Ledger(folder)
    ledger.tell("start", key)
    with suppress(FileExistsError):
        if key == "raises":
            (folder / "raised").touch(exist_ok=False)
            raise PlannedError(key)
    if key == "fails":
        raise PlannedError(key)
    ledger.tell("end", key)
    return key


# -- dramatiq --


def _broker(folder: Path) -> Any:
    import dramatiq
    from dramatiq.results import Results

    from litebroker_dramatiq import SQLiteBroker, SQLiteResultBackend

    broker = SQLiteBroker(folder / "jobs.db")
    broker.add_middleware(Results(backend=SQLiteResultBackend(folder / "jobs.db")))
    dramatiq.set_broker(broker)

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, max_backoff=5, store_results=True)
    def run(key: str) -> str:
        return _do(folder, key)

    return broker


def _fill_dramatiq(folder: Path) -> None:
    import dramatiq

    broker = _broker(folder)
    run = broker.get_actor("run")
    dramatiq.pipeline([run.message("first"), run.message_with_options(args=("next",), pipe_ignore=True)]).run()
    for key in ("raises", "fails"):
        run.send(key)
    run.send_with_options(args=("late",), delay=30)
    broker.close()


def _work_dramatiq(folder: Path) -> None:
    import dramatiq

    broker = _broker(folder)
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    broker.join("default", timeout=_LIMIT_S * 1000)
    worker.stop()


def _dead_dramatiq(folder: Path) -> dict[str, str]:
    broker = _broker(folder)
    letters = broker.dead_letters()
    return {letter.message.args[0]: letter.reason for letter in letters if letter.message is not None}


# -- huey --


def _huey(folder: Path) -> Any:
    from litebroker_huey import SQLiteHuey

    huey = SQLiteHuey("proof", filename=folder / "jobs.db", read_timeout=0.02)

    def run(key: str) -> str:
        return _do(folder, key)

    def follow(key: str, _result: str) -> str:
        return _do(folder, key)

    return huey, huey.task(retries=1, name="run")(run), huey.task(name="follow")(follow)


def _fill_huey(folder: Path) -> None:
    huey, run, follow = _huey(folder)
    huey.enqueue(run.s("first").then(follow, "next"))
    for key in ("raises", "fails"):
        run(key)
    run.schedule(("late",), delay=0.03)
    huey.storage.close()


def _work_huey(folder: Path) -> None:
    huey, *_ = _huey(folder)
    huey.create_consumer(workers=1)
    for _ in range(100):
        huey._prefetch.ran(0.0)  # noqa: SLF001 - so that it takes tasks for short, and claims several
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        for task in huey.read_schedule():
            huey.enqueue(task)
        task = huey.dequeue()
        if task is not None:
            huey.execute(task)
        elif not (huey.pending_count() or huey.scheduled_count() or huey.inflight_count()):
            return
    raise TimeoutError("not all tasks came to an end")


def _dead_huey(folder: Path) -> dict[str, str]:
    huey, *_ = _huey(folder)
    jobs = [(huey.storage.engine.get(dead.job_id), dead.reason) for dead in huey.dead_tasks()]
    return {huey.deserialize_task(job.payload).args[0]: reason for job, reason in jobs}


# -- rq --


def rq_job(folder: str, key: str) -> str:
    return _do(Path(folder), key)


def _rq_queue(folder: Path) -> Any:
    import rq

    from litebroker_rq import connect

    return rq.Queue("proof", connection=connect(folder / "jobs.db"))


def _fill_rq(folder: Path) -> None:
    import rq

    queue = _rq_queue(folder)

    def put(key: str, **options: object) -> object:
        return queue.enqueue(rq_job, str(folder), key, job_id=key, failure_ttl=-1, **options)

    put("next", depends_on=put("first"))
    put("raises", retry=rq.Retry(max=1))
    put("fails")


def _work_rq(folder: Path) -> None:
    import rq

    queue = _rq_queue(folder)
    connection = queue.connection
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        worker = rq.SimpleWorker([queue], connection=connection)
        worker.work(burst=True, logging_level="CRITICAL")
        started = queue.started_job_registry.get_job_ids(cleanup=False)
        if not started and not queue.count:
            return
    raise TimeoutError("not all jobs came to an end")


def _dead_rq(folder: Path) -> dict[str, str]:
    queue = _rq_queue(folder)
    found = {}
    for key in queue.failed_job_registry.get_job_ids():
        text = str(queue.fetch_job(key).latest_result().exc_string)
        found[key] = "planned" if "PlannedError" in text else "lapsed" if "AbandonedJobError" in text else text
        # What waits for a job that failed goes on waiting: RQ's rule.
        found |= {"next": "waits"} if key == "first" else {}
    return found


WAYS = {
    way.name: way
    for way in (
        Way("dramatiq", "litebroker_dramatiq", _fill_dramatiq, _work_dramatiq, _dead_dramatiq),
        Way("huey", "litebroker_huey", _fill_huey, _work_huey, _dead_huey),
        Way("rq", "litebroker_rq", _fill_rq, _work_rq, _dead_rq),
    )
    if find_spec(way.name) is not None
}


def _check(way: Way, folder: Path) -> list[str]:
    """Another worker goes on; then what is wrong. In a process of its own."""
    _quiet()
    way.work(folder)
    wrong = []
    dead = way.dead(folder)
    lines = (folder / "ledger").read_text().split("\n") if (folder / "ledger").exists() else []
    told = Counter(lines)
    expected = {"first", "next", "raises", "fails", *(["late"] if way.name != "rq" else [])}
    for key in sorted(expected):
        ends = told[f"end {key}"]
        if not ends and key not in dead:
            wrong.append(f"{key} is lost: {lines}")
        if ends > 2:  # of two workers
            wrong.append(f"{key} ended {ends} times: {lines}")
    if unexpected := {key: reason for key, reason in dead.items() if key != "fails" and way.name != "rq"}:
        wrong.append(f"one kill made dead letters of {unexpected}")
    with closing(SQLiteStorage(folder / "jobs.db")) as storage:
        if storage.execute("pragma integrity_check") != [("ok",)]:
            wrong.append("integrity_check found the file damaged")
        wrong += [what for what, statement in FAULTS.items() if storage.execute(statement)]
    return wrong


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


class WayBench:
    """One way: its steps, and a worker that is killed at any of them."""

    def __init__(self, way: Way, folder: Path) -> None:
        self.way, self.folder = way, folder
        self._number = 0
        here = self._filled()
        self.steps: list[Step] = list(
            dict.fromkeys((name, count) for name, count in ask(lambda: self._run(here, None)))
        )

    def _filled(self) -> Path:
        self._number += 1
        here = self.folder / str(self._number)
        here.mkdir()
        ask(lambda: self.way.fill(here))
        return here

    def _run(self, here: Path, stand_at: Step | None) -> list[Step]:
        _quiet()
        steps = Steps(stand_at)
        steps.at_statements()
        steps.at_system_calls(self.way.package)
        steps.arm()
        self.way.work(here)
        steps.disarm()
        return steps.seen if stand_at is None else []

    def kill_at(self, step: Step) -> list[str] | None:
        """What was wrong afterwards; None when it did not come to this step."""
        here = self._filled()
        child = Child(lambda: self._run(here, step))
        wrong: list[str] | None = None
        try:
            if child.stands():
                child.kill()
                wrong = list(ask(lambda: _check(self.way, here)))
        except ChildProcessError as error:
            wrong = [str(error)]
        shutil.rmtree(here)
        return wrong


def spread(steps: list[Step], chance: random.Random) -> list[Step]:
    """Each kind of step once, in an order drawn by chance, then each a second time at another arrival, and so on."""
    kinds: dict[str, list[Step]] = {}
    for step in chance.sample(steps, len(steps)):
        kinds.setdefault(step[0], []).append(step)
    ranked = [(rank, step) for found in kinds.values() for rank, step in enumerate(found)]
    chance.shuffle(ranked)
    return [step for _, step in sorted(ranked, key=lambda it: it[0])]


def adapters(folder: Path, seconds: float, seed: int) -> Figures:
    """Kills at steps, drawn by chance, of each adapter in turn, until the time is up."""
    figures = Figures("adapters", seed)
    chance = random.Random(seed)
    with figures.timed():
        deadline = time.monotonic() + seconds
        benches = []
        for way in WAYS.values():
            (folder / way.name).mkdir()
            bench = WayBench(way, folder / way.name)
            benches.append((bench, spread(bench.steps, chance)[::-1]))
        while any(steps for _, steps in benches):
            for bench, steps in benches:
                if steps:
                    step = steps.pop()
                    wrong = bench.kill_at(step)
                    figures.fault("steps not reached again" if wrong is None else "kills inside a step")
                    figures.jobs += 5
                    where = f"{bench.way.name}, {step[0]} ({step[1]})"
                    figures.wrong("unexplained", *(f"{where}: {what}" for what in wrong or ()))
                if time.monotonic() > deadline:
                    return figures
    return figures

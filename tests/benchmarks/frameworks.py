"""Dramatiq, Huey and RQ: on litebroker beside Redis, and beside what else keeps their jobs in SQLite.

Redis keeps nothing on disk here, so the fair comparison is with ``relaxed``; the default's figures stand beside. The
measurements are those of `bench_dramatiq`, `bench_huey` and `bench_rq`, which also run by themselves and measure more.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import HueyStorage, connections_made, found_settings
from tests.benchmarks.measuring import OURS, Bench, Line, Sample, Series, compared, told, turned

# What RQ and redis-py take themselves, on a connection that has its answers ready.
CANNED = "RQ itself, no storage"
REDIS, DEFAULT = "Redis", f"{OURS}, default"
RELAXED = "relaxed / nothing on disk"

# What is wanted, of Redis.
DRAMATIQ = {"send": 3, "drain": 3, "command": 2}
HUEY = {"enqueue": 3, "threads": 3, "processes": 1.5}
RQ = {"enqueue": 2, "enqueue_many": None, "SimpleWorker": 2, "Worker (forks)": 1}


def dramatiq(bench: Bench) -> Iterator[Line]:
    """Messages sent one by one, and drained by a Worker and by the command."""
    module = _measurements("dramatiq")
    titles = {
        "send": (module.send, "Dramatiq: send"),
        "drain": (module.drain, "Dramatiq: drain, a Worker of 8 threads"),
        "command": (module.drain_command, "Dramatiq: drain, the command with 2 processes"),
    }
    kinds = {OURS: "relaxed", DEFAULT: "durable", "StubBroker, in memory": "stub"}
    settings = {}
    with bench.place() as folder, module.redis_server(folder) as url:
        if url is not None:
            kinds = {REDIS: "redis", **kinds}
        if importlib.util.find_spec("dramatiq_sqlite") is not None:
            kinds["dramatiq-sqlite"] = "dramatiq-sqlite"
            settings["dramatiq-sqlite"] = _settings_of_dramatiq_sqlite(module, folder)
        places = {name: module.Place(kind, folder, url) for name, kind in kinds.items()}
        for key, (measure, title) in titles.items():
            # A StubBroker's messages do not leave their process, and dramatiq-sqlite is slow to read.
            inside = {name: it for name, it in places.items() if key != "command" or it.name != "stub"}

            def run(name: str, measure: Any = measure, key: str = key) -> float:
                slow = places[name].name == "dramatiq-sqlite" and key != "send"
                return float(measure(places[name], max(bench.count(1000 if slow else 10_000), 20)))

            yield _line("dramatiq", title, _in_turns(bench, inside, run), DRAMATIQ[key], settings)


def _settings_of_dramatiq_sqlite(module: Any, folder: Path) -> str:
    with connections_made() as connections:
        module.open_broker(f"dramatiq-sqlite {folder}/settings.db").close()
    return found_settings(connections[-1])


def huey(bench: Bench) -> Iterator[Line]:
    """Tasks enqueued one by one, and drained by consumers of 4 threads and of 2 processes."""
    module = _measurements("huey")
    names = {REDIS: "redis", OURS: "relaxed", DEFAULT: "durable", "full": "full", "SqliteHuey": "sqlite"}
    if shutil.which("redis-server") is None:
        del names[REDIS]
    keys = ("enqueue", "threads", "processes")
    titles = ("Huey: enqueue", "Huey: drain, 4 threads", "Huey: drain, 2 processes")
    with bench.place() as folder, ExitStack() as stack:
        # `Server.choose` tells its processes by the environment.
        stack.callback(_restore, dict(os.environ))
        storage = HueyStorage(folder / "settings.db", "full")
        settings = {"SqliteHuey": storage.settings()}
        storage.close()
        servers = {name: stack.enter_context(module.Server(backend)) for name, backend in names.items()}

        def run(name: str) -> Sequence[float]:
            servers[name].choose()
            found: Sequence[float] = module.measure(max(bench.count(6000), 500))
            return found

        found = _in_turns(bench, names, run, parts=len(keys))
    for part, (key, title) in enumerate(zip(keys, titles, strict=True)):
        series = {name: parts[part] for name, parts in found.items()}
        full = {name: series.pop(name) for name in ("SqliteHuey", "full")}
        yield _line("huey", title, series, HUEY[key], settings)
        full["SqliteHuey"].settings = settings["SqliteHuey"]
        yield compared("huey", title, "full / FULL", full, base="SqliteHuey", ours="full")


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def rq(bench: Bench) -> Iterator[Line]:
    """Jobs enqueued one by one and in one call, and done by a worker that forks and by one that does not."""
    module = _measurements("rq")
    logging.disable(logging.ERROR)
    try:
        with bench.place() as folder, ExitStack() as stack:
            clients: dict[str, Callable[[], Any]] = {}
            if shutil.which("redis-server") is not None:
                url = stack.enter_context(module.redis_server(folder))
                clients[REDIS] = lambda: module.redis.Redis.from_url(url)
            clients[OURS] = lambda: module.connect(folder / "relaxed.db", durability="relaxed")
            clients[DEFAULT] = lambda: module.connect(folder / "default.db", durability="durable")
            jobs = max(bench.count(2000), 20)
            horse = module.canned.Tape()
            module.drain(module.canned.client(module.canned.Recording, folder / "horse.db", horse), 100)
            for key, measure in module.MEASURES.items():
                tape, recorded = module.canned.Tape(horse), folder / f"{key}.db"
                measure(module.canned.client(module.canned.Recording, recorded, tape), jobs)
                makers = dict(clients)
                if measure is not module.drain_forking:  # which would fork this process, large as it is
                    makers[CANNED] = module.canned.client(module.canned.Canned, recorded, tape)

                def run(name: str, measure: Any = measure, makers: Any = makers, tape: Any = tape) -> float:
                    if name == CANNED:
                        tape.rewind()
                    else:
                        makers[name]().flushdb()
                    return float(measure(makers[name], jobs))

                yield _line("rq", f"RQ: {key}", _in_turns(bench, makers, run), RQ.get(key), {})
    finally:
        logging.disable(logging.NOTSET)


def _measurements(framework: str) -> Any:
    """The module that measures it; importing that needs the framework."""
    try:
        return importlib.import_module(f"tests.benchmarks.bench_{framework}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing: pip install -e '.[{framework}]'", name=error.name
        ) from None


def _in_turns(
    bench: Bench, names: Mapping[str, object], run: Callable[[str], Any], *, parts: int = 0
) -> dict[str, Any]:
    """A series for each, or so many where each run answers several rates."""
    found = {name: [Series() for _ in range(parts or 1)] for name in names}
    for number in range(bench.rounds):
        for name in turned([name for name in found if not found[name][0].failure], number):
            try:
                rates = run(name) if parts else [run(name)]
            except Exception as error:  # noqa: BLE001 (a peer may raise anything)
                for series in found[name]:
                    series.failure = told(error)
                continue
            for series, rate in zip(found[name], rates, strict=True):
                series.append(Sample(rate))
    return {name: series if parts else series[0] for name, series in found.items()}


def _line(work: str, title: str, series: dict[str, Series], times: float | None, settings: Mapping[str, str]) -> Line:
    for name, text in settings.items():
        if name in series:
            series[name].settings = text
    return compared(work, title, RELAXED, series, base=REDIS, at_least=times)

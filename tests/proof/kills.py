"""Workers and producers under load, killed at random moments; a ledger beside the file tells what became of all."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from tests.proof.figures import Figures
from tests.proof.fleets import Fleet, count_left, dead_letters
from tests.proof.ledger import Account, Ledger
from tests.proof.processes import Herd, members

from litebroker import SQLiteStorage

_DRAIN_S = 90.0
_AT_WORK_S = 15.0
_FEWEST = 2
# So often a kill waits until there is work again; at other times it may strike while things start.
_UNDER_LOAD = 0.75
# A producer dies now and then, too: what it was adding may be there or not, and all that was acknowledged has to be.
_PRODUCER = 0.1


class _Campaign:
    def __init__(self, fleet: Fleet, folder: Path, seed: int) -> None:
        self.fleet = fleet
        self.chance = random.Random(seed)
        self.path = folder / "jobs.db"
        self.ledger = Ledger(folder)
        driver = "apsw" if seed // 3 % 3 == 0 and find_spec("apsw") is not None else "sqlite3"
        durability = ("relaxed", "durable", "full")[seed % 3 if fleet.name != "claims" else 0]
        url = f"sqlite:///{self.path}?driver={driver}&durability={durability}"
        self.herd = Herd(
            folder,
            {
                "PROOF_FOLDER": str(folder),
                "PROOF_URL": url,
                "RQ_CONNECTION_CLASS": "litebroker_rq.SQLiteConnection",
                "RQ_REDIS_URL": url,
                "LITEBROKER_URL": url,
                "PROOF_BACKLOG": str(fleet.backlog),
            },
        )
        self.workers: list[subprocess.Popen[bytes]] = []
        self.struck: set[int] = set()  # the workers of which something was killed
        self.wrong: list[str] = []
        self.producer: subprocess.Popen[bytes] | None = None

    def start_missing(self, *, produce: bool = True) -> None:
        """Start what is not at work; what a worker's end has left of it is killed first."""
        for worker in list(self.workers):
            if worker.poll() is not None:
                if not self.struck & {worker.pid}:
                    self.wrong.append(f"a worker ended by itself, with {worker.returncode}")
                self.clear(worker)
                self.workers.remove(worker)
        while len(self.workers) < self.fleet.workers:
            self.workers.append(self.herd.start([sys.executable, *self._command()]))
        if self.producer is not None and self.producer.poll() is not None:
            self.clear(self.producer)
            self.producer = None
        if self.producer is None and produce:
            program = f"from tests.proof.apps.{self.fleet.app} import producer; producer()"
            self.producer = self.herd.start([sys.executable, "-c", program])

    def _command(self) -> list[str]:
        command = list(self.fleet.command)
        return [*command, "--queue", "proof"] if self.fleet.name == "command" else command

    def clear(self, process: subprocess.Popen[bytes]) -> int:
        hit = self.herd.kill(members(process.pid), self.ledger)
        self.herd.clear(process)
        return hit

    def wait_for_work(self) -> None:
        """Until jobs have come to their ends since the last strike."""
        deadline = time.monotonic() + _AT_WORK_S
        told = self.path.with_name("ledger")
        begun = told.stat().st_size
        while b"\nend" not in _from(told, begun) and time.monotonic() < deadline:
            time.sleep(0.01)

    def strike(self) -> int:
        """Kill something; how many processes."""
        if self.producer is not None and self.chance.random() < _PRODUCER:
            return self.herd.kill([self.producer.pid], self.ledger)
        worker = self.chance.choice(self.workers)
        self.struck.add(worker.pid)
        living = members(worker.pid)
        alone = [pid for pid in living if pid != worker.pid or not self.fleet.spare]
        if self.chance.random() < self.fleet.whole or not alone:
            return self.herd.kill(living, self.ledger)
        return self.herd.kill([self.chance.choice(alone)], self.ledger)

    def drain(self, figures: Figures) -> None:
        """Let healthy workers come to the end of all that is left."""
        if self.producer is not None:
            figures.fault("kills", self.clear(self.producer))
            self.producer = None
        deadline = time.monotonic() + _DRAIN_S
        while count_left(self.path) and time.monotonic() < deadline and not self.wrong:
            self.start_missing(produce=False)
            time.sleep(0.2)


def _from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def kills(fleet: Fleet, folder: Path, *, seconds: float, seed: int) -> Figures:
    """One round with one kind of worker: so many seconds of kills, then a quiet end, then the account."""
    figures = Figures(f"kills: {fleet.name}", seed)
    with figures.timed():
        campaign = _Campaign(fleet, folder, seed)
        try:
            deadline = time.monotonic() + seconds
            while (time.monotonic() < deadline or figures.faults["kills"] < _FEWEST) and not campaign.wrong:
                campaign.start_missing()
                if campaign.chance.random() < _UNDER_LOAD:
                    campaign.wait_for_work()
                time.sleep(min(campaign.chance.expovariate(1 / fleet.pause_s), 4 * fleet.pause_s))
                figures.fault("kills", campaign.strike())
            campaign.start_missing()
            campaign.drain(figures)
            for worker in campaign.workers:
                if not campaign.herd.stop(worker):
                    figures.wrong("unexplained", f"a worker of {fleet.name} did not end on SIGTERM")
            _judge(campaign, figures)
        finally:
            campaign.herd.close()
            campaign.ledger.close()
    return figures


def _judge(campaign: _Campaign, figures: Figures) -> None:
    dead, left = dead_letters(campaign.path)
    figures.wrong("unexplained", *campaign.wrong)
    verdict = Account(campaign.path.parent).judge(dead, left)
    figures.jobs, figures.runs, figures.dead = verdict.jobs, verdict.runs, verdict.dead
    figures.wrong("lost", *verdict.lost)
    figures.wrong("doubly_leased", *verdict.doubly_leased)
    figures.wrong("unexplained", *verdict.unexplained)
    with closing(SQLiteStorage(campaign.path)) as storage:
        if storage.execute("pragma integrity_check") != [("ok",)]:
            figures.wrong("unexplained", "integrity_check found the file damaged")

"""What was done and what came of it, in figures that can be added up."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# The three that have to be 0.
BAD = ("lost", "doubly_leased", "unexplained")


@dataclass
class Figures:
    """Of one part of the campaign.

    Attributes:
        faults: How often something was done to it, by name: kills, and whatever else goes wrong on bad days.
        jobs: How many jobs went through that.
        found: What should not have been, in words. Each counts under one of `BAD`.
    """

    part: str
    seed: int
    seconds: float = 0.0
    jobs: int = 0
    runs: int = 0
    dead: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubly_leased: int = 0
    unexplained: int = 0
    found: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubly_leased or self.unexplained)

    def fault(self, what: str, times: int = 1) -> None:
        self.faults[what] += times

    def wrong(self, kind: str, *what: str) -> None:
        """Count what should not have been. ``kind`` is one of `BAD`."""
        setattr(self, kind, getattr(self, kind) + len(what))
        self.found += [f"{kind}: {it}" for it in what]

    @contextmanager
    def timed(self) -> Iterator[Figures]:
        began = time.monotonic()
        try:
            yield self
        finally:
            self.seconds += time.monotonic() - began

    def line(self) -> str:
        faults = ", ".join(f"{count:,} {name}" for name, count in self.faults.most_common()) or "no faults"
        bad = ", ".join(f"{name.replace('_', ' ')} {getattr(self, name)}" for name in BAD)
        return f"{self.part}: {self.seconds:.0f} s, seed {self.seed}: {faults}; {self.jobs:,} jobs; {bad}"

    def as_json(self) -> str:
        return json.dumps({**vars(self), "versions": versions()})


def versions() -> dict[str, str]:
    """Of all that took part."""
    found = {
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "Linux": ".".join(platform.release().split(".")[:2]),
    }
    for name in ("apsw", "dramatiq", "huey", "rq", "gevent"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read(record: Path) -> list[Figures]:
    """All that was recorded, a line each."""
    found = []
    for line in record.read_text().splitlines() if record.exists() else []:
        fields = json.loads(line)
        fields.pop("versions")
        found.append(Figures(**{**fields, "faults": Counter(fields["faults"])}))
    return found


def recorded_versions(record: Path) -> dict[str, list[str]]:
    """Every version that took part in what was recorded."""
    found: dict[str, list[str]] = {}
    for line in record.read_text().splitlines():
        for name, version in json.loads(line)["versions"].items():
            known = found.setdefault(name, [])
            if version not in known:
                known.append(version)
    return found


def total(figures: Sequence[Figures], part: str) -> Figures:
    """All of them as one."""
    together = Figures(part, 0)
    for one in figures:
        together.seconds += one.seconds
        together.jobs += one.jobs
        together.runs += one.runs
        together.dead += one.dead
        together.faults += one.faults
        for kind in BAD:
            setattr(together, kind, getattr(together, kind) + getattr(one, kind))
        together.found += one.found
    return together

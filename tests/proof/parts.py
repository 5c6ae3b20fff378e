"""The parts of the campaign, by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.proof.adapters import adapters
from tests.proof.bad_days import bad_days
from tests.proof.failpoints import failpoints
from tests.proof.figures import Figures
from tests.proof.fleets import FLEETS, Fleet
from tests.proof.histories import histories
from tests.proof.kills import kills
from tests.proof.model import model
from tests.proof.wal_reset import wal_reset


@dataclass(frozen=True)
class Part:
    """Attributes: ``seconds``: what one round of it takes in a long campaign, about."""

    name: str
    seconds: float
    run: Callable[[Path, float, int], Figures]


def _kills(fleet: Fleet) -> Part:
    def run(folder: Path, seconds: float, seed: int) -> Figures:
        return kills(fleet, folder, seconds=seconds, seed=seed)

    return Part(f"kills: {fleet.name}", 40, run)


_PARTS = (
    *(_kills(fleet) for fleet in FLEETS.values() if fleet.can_run),
    Part("failpoints", 120, failpoints),
    Part("adapters", 120, adapters),
    Part("histories", 60, histories),
    Part("model", 60, model),
    Part("WAL resets", 30, wal_reset),
    Part("bad days", 300, bad_days),
)
PARTS = {part.name: part for part in _PARTS}

"""What litebroker costs, beside the least that a queue on SQLite can cost: ``python -m tests.benchmarks``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A bare checkout is enough: nothing has to be installed.
SOURCES = [str(ROOT / "core"), str(ROOT / "integrations"), str(ROOT)]
sys.path[:0] = [source for source in SOURCES if source not in sys.path]

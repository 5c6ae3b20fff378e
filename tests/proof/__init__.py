"""What breaks it: a campaign of faults, with figures. ``python -m tests.proof --minutes N``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A bare checkout is enough, here and in the processes that are started: nothing has to be installed.
SOURCES = [str(ROOT / "core"), str(ROOT / "integrations"), str(ROOT)]
sys.path[:0] = [source for source in SOURCES if source not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(SOURCES)

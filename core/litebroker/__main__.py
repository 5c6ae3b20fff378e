"""``python -m litebroker``: the command, where its script is not on PATH."""

from __future__ import annotations

from litebroker.cli import main

main()

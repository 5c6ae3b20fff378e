"""The report: a table of figures, printed, and written between two marks of a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.proof.figures import Figures, read, recorded_versions, total

BEGIN, END = "<!-- the figures of tests.proof begin -->", "<!-- the figures of tests.proof end -->"


def table(rounds: Sequence[Figures]) -> str:
    """A line for each part, and one for all of it."""
    names = list(dict.fromkeys(figures.part for figures in rounds))
    lines = [total([it for it in rounds if it.part == name], name) for name in names]
    rows = [_row(line) for line in [*lines, total(rounds, "**all**")]]
    heads = ["part", "minutes", "kills", "jobs", "runs", "dead letters", "lost", "doubly leased", "unexplained", "and"]
    texts = [heads, ["---", *["---:"] * 8, "---"], *rows]
    return "\n".join(f"| {' | '.join(texts_)} |" for texts_ in texts)


def _row(figures: Figures) -> list[str]:
    kills = sum(count for what, count in figures.faults.items() if what.startswith("kills"))
    others = [f"{count:,} {what}" for what, count in figures.faults.most_common() if not what.startswith("kills")]
    numbers = [
        kills,
        figures.jobs,
        figures.runs,
        figures.dead,
        figures.lost,
        figures.doubly_leased,
        figures.unexplained,
    ]
    return [figures.part, f"{figures.seconds / 60:.1f}", *(f"{number:,}" for number in numbers), ", ".join(others)]


def write(page: Path, record: Path) -> None:
    """Put the table of everything that was recorded into the page."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no {BEGIN} ... {END}: write both where the table shall be")
    with_versions = "; ".join(f"{name} {' and '.join(found)}" for name, found in recorded_versions(record).items())
    rounds = read(record)
    minutes = sum(figures.seconds for figures in rounds) / 60
    summary = f"{len(rounds)} rounds, {minutes:.0f} minutes, until {time.strftime('%Y-%m-%d')}; with {with_versions}."
    page.write_text(f"{before}{BEGIN}\n\n{summary}\n\n{table(rounds)}\n\n{END}{after}")

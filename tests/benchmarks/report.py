"""What was found, as tables in Markdown and as a chart in SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tests.benchmarks.contestants import WHEN_KILLED, OursBelow
from tests.benchmarks.measuring import OURS, RAW, Line

BEGIN, END = "<!-- Made by `python -m tests.benchmarks --docs`: begin -->", "<!-- end -->"
CHART = "benchmarks.svg"
VERDICTS = {None: "", True: "reached", False: "**not reached**"}
# Bases that are litebroker, too, at other work: the chart is about others.
ITSELF = ("at 1,000", "without a key", "nothing kept", "100 threads", "threads")
HEADS = ("work", "level", "beside", OURS, "ratio", "CPU µs", "others", "to reach", "")


def markdown(where: Mapping[str, str], lines: Sequence[Line], *, chart: str | None = None) -> str:
    """Everything: on what, the chart, the figures, and who took part."""
    loads = [line.load for line in lines if line.load is not None]
    spread = {"load when a work began": f"{min(loads):.1f} to {max(loads):.1f}"} if loads else {}
    parts = ["\n".join(f"* {name}: {value}" for name, value in {**where, **spread}.items())]
    if chart is not None:
        parts.append(f"![Rates of litebroker, of bare sqlite3, of Redis and of other queues]({chart})")
    parts += [figures(lines), took_part(lines)]
    failed = [f"* {line.title} [{line.level}]: {name} failed: {why}" for line in lines for name, why in line.failures()]
    if failed:
        parts.append("\n".join(failed))
    return "\n\n".join(part for part in parts if part)


def figures(lines: Sequence[Line]) -> str:
    """The table of all lines."""
    return _table(HEADS, [_cells(line) for line in lines])


def _cells(line: Line) -> tuple[str, ...]:
    ours, base = line.entries.get(OURS), line.entries.get(line.base)
    times = [entry.cpu_us for entry in (base, ours) if entry is not None]
    others = [
        f"{name} {entry.text}{'' if entry.times is None else f': {_times(entry.times)} x'}"
        for name, entry in line.entries.items()
        if name not in (OURS, line.base) and entry.text
    ]
    return (
        line.title,
        line.level,
        f"{base.text} {line.base}" if base and base.text else "",
        (ours.text or "failed") if ours else "",
        _times(base.times) if base and base.times is not None else "",
        " / ".join(f"{time:.0f}" if time is not None else "-" for time in times) if any(times) else "",
        "; ".join(others),
        line.wanted,
        VERDICTS[line.reached] if line.reached is not None or not line.wanted else "not measured",
    )


def _times(times: float) -> str:
    return f"{times:.2f}" if times < 10 else f"{times:,.0f}"


def took_part(lines: Sequence[Line]) -> str:
    """The contestants on SQLite that have figures, with what was found in their connections."""
    settings: dict[str, list[str]] = {}
    for line in lines:
        for name, entry in line.entries.items():
            if entry.settings and entry.settings not in settings.setdefault(name, []):
                settings[name].append(entry.settings)
    rows = [(name, "; ".join(found), WHEN_KILLED.get(name, "")) for name, found in settings.items()]
    if not rows:
        return ""
    return _table(("who", "journal mode / synchronous, as found", "a job whose worker is killed"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [tuple(heads), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    cells.insert(1, tuple("-" * max(width, 3) for width in widths))
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells)


def into_docs(document: Path, where: Mapping[str, str], lines: Sequence[Line]) -> None:
    """Write the figures between the document's markers, and the chart beside it."""
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"{document} has not the markers {BEGIN!r} and {END!r}, once and in this order")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    section = markdown(where, lines, chart=CHART)
    document.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")
    (document.parent / CHART).write_text(svg(lines), encoding="utf-8")


# -- the chart --

WIDTH, MARGIN, COLUMNS = 940, 16, 2
COLUMN = (WIDTH - MARGIN * (COLUMNS + 1)) // COLUMNS
NAME, BAR = 150, 150  # within a column, from left to right; figures follow
ROW, HEAD, GAP = 18, 22, 14

STYLE = """
  .back { fill: #ffffff } text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 }
  .soft { fill: #59636e } .ours { fill: #2563eb } .base { fill: #8b949e } .peer { fill: #c3c9d0 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } text { fill: #e6edf3 }
    .soft { fill: #9198a1 } .ours { fill: #60a5fa } .base { fill: #8b949e } .peer { fill: #57606a }
  }
"""


class _Group(NamedTuple):
    title: str
    level: str
    bars: list[tuple[str, str, float, str]]  # the name, its class, its share of the longest, the figure

    @property
    def height(self) -> int:
        return HEAD + ROW * len(self.bars) + GAP


def svg(lines: Sequence[Line]) -> str:
    """A group of bars for each line that has rates of others; the longest bar is the fastest."""
    groups = list(_groups(lines))
    heights = [MARGIN + 20] * COLUMNS
    drawn: list[str] = []
    for group in groups:
        column = heights.index(min(heights))
        drawn += _drawn(group, MARGIN + column * (COLUMN + MARGIN), heights[column])
        heights[column] += group.height
    height = max(heights) + MARGIN
    said = "Operations a second; in brackets, how many times as fast litebroker is. Each group has its own scale."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Rates of litebroker and of others</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{WIDTH}" height="{height}"/>',
            f'<text class="soft" x="{MARGIN}" y="{MARGIN + 8}">{said}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def _groups(lines: Sequence[Line]) -> Iterator[_Group]:
    head = ""
    for line in lines:
        head = head if line.title.startswith("...") else line.title.partition(",")[0]
        title = re.sub(r"^\.\.\.", head, line.title)
        shown = {name: entry for name, entry in line.entries.items() if name != OursBelow.name and entry.value}
        rates = all(entry.text.endswith("/s") for entry in shown.values())
        if not rates or OURS not in shown or line.base not in shown or line.base in ITSELF:
            continue
        if line.base == RAW and len(shown) < 3 and not line.wanted:
            continue
        most = max(entry.value or 0 for entry in shown.values())
        bars = []
        for name in (OURS, line.base, *(name for name in shown if name not in (OURS, line.base))):
            entry = shown[name]
            times = "" if entry.times is None else f" ({_times(entry.times)} x)"
            kind = "ours" if name.startswith(OURS) else "base" if name == line.base else "peer"
            bars.append((name, kind, (entry.value or 0) / most, f"{entry.text}{times}"))
        yield _Group(title, line.level, bars)


def _drawn(group: _Group, left: int, top: int) -> Iterator[str]:
    yield (
        f'<text x="{left}" y="{top + 14}"><tspan class="title">{escape(group.title)}</tspan>'
        f'<tspan class="soft" dx="8">{escape(group.level)}</tspan></text>'
    )
    for number, (name, kind, share, text) in enumerate(group.bars):
        y, wide = top + HEAD + number * ROW, max(BAR * share, 1)
        yield f'<text x="{left + NAME - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect class="{kind}" x="{left + NAME}" y="{y + 2}" width="{wide:.1f}" height="13" rx="2"/>'
        yield f'<text class="soft" x="{left + NAME + wide + 6:.1f}" y="{y + 12}">{escape(text)}</text>'


def as_json(where: Mapping[str, str], lines: Sequence[Line]) -> dict[str, Any]:
    return {"where": dict(where), "lines": [line.as_json() for line in lines]}

"""Tables that fit a terminal or a pipe, and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from litebroker.explanation import duration as duration  # noqa: PLC0414 - one way to say it, everywhere

_WIDE = 10_000


def print_json(value: Any) -> None:
    """One line of JSON in ASCII, which any terminal and locale can take."""
    click.echo(json.dumps(value))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns, the first to the left and the others to the right; below each other where the terminal is too narrow.

    What goes into a pipe is never cut.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(head):
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    with console.capture() as captured:
        _print(console, table, head, rows)
    # Not through rich, which makes of a closed pipe an exit of its own.
    click.echo(captured.get(), nl=False, color=True)


def _print(console: Console, table: Table, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if Measurement.get(console, console.options.update(width=_WIDE), table).maximum <= console.width:
        console.print(table)
        return
    widest = max(map(len, head[1:]))
    for row in rows:
        console.print(Text(printable(row[0]), style="bold"), soft_wrap=True)
        for name, cell in zip(head[1:], row[1:], strict=True):
            if cell:
                console.print(Text(f"  {name:<{widest}}  {printable(cell)}"), soft_wrap=True)


def printable(text: str) -> str:
    """The text, or its Python form where it holds what a terminal would obey."""
    return text if text.isprintable() else repr(text)

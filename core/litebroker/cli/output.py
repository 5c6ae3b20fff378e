"""Tables that fit a terminal or a pipe, JSON, and questions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from litebroker.arguments import instant
from litebroker.explanation import duration as duration  # noqa: PLC0414 - one way to say it, everywhere

_WIDE = 10_000

Rows = Sequence[Sequence[str]]


def print_json(value: Any) -> None:
    """One line of JSON in ASCII, which any terminal and locale can take."""
    click.echo(json.dumps(value))


def iso(at_ms: int | None) -> str | None:
    """An instant as JSON has it: ISO 8601, UTC, with milliseconds."""
    return None if at_ms is None else instant(at_ms).isoformat(timespec="milliseconds")


def print_table(head: Sequence[str], rows: Rows, *, right: Collection[str] | None = None) -> None:
    """Columns, below each other where the terminal is too narrow. What goes into a pipe is never cut.

    Args:
        right: The columns that stand to the right; None is all but the first.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WIDE)
    with console.capture() as captured:
        console.print(laid_out(console, head, rows, right=right), soft_wrap=True)
    # Not through rich, which makes of a closed pipe an exit of its own.
    click.echo(captured.get(), nl=False, color=True)


def laid_out(console: Console, head: Sequence[str], rows: Rows, *, right: Collection[str] | None = None) -> Group:
    """The table as it fits the console: in columns, or each row's cells below each other."""
    cells = [[printable(cell) for cell in row] for row in rows]
    # Not by rich's own Table, which takes half a millisecond a row.
    widths = [max(map(cell_len, column)) for column in zip(head, *cells, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:
        left = [name not in (head[1:] if right is None else right) for name in head]
        lines = ["  ".join(map(_padded, row, widths, left)).rstrip() for row in (head, *cells)]
        return Group(Text(lines[0], style="bold"), *map(Text, lines[1:]))
    widest = max(map(len, head[1:]))
    below = []
    for row in cells:
        below.append(Text(row[0], style="bold"))
        below += [Text(f"  {name:<{widest}}  {cell}") for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    return Group(*below)


def _padded(cell: str, width: int, left: bool) -> str:  # noqa: FBT001 - as `map` gives it
    """As wide as the column is on a terminal, where some letters take two places and some none."""
    space = " " * (width - cell_len(cell))
    return cell + space if left else space + cell


def printable(text: str) -> str:
    """The text, or its Python form where it holds what a terminal would obey."""
    return text if text.isprintable() else repr(text)


def tell(message: str) -> None:
    """A line on stderr, beside the output."""
    click.echo(printable(message), err=True)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is destroyed, on stderr, unless ``--yes`` has answered.

    Raises:
        click.ClickException: The answer was no.
        click.UsageError: Nobody can be asked, since stdin is no terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"give --yes, since nobody can be asked here: {question}")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was done")

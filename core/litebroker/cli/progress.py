"""Progress of long work: a bar on stderr, in a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Show how far it is. What it gives takes how much is done, and how much there is, as far as that is known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)

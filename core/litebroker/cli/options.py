"""What commands share: where the database is, which queues are meant, and how times are written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import click

from litebroker.errors import LitebrokerError
from litebroker.jobs import QueueInfo
from litebroker.sqlite import SQLiteStorage, open_storage
from litebroker.sqlite.location import MEMORY, Options, parse
from litebroker.storage import Storage

_F = TypeVar("_F", bound=Callable[..., Any])

VARIABLE = "LITEBROKER_URL"
_WHOLE = 1000  # letters: more than a sentence has
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass
class Place:
    """What the command line has said so far.

    Attributes:
        args: All of its arguments.
        database: The one of ``--db``; the option of a command goes before the group's.
    """

    args: tuple[str, ...] = ()
    database: str | None = None


class Commands(click.Group):
    """A group that shows the whole first sentence of each command's help, where click cuts it to one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, it.get_short_help_str(_WHOLE)) for name, it in found if it is not None])


def _remember(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Place).database = value


def database_option(command: _F) -> _F:
    """Add ``--db``."""
    return click.option(
        "--db",
        metavar="PATH_OR_URL",
        expose_value=False,
        callback=_remember,
        help=f"The database; without it, the environment variable {VARIABLE}.",
    )(command)


def database(ctx: click.Context) -> str:
    """Where the database is. Raises ``click.UsageError`` when nobody said."""
    found = ctx.ensure_object(Place).database
    found = os.environ.get(VARIABLE) if found is None else found
    if not found:
        raise click.UsageError(f"which database? Give --db PATH_OR_URL, or set {VARIABLE}.", ctx)
    return found


@contextmanager
def usage_errors(ctx: click.Context) -> Iterator[None]:
    """Wrong arguments, as the library tells of them, are the user's: exit status 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, LitebrokerError):
            raise
        raise click.UsageError(str(error), ctx) from error


@contextmanager
def opened(ctx: click.Context, *, must_exist: bool = False, **options: Any) -> Iterator[SQLiteStorage]:
    """The database of the command line.

    Args:
        must_exist: Refuse a file that is not there: nobody looks into a new one on purpose.
    """
    where = database(ctx)
    with usage_errors(ctx):
        storage = open_storage(where, **{name: value for name, value in options.items() if value is not None})
    try:
        path = storage.path
        if path is None:
            raise _in_memory(ctx, where)
        if must_exist and not os.path.exists(path):  # noqa: PTH110 (as the storage has it)
            raise click.ClickException(f"{path}: there is no such file")
        if must_exist and os.path.isfile(path) and os.path.getsize(path) == 0:  # noqa: PTH113, PTH202 (as above)
            raise click.ClickException(f"{path}: the file is empty: nothing was ever added to it")
        yield storage
    finally:
        storage.close()


def file_of(ctx: click.Context, *, must_exist: bool = True) -> tuple[str, Options]:
    """The path of the database, and how it is opened, for commands that look after the file and open no storage.

    Raises:
        click.UsageError: It is not understood, or is in memory.
        click.ClickException: There is no such file.
    """
    where = database(ctx)
    with usage_errors(ctx):
        path, found = parse(where)
        options = Options(**found)
    if path == MEMORY:
        raise _in_memory(ctx, where)
    if must_exist and not os.path.isfile(path):  # noqa: PTH113 (as the storage has it)
        raise click.ClickException(f"{path}: there is no such file")
    return path, options


def _in_memory(ctx: click.Context, where: str) -> click.UsageError:
    return click.UsageError(f"{where!r} would be gone when this command ends: give the path of a file", ctx)


def queues_option(command: _F) -> _F:
    """Add ``--queue``, as ``names``, which `named_queues` looks up."""
    return click.option(
        "--queue", "names", metavar="NAME", multiple=True, help="Only this queue. May be given several times."
    )(command)


def named_queues(storage: Storage, names: Sequence[str]) -> list[QueueInfo]:
    """The queues of these names; all, where none is named. Raises ``click.ClickException`` for one that is missing."""
    known = storage.queues()
    for name in names:
        if all(it.name != name for it in known):
            there = ", ".join(repr(it.name) for it in known[:10]) or "none"
            raise click.ClickException(f"{storage.location}: there is no queue {name!r}; there are: {there}")
    return [it for it in known if not names or it.name in names]


def duration(text: str) -> float:
    """The type of an option: seconds, or a number with a unit, such as 90, 1.5s, 200ms, 5m, 2h, 7d."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)(ms|[smhd]?)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no length of time: give seconds, or a number with ms, s, m, h or d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def instant(text: str) -> datetime:
    """The type of an option: an ISO 8601 date and time with its time zone, such as 2030-01-31T06:00:00Z."""
    try:
        found = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))  # Python 3.10 has no Z.
    except ValueError:
        raise click.BadParameter(f"{text!r} is no date and time: write it like 2030-01-31T06:00:00Z") from None
    if found.utcoffset() is None:
        raise click.BadParameter(f"{text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    return found

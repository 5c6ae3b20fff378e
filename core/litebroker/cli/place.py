"""The file of the command line, for commands that look after it and do not open it as a storage."""

from __future__ import annotations

import os

import click

from litebroker.cli.options import database, usage_errors
from litebroker.sqlite.location import MEMORY, Options, parse


def file_of(ctx: click.Context, *, must_exist: bool = True) -> tuple[str, Options]:
    """Its path, and how it is opened.

    Raises:
        click.UsageError: It is not understood, or is in memory.
        click.ClickException: There is no such file.
    """
    where = database(ctx)
    with usage_errors(ctx):
        path, found = parse(where)
        options = Options(**found)
    if path == MEMORY:
        raise click.UsageError(f"{where!r} would be gone when this command ends: give the path of a file", ctx)
    if must_exist and not os.path.isfile(path):  # noqa: PTH113 (as the storage has it)
        raise click.ClickException(f"{path}: there is no such file")
    return path, options

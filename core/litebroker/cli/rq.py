"""``litebroker rq ...``: RQ's own commands, on the file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from litebroker.cli.options import database, database_option


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@database_option
@click.pass_context
def rq(ctx: click.Context, argv: tuple[str, ...]) -> Any:
    """Run a command of rq on the file: litebroker rq worker --db jobs.db high default."""
    where = database(ctx)
    try:
        commandline = import_module("litebroker_rq.commandline")
        import_module("rq")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the package {error.name} is not installed: pip install 'litebroker[rq]'"
        ) from error
    ctx.exit(commandline.main(where, argv))

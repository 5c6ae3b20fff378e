"""``litebroker rq ...``: RQ's own commands, on the file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from litebroker.cli.options import database, database_option, usage_errors


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("argv", metavar="COMMAND [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@database_option
@click.pass_context
def rq(ctx: click.Context, argv: tuple[str, ...]) -> Any:
    """Run a command of RQ's own on the file.

    \b
    litebroker rq worker --db jobs.db high default
    litebroker rq info --db jobs.db
    litebroker rq requeue --db jobs.db --queue default --all

    What stands behind rq, but for --db, goes to RQ: litebroker rq COMMAND --help shows RQ's help, and
    https://python-rq.org/docs has the rest.
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if not argv or argv[0] in ctx.help_option_names:
        click.echo(ctx.get_help(), err=not argv)
        ctx.exit(0 if argv else 2)
    where = None if "--help" in argv else database(ctx)  # Help needs no file.
    try:
        commandline = import_module("litebroker_rq.commandline")
        import_module("rq")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the package {error.name} is not installed: pip install 'litebroker[rq]'"
        ) from error
    if where is not None:
        with usage_errors(ctx):
            import_module("litebroker_rq.database").split(where)
    ctx.exit(commandline.main(where, argv))

"""The commands in one group, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from typing import Any, cast

import click

from litebroker.cli.options import Commands, Place, database_option
from litebroker.errors import LitebrokerError

_INTERRUPTED = 130
_PIPE_CLOSED = 141  # As a shell reports a program that SIGPIPE has ended.


# Each command and its module, which is loaded when the command is asked for: together they take longer to load than
# most commands take to run.
_COMMANDS = {
    "add": "add",
    "backup": "backup",
    "check": "doctor",
    "completion": "completion",
    "dead": "dead",
    "doctor": "doctor",
    "export": "transfer",
    "import": "transfer",
    "jobs": "jobs",
    "metrics": "metrics",
    "migrate": "backup",
    "pause": "queues",
    "purge": "queues",
    "queues": "queues",
    "restore": "backup",
    "resume": "queues",
    "rq": "rq",
    "schedules": "schedules",
    "stats": "stats",
    "vacuum": "backup",
    "why": "why",
    "worker": "worker",
}


class _Group(Commands):
    def list_commands(self, _: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        # A keyword of Python's has an underscore behind it there.
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        return cast("click.Command", getattr(import_module(f"litebroker.cli.{module}"), name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # Click does so by itself, in later releases, where all commands are loaded.
            near = " or ".join(repr(it) for it in get_close_matches(args[0], _COMMANDS))
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near}?", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except LitebrokerError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            # Python would write what is left once more at its end, and complain.
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123 (no path, but a device)
                os.dup2(nothing.fileno(), sys.stdout.fileno())
            ctx.exit(_PIPE_CLOSED)
        except OSError as error:
            raise click.ClickException(str(error)) from error
        return result


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001 (click calls it so)
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"litebroker {version('litebroker')}")
        except PackageNotFoundError:
            raise click.ClickException("litebroker is not installed: it runs from its source folder") from None
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show it.")
@database_option
def litebroker() -> None:
    """Jobs on one SQLite file.

    The file is given by --db, here or behind a command, or by the environment variable LITEBROKER_URL: a path, or
    a URL such as sqlite:///jobs.db.

    It ends with 0 when all went well, 1 when something was refused or failed, 2 when the command line is wrong, and
    130 when it was interrupted.
    """


def run(args: Sequence[str]) -> int:
    """Run the command line; the exit status. What is wrong with it is told on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A terminal that lacks a letter is no reason to fail.
    try:
        result = litebroker.main(list(args), "litebroker", standalone_mode=False, obj=Place(args=tuple(args)))
    except click.ClickException as error:
        with contextlib.suppress(BrokenPipeError):
            error.show()
        return error.exit_code
    except click.Abort:
        return _INTERRUPTED
    return result if isinstance(result, int) else 0

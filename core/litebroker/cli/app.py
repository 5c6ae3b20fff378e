"""The commands in one group, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from litebroker.cli.add import add
from litebroker.cli.backup import backup, migrate, restore, vacuum
from litebroker.cli.completion import completion
from litebroker.cli.dead import dead
from litebroker.cli.doctor import check, doctor
from litebroker.cli.jobs import jobs
from litebroker.cli.metrics import metrics
from litebroker.cli.options import Place, database_option
from litebroker.cli.queues import pause, purge, queues, resume
from litebroker.cli.rq import rq
from litebroker.cli.schedules import schedules
from litebroker.cli.stats import stats
from litebroker.cli.transfer import export, import_
from litebroker.cli.why import why
from litebroker.cli.worker import worker
from litebroker.errors import LitebrokerError

_INTERRUPTED = 130
_PIPE_CLOSED = 141  # As a shell reports a program that SIGPIPE has ended.


class _Group(click.Group):
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


litebroker.add_command(add)
litebroker.add_command(backup)
litebroker.add_command(check)
litebroker.add_command(completion)
litebroker.add_command(dead)
litebroker.add_command(doctor)
litebroker.add_command(export)
litebroker.add_command(import_)
litebroker.add_command(jobs)
litebroker.add_command(metrics)
litebroker.add_command(migrate)
litebroker.add_command(pause)
litebroker.add_command(purge)
litebroker.add_command(queues)
litebroker.add_command(restore)
litebroker.add_command(resume)
litebroker.add_command(rq)
litebroker.add_command(schedules)
litebroker.add_command(stats)
litebroker.add_command(vacuum)
litebroker.add_command(why)
litebroker.add_command(worker)


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

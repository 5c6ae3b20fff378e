"""``litebroker backup``, ``restore``, ``migrate`` and ``vacuum``: looking after the file."""

from __future__ import annotations

import os

import click

from litebroker.cli.options import database_option, file_of, opened
from litebroker.cli.output import print_json
from litebroker.cli.progress import progress
from litebroker.sqlite import schema
from litebroker.sqlite.backup import back_up
from litebroker.sqlite.backup import restore as restored
from litebroker.sqlite.connection import connect

_BUSY_MS = 5000


@click.command()
@click.argument("target", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def backup(ctx: click.Context, target: str, *, force: bool, as_json: bool) -> None:
    """Copy the file while it is in use: one moment of it, whole and checked, as the file TARGET."""
    path, options = file_of(ctx)
    with progress("copying") as show:
        copied = back_up(
            path,
            target,
            driver=options.driver,
            overwrite=force,
            on_step=lambda left, total: show(total - left, total),
        )
    if as_json:
        print_json(
            {"database": path, "backup": target, "bytes": copied.size, "read_for_seconds": copied.read_ms / 1000}
        )
    else:
        click.echo(f"{target}: {copied.size:,} bytes, checked; the file was read for {copied.read_ms / 1000:.2f} s")


@click.command()
@click.argument("source", metavar="BACKUP", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace the database that is there, which nobody may have open.")
@click.option(
    "--requeue-active",
    is_flag=True,
    help="Make the active jobs pending again at once, the attempt not counted; else their leases have to end.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def restore(ctx: click.Context, source: str, *, force: bool, requeue_active: bool, as_json: bool) -> None:
    """Make a database of a BACKUP, where --db says: a new file, or one that nobody uses."""
    path, options = file_of(ctx, must_exist=False)
    with progress("copying") as show:
        copied = restored(
            source,
            path,
            driver=options.driver,
            overwrite=force,
            requeue_active=requeue_active,
            network=options.network,
            on_step=lambda left, total: show(total - left, total),
        )
    if as_json:
        print_json({"backup": source, "database": path, "bytes": copied.size, "requeued": copied.requeued})
    else:
        click.echo(
            f"{path}: {copied.size:,} bytes, checked"
            + (f"; {copied.requeued} active jobs are pending again" if requeue_active else "")
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def migrate(ctx: click.Context, *, as_json: bool) -> None:
    """Bring the file's tables up to this version. Workers do it, too, when they open the file."""
    path, options = file_of(ctx)
    # Before the storage opens it, which migrates.
    db = connect(os.path.realpath(path), options.driver, busy_timeout_ms=_BUSY_MS, read_only=True)
    try:
        before = schema.check(db, path, shared=options.shared)
    finally:
        db.close()
    with opened(ctx) as storage:
        storage.open()
        components = storage.components()
    after = len(schema.migrations())
    if as_json:
        print_json({"database": path, "from": before, "to": after, "components": components})
    elif before == after:
        click.echo(f"{path}: schema {after}, nothing to do")
    else:
        click.echo(f"{path}: schema {before} -> {after}")


@click.command()
@click.option("--full", is_flag=True, help="Write the file anew as a whole; all writers wait meanwhile.")
@click.option(
    "--incremental", is_flag=True, help="With --full: prepare the file, so that later times can do it in bites."
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def vacuum(ctx: click.Context, *, full: bool, incremental: bool, as_json: bool) -> None:
    """Give the space of deleted jobs back to the disk, in short bites where the file allows it."""
    if incremental and not full:
        raise click.UsageError("--incremental needs --full: the file has to be written anew once", ctx)
    with opened(ctx, must_exist=True) as storage, progress("giving back") as show:
        before, after = storage.vacuum(
            full=full, incremental=incremental, on_bite=lambda left, total: show(total - left, total)
        )
        location = storage.location
    if as_json:
        print_json(
            {
                "database": location,
                "before": {"bytes": before.size, "free": before.free},
                "after": {"bytes": after.size, "free": after.free},
                "incremental": after.incremental,
            }
        )
    elif after.size == before.size:
        click.echo(f"{location}: {after.size:,} bytes, nothing to give back")
    else:
        click.echo(f"{location}: {before.size:,} bytes -> {after.size:,}")

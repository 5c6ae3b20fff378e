"""``litebroker export`` and ``litebroker import``: jobs as lines of JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

import click

from litebroker.cli.options import database_option, file_of, named_queues, opened, queues_option
from litebroker.cli.output import print_json
from litebroker.cli.progress import progress
from litebroker.errors import TransferError
from litebroker.inspection import Inspection
from litebroker.ndjson import queues_of
from litebroker.sqlite import SQLiteStorage
from litebroker.sqlite.backup import refuse_parts
from litebroker.transfer import Imported, export_lines, goes_on_behind, import_lines, last_line

_TAIL = 1 << 20
_SQLITE = b"SQLite format 3\0"  # how every database begins (sqlite.org/fileformat2.html)


@click.command("export")
@queues_option
@click.option(
    "--output", "-o", "target", type=click.Path(dir_okay=False), help="Write to this file, not to the standard output."
)
@click.option("--resume", is_flag=True, help="Go on with the file of --output, where an export was interrupted.")
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@database_option
@click.pass_context
def export(ctx: click.Context, names: tuple[str, ...], *, target: str | None, resume: bool, force: bool) -> None:
    """Write all jobs, schedules and values as lines of JSON (ndjson).

    \b
    litebroker export -o jobs.ndjson
    litebroker export --queue emails | gzip > emails.ndjson.gz
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if (resume or force) and target is None:
        raise click.UsageError("--resume and --force are about the file of --output", ctx)
    if resume and force:
        raise click.UsageError("--resume and --force exclude each other: go on with the file, or replace it", ctx)
    with opened(ctx, must_exist=True) as storage:
        storage.open()
        queues = [info.name for info in named_queues(storage, names)] if names else None
        _refuse_adapters_tables(storage, queues)
        if target is not None:
            _refuse_database(storage, target)
        where = (
            nullcontext((sys.stdout.buffer, None))
            if target is None
            else _output(target, queues, resume=resume, force=force)
        )
        jobs = 0
        with where as (file, after), progress("exporting") as show:
            total = sum(sum(storage.counts(info.name)) for info in storage.queues()) if sys.stderr.isatty() else None

            def on_jobs(more: int) -> None:
                nonlocal jobs
                jobs += more
                show(jobs, total)

            for piece in export_lines(storage, queues=queues, after=after, on_jobs=on_jobs):
                file.write(piece)
            file.flush()


def _refuse_adapters_tables(storage: SQLiteStorage, queues: list[str] | None) -> None:
    """Jobs that are more than a row here would come over without the rest."""
    components = storage.components()
    if queues is None and components:
        raise click.ClickException(
            f"{storage.location}: {', '.join(components)} keeps tables of its own beside the jobs, which an export"
            " leaves out: use `litebroker backup` for all of it, or export other queues by --queue"
        )
    inspection = Inspection(storage)
    for name in queues or ():
        why_not = inspection.why_not_alone(name)
        if why_not is not None:
            raise click.ClickException(why_not)


def _refuse_database(storage: SQLiteStorage, target: str) -> None:
    """No database is replaced by an export: neither this one, nor another, which others may have open."""
    # Before it is opened: to close this one again would drop SQLite's locks on it.
    refuse_parts(target, str(storage.path))
    if os.path.isfile(target):  # noqa: PTH113 (a path of the command line, as it stands there)
        with open(target, "rb") as file:  # noqa: PTH123
            if file.read(len(_SQLITE)) == _SQLITE:
                raise click.ClickException(f"{target}: this is an SQLite database: give another path")


@contextmanager
def _output(
    target: str, queues: list[str] | None, *, resume: bool, force: bool
) -> Iterator[tuple[BinaryIO, bytes | None]]:
    """The file to write to, and the line to go on behind."""
    if not resume:
        if os.path.exists(target) and not force:  # noqa: PTH110 (a path of the command line, as it stands there)
            raise click.ClickException(f"{target}: there is a file already: give --force, or --resume to go on with it")
        with open(target, "wb") as file:  # noqa: PTH123
            yield file, None
        return
    with open(target, "r+b") as file:  # noqa: PTH123
        if file.seek(0, os.SEEK_END):
            _refuse_another_export(target, file, queues)
        line, end = _last_line(file)
        if line is not None and not goes_on_behind(line):
            line, end = None, 0
        file.truncate(end)
        file.seek(end)
        yield file, line


def _refuse_another_export(target: str, file: BinaryIO, queues: list[str] | None) -> None:
    file.seek(0)
    first = file.readline()
    if first.endswith(b"\n"):
        exported = queues_of(first)
        if exported != queues:
            of = "all queues" if exported is None else ", ".join(map(repr, exported))
            raise click.ClickException(f"{target}: this is an export of {of}: resume it with the same, or use --force")


def _last_line(file: BinaryIO) -> tuple[bytes | None, int]:
    """The last whole line, and where it ends. It may be as long as a payload."""
    size = file.seek(0, os.SEEK_END)
    length = _TAIL
    while True:
        start = max(size - length, 0)
        file.seek(start)
        tail = file.read()
        line, behind = last_line(tail, whole=start == 0)
        if line is not None:
            return line, size - behind
        if start == 0:
            return None, 0
        length *= 2


@click.command("import")
@click.argument("source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--check", "only_check", is_flag=True, help="Check every line, and import nothing.")
@click.option(
    "--afresh", is_flag=True, help="Begin again, though an earlier import of this file came further; see the manual."
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@database_option
@click.pass_context
def import_(ctx: click.Context, source: str, *, only_check: bool, afresh: bool, as_json: bool) -> None:
    """Add what an export has written to FILE (- is the standard input), under the same ids.

    When it was interrupted, or a line was refused, run it again: it goes on where it stopped.
    """
    path, _options = file_of(ctx, must_exist=False)
    if source != "-":
        refuse_parts(source, path)
    total = os.stat(source).st_size if source != "-" else None  # noqa: PTH116
    done = 0
    with (
        nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file,  # noqa: PTH123
        progress("importing") as show,
    ):

        def on_lines(_lines: int, size: int) -> None:
            nonlocal done
            done += size
            show(done, total)

        if only_check:
            imported = import_lines(None, file, on_lines=on_lines)
        else:
            with opened(ctx) as storage:
                imported = import_lines(storage, file, afresh=afresh, on_lines=on_lines)
    _tell(imported, checked=only_check, as_json=as_json)
    if not imported.complete:
        raise TransferError(
            f"{source}: the export was cut off: its last line is missing; what there is of it is"
            f" {'right' if only_check else 'imported'}"
        )


def _tell(imported: Imported, *, checked: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "jobs": imported.jobs,
                "skipped": imported.skipped,
                "schedules": imported.schedules,
                "values": imported.values,
                "resumed_behind_line": imported.resumed,
                "complete": imported.complete,
            }
        )
        return
    found = f"{imported.jobs} jobs, {imported.schedules} schedules, {imported.values} values"
    if checked:
        click.echo(f"all lines are right: {found}")
        return
    if imported.skipped:
        found += f"; {imported.skipped} jobs were there already, or their dedupe key was held"
    if imported.resumed:
        found += f"; {imported.resumed} lines were imported before"
    click.echo(f"added {found}")

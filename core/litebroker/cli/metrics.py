"""``litebroker metrics``."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import click

from litebroker.cli.options import database_option, opened


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="Write them to this file, in place of what it holds, at once as a whole.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65_535),
    help="Serve them over HTTP until a signal comes; 0 is any port.",
)
@click.option("--address", metavar="HOST", default="127.0.0.1", show_default=True, help="Where --port listens.")
@database_option
@click.pass_context
def metrics(ctx: click.Context, *, output: str | None, port: int | None, address: str) -> None:
    """Print what is in the file as metrics for Prometheus, once, or serve them.

    \b
    litebroker metrics --output /var/lib/node_exporter/litebroker.prom
    litebroker metrics --port 9101
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    if output is not None and port is not None:
        raise click.UsageError("--output and --port exclude each other: give one", ctx)
    try:
        from litebroker.metrics import StorageCollector
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server, write_to_textfile

    with opened(ctx, must_exist=True) as storage:
        storage.queues()  # What is wrong with the file is this command's own error.
        registry = CollectorRegistry()
        registry.register(StorageCollector(storage))
        if output is not None:
            write_to_textfile(os.path.abspath(output), registry)  # noqa: PTH100 (it puts another name behind it)
        elif port is None:
            click.echo(generate_latest(registry), nl=False)
        else:
            stopped = threading.Event()

            def stop(_number: int, _frame: FrameType | None) -> None:
                stopped.set()

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            server, thread = start_http_server(port, address, registry)
            click.echo(f"serves http://{address}:{server.server_port}/metrics", err=True)
            # In slices, since a signal that comes just before the wait would else be noticed only after it.
            while not stopped.wait(0.5):
                pass
            server.shutdown()
            thread.join()
            server.server_close()

"""``litebroker worker``: one process, one that looks after several, or one that gives its jobs to child processes."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from litebroker.cli import supervisor
from litebroker.cli.options import Place, database, database_option, duration, opened, usage_errors
from litebroker.cli.shift import REFUSED, Shift
from litebroker.errors import LitebrokerError
from litebroker.handlers import is_async
from litebroker.logs import log_to_stderr
from litebroker.queue import Queue
from litebroker.sqlite import SQLiteStorage, open_storage
from litebroker.worker import Worker

if TYPE_CHECKING:
    import asyncio

# Python lets a thread that computes keep the others waiting for 5 ms at each step of theirs; a worker whose handlers
# compute would claim and complete a few hundred jobs a second, where it does thousands so.
_SWITCH_INTERVAL_S = 0.0005
_LEASE_S = 30.0
_LEVELS = ("debug", "info", "warning", "error")

_logger = logging.getLogger("litebroker.worker")


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What the command line asks of each process."""

    target: str
    names: tuple[str, ...]
    concurrency: int
    batch: int | None
    lease: float | None
    durability: str | None
    stop_timeout: float | None
    children: dict[str, Any] | None  # What `Queue.process` is to know of them; None is threads.


@click.command()
@click.argument("target", metavar="MODULE:HANDLER")
@click.option(
    "--queue",
    "names",
    metavar="NAME",
    multiple=True,
    help="Work on this queue. May be given several times. Without it: on the one Queue that the module declares.",
)
@click.option(
    "--concurrency", metavar="N", type=click.IntRange(1, 10_000), default=1, help="Jobs at once of each queue; 1."
)
@click.option(
    "--processes", metavar="N", type=click.IntRange(1, 1000), default=1, help="Processes, each with its threads; 1."
)
@click.option(
    "--isolate",
    is_flag=True,
    help="Run each job in one of N child processes: a crash fails that job only. The next three options imply it.",
)
@click.option("--time-limit", type=duration, help="End the process of a job that takes longer; the job fails.")
@click.option(
    "--recycle-after", metavar="N", type=click.IntRange(1), help="Replace a child process after so many jobs."
)
@click.option(
    "--recycle-mb", metavar="N", type=click.IntRange(1), help="Replace one that holds so many megabytes after a job."
)
@click.option(
    "--batch",
    metavar="N",
    type=click.IntRange(1, 10_000),
    help="Call the handler with a list of up to so many payloads.",
)
@click.option("--lease", type=duration, help="How long a claim holds a job, unless it is renewed; 30s.")
@click.option(
    "--durability", type=click.Choice(["relaxed", "durable", "full"]), help="What a power cut may take; durable."
)
@click.option(
    "--stop-timeout", type=duration, help="How long a stop waits for running jobs; without it, until they end."
)
@click.option("--log-level", type=click.Choice(_LEVELS, case_sensitive=False), default="info", help="info.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", help="json: one object a line; text."
)
@database_option
@click.pass_context
def worker(
    ctx: click.Context,
    target: str,
    *,
    names: tuple[str, ...],
    concurrency: int,
    processes: int,
    isolate: bool,
    time_limit: float | None,
    recycle_after: int | None,
    recycle_mb: int | None,
    batch: int | None,
    lease: float | None,
    durability: str | None,
    stop_timeout: float | None,
    log_level: str,
    log_format: str,
) -> int:
    """Run the jobs of a queue: call HANDLER, a function in MODULE, with the payload of each.

    \b
    litebroker worker tasks:send_email --queue emails --concurrency 4

    HANDLER takes the payload, or the payload and a context. MODULE is found from the current folder. A queue that it
    declares as a Queue is worked on with that object's settings, on that object's file.

    SIGTERM and SIGINT (Ctrl-C) stop it: it claims no more, and waits for the jobs that run. A second signal cancels
    them. It ends with 0 when all of them ended, and with 3 when some had to be left, to be run again.
    """  # noqa: D301 (\b is click's own: it keeps the lines apart)
    set_up_log = functools.partial(log_to_stderr, log_level, as_json=log_format == "json")
    set_up_log()
    isolate = isolate or any(it is not None for it in (time_limit, recycle_after, recycle_mb))
    if isolate and concurrency > 1:
        message = (
            f"--concurrency {concurrency} counts threads, and a child process runs one job at a time: give --processes"
        )
        raise click.UsageError(message, ctx)
    children = {
        "time_limit": time_limit,
        "recycle_after": recycle_after,
        "recycle_mb": recycle_mb,
        "initializer": set_up_log,
    }
    setup = _Setup(
        target=target,
        names=tuple(dict.fromkeys(names)),
        concurrency=processes if isolate else concurrency,
        batch=batch,
        lease=lease,
        durability=durability,
        stop_timeout=stop_timeout,
        children=children if isolate else None,
    )
    control = supervisor.control()
    if processes > 1 and control is None and not isolate:
        command = [sys.executable, "-m", "litebroker", *ctx.ensure_object(Place).args]
        return supervisor.Supervisor(command, processes, stop_timeout=stop_timeout).run()
    try:
        return _work(ctx, setup, control)
    except (click.ClickException, LitebrokerError, OSError):
        if control is not None:
            with suppress(OSError):  # the supervisor has gone
                control.send(REFUSED)
        raise


def _work(ctx: click.Context, setup: _Setup, control: socket.socket | None) -> int:
    """Run the workers in this process."""
    shift = Shift(stop_timeout=setup.stop_timeout, control=control)
    module, handler = _load(ctx, setup.target)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with ExitStack() as stack:
        loop = _loop(stack) if is_async(handler) and setup.children is None else None
        queues = _queues(ctx, stack, setup, module)
        with usage_errors(ctx):
            return shift.run(lambda: [_start(queue, handler, setup, loop) for queue in queues])


def _loop(stack: ExitStack) -> asyncio.AbstractEventLoop:
    """The event loop of an async handler: one for all queues, as what the module keeps may belong to it."""
    from litebroker.coroutines import Host  # It imports asyncio, which takes long.

    host = Host("litebroker-loop")
    stack.callback(host.close)
    return host.start()


def _start(
    queue: Queue[Any], handler: Callable[..., object], setup: _Setup, loop: asyncio.AbstractEventLoop | None
) -> Worker:
    # Said first, so that it stands above what the jobs log.
    _logger.info("works on queue %r of %s: %s", queue.name, queue.storage.location, _described(setup, loop))
    options: dict[str, Any] = {"concurrency": setup.concurrency, "loop": loop}
    if setup.children is not None:
        options |= {"workers": "processes", **setup.children}
    if setup.batch is None:
        return queue.process(handler, **options)
    return queue.process_many(handler, batch=setup.batch, **options)


def _described(setup: _Setup, loop: asyncio.AbstractEventLoop | None) -> str:
    batches = "" if setup.batch is None else f", in batches of up to {setup.batch}"
    if loop is not None:
        return f"{setup.target}, up to {setup.concurrency} at once{batches}"
    kind = "thread" if setup.children is None else "process"
    plural = "" if setup.concurrency == 1 else "s" if setup.children is None else "es"
    return f"{setup.target}, {setup.concurrency} {kind}{plural}{batches}"


def _load(ctx: click.Context, target: str) -> tuple[ModuleType, Callable[..., object]]:
    """The module and the handler in it. Raises ``click.ClickException`` where there is none."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise click.UsageError(f"{target!r}: write MODULE:HANDLER, such as tasks:send_email", ctx)
    if "/" in module_name or module_name.endswith(".py"):
        name = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise click.UsageError(f"{target!r}: a module is written with dots and without .py: {name}:{path}", ctx)
    if os.getcwd() not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            message = f"there is no module {error.name!r} in {os.getcwd()}, nor among those installed"  # noqa: PTH109
            raise click.UsageError(message, ctx) from None
        raise _failed(module_name, error) from error
    except Exception as error:  # Whatever the user's module raises.
        raise _failed(module_name, error) from error
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise click.UsageError(f"module {module_name!r} has no {path!r}", ctx) from None
    if not callable(found):
        raise click.UsageError(f"{target} is {type(found).__name__}, and cannot be called", ctx)
    return module, found


def _failed(module_name: str, error: Exception) -> click.ClickException:
    """What the user's module raised, and where; its traceback for those who log at the level debug."""
    _logger.debug("importing %s failed", module_name, exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    # The user's own line, not the one of a library that it called.
    own = [it for it in frames if it.filename.startswith(os.getcwd()) and "site-packages" not in it.filename]  # noqa: PTH109
    frame = (own or frames)[-1]
    # A syntax error's own text says where it is.
    where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
    return click.ClickException(f"importing {module_name} failed: {type(error).__name__}: {error}{where}")


def _queues(ctx: click.Context, stack: ExitStack, setup: _Setup, module: ModuleType) -> list[Queue[Any]]:
    """The queues to work on: those that the module declares under these names, and new ones under the others."""
    declared: dict[str, Queue[Any]] = {}
    for found in vars(module).values():
        if isinstance(found, Queue) and declared.setdefault(found.name, found) is not found:
            raise click.UsageError(f"module {module.__name__!r} declares queue {found.name!r} twice", ctx)
    if not setup.names and len(declared) != 1:
        there = ", ".join(map(repr, declared)) or "none"
        message = f"which queue? Give --queue NAME; module {module.__name__!r} declares: {there}"
        raise click.UsageError(message, ctx)
    names = setup.names or tuple(declared)
    storage: SQLiteStorage | None = None
    if any(name not in declared for name in names):
        storage = stack.enter_context(opened(ctx, durability=setup.durability))
        storage.open()
    queues = []
    for name in names:
        if name in declared:
            _check_declared(ctx, declared[name], setup)
            queues.append(declared[name])
        else:
            with usage_errors(ctx):
                queues.append(Queue(name, storage, lease=_LEASE_S if setup.lease is None else setup.lease))
        stack.callback(queues[-1].close)
    return queues


def _check_declared(ctx: click.Context, queue: Queue[Any], setup: _Setup) -> None:
    """What a Queue object says is not said twice. The environment's database is for those without one."""
    for option, value in (("--lease", setup.lease), ("--durability", setup.durability)):
        if value is not None:
            message = f"queue {queue.name!r} is declared in the module with settings of its own: leave out {option}"
            raise click.UsageError(message, ctx)
    if ctx.ensure_object(Place).database is not None:
        with usage_errors(ctx):
            storage = open_storage(database(ctx))
        same = storage.location == queue.storage.location
        storage.close()
        if not same:
            message = f"queue {queue.name!r} is declared in the module on {queue.storage.location}: leave out --db"
            raise click.UsageError(message, ctx)

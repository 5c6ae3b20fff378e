"""What runs in a child process of a worker: it calls the handler, and the parent does the rest (`litebroker.children`).

The handler runs in the main thread. A second thread reads which jobs are cancelled, and ends the process when the
parent has gone; where the kernel can do that by itself, it does, since a handler may compute without ever letting go of
the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, cast

from litebroker.children import SIGNALS, VARIABLE, Channel, Message, cancelled_in, unpacked
from litebroker.contexts import AsyncContext, Context, Held
from litebroker.failures import job_error
from litebroker.handlers import is_async
from litebroker.jobs import JobError, JobSpec
from litebroker.observers import running_job
from litebroker.results import report
from litebroker.sqlite import SQLiteStorage
from litebroker.storage import Storage
from litebroker.terms import Terms

_FILES = 4
# Between two reports of progress to the parent, who writes them down twice a second.
_REPORT_S = 0.1


def main() -> None:
    """Do what the parent says, until it says that this is the end."""
    channel_file, bell_file, stacks, life = map(int, sys.argv[-_FILES:])
    channel, bell = (socket.socket(fileno=file) for file in (channel_file, bell_file))
    for end in (channel, bell):
        end.set_inheritable(False)
    for file in (stacks, life):
        os.set_inheritable(file, False)
    os.environ[VARIABLE] = str(os.getpid())
    _set_signals(stacks)
    _end_with_parent(life)
    forks = _Forks(channel)
    os.register_at_fork(before=forks.before, after_in_parent=forks.after_in_parent, after_in_child=forks.after_in_child)
    child = _Child(Channel(channel), bell)
    with suppress(EOFError, ConnectionError):  # The parent has gone, which the other thread sees, too.
        if child.begin():
            while child.work():
                pass


def _set_signals(stacks: int) -> None:
    """Leave the end to the parent: a service manager sends its signals to everyone.

    No signal is ignored, since that would go on to the programs that a handler starts. SIGTERM has the main thread's
    stack written, as the crashes do: the parent wants to know where a handler stood that took too long.
    """
    os.set_blocking(stacks, False)  # Nobody may be reading.
    signal.signal(signal.SIGINT, lambda *_: None)
    faulthandler.enable(file=stacks, all_threads=False)
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end_with_parent(life: int) -> None:
    """Have the kernel kill this process and what it has started when the far end of the pipe closes.

    So many systems cannot; there the thread that waits for the bell has to see it.
    """
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


class _Forks:
    """Has processes that the handler forks take no part in this, and end by the signals that end others."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._masks = threading.local()

    def before(self) -> None:
        # One that is told to end as soon as it is there has to wait for `after_in_child`.
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def after_in_child(self) -> None:
        self._channel.close()
        faulthandler.unregister(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.after_in_parent()


class _Child:
    """This process.

    Args:
        channel: Messages from and to the parent.
        bell: Tells which jobs are cancelled. Its end is the parent's.
    """

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = 0  # of the latest call,
        self._unit: list[Held] = []  # and its jobs.
        self._cancelled: set[tuple[int, int]] = set()
        self._location = ""
        self._handler: Callable[..., object] = print
        self._terms = cast("Terms", None)
        self._in_batches = self._with_context = self._weighs = False
        threading.Thread(target=self._listen, args=(bell,), name="litebroker-bell", daemon=True).start()

    def begin(self) -> bool:
        """Load the handler, and say so. False, and said, where that is not possible."""
        pickled, self._location, self._in_batches, self._with_context, self._weighs, module, path, argv = (
            self._receive()
        )
        sys.path[:] = path
        sys.argv[:] = argv
        try:
            if module is not None:
                _load_main(*module)
            self._handler, self._terms, initializer = pickle.loads(pickled)  # noqa: S301 (the parent's)
            if initializer is not None:
                initializer()
        except BaseException as error:  # noqa: BLE001 (a module that calls sys.exit() is no handler either)
            failure = job_error(error, skip=1)
            text = f"a child process cannot load the handler: {failure.type}: {failure.message}"
            self._channel.send("refused", text, failure.stack)
            return False
        self._channel.send("ready")
        return True

    def work(self) -> bool:
        """Wait for the next call, and make it. False: there is none any more."""
        kind, *rest = self._receive()
        if kind == "end":
            return False
        self._run([Held(unpacked(fields), float("inf")) for fields in rest[0]])
        return True

    def _run(self, unit: list[Held]) -> None:
        errand = _Errand(self._channel, self._location)
        failures: list[tuple[int, str, tuple[Any, ...]]] = []
        values: list[Any] = []
        contexts: list[Context] = []
        results: list[tuple[bytes | None, tuple[Any, ...] | None]] = []
        self._take(unit)
        for position, held in enumerate(unit):
            try:
                values.append(self._terms.decode(held.record.payload, held.record.encoding))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever the serializer raises)
                failures.append((position, "parse", _told(error)))
            else:
                contexts.append(_Context(held, self._terms, self._lock, errand, position))
        if contexts:
            token = running_job.set(unit[0].record if len(unit) == 1 else None)
            try:
                returned = self._call(values, contexts)
            except BaseException as error:  # noqa: BLE001 (a handler that raises SystemExit has failed, too)
                known = {position for position, *_ in failures}
                told = _told(error, skip=2)
                failures += [(position, "handler", told) for position in range(len(unit)) if position not in known]
            else:
                results = self._results(unit, failures, returned)
            running_job.reset(token)
        if os.getpid() != self._pid:
            os._exit(0)  # The handler forked, and this is the other one.
        with suppress(OSError, ValueError):
            sys.stdout.flush()  # The next job may be the last.
        self._take([])
        errand.finish(results, failures, _resident_bytes() if self._weighs else 0)

    def _call(self, values: list[Any], contexts: list[Context]) -> Any:
        arguments: list[Any] = [values if self._in_batches else values[0]]
        if not is_async(self._handler):
            if self._with_context:
                arguments.append(contexts if self._in_batches else contexts[0])
            return self._handler(*arguments)
        import asyncio  # It takes a while, and few need it.

        from litebroker.hops import Hops

        if self._with_context:
            hops = Hops("litebroker-child")
            awaited = [_AsyncContext(context, hops) for context in contexts]
            arguments.append(awaited if self._in_batches else awaited[0])
        return asyncio.run(_awaited(cast("Coroutine[Any, Any, object]", self._handler(*arguments)), contexts))

    def _results(
        self, unit: list[Held], failures: list[tuple[int, str, tuple[Any, ...]]], returned: object
    ) -> list[tuple[bytes | None, tuple[Any, ...] | None]]:
        """What the handler has returned for each job, to be kept; ``[]`` where that is asked for by none."""
        if not any(held.record.headers for held in unit):
            return []
        unreadable = {position for position, *_ in failures}
        records = [held.record for position, held in enumerate(unit) if position not in unreadable]
        found = iter(self._terms.results(records, returned, in_batches=self._in_batches))
        results: list[tuple[bytes | None, tuple[Any, ...] | None]] = []
        for position in range(len(unit)):
            result, error = (None, None) if position in unreadable else next(found)
            results.append((result, None if error is None else _told(error)))
        return results

    def _take(self, unit: list[Held]) -> None:
        with self._lock:
            self._unit = unit
            if unit:
                self._number += 1
                for position, held in enumerate(unit):
                    if (self._number, position) in self._cancelled:
                        held.cancel()
            else:
                self._cancelled.clear()

    def _receive(self) -> Message:
        message = self._channel.receive()
        if message is None:
            raise EOFError
        return message

    def _listen(self, bell: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # They are for the thread of the handler.
        data = bytearray()
        while True:
            try:
                more = bell.recv(4096)
            except OSError:
                more = b""
            if not more:
                if os.getpgrp() == os.getpid():
                    os.killpg(os.getpid(), signal.SIGKILL)
                os._exit(1)
            data += more
            with self._lock:
                for number, position in cancelled_in(data):
                    if number > self._number:
                        self._cancelled.add((number, position))
                    elif number == self._number and position < len(self._unit):
                        self._unit[position].cancel()


class _Errand:
    """What the handler has the parent do for its jobs while it runs, from any of its threads.

    Attributes:
        location: Where the jobs are.
    """

    def __init__(self, channel: Channel, location: str) -> None:
        self.location = location
        self._channel = channel
        self._lock = threading.Lock()
        self._is_over = False
        self._reports: dict[int, tuple[float, str]] = {}  # Those that the parent has not been sent.
        self._reported_at = 0.0
        self._timer: threading.Timer | None = None

    def ask(self, what: str, position: int, *rest: Any) -> Any:
        """What the parent answers; False when the call is over. Raises what the parent raised."""
        with self._lock:
            if self._is_over:
                return False
            self._channel.send(what, position, *rest)
            answer = self._channel.receive()
        if answer is None:
            raise EOFError
        reply, error = answer
        if error is not None:
            raise pickle.loads(error)  # noqa: S301 (the parent's)
        return reply

    def report(self, position: int, fraction: float, note: str) -> None:
        """Send it, or the latest of those that come so soon after each other that nobody would see them all."""
        with self._lock:
            self._reports[position] = fraction, note
            wait = self._reported_at + _REPORT_S - monotonic()
            if wait <= 0:
                self._send_reports()
            elif self._timer is None:
                self._timer = threading.Timer(wait, self._report_late)
                self._timer.daemon = True
                self._timer.start()

    def _report_late(self) -> None:
        with self._lock, suppress(OSError):  # The parent has gone.
            self._timer = None
            self._send_reports()

    def _send_reports(self) -> None:
        if not self._is_over:
            for position, (fraction, note) in self._reports.items():
                self._channel.send("progress", position, fraction, note)
        self._reports.clear()
        self._reported_at = monotonic()

    def finish(self, results: list[Any], failures: list[tuple[int, str, tuple[Any, ...]]], size: int) -> None:
        """The call is over."""
        with self._lock:
            self._is_over = True
            self._channel.send("done", results, failures, size)


class _Context(Context):
    """Has the parent settle the job, who holds its lease."""

    __slots__ = ("_errand", "_position")

    def __init__(self, held: Held, terms: Terms, lock: threading.Lock, errand: _Errand, position: int) -> None:
        super().__init__(held, cast("Storage", None), terms, lock)
        self._errand = errand
        self._position = position

    def progress(self, fraction: float, note: str = "") -> None:
        fraction, note, _ = report(fraction, note, 0)
        self._errand.report(self._position, fraction, str.__str__(note))

    def _complete(self, specs: Sequence[JobSpec], result: bytes | None, connection: object | None) -> bool:
        if connection is None:
            return bool(self._errand.ask("complete", self._position, [_plain(spec) for spec in specs], result))
        # Whoever has the lease may. The parent has to know, since it is the one to see whether that is committed.
        driver = "apsw" if type(connection).__module__.partition(".")[0] == "apsw" else "sqlite3"
        storage = SQLiteStorage(self._errand.location, driver=driver, shared=True)
        try:
            bound = storage.bind(connection)
            done = False
            if self._errand.ask("settles", self._position, True, True):
                try:
                    done = self._terms.complete(bound, self._record, specs, result)
                except BaseException:
                    self._errand.ask("settles", self._position, False, False)
                    raise
                self._errand.ask("settles", self._position, True, done)
        finally:
            storage.close()
        return done

    def _fail(self, failure: JobError, wait_ms: int | None) -> bool:
        return bool(self._errand.ask("fail", self._position, _plain(failure), wait_ms))

    def _release(self, delay_ms: int | None) -> bool:
        return bool(self._errand.ask("release", self._position, delay_ms))


class _AsyncContext(AsyncContext):
    __slots__ = ()

    def progress(self, fraction: float, note: str = "") -> None:
        self.sync.progress(fraction, note)


async def _awaited(coroutine: Coroutine[Any, Any, object], contexts: list[Context]) -> object:
    """Await the handler; when none of its jobs is wanted any more, it is cancelled."""
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    helds = [context._held for context in contexts]  # noqa: SLF001 (they are of one make)

    def interrupt() -> None:
        if task is not None and all(held.cancelled for held in helds):
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(task.cancel)

    for held in helds:
        held.interrupt = interrupt
    interrupt()
    return await coroutine


def _plain(fields: Sequence[Any]) -> tuple[Any, ...]:
    """A named tuple without what `marshal` does not know: other mappings and sequences, and subclasses of ``str``."""
    return tuple(_plain_value(value) for value in fields)


def _plain_value(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | bytes | int | None):
        return value
    if hasattr(value, "items"):
        return {str.__str__(name): str.__str__(text) for name, text in value.items()}
    return _plain(value)


def _told(error: BaseException, *, skip: int = 1) -> tuple[Any, ...]:
    """What the parent is told of an exception: its type, message, stack and causes."""
    return _plain(job_error(error, skip=skip)[1:])


def _load_main(how: str, where: str) -> None:
    """Import the program's main module, under a name that does not start it, for what it defines."""
    name = "__mp_main__"  # As `multiprocessing` calls it, too.
    if how == "module":
        found = runpy.run_module(where, run_name=name, alter_sys=True)
    else:
        found = runpy.run_path(where, run_name=name)
    module = types.ModuleType(name)
    vars(module).update(found)
    sys.modules["__main__"] = sys.modules[name] = module


def _resident_bytes() -> int:
    """The memory that this process holds; where the system does not say, the most that it has held."""
    if sys.platform == "linux":
        with suppress(OSError), open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (no path, but the kernel)
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

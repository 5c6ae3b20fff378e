"""A worker's async handler, on one event loop: the caller's, or one in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any

_inside: ContextVar[Coroutines | None] = ContextVar("litebroker_coroutines", default=None)


class Run:
    """One call of the handler.

    Attributes:
        unit: What it is called for; whoever starts it knows.
        around: Entered in the task around the call.
        interrupted: It was cancelled from here.
        error: What it raised; None when it returned ``returned``.
    """

    __slots__ = ("around", "call", "ended", "error", "interrupted", "name", "returned", "started", "task", "unit")

    def __init__(
        self,
        unit: Any,
        call: Callable[[], Coroutine[Any, Any, object]],
        around: Callable[[], AbstractContextManager[object]],
        name: str,
    ) -> None:
        self.unit = unit
        self.call = call
        self.around = around
        self.name = name
        self.started = self.ended = monotonic()
        self.interrupted = False
        self.returned: object = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def was_cancelled(self) -> bool:
        """Whether it has ended by a cancellation, from wherever."""
        return isinstance(self.error, asyncio.CancelledError)


class Host:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave = asyncio.Event()

    def start(self) -> asyncio.AbstractEventLoop:
        """Start it, once; the loop, which runs."""
        self._thread.start()
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError("the event loop could not be started: its thread has said why")
        return self._loop

    def close(self) -> None:
        """Have it end. What is left on it is cancelled."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(self._leave.set)

    def join(self) -> None:
        """Wait for its end."""
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        try:
            asyncio.run(self._stay())
        finally:
            self._ready.set()

    async def _stay(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._leave.wait()


class Coroutines:
    """Runs coroutines for a thread that starts them and hears of their ends.

    Args:
        loop: The loop of a program that has one; None makes one, in a thread of this name.
        on_end: Called on the loop when `finished` is no longer empty. It must be quick.

    Attributes:
        finished: Those that have ended, for the thread to take.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None, name: str, on_end: Callable[[], object]) -> None:
        self.finished: deque[Run] = deque()
        self._loop = loop
        self._host = Host(name) if loop is None else None
        self._on_end = on_end
        self._running: set[Run] = set()

    def open(self) -> None:
        """Before anything is started."""
        if self._host is not None:
            self._loop = self._host.start()

    def close(self) -> None:
        """When nothing is to be started any more: end a loop of its own. What handlers have left on it is cancelled."""
        if self._host is not None:
            self._host.close()

    def join(self) -> None:
        """Wait for the end of a loop of its own."""
        if self._host is not None:
            self._host.join()

    run = Run

    def start(self, runs: Sequence[Run]) -> None:
        """Run them. On a loop that is closed they have ended at once, interrupted; so have those that are already."""
        if not runs:
            return
        self._running.update(runs)
        self._abandon([run for run in runs if run.interrupted])
        if not self._soon(self._launch, runs):
            self._abandon(runs)

    def interrupt(self, run: Run) -> None:
        """Cancel it. Any thread may."""
        run.interrupted = True
        self._soon(self._cancel, run)

    def has_left(self, *, closing: bool) -> bool:
        """Whether the loop will not run what is on it: it is closed; or it stands still, and nobody is to wait."""
        loop = self._loop
        return loop is None or loop.is_closed() or (closing and not loop.is_running())

    def give_up(self) -> None:
        """The loop has left: all that was on it has ended, interrupted; and is cancelled, should the loop come back."""
        runs = list(self._running)
        for run in runs:
            self.interrupt(run)
        self._abandon(runs)

    def is_here(self) -> bool:
        """Whether this is the loop's thread, or one that works for a handler, which cannot wait for itself."""
        if _inside.get() is self:
            return True
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _soon(self, callback: Callable[..., object], *args: Any) -> bool:
        """Have the loop call it. False: it is closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    def _abandon(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if self._is_over(run):
                run.interrupted = True
                run.error = asyncio.CancelledError("it was cancelled before it began, or its event loop has gone")
                self.finished.append(run)

    def _is_over(self, run: Run) -> bool:
        """Take it from those that run. Of two threads one gets True."""
        try:
            self._running.remove(run)
        except KeyError:
            return False
        return True

    # On the loop

    def _launch(self, runs: Sequence[Run]) -> None:
        loop = asyncio.get_running_loop()
        for run in runs:
            if run in self._running:  # If not, it was given up.
                run.task = loop.create_task(self._live(run), name=run.name)
                run.task.add_done_callback(partial(self._end, run))

    def _cancel(self, run: Run) -> None:
        if run.task is not None:
            run.task.cancel()

    async def _live(self, run: Run) -> None:
        _inside.set(self)
        run.started = monotonic()
        try:
            with run.around():
                run.returned = await run.call()
        except GeneratorExit:
            raise  # The loop has gone, and this is what is left of it.
        except BaseException as error:
            run.error = error
            if isinstance(error, KeyboardInterrupt) and self._host is None:
                raise  # It is the program's, whichever of its coroutines it has struck.
        # Another one that a handler raises, such as SystemExit, is its failure, and must not end the loop.

    def _end(self, run: Run, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            run.error = asyncio.CancelledError("it was cancelled before it began")
        else:
            run.error = run.error or task.exception()  # Seen: asyncio need not tell of it.
        run.ended = monotonic()
        if self._is_over(run):
            self.finished.append(run)
            self._on_end()

"""Calls of asyncio code that run in threads: one hop there, one back.

`asyncio.to_thread` would do, but it shares its threads with whatever else the program does, costs a third more, and
leaves a caller who is cancelled in the dark: the call runs on, and nobody learns what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from litebroker.errors import CancelledTooLateError

R = TypeVar("R")

# Enough for a group commit to carry many at once, and few enough for a process to have.
_MOST_THREADS = 16
# A thread without work ends after this.
_REST_S = 10.0


class Hops:
    """A bounded pool of threads, for any number of event loops. It starts them as they are needed, and lets them go.

    After a fork the child has a pool without threads, and none of the calls that waited.
    """

    def __init__(self, name: str, *, most: int = _MOST_THREADS) -> None:
        self._name = name
        self._most = most
        self._fresh()

    def _fresh(self) -> None:
        """What belongs to one process only."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[_Call[Any]] = deque()
        # Threads without work, each behind a lock that is released to call it.
        self._resting: list[threading.Lock] = []
        self._threads = 0
        self._closed = False
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()

    async def look(self, function: Callable[[], R]) -> R:
        """Call what changes nothing. Who is cancelled goes on at once, and the answer goes nowhere."""
        call = self._start(function)
        try:
            await call.heard
        except asyncio.CancelledError:
            call.withdraw()
            raise
        return call.outcome()

    async def do(self, function: Callable[[], R], *, undo: Callable[[R], object] | None = None) -> R:
        """Call what changes something. Who is cancelled learns whether it happened.

        Args:
            undo: Takes back what has happened, in a thread, too, when the caller was cancelled, or the loop is closed.

        Raises:
            asyncio.CancelledError: It did not happen, or was undone, unless its cause is a `CancelledTooLateError`;
                that is no subclass, since asyncio's timeouts want the class itself before Python 3.13.
        """
        call = self._start(function, undo)
        try:
            await call.heard
        except asyncio.CancelledError as cancelled:
            if call.withdraw():
                raise
            await _end_of(call)
            if call.error is not None:
                raise cancelled from call.error
            if undo is None:
                raise cancelled from CancelledTooLateError(call.result)
            await self.insist(partial(undo, call.outcome()))
            raise
        return call.outcome()

    async def insist(self, function: Callable[[], R]) -> R:
        """Call what has to happen, though the caller has been cancelled, and is again."""
        call = self._start(function)
        await _end_of(call)
        return call.outcome()

    def close(self) -> None:
        """Let the threads go, when they have done what waits. A call that comes later starts new ones."""
        with self._lock:
            self._closed = True
            while self._resting:
                self._resting.pop().release()

    def _start(self, function: Callable[[], R], undo: Callable[[R], object] | None = None) -> _Call[R]:
        if os.getpid() != self._pid:
            self._fresh()
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes.setdefault(loop, _Mailbox(loop))
        call = _Call(function, undo, mailbox, loop.create_future())
        orphan = None
        with self._lock:
            self._closed = False
            self._waiting.append(call)
            if self._resting:
                self._resting.pop().release()
            elif self._threads < self._most:
                self._threads += 1
                try:
                    threading.Thread(target=self._serve, name=f"{self._name}-hop", daemon=True).start()
                except RuntimeError:
                    self._threads -= 1
                    # At the interpreter's end there are no new ones: those that are there see to it, or we ourselves.
                    orphan = self._waiting.pop() if not self._threads else None
        if orphan is not None:
            orphan.run()
        return call

    def _serve(self) -> None:
        bell = threading.Lock()
        bell.acquire()
        while True:
            with self._lock:
                call = self._waiting.popleft() if self._waiting else None
                if call is None:
                    if self._closed:
                        self._threads -= 1
                        return
                    self._resting.append(bell)
            if call is not None:
                call.run()
                del call  # A thread at rest keeps nobody's data.
            elif not bell.acquire(timeout=_REST_S):
                with self._lock:
                    if bell in self._resting:
                        self._resting.remove(bell)
                        self._threads -= 1
                        return
                bell.acquire()  # It was called at the last moment.


class _Call(Generic[R]):
    """A call, on its way.

    Attributes:
        heard: Done when the outcome has come back. It carries nothing, and another one may take its place.
    """

    __slots__ = ("_context", "_function", "_mailbox", "_tickets", "_undo", "error", "has_ended", "heard", "result")

    result: R

    def __init__(
        self,
        function: Callable[[], R],
        undo: Callable[[R], object] | None,
        mailbox: _Mailbox,
        heard: asyncio.Future[None],
    ) -> None:
        self.heard = heard
        self.has_ended = False
        self.error: BaseException | None = None
        self._function = function
        self._undo = undo
        self._mailbox = mailbox
        self._context: Context = copy_context()
        self._tickets = [True]

    def withdraw(self) -> bool:
        """Keep it from being run. False: a thread has begun."""
        try:
            return self._tickets.pop()  # Of two threads one gets it.
        except IndexError:
            return False

    def run(self) -> None:
        """In a thread."""
        if not self.withdraw():
            return
        try:
            self.result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            self.error = error
        if not self._mailbox.put(self) and self._undo is not None and self.error is None:
            # The loop has been closed: nobody is there to have it.
            self._context.run(self._undo, self.result)

    def outcome(self) -> R:
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # It knows this frame, which knows it.
        return self.result


class _Mailbox:
    """Takes outcomes back to their loop: all that come together with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[_Call[Any]] = deque()
        self._is_called = False

    def put(self, call: _Call[Any]) -> bool:
        """From a thread. False when the loop is closed."""
        self._calls.append(call)
        if self._is_called:
            return True
        self._is_called = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
                return True
        except RuntimeError:
            pass
        return False

    def _deliver(self) -> None:
        self._is_called = False  # First: what is put in from now on is either found below, or calls again.
        with contextlib.suppress(IndexError):
            while True:
                call = self._calls.popleft()
                call.has_ended = True
                if not call.heard.done():
                    call.heard.set_result(None)


async def _end_of(call: _Call[Any]) -> None:
    """Wait for it, whatever cancels the caller meanwhile."""
    while not call.has_ended:
        call.heard = asyncio.get_running_loop().create_future()
        with contextlib.suppress(asyncio.CancelledError):
            await call.heard

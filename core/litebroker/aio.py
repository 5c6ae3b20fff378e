"""A queue for asyncio: each operation is `Queue`'s own, done in a thread, and awaited."""

from __future__ import annotations

import asyncio
import builtins
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from litebroker.arguments import duration_ms, whole_number
from litebroker.contexts import AsyncContext
from litebroker.errors import CancelledTooLateError, StorageClosedError
from litebroker.handlers import is_async
from litebroker.hops import Hops
from litebroker.queue import Job, Queue
from litebroker.storage import Listener, Storage
from litebroker.worker import Worker

__all__ = ["AsyncContext", "AsyncQueue", "AsyncWorker", "CancelledTooLateError"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

# Who waits for a job looks this often, though nothing woke it, as `Queue.claim` does.
_LOOK_S = 0.5
# The thread that waits for jobs stays so long when nobody waits for it.
_LINGER_S = 5.0
# It may be woken so often in a row for nothing, before it becomes slower, and at most so slow.
_MOST_IN_VAIN, _PAUSE_S = 5, 0.05
# `async for` claims again after this.
_WAIT_S = 3600.0
# Threads that wait for workers, beside those of operations.
_MOST_PATIENT = 1000
# How long `run` lets cancelled handlers end.
_LAST_WORDS_S = 5.0


def _looks(
    method: Callable[Concatenate[Queue[T], P], R],
) -> Callable[Concatenate[AsyncQueue[T], P], Coroutine[Any, Any, R]]:
    """The method of `Queue`, awaited. It changes nothing: who is cancelled does not wait for it."""

    async def call(self: AsyncQueue[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._hops.look(functools.partial(method, self.sync, *args, **kwargs))

    return _named(call, method)


def _does(
    method: Callable[Concatenate[Queue[T], P], R],
) -> Callable[Concatenate[AsyncQueue[T], P], Coroutine[Any, Any, R]]:
    """The method of `Queue`, awaited. Who is cancelled learns whether it happened."""

    async def call(self: AsyncQueue[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._hops.do(functools.partial(method, self.sync, *args, **kwargs))

    return _named(call, method)


def _starts(
    method: Callable[Concatenate[Queue[T], P], Worker],
) -> Callable[Concatenate[AsyncQueue[T], P], Coroutine[Any, Any, AsyncWorker]]:
    """The method of `Queue`, awaited, with this event loop for an async handler."""

    async def call(self: AsyncQueue[T], /, *args: P.args, **kwargs: P.kwargs) -> AsyncWorker:
        options: dict[str, Any] = {**kwargs}
        handler = args[0] if args else options.get("handler")
        if callable(handler) and is_async(handler) and options.get("workers", "threads") == "threads":
            options.setdefault("loop", asyncio.get_running_loop())
        start = cast("Callable[..., Worker]", method)
        worker = await self._patient.do(functools.partial(start, self.sync, *args, **options), undo=Worker.close)
        return self._add_worker(worker)

    return _named(call, method)


def _named(call: Callable[P, R], method: Callable[..., object]) -> Callable[P, R]:
    functools.update_wrapper(call, method)
    call.__module__ = __name__
    call.__qualname__ = f"AsyncQueue.{call.__name__}"
    return call


def _like(
    model: Callable[Concatenate[Queue[Any], P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[AsyncQueue[Any], P], None]]:
    """For type checkers: it takes what the model takes."""
    del model
    return lambda function: function


class AsyncQueue(Generic[T]):
    """`Queue` for asyncio. Each operation is awaited, and is one trip to a thread and back.

    Give it what `Queue` takes, or a queue that there is. Any number of tasks may use it, of any number of event
    loops; its threads are its own, sixteen at the most.

    Who is cancelled can know what happened: an operation that has not begun does not begin; one that has begun comes to
    its end first, and where it has changed something, ``CancelledTooLateError.of(error)`` has what it answered. For any
    other ``CancelledError`` that is None: nothing happened. What only reads is left alone at once. A `claim` gives its
    jobs back.

    Attributes:
        sync: The queue itself, for threads. It has `bind`, too: a connection belongs to its thread.
    """

    sync: Queue[T]

    @overload
    def __init__(self, queue: Queue[T], /) -> None: ...
    @overload
    @_like(Queue.__init__)
    def __init__(self, *args: Any, **options: Any) -> None: ...
    def __init__(self, *args: Any, **options: Any) -> None:
        if args and isinstance(args[0], Queue):
            self._owned = False
            (self.sync,) = args
        else:
            where = args[1] if len(args) > 1 else options.get("where", "")
            if not isinstance(where, str | os.PathLike) and not hasattr(where, "fire_schedule"):
                raise TypeError(
                    f"where={where!r}: give a path, a URL or a storage; a connection belongs to its thread, where"
                    " Queue.bind() takes it"
                )
            self._owned = True
            self.sync = Queue(*args, **options)
        self._closed = False
        self._workers: list[AsyncWorker] = []
        self._hops = Hops(f"litebroker-{self.name}")
        self._patient = Hops(f"litebroker-{self.name}-patient", most=_MOST_PATIENT)
        self._line = _Line(self.sync, self._hops)

    @property
    def name(self) -> str:
        return self.sync.name

    @property
    def storage(self) -> Storage:
        return self.sync.storage

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def close(self) -> None:
        """Close the workers that it started, as by their `close`, and the storage, if it opened it.

        Waiting claims get ``[]``, and each ``async for`` ends. In a handler of one of its workers, which `close` cannot
        wait for, the storage stays open.
        """
        self._closed = True
        await self._patient.look(self._line.close)
        for worker in self._workers:
            await worker.close()
        if self._owned:
            await self._patient.look(self.sync.close)
        self._hops.close()
        self._patient.close()

    async def __aenter__(self) -> AsyncQueue[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncQueue {self.name!r} on {self.storage.location}>"

    # Adding

    add = _does(Queue[T].add)
    add_many = _does(Queue[T].add_many)
    notify = _does(Queue[T].notify)

    async def run_in_transaction(self, function: Callable[[Queue[T]], R]) -> R:
        """Call ``function(queue)`` in a thread, in one transaction: all that it does through the queue, or nothing.

        A transaction belongs to a thread, so the function is no coroutine, and awaits nothing. Others wait meanwhile,
        so keep it short.
        """
        if is_async(function):
            raise TypeError(
                f"function={function!r} is async: a transaction belongs to one thread; give an ordinary one"
            )

        def call() -> R:
            with self.sync.transaction() as queue:
                return function(queue)

        return await self._hops.do(call)

    # The message level

    async def claim(
        self,
        limit: int = 1,
        *,
        lease: float | timedelta | None = None,
        wait: float | timedelta | None = None,
    ) -> builtins.list[Job[T]]:
        """As `Queue.claim`. One thread claims for all tasks that wait; they are served in the order they came.

        Cancelled, it gives its jobs back before the ``CancelledError`` is raised.
        """
        if wait is None or self._closed:
            claim = functools.partial(self.sync.claim, limit, lease=lease)
            return await self._hops.do(claim, undo=self._line.give_back)
        whole_number("limit", limit, at_least=1)
        if lease is not None:
            duration_ms("lease", lease, positive=True)
        return await self._line.wait(limit, lease, monotonic() + duration_ms("wait", wait) / 1000)

    complete = _does(Queue[T].complete)
    fail = _does(Queue[T].fail)
    extend = _does(Queue[T].extend)
    release = _does(Queue[T].release)

    def __aiter__(self) -> AsyncIterator[Job[T]]:
        """Claim one job after the other, waiting for each, until the queue is closed.

        Each is to be settled in the loop's body, by `complete`, `fail` or `release`: from here nobody sees whether the
        body went well. None is claimed ahead, so that a ``break`` leaves none behind. Several tasks may do so at once.
        """
        return _Jobs(self)

    # Workers

    process = _starts(Queue[T].process)
    process_many = _starts(Queue[T].process_many)

    def _add_worker(self, worker: Worker) -> AsyncWorker:
        added = AsyncWorker(worker, self._patient)
        self._workers = [*(it for it in self._workers if not it.closed), added]
        return added

    # Looking

    get = _looks(Queue[T].get)
    find = _looks(Queue[T].find)
    list = _looks(Queue[T].list)
    dead_letters = _looks(Queue[T].dead_letters)
    stats = _looks(Queue[T].stats)
    size = _looks(Queue[T].size)

    why = _looks(Queue[T].why)
    progress = _looks(Queue[T].progress)

    async def result(self, job: Job[Any] | int, *, timeout: float | timedelta | None = None) -> Any:
        """As `Queue.result`. One thread waits for all tasks. Cancelled, it waits no longer; the job goes on."""
        seconds = None if timeout is None else duration_ms("timeout", timeout) / 1000
        future = await self._hops.do(functools.partial(self.sync.future, job), undo=Future.cancel)
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([wrapped], timeout=seconds)
        finally:
            future.cancel()  # Which does nothing to one that is done.
        if done:
            return await wrapped
        return await self._hops.look(functools.partial(self.sync.result, job, timeout=0))  # It says what the job does.

    async def paused(self) -> bool:
        """Whether `pause` has stopped its claims."""
        return await self._hops.look(lambda: self.sync.paused)

    # Changing

    retry = _does(Queue[T].retry)
    retry_all = _does(Queue[T].retry_all)
    cancel = _does(Queue[T].cancel)
    reschedule = _does(Queue[T].reschedule)
    remove = _does(Queue[T].remove)
    purge = _does(Queue[T].purge)
    pause = _does(Queue[T].pause)
    resume = _does(Queue[T].resume)

    # Schedules

    schedule = _does(Queue[T].schedule)
    get_schedule = _looks(Queue[T].get_schedule)
    schedules = _looks(Queue[T].schedules)
    remove_schedule = _does(Queue[T].remove_schedule)


class _Jobs(AsyncIterator[Job[T]]):
    def __init__(self, queue: AsyncQueue[T]) -> None:
        self._queue = queue

    async def __anext__(self) -> Job[T]:
        while not self._queue.closed:
            try:
                jobs = await self._queue.claim(wait=_WAIT_S)
            except StorageClosedError:
                if self._queue.closed:
                    break
                raise
            if jobs:
                return jobs[0]
        raise StopAsyncIteration


class AsyncWorker:
    """A `Worker`, awaited. `AsyncQueue.process` starts it.

    Close it before the event loop ends, or leave it to the queue's ``async with``: on a loop that ends before, handlers
    are cancelled, and have failed.
    """

    def __init__(self, worker: Worker, patient: Hops) -> None:
        self._worker = worker
        self._patient = patient

    @property
    def closed(self) -> bool:
        """Whether it has ended: nothing runs any more, and all is settled."""
        return self._worker.closed

    async def close(self, timeout: float | timedelta | None = None) -> bool:
        """Claim no more, give back what has not started, and wait for the jobs that run. Idempotent.

        Args:
            timeout: Seconds to wait; None is without limit. Then the handlers are cancelled: the task of an async one,
                whose job is given back, and ``context.cancelled`` of one in a thread.

        Returns:
            Whether all have ended. If not, `close` may be called again. A handler that closes its own worker gets False
            at once, since it runs itself.
        """
        return await self._patient.look(functools.partial(self._worker.close, timeout))

    async def run(self, *, timeout: float | timedelta | None = None) -> bool:
        """Work until SIGTERM or SIGINT (Ctrl-C) comes, then close in order. Answers whether all handlers ended.

        A second signal, or ``timeout`` seconds after the first, cancels the handlers; five seconds later it returns,
        whatever they do. The signals' own handlers are back then. Outside of the main thread, which alone gets
        signals, it works until someone closes the worker. Who cancels it cancels the handlers, too.
        """
        try:
            with self._worker._signals():  # noqa: SLF001 (they are of one make)
                return await self._patient.look(functools.partial(self._worker.run, timeout=timeout))
        except asyncio.CancelledError:
            await self.close(0)
            await self.close(_LAST_WORDS_S)
            raise

    async def __aenter__(self) -> AsyncWorker:  # noqa: PYI034 (Self came with Python 3.11)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Waiter:
    """Someone who waits for jobs.

    Attributes:
        has_looked: A claim has been made since it came, which it had a share in.
        leaves: It waits no longer than the claim takes that is under way, or its first one,
        wants: and takes what that brings. If not, it was cancelled.
        has_ended: It has got jobs, or an error, or nothing.
    """

    def __init__(self, limit: int, lease: float | timedelta | None) -> None:
        self.limit = limit
        self.lease = lease
        self.jobs: list[Job[Any]] = []
        self.error: Exception | None = None
        self.has_looked = False
        self.leaves = False
        self.wants = True
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Future[None] = self._loop.create_future()

    async def ended(self) -> None:
        """Until it has. Cancelled, it may be called again."""
        while not self.has_ended:
            self._heard = self._loop.create_future()
            await self._heard

    def wake(self) -> bool:
        """From any thread. False when its loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._hear)
        except RuntimeError:
            return False
        return True

    def _hear(self) -> None:
        self.has_ended = True
        if not self._heard.done():
            self._heard.set_result(None)


class _Line:
    """All who wait for a queue's jobs: one thread claims for them, as long as there are any, and shares them out."""

    def __init__(self, queue: Queue[Any], hops: Hops) -> None:
        self._queue = queue
        self._hops = hops
        self._fresh()

    def _fresh(self) -> None:
        """What belongs to one process only."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._waiters: dict[_Waiter, None] = {}  # In the order they came.
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None
        self._closed = False
        self._has_grown = False  # Someone has come since the last claim.
        self._claiming = False

    async def wait(self, limit: int, lease: float | timedelta | None, ends_at: float) -> list[Job[Any]]:
        """The jobs that come; ``[]`` when none has until then, or the queue is closed."""
        waiter = _Waiter(limit, lease)
        self._enter(waiter)
        timer = asyncio.get_running_loop().call_later(ends_at - monotonic(), self._leave, waiter)
        try:
            await waiter.ended()
        except asyncio.CancelledError:
            self._leave(waiter, wants=False)
            while not waiter.has_ended:
                with suppress(asyncio.CancelledError):
                    await waiter.ended()
            if waiter.jobs:
                await self._hops.insist(functools.partial(self.give_back, waiter.jobs))
            raise
        finally:
            timer.cancel()
        if waiter.error is not None:
            raise waiter.error
        return waiter.jobs

    def give_back(self, jobs: Sequence[Job[Any]]) -> None:
        """Release what nobody is there to have any more."""
        if jobs:
            self._queue.storage.release([job.record.lease for job in jobs])

    def close(self) -> None:
        """Let all go who wait. Waits for a claim that is under way."""
        with self._lock:
            self._closed = True
            self._dismiss()
            self._change.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _enter(self, waiter: _Waiter) -> None:
        if os.getpid() != self._pid:
            self._fresh()
        with self._lock:
            if self._closed:
                waiter.wake()
                return
            if self._thread is None:
                name = f"litebroker-{self._queue.name}-claim"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiters[waiter] = None
            self._has_grown = True
            self._change.notify()
            if self._listener is not None:
                self._listener.wake()

    def _leave(self, waiter: _Waiter, *, wants: bool = True) -> None:
        """Wait no longer. On its loop."""
        with self._lock:
            if waiter not in self._waiters:
                return  # It has been served, and is about to hear of it.
            if self._claiming or (wants and not waiter.has_looked):
                waiter.leaves, waiter.wants = True, wants
                return
            del self._waiters[waiter]
            if not self._waiters and self._listener is not None:
                self._listener.wake()  # It would take wake-ups from others.
        waiter.wake()

    def _dismiss(self, error: Exception | None = None) -> None:
        """With the lock held."""
        self._claiming = False
        for waiter in self._waiters:
            waiter.error = error
            waiter.wake()
        self._waiters.clear()
        if self._listener is not None:
            self._listener.wake()

    # In the thread

    def _serve(self) -> None:
        try:
            with closing(self._queue.storage.listener([self._queue.name])) as listener:
                self._listener = listener
                in_vain = 0
                while self._is_wanted():
                    if self._claim():
                        in_vain = 0
                        continue
                    if in_vain > _MOST_IN_VAIN:
                        # Others were faster each time, or what is there cannot be claimed: be slower.
                        with self._lock:
                            self._change.wait(min(_PAUSE_S, 0.001 * 2 ** min(in_vain - _MOST_IN_VAIN, 10)))
                    woken = bool(self._waiters) and listener.wait(_LOOK_S)
                    in_vain = in_vain + 1 if woken and not self._has_grown else 0
                    if woken and not self._waiters:
                        # It may have been a job, for which someone in another process waits.
                        self._queue.notify()
        except Exception as error:  # noqa: BLE001 (each of them gets it)
            with self._lock:
                self._thread = self._listener = None
                self._dismiss(error)

    def _is_wanted(self) -> bool:
        """Wait for someone who waits. False, and the thread ends: nobody came."""
        with self._lock:
            if not self._waiters and not self._closed:
                self._change.wait(_LINGER_S)
            if not self._waiters:
                self._thread = self._listener = None
            return self._thread is not None

    def _claim(self) -> bool:
        """Claim what the first want, and the others on the same terms. Whether there was anything."""
        with self._lock:
            self._has_grown = False
            lease = next((waiter.lease for waiter in self._waiters), None)
            limit = sum(waiter.limit for waiter in self._waiters if waiter.lease == lease)
            there = list(self._waiters)
            self._claiming = limit > 0
        if not limit:
            return False
        jobs = self._queue.claim(limit, lease=lease)
        found = bool(jobs)
        with self._lock:
            for waiter in there:
                # Where there is nothing, there is nothing on other terms.
                waiter.has_looked = waiter.has_looked or not found or waiter.lease == lease
            for waiter in [it for it in self._waiters if it.lease == lease and it.wants]:
                waiter.jobs, jobs = jobs[: waiter.limit], jobs[waiter.limit :]
        self.give_back(jobs)
        with self._lock:
            self._claiming = False
            served = [it for it in self._waiters if it.jobs or (it.leaves and (it.has_looked or not it.wants))]
            for waiter in served:
                del self._waiters[waiter]
        for waiter in served:
            if not waiter.wake():
                self.give_back(waiter.jobs)
        return found

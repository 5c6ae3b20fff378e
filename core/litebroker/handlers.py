"""A handler as a worker calls it, and what becomes of the jobs that it is called with.

It runs in the thread that asks for it, in a child process, or on an event loop. In the end each `Held` says what its
job has come to: it has failed, or has a result to be kept, or is settled already, by its handler or since it could not
run to its end by no fault of its own and was given back. Who has claimed the jobs settles the others.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CoroutineType
from typing import TYPE_CHECKING, Any, cast

from litebroker.children import Lane, failure_of
from litebroker.contexts import AsyncContext, Context, Held
from litebroker.errors import ChildError, ProcessDiedError, TimeLimitError
from litebroker.failures import job_error
from litebroker.jobs import JobError
from litebroker.observers import Watched, running_job
from litebroker.results import kept_for_ms, tell_waiters
from litebroker.storage import Storage
from litebroker.terms import ErrorKind, Teller, Terms

if TYPE_CHECKING:
    # They import asyncio, which a worker with threads does not need, and which takes long.
    from litebroker.coroutines import Coroutines, Run
    from litebroker.hops import Hops

_ASYNC = "the handler gave a coroutine, though it is no async function: declare it with `async def`, or await it inside"


class Handler:
    """Calls ``function`` on units: one job, or some where it takes batches. Any thread may, several at once.

    Args:
        lock: Held by whoever cancels a `Held`.

    Attributes:
        with_context: It is called with contexts, too.
    """

    def __init__(
        self,
        function: Callable[..., object],
        storage: Storage,
        terms: Terms,
        teller: Teller,
        lock: threading.Lock,
        *,
        in_batches: bool,
    ) -> None:
        self.with_context = _takes_context(function)
        self._function = function
        self._storage = storage
        self._terms = terms
        self._teller = teller
        self._lock = lock
        self._in_batches = in_batches
        self._call = self._caller()
        self._hops: Hops | None = None

    def close(self) -> None:
        """No call runs any more, and none follows."""
        if self._hops is not None:
            self._hops.close()

    def run(self, unit: list[Held]) -> None:
        """Call it for these in this thread."""
        values, readable = self._read(unit)
        if not readable:
            return
        observers = self._terms.observers
        token = running_job.set(readable[0].record if len(readable) == 1 else None)
        try:
            if observers:
                with Watched(observers, [held.record for held in readable]):
                    returned = self._call(values, readable)
            else:
                returned = self._call(values, readable)
        except BaseException as error:  # noqa: BLE001 (a handler that raises SystemExit has failed, too)
            for held in readable:
                self._spoil(held, "handler", error)
        else:
            self._note_results(readable, returned)
        running_job.reset(token)
        for held in readable:
            if held.uncommitted:
                self._verify(held)

    def run_in(self, lane: Lane, unit: list[Held]) -> None:
        """Call it for these in the child process of a lane."""
        try:
            with Watched(self._terms.observers, [held.record for held in unit]):
                self._call_in(lane, unit)
        except ChildError:
            pass  # It was for those who watch.
        except (ProcessDiedError, TimeLimitError) as error:
            if isinstance(error, ProcessDiedError) and not error.began:
                self._take_back(unit)
                self._teller.error("process", error)
            else:
                kind: ErrorKind = "timeout" if isinstance(error, TimeLimitError) else "crashed"
                for held in unit:
                    self._spoil_as(held, kind, error, failure_of(kind, error))
        except Exception as error:  # noqa: BLE001 (what the child said made no sense)
            for held in unit:
                self._spoil_as(held, "crashed", error, job_error(error, reason="crashed"))
        for held in unit:
            if held.uncommitted:
                self._verify(held)

    def _call_in(self, lane: Lane, unit: list[Held]) -> None:
        with self._lock:
            for held, event in zip(unit, lane.events(len(unit)), strict=True):
                held.event = event
                if held.cancelled:
                    event.set()
        contexts = self._contexts(unit)
        results, failures = lane.run(
            [held.record for held in unit],
            lambda what, position, *rest: contexts[position]._answer(what, *rest),  # noqa: SLF001 (of this module)
        )
        for held, (result, refusal) in zip(unit, results, strict=False):  # There are none where none is to be kept.
            held.result = result
            if refusal is not None and not held.settled:
                self._teller.error("result", refusal, held.record)
        for position, kind, error in failures:
            self._spoil_as(unit[position], kind, error, failure_of(kind, error))
        if failures:
            raise failures[-1].error

    def start(self, units: Sequence[list[Held]], coroutines: Coroutines) -> list[Run]:
        """Call it for each of these on the event loop. Answers those that have ended already: none could be read."""
        runs: list[Run] = []
        ended: list[Run] = []
        for unit in units:
            values, readable = self._read(unit)
            run = coroutines.run(
                unit,
                functools.partial(self._coroutine, values, readable),
                functools.partial(self._around, readable),
                f"litebroker-{self._terms.queue}-{unit[0].record.id}",
            )
            if readable:
                self._let_interrupt(run, readable, coroutines)
                runs.append(run)
            else:
                ended.append(run)
        coroutines.start(runs)
        return ended

    def _let_interrupt(self, run: Run, readable: list[Held], coroutines: Coroutines) -> None:
        def interrupt() -> None:
            # Those of a batch end together, when none of them is wanted any more.
            if all(held.cancelled for held in readable):
                coroutines.interrupt(run)

        with self._lock:
            for held in readable:
                held.interrupt = interrupt
            if all(held.cancelled for held in readable):
                run.interrupted = True

    def _around(self, readable: list[Held]) -> AbstractContextManager[object]:
        """In the task of the handler."""
        records = [held.record for held in readable]
        running_job.set(records[0] if len(records) == 1 else None)
        return Watched(self._terms.observers, records) if self._terms.observers else nullcontext()

    def judge(self, run: Run, *, closing: bool) -> None:
        """Decide what becomes of the jobs of a call on the event loop that has ended."""
        unit: list[Held] = run.unit
        # In an end in order, who cancels all that is on the loop is part of it. Otherwise a cancellation that came from
        # elsewhere is a failure: a handler that awaits what was cancelled would be given back, and run, for ever.
        if run.was_cancelled and (run.interrupted or closing):
            self._take_back([held for held in unit if not held.settled and held.failure is None])
        elif run.error is not None:
            for held in unit:
                if held.failure is None:
                    self._spoil(held, "handler", run.error, skip=1)
        else:
            self._note_results([held for held in unit if held.failure is None], run.returned)
        for held in unit:
            if held.uncommitted:
                self._verify(held)

    # What it comes to

    def _read(self, unit: list[Held]) -> tuple[list[Any], list[Held]]:
        """The payloads, and whose they are; those that cannot be read have failed."""
        readable: list[Held] = []
        values = []
        for held in unit:
            try:
                values.append(self._terms.decode(held.record.payload, held.record.encoding))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever the serializer raises)
                self._spoil(held, "parse", error)
            else:
                readable.append(held)
        return values, readable

    def _take_back(self, interrupted: list[Held]) -> None:
        """Release what was cancelled by no fault of its own. What was lost stays so."""
        for held in interrupted:
            held.settled = True
        try:
            released = self._storage.release([held.lease for held in interrupted]) if interrupted else []
        except Exception as error:  # noqa: BLE001 (told; the leases end by themselves)
            self._teller.error("cleanup", error)
            return
        for held, yes in zip(interrupted, released, strict=True):
            if yes:
                self._teller.settled(held.record, "released")

    def _spoil_as(self, held: Held, kind: ErrorKind, error: BaseException, failure: JobError) -> None:
        wait_ms = self._terms.wait_ms(held.record)
        held.failure = failure, wait_ms
        self._teller.error(kind, error, held.record, wait_ms=wait_ms, settled=held.settled)

    def _spoil(self, held: Held, kind: ErrorKind, error: BaseException, *, skip: int | None = None) -> None:
        if skip is None:
            skip = 2 if kind == "handler" else 1  # `run`, and what `_caller` made
        self._spoil_as(held, kind, error, job_error(error, reason=kind, skip=skip))

    def _note_results(self, unit: list[Held], returned: object) -> None:
        """What the handler has returned for these, to be kept with their end."""
        for held in unit:
            if held.record.headers:
                break
        else:
            return
        results = self._terms.results([held.record for held in unit], returned, in_batches=self._in_batches)
        for held, (result, error) in zip(unit, results, strict=True):
            held.result = result
            if error is not None and not held.settled:
                self._teller.error("result", error, held.record)

    def _verify(self, held: Held) -> None:
        """It was completed in the handler's own transaction: did that commit?"""
        try:
            record = self._storage.get(held.record.id)
        except Exception as error:  # noqa: BLE001 (told; if it did not, the lease ends by itself)
            self._teller.error("complete", error, held.record)
            return
        if record is not None and record.token == held.lease.token:
            held.settled = False
            if held.failure is None:
                self._spoil(held, "handler", RuntimeError("the transaction that completed the job was not committed"))
            return
        if kept_for_ms(held.record.headers) is not None:
            # Its waiters were told within the transaction, and found nothing yet.
            tell_waiters(self._storage, held.record)
        self._teller.settled(held.record, "completed")

    # The call

    def _caller(self) -> Callable[[list[Any], list[Held]], object]:
        """The handler, as `run` calls it."""
        handler, in_batches, with_context = self._function, self._in_batches, self.with_context

        def call(values: list[Any], unit: list[Held]) -> object:
            if not with_context:
                result = handler(values if in_batches else values[0])
            else:
                contexts = self._contexts(unit)
                result = handler(values, contexts) if in_batches else handler(values[0], contexts[0])
            if type(result) is CoroutineType:
                result.close()
                raise TypeError(_ASYNC)
            return result

        def call_async(values: list[Any], unit: list[Held]) -> object:
            import asyncio

            return asyncio.run(self._coroutine(values, unit))

        return call_async if is_async(handler) else call

    def _coroutine(self, values: list[Any], unit: list[Held]) -> Coroutine[Any, Any, object]:
        """The call of an async handler."""
        data = values if self._in_batches else values[0]
        if not self.with_context:
            return cast("Coroutine[Any, Any, object]", self._function(data))
        if self._hops is None:
            from litebroker.hops import Hops

            self._hops = Hops(f"litebroker-{self._terms.queue}")
        contexts = [AsyncContext(context, self._hops) for context in self._contexts(unit)]
        return cast("Coroutine[Any, Any, object]", self._function(data, contexts if self._in_batches else contexts[0]))

    def _contexts(self, unit: list[Held]) -> list[Context]:
        return [Context(held, self._storage, self._terms, self._lock) for held in unit]


def is_async(handler: Callable[..., object]) -> bool:
    """Whether to call it is to get a coroutine."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def _takes_context(handler: Callable[..., object]) -> bool:
    """Whether it is to be called with a `Context` too: its second argument has no default, or is named "context"."""
    if not callable(handler):
        raise TypeError(f"handler={handler!r} cannot be called")
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False  # Some that are written in C do not tell.
    positional = [it for it in parameters if it.kind in {it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD}]
    required = [it for it in positional if it.default is it.empty]
    if len(required) > 2 or any(it.kind is it.KEYWORD_ONLY and it.default is it.empty for it in parameters):  # noqa: PLR2004
        raise TypeError(f"handler={handler!r} wants more than the data and a context")
    if not positional and not any(it.kind is it.VAR_POSITIONAL for it in parameters):
        raise TypeError(f"handler={handler!r} takes no argument: it gets the data, and a context if it wants")
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "context")  # noqa: PLR2004

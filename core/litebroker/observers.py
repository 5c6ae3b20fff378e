"""What watches a queue's jobs in this process: metrics, traces, and log lines that name their job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Literal

from litebroker.jobs import Added, JobRecord, JobSpec, State

Outcome = Literal["completed", "retried", "failed", "released", "lost"]

_logger = logging.getLogger("litebroker")
# Set by whoever runs a handler, in the thread, task or process where it runs; None where it has several jobs at once.
running_job: ContextVar[JobRecord | None] = ContextVar("litebroker_job", default=None)


def current_job() -> JobRecord | None:
    """The job whose handler runs in this thread or task; None outside of one, and where it has several at once."""
    return running_job.get()


class Observer:
    """Is told what happens to a queue's jobs in this process, once `Queue.observe` has it. Override what you need.

    The threads that do the work call it, several at once: be quick. What it raises is logged, and changes nothing.
    """

    def adding(self, specs: Sequence[JobSpec]) -> AbstractContextManager[Sequence[JobSpec]]:
        """Around the writing of new jobs; gives those to write, as many and in the same order.

        Also for what follows a job (``then=``), not for the ticks of schedules. An error of the storage passes
        through. Inside of a transaction the commit comes later, if it does.
        """
        return nullcontext(specs)

    def added(self, specs: Sequence[JobSpec], added: Sequence[Added]) -> None:
        """They were written; inside of what `adding` gave."""

    def claimed(self, jobs: Sequence[JobRecord]) -> None:
        """A worker has claimed them, or `Queue.claim`."""

    def running(self, jobs: Sequence[JobRecord]) -> AbstractContextManager[object]:
        """Around the handler, in its thread or task; an error of the handler passes through."""
        del jobs
        return nullcontext()

    def settled(self, job: JobRecord, outcome: Outcome) -> None:
        """What became of a claimed job, once it is committed, or is to be with the caller's own transaction.

        "failed" is a dead letter, also of a worker that vanished; "released" was given back by its handler; "lost" went
        to another worker.
        """


Observers = Sequence[Observer]


def after(state: State | None) -> Outcome:
    """What an attempt that failed has come to, by what the storage says of the job; None is a lost lease."""
    if state is None:
        return "lost"
    return "failed" if state is State.FAILED else "retried"


class Watched:
    """Around a handler: the observers are told. No generator, which would show in the handler's tracebacks."""

    __slots__ = ("_entered", "_jobs", "_observers")

    def __init__(self, observers: Observers, jobs: Sequence[JobRecord]) -> None:
        self._observers = observers
        self._jobs = jobs
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        for observer in self._observers:
            try:
                manager = observer.running(self._jobs)
                manager.__enter__()
            except (Exception, SystemExit) as error:  # noqa: BLE001 (logged)
                _complain(observer, error)
            else:
                self._entered.append(manager)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._entered:
            manager = self._entered.pop()
            try:
                manager.__exit__(kind, error, trace)
            except BaseException as raised:  # noqa: BLE001 (a generator may raise the handler's own, or an exit)
                if raised is not error:
                    _complain(manager, raised)


@contextmanager
def adding(observers: Observers, specs: Sequence[JobSpec]) -> Iterator[Sequence[JobSpec]]:
    """Around the writing of jobs: those to write, as the observers want them."""
    entered: list[AbstractContextManager[Sequence[JobSpec]]] = []
    failed: BaseException | None = None
    for observer in observers:
        try:
            manager = observer.adding(specs)
            wanted = manager.__enter__()
        except Exception as error:  # noqa: BLE001 (logged)
            _complain(observer, error)
            continue
        entered.append(manager)
        if len(wanted) == len(specs):
            specs = wanted
        else:
            _complain(observer, ValueError(f"it gave {len(wanted)} jobs for {len(specs)}: none of them is taken"))
    try:
        yield specs
    except BaseException as error:
        failed = error
        raise
    finally:
        for manager in reversed(entered):
            try:
                manager.__exit__(type(failed) if failed else None, failed, failed.__traceback__ if failed else None)
            except BaseException as raised:  # noqa: BLE001 (as above)
                if raised is not failed:
                    _complain(manager, raised)


def tell(observers: Observers, what: Callable[[Observer], object]) -> None:
    """Tell each, such as by ``lambda observer: observer.claimed(jobs)``."""
    for observer in observers:
        try:
            what(observer)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (logged)
            _complain(observer, error)


def _complain(observer: object, error: BaseException) -> None:
    _logger.error("an observer itself raised: %s", type(observer).__qualname__, exc_info=error)

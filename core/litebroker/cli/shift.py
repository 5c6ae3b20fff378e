"""Workers in this process, from their start to their end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType

from litebroker.worker import Worker

SIGNALS = (signal.SIGTERM, signal.SIGINT)
UNFINISHED = 3
# Signals come in pairs where a terminal, or a service manager, sends them to all processes and a parent hands its own
# on, too.
ECHO_S = 0.5
# What supervisor and process say to each other: it works; it cannot do what it is asked to, and has said why; it is to
# stop; it is to cancel what runs.
UP, REFUSED, STOP, HURRY = b"u", b"r", b"s", b"h"
# How long cancelled handlers have to notice.
_LAST_WORDS_S = 5.0
# A signal that comes right before the main thread begins to wait for a lock does not end that wait, and Python runs the
# handler only after it. So no wait is longer than this.
_LOOK_S = 0.5
_WORKS, _STOPS, _CANCELS = range(3)

_logger = logging.getLogger("litebroker.worker")


class Shift:
    """Workers from their start until a signal, or the supervisor, ends them.

    Args:
        stop_timeout: Seconds that a stop waits for running jobs; None is without limit.
        control: A socket whose other end is the supervisor's. When that is gone, they stop.
    """

    def __init__(self, *, stop_timeout: float | None, control: socket.socket | None) -> None:
        self._stop_timeout = stop_timeout
        self._control = control
        self._begun = False
        self._status = 0
        self._asked_at = -ECHO_S
        self._lock = threading.Lock()
        # The number of a signal, what the supervisor says, or the worker that ended.
        self._events: SimpleQueue[int | bytes | Worker] = SimpleQueue()
        if control is not None:
            # Before the handler is imported, which may take long, or for ever.
            threading.Thread(target=self._obey, args=(control,), name="litebroker-control", daemon=True).start()

    def run(self, start: Callable[[], Sequence[Worker]]) -> int:
        """Start the workers, and see them to their end. Answers the exit status, or exits when something still runs."""
        with self._signals():
            with self._lock:
                self._begun = True
            workers = start()
            for worker in workers:
                threading.Thread(target=self._follow, args=(worker,), daemon=True).start()
            if self._control is not None:
                with suppress(OSError):  # The supervisor has gone, which `_obey` sees, too.
                    self._control.send(UP)
            if self._end(workers):
                _logger.info("stopped")
                return self._status
        _logger.warning("stopped, and left jobs unfinished: they will be run again")
        # An ordinary exit would wait for the handlers that do not end.
        logging.shutdown()
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(UNFINISHED)

    def _end(self, workers: Sequence[Worker]) -> bool:
        """Wait for the end, and bring it about when asked to. Whether nothing runs any more."""
        running = set(workers)
        stage = _WORKS
        ends_at: float | None = None
        while running:
            event = self._next(ends_at)
            if isinstance(event, Worker):
                running.discard(event)
            asked = self._asked(stage, event)
            if asked == stage:
                continue
            stage = asked
            if stage == _STOPS:
                _logger.info("stopping: waits for the jobs that run")
                for worker in workers:
                    threading.Thread(target=worker.close, daemon=True).start()
                ends_at = None if self._stop_timeout is None else monotonic() + self._stop_timeout
            elif stage == _CANCELS:
                _logger.info("stopping now: cancels the jobs that run")
                for worker in workers:
                    worker.close(0)
                ends_at = monotonic() + _LAST_WORDS_S
            else:
                return False
        return True

    def _asked(self, stage: int, event: int | bytes | Worker | None) -> int:
        """The stage that an event asks for."""
        if event is None:
            return stage + 1
        if isinstance(event, Worker):
            if stage == _WORKS:
                _logger.error("a worker was closed by something in this process, and not by a signal")
                self._status = 1
            return max(stage, _STOPS)
        now = monotonic()
        # What the supervisor says may be the same signal, which came here, too.
        is_echo = now - self._asked_at < ECHO_S
        if not is_echo:
            self._asked_at = now
        if isinstance(event, bytes):
            return max(stage, _CANCELS if event == HURRY else _STOPS)
        return stage if is_echo else stage + 1

    def _next(self, ends_at: float | None) -> int | bytes | Worker | None:
        """The next event; None when there was none until then."""
        while True:
            left = _LOOK_S if ends_at is None else min(ends_at - monotonic(), _LOOK_S)
            try:
                return self._events.get(timeout=max(left, 0))
            except Empty:
                if ends_at is not None and monotonic() >= ends_at:
                    return None

    def _obey(self, control: socket.socket) -> None:
        word = STOP
        while word:
            try:
                word = control.recv(1)
            except OSError:
                word = b""
            with self._lock:
                if not self._begun:
                    os._exit(0)
            self._events.put(word or STOP)

    def _follow(self, worker: Worker) -> None:
        worker.run()
        self._events.put(worker)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, _: FrameType | None) -> None:
            self._events.put(number)

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

"""Several worker processes, started again when they die, and stopped together."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic

from litebroker.children import ended
from litebroker.cli.shift import ECHO_S, HURRY, REFUSED, SIGNALS, STOP, UNFINISHED, UP

# A process that dies is started again after this; each time later, unless it has lived for a while.
_PAUSE_S, _LONGEST_PAUSE_S, _WHILE_S = 0.1, 30.0, 10.0
# Cancelled handlers have five seconds to notice; a process that is still there after this is killed.
_KILL_AFTER_S = 10.0
# Whatever a signal should have told is looked at again after this.
_LOOK_S = 1.0
_VARIABLE = "LITEBROKER_SUPERVISED"
_WORKS, _STOPS, _CANCELS, _KILLS = range(4)

_logger = logging.getLogger("litebroker.worker")


def control() -> socket.socket | None:
    """In a process of a supervisor: the socket to it. None in others."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    found = socket.socket(fileno=int(file))
    found.set_inheritable(False)
    return found


class _Process:
    """A worker process, and those that come after it in its place."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.start_at = 0.0
        self._command = command
        self._deaths = 0
        self._started_at = 0.0
        self._up = False
        self.refused = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own command)
                self._command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, _VARIABLE: str(theirs.fileno())},
                start_new_session=True,  # A terminal's Ctrl-C is for the supervisor, which hands it on.
            )
        self._control, self._up, self._started_at = ours, False, monotonic()
        _logger.info("process %d started: pid %d", self.number, self._process.pid)

    def is_up(self) -> bool:
        """Whether it has said that it works."""
        if not self._up and self._control is not None:
            with suppress(OSError):
                said = self._control.recv(16)
                self._up = UP in said
                self.refused = self.refused or REFUSED in said
        return self._up

    def listen(self, selector: selectors.BaseSelector) -> bool:
        """Have the selector end when it says something. Whether it had to be asked."""
        if self._control is None or self._up:
            return False
        selector.register(self._control, selectors.EVENT_READ)
        return True

    def tell(self, word: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):  # It has gone; `reap` will see it.
                self._control.send(word)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def reap(self) -> int | None:
        """Its exit status, once, when it has ended; negative for the signal that killed it."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return None
        self._process = None
        if self._control is not None:
            self._control.close()
        self._control = None
        now = monotonic()
        self._deaths = 0 if now - self._started_at >= _WHILE_S else self._deaths + 1
        self.start_at = now + min(_PAUSE_S * 2 ** min(max(self._deaths - 1, 0), 20), _LONGEST_PAUSE_S)
        return status


class Supervisor:
    """Runs so many processes of a command until a signal ends it.

    The first is started alone: if it refuses before it has worked, something is wrong with the command line, and it is
    not tried again. Stopping goes over a socket to each process, and by stages, so that one who got the signal himself
    does not count it twice; when the supervisor is gone, its end of the socket is too, and the processes stop.
    """

    def __init__(self, command: Sequence[str], count: int, *, stop_timeout: float | None) -> None:
        self._processes = [_Process(number, command) for number in range(1, count + 1)]
        self._stop_timeout = stop_timeout
        self._stage = _WORKS
        self._kill_at: float | None = None
        self._signalled_at = -ECHO_S
        self._proven = False
        self._status = 0
        self._bell, self._rope = socket.socketpair()

    def run(self) -> int:
        """Answers the exit status: 0, what the first process refused with, or `UNFINISHED`."""
        with self._bell, self._rope, self._signals():
            while True:
                self._reap()
                self._start()
                if not any(it.runs for it in self._processes) and self._stage != _WORKS:
                    break
                self._wait()
        if self._status == 0:
            _logger.info("stopped")
        elif self._status == UNFINISHED:
            _logger.warning("stopped, and left jobs unfinished: they will be run again")
        return self._status

    def _start(self) -> None:
        if self._stage != _WORKS:
            return
        if not self._proven:
            self._proven = self._processes[0].is_up()
        now = monotonic()
        for process in self._processes if self._proven else self._processes[:1]:
            if not process.runs and now >= process.start_at:
                process.start()

    def _reap(self) -> None:
        for process in self._processes:
            # What it said before it died counts.
            self._proven = self._proven or process.is_up()
            status = process.reap()
            if status is None:
                continue
            if self._stage != _WORKS:
                if status != 0 and process.is_up():
                    self._status = self._status or UNFINISHED
                    _logger.warning("process %d %s", process.number, ended(status))
            elif not self._proven and process.refused:
                self._stage, self._status = _STOPS, status
            else:
                pause = max(process.start_at - monotonic(), 0)
                _logger.error("process %d %s; it is started again in %.1f s", process.number, ended(status), pause)

    def _wait(self) -> None:
        """Until something happens, or is to be done."""
        now = monotonic()
        times = [now + _LOOK_S]
        if self._stage == _WORKS and self._proven:
            times += [it.start_at for it in self._processes if not it.runs]
        if self._kill_at is not None:
            times.append(self._kill_at)
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for process in self._processes if not self._proven else ():
                process.listen(selector)
            selector.select(max(min(times) - now, 0))
        with suppress(BlockingIOError):
            for number in self._bell.recv(4096):
                if number in SIGNALS:
                    self._signalled()
        if self._kill_at is not None and monotonic() >= self._kill_at:
            self._go_on_to(_KILLS)

    def _signalled(self) -> None:
        now = monotonic()
        if now - self._signalled_at >= ECHO_S and self._stage < _KILLS:
            self._signalled_at = now
            self._go_on_to(self._stage + 1)

    def _go_on_to(self, stage: int) -> None:
        self._stage = stage
        self._kill_at = None
        if stage == _STOPS:
            _logger.info("stopping %d processes", sum(it.runs for it in self._processes))
            if self._stop_timeout is not None:
                self._kill_at = monotonic() + self._stop_timeout + _KILL_AFTER_S
        elif stage == _CANCELS:
            self._kill_at = monotonic() + _KILL_AFTER_S
        for process in self._processes:
            if stage == _KILLS:
                process.kill()
            else:
                process.tell(STOP if stage == _STOPS else HURRY)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Meanwhile, each signal rings the bell with its number."""
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        numbers = (*SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        file = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(file)
            for number, handler in before.items():
                signal.signal(number, handler)

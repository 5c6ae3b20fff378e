"""Child processes that run a worker's handler, as the worker sees them; `litebroker.child` is what runs in them.

A child runs one call of the handler at a time, in its main thread. Claims, leases and settling stay with the parent, so
that a child that dies, or is ended by the time limit, takes nothing with it but the job that it ran. It is a new
interpreter, never a fork: what the parent's threads hold at that moment, in whatever library, does not go along.

Four descriptors lead to each child. Messages go over a socket. A second one tells it of jobs that are cancelled, while
its main thread computes. Into a pipe, faulthandler writes where the handler stood when the child crashed, or when its
time was up. And the far end of the last pipe closes when the parent dies, in whatever way, which ends the child.
"""

from __future__ import annotations

import marshal
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Literal, NamedTuple

from litebroker.arguments import duration_ms, whole_number
from litebroker.errors import ChildError, ProcessDiedError, ProcessStartError, TimeLimitError
from litebroker.jobs import JobError, JobRecord, State
from litebroker.terms import Terms, log_error

# A child knows by it that it is one; the value is its pid, so that what it starts does not take itself for one, too.
VARIABLE = "LITEBROKER_CHILD"
# Those that come to all processes, and that a child leaves to its parent.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# That a child has died is known at once by the end of its socket, unless something that it has forked holds it, too.
_LOOK_S = 1.0
# How long a child may take to end in order, and to say where its handler stands.
_LEAVE_S, _STACK_S = 5.0, 0.5
# A child that dies, or refuses to work, without a job to blame is started again after this; each time later.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LONGEST_STACK = 16_384
_LENGTH, _CANCEL = struct.Struct("<Q"), struct.Struct("<QI")
_MEBIBYTE = 2**20
_RUN = "import sys; sys.path.insert(0, {folder!r}); from litebroker.child import main; main()"
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (sys.path holds strings)
_CHILD_FILE = os.path.join(_FOLDER, "litebroker", "child.py")  # noqa: PTH118 (as above)

Message = tuple[Any, ...]
Answer = Callable[..., object]
"""Does what a child asks for in its job's name. An exception is the child's to raise."""


Result = tuple[bytes | None, ChildError | None]
"""What a handler returned, as it is kept, and why it could not be kept as it was."""


class Failure(NamedTuple):
    """How one job of a call went wrong: the position in it, and what was raised."""

    position: int
    kind: Literal["handler", "parse"]
    error: ChildError


def failure_of(reason: str, error: ChildError | ProcessDiedError | TimeLimitError) -> JobError:
    """What is kept with the job."""
    if isinstance(error, ChildError):
        return JobError(reason, error.type, error.message, error.stack, error.causes)
    return JobError(reason, type(error).__name__, str(error), error.stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """How handlers run in child processes.

    Attributes:
        time_limit: Seconds that one call of the handler may take; then its process is ended.
        recycle_after: A process that has run so many calls is replaced by a new one.
        recycle_mb: So is one that holds so many megabytes (2**20 bytes) of memory after a call.
        initializer: Called in each process before its first job.
    """

    time_limit: float | timedelta | None = None
    recycle_after: int | None = None
    recycle_mb: int | None = None
    initializer: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.time_limit is not None:
            duration_ms("time_limit", self.time_limit, positive=True)
        for name, value in (("recycle_after", self.recycle_after), ("recycle_mb", self.recycle_mb)):
            if value is not None:
                whole_number(name, value, at_least=1)
        if self.initializer is not None and not callable(self.initializer):
            raise TypeError(f"initializer={self.initializer!r} cannot be called")
        if os.name != "posix":
            raise ValueError(f"workers='processes' needs POSIX, and this is {os.name!r}: use workers='threads'")

    @classmethod
    def asked(cls, workers: str, **options: Any) -> Processes | None:
        """What the caller of `process` asks for; None is threads.

        Raises:
            TypeError: An option is of a wrong type.
            ValueError: ``workers`` is neither, or an option is out of range, or not for threads.
        """
        if workers == "processes":
            return cls(**options)
        if workers != "threads":
            raise ValueError(f"workers={workers!r}: it is 'threads' or 'processes'")
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"{name}={value!r} is for workers='processes': a thread cannot be ended or replaced")
        return None


class Channel:
    """Messages of plain values over a socket, in order. One thread sends at a time, and one receives.

    They are written by `marshal`, not by `pickle`: whatever a handler may have made of its process, a message from it
    cannot call anything here. Both ends are of one version of Python.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def send(self, *message: Any, until: float | None = None) -> None:
        """Send it whole. Raises ``TimeoutError`` when it could not be sent until then (monotonic)."""
        data = marshal.dumps(message)
        self._socket.settimeout(None if until is None else max(until - monotonic(), 0.001))
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, until: float | None = None) -> Message | None:
        """The next message; None when none came until then (monotonic). Raises ``EOFError`` at the end of all."""
        while (message := self._take()) is None:
            self._socket.settimeout(None if until is None else max(until - monotonic(), 0.001))
            try:
                data = self._socket.recv(65_536)
            except TimeoutError:
                return None
            if not data:
                raise EOFError
            self._received += data
        return message

    def close(self) -> None:
        self._socket.close()

    def _take(self) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message: Message = marshal.loads(memoryview(self._received)[_LENGTH.size : end])  # noqa: S302 (see the class)
        del self._received[:end]
        return message


def cancelled_in(data: bytearray) -> Iterator[tuple[int, int]]:
    """The calls, by number, and the positions in them that a child is told are cancelled; taken out of ``data``."""
    while len(data) >= _CANCEL.size:
        yield _CANCEL.unpack_from(data)
        del data[: _CANCEL.size]


def ended(status: int) -> str:
    """How a process came to its end, by its exit status; negative is the signal that killed it."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class Children:
    """All child processes of one worker: a `Lane` for each of its threads.

    Raises:
        TypeError: The handler, or something that it needs, cannot be found by another process.
        RuntimeError: This is a child process itself.
    """

    def __init__(
        self,
        handler: Callable[..., object],
        terms: Terms,
        processes: Processes,
        *,
        location: str,
        count: int,
        in_batches: bool,
        with_context: bool,
    ) -> None:
        if os.environ.get(VARIABLE) == str(os.getpid()):
            raise RuntimeError(
                "a child process that was to run a handler called process(workers='processes') itself: put that call"
                " under `if __name__ == '__main__':`, or in a function that only the parent calls"
            )
        if not sys.executable:
            raise RuntimeError("workers='processes' needs an interpreter to start, and sys.executable names none")
        limit = processes.time_limit
        self.time_limit_s = None if limit is None else duration_ms("time_limit", limit) / 1000
        self.recycle_after = processes.recycle_after
        self.recycle_bytes = None if processes.recycle_mb is None else processes.recycle_mb * _MEBIBYTE
        # What an error is told to, and who observes, is the parent's affair.
        plain = replace(terms, on_error=log_error, observers=[])
        parts = {"handler": handler, "serializer": terms.serializer, "initializer": processes.initializer}
        for name, part in parts.items():
            _pickled(name, part)
        self._begin: Message = (
            pickle.dumps((handler, plain, processes.initializer)),
            location,
            in_batches,
            with_context,
            self.recycle_bytes is not None,
        )
        self._main = _main_module(handler) if any(b"__main__" in _pickled(*it) for it in parts.items()) else None
        self.lanes = [Lane(self) for _ in range(count)]
        _all.add(self)

    def message(self) -> Message:
        """What a child is told first."""
        return (*self._begin, self._main, list(sys.path), list(sys.argv))

    def start(self) -> None:
        """Start a process in each lane, all at once, and wait until they are ready.

        Raises:
            ProcessStartError: One of them refused, or died.
            OSError: The system gave no more processes, or descriptors.
        """
        for lane in self.lanes:
            lane.spawn()
        for lane in self.lanes:
            while not lane.prepare(_LOOK_S):
                pass

    def look(self) -> bool:
        """Whether a process without a job has died; that is known to its lane then."""
        return bool(sum(lane.look() for lane in self.lanes))

    def close(self) -> None:
        """End all processes, those that do not end in order by force. No lane may be at work."""
        ends_at = monotonic() + _LEAVE_S
        children = [child for lane in self.lanes for child in lane.take_all()]
        for child in children:
            child.dismiss()
        for child in children:
            child.wait(ends_at)
        _all.discard(self)

    def forget(self) -> None:
        """After a fork, in the child that it made: the processes are not its own, nor are the ends of their pipes."""
        for lane in self.lanes:
            for child in lane.take_all():
                child.forget()


class Lane:
    """A place for a child process, and those that come after it. One thread at a time uses it, but for `look`."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._child: _Child | None = None
        self._next: _Child | None = None  # It is to follow the child, and starts while that one works.
        self._ready = False
        self._failures = 0
        self._start_at = 0.0

    @property
    def ready(self) -> bool:
        """There is a process, and it waits for a job."""
        return self._ready

    @property
    def pause_s(self) -> float:
        """For how long no process is to be started here."""
        return 0.0 if self._child is not None or self._next is not None else max(self._start_at - monotonic(), 0.0)

    def spawn(self) -> None:
        """Start a process without waiting for it."""
        if self._child is None:
            self._child, self._next = self._next or _Child(self._children), None

    def prepare(self, seconds: float) -> bool:
        """Have a process that is ready: start one, or wait for it for a while. Whether there is one.

        Raises:
            ProcessStartError: It refused, or died. `pause_s` says how long to leave it at that.
            OSError: The system gave no process.
        """
        old = self._child
        if old is not None and (old.is_used_up or old.has_died()):
            # One that has died without having done anything may do so again.
            self._drop(failed=not old.is_used_up and old.number == 0)
        else:
            old = None
        try:
            try:
                if not self.pause_s:
                    self.spawn()
            finally:
                if old is not None:
                    old.dismiss()
                    old.wait(monotonic() + _LEAVE_S)
            child = self._child
            self._ready = child is not None and child.is_ready(seconds)
        except (OSError, ProcessStartError):
            self._fail()
            raise
        return self._ready

    def events(self, count: int) -> list[threading.Event]:
        """For each job of the next call one that, when it is set, tells the process that the job is cancelled."""
        child = self._child
        if child is None:
            raise RuntimeError("there is no process: prepare one first")
        return [_Cancelled(child, child.number + 1, position) for position in range(count)]

    def run(self, records: Sequence[JobRecord], answer: Answer) -> tuple[list[Result], list[Failure]]:
        """Call the handler in the process, which has to be ready.

        Returns:
            The jobs' results, ``[]`` where none is to be kept, and the jobs that went wrong.

        Raises:
            TimeLimitError: It took too long, and was ended.
            ProcessDiedError: The process died. Where ``began`` is False, it has seen nothing of the jobs.
        """
        child = self._child
        if child is None:
            raise RuntimeError("there is no process: prepare one first")
        after = self._children.recycle_after
        if after is not None and child.number + 1 >= after and self._next is None:
            with suppress(OSError):  # `prepare` tries it again, and says so.
                self._next = _Child(self._children)
        try:
            results, failures, size = child.run(records, answer, self._children.time_limit_s)
        except (ProcessDiedError, TimeLimitError) as error:
            began = isinstance(error, TimeLimitError) or error.began
            self._drop(failed=not began)
            raise
        except BaseException:  # What it said made no sense: the handler has written where it should not.
            child.end()
            self._drop(failed=False)
            raise
        self._failures = 0
        most = self._children.recycle_bytes
        child.is_used_up = (after is not None and child.number >= after) or (most is not None and size >= most)
        self._ready = not child.is_used_up
        return results, failures

    def look(self) -> bool:
        """Whether the process is known to have died, without a job. For another thread than the one that uses it."""
        child = self._child
        if not self._ready or child is None or not child.has_died():
            return False
        self._ready = False
        return True

    def take_all(self) -> list[_Child]:
        """What is here, which is here no more then."""
        found = [child for child in (self._child, self._next) if child is not None]
        self._child = self._next = None
        self._ready = False
        return found

    def _drop(self, *, failed: bool) -> None:
        """The process has died."""
        self._child, self._ready = None, False
        self._failures = self._failures + 1 if failed else 0
        # The first time at once: it may have been idle for days.
        pause = 0.0 if self._failures <= 1 else min(_PAUSE_S * 2.0 ** min(self._failures - 2, 20), _LONGEST_PAUSE_S)
        self._start_at = monotonic() + pause

    def _fail(self) -> None:
        """None came to be, or it did not become ready."""
        for child in self.take_all():
            child.end()
        self._failures = max(self._failures, 1)
        self._drop(failed=True)


class _Child:
    """One child process, from its start to its end."""

    def __init__(self, children: Children) -> None:
        self.number = 0  # of the latest call
        self.is_used_up = False
        self._is_ready = False
        self._group_is_gone = False
        self._lock = threading.Lock()  # For the bell, which others ring.
        with ExitStack() as on_error, ExitStack() as theirs:
            end, channel = socket.socketpair()
            on_error.enter_context(end)
            theirs.enter_context(channel)
            self._bell, bell = socket.socketpair()
            on_error.enter_context(self._bell)
            theirs.enter_context(bell)
            self._stacks, stacks = os.pipe()
            on_error.callback(os.close, self._stacks)
            theirs.callback(os.close, stacks)
            life, self._life = os.pipe()
            on_error.callback(os.close, self._life)
            theirs.callback(os.close, life)
            files = [channel.fileno(), bell.fileno(), stacks, life]
            # It inherits the mask, and takes it off when it knows what to do with these signals.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            theirs.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            self._process = subprocess.Popen(  # noqa: S603 (our own command)
                [sys.executable, *_flags(), "-c", _RUN.format(folder=_FOLDER), *map(str, files)],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                # A terminal's Ctrl-C is for the parent. And what a handler starts can be ended along with it.
                start_new_session=True,
            )
            on_error.pop_all()
        os.set_blocking(self._stacks, False)
        self._bell.setblocking(False)
        self._channel = Channel(end)
        # It has not begun to read; what does not fit waits there, with the time that an import may take.
        with suppress(OSError):  # It has died already, as `is_ready` will say.
            self._channel.send(*children.message())

    def is_ready(self, seconds: float) -> bool:
        """Wait so long for it to be ready.

        Raises:
            ProcessStartError: It refused, or died.
        """
        if self._is_ready:
            return True
        try:
            message = self._channel.receive(monotonic() + seconds)
            if message is None and self.has_died():
                message = self._channel.receive(monotonic()) or self._end_of_file()
        except (EOFError, OSError):
            status, stack = self.end()
            raise ProcessStartError(
                f"a child process {ended(status)} before it was ready for the handler", stack=stack
            ) from None
        if message is None:
            return False
        if message[0] == "refused":
            self.end()
            raise ProcessStartError(message[1], stack=message[2])
        self._is_ready = True
        return True

    def run(
        self, records: Sequence[JobRecord], answer: Answer, limit_s: float | None
    ) -> tuple[list[Result], list[Failure], int]:
        """As `Lane.run`; with the bytes of memory that it holds."""
        until = None if limit_s is None else monotonic() + limit_s
        self.number += 1
        began = False
        try:
            self._channel.send("run", [_packed(record) for record in records], until=until)
            while True:
                look_at = monotonic() + _LOOK_S
                message = self._channel.receive(look_at if until is None else min(look_at, until))
                if message is None:
                    if until is not None and monotonic() >= until:
                        raise TimeoutError  # noqa: TRY301 (as `send` raises it)
                    if not self.has_died():
                        continue
                    message = self._channel.receive(monotonic()) or self._end_of_file()
                began = True
                if message[0] == "done":
                    _, results, failures, size = message
                    return (
                        [(result, None if error is None else ChildError(*error)) for result, error in results],
                        [Failure(position, kind, ChildError(*error)) for position, kind, error in failures],
                        size,
                    )
                self._answer(answer, message, until)
        except TimeoutError:
            if limit_s is None:
                raise AssertionError("there is no limit to pass") from None
            _, stack = self.end(self._where())
            raise TimeLimitError(limit_s, stack=stack) from None
        except (EOFError, OSError) as error:
            status, stack = self.end()
            # What it had not read when it died resets the connection, and what it cannot read any more breaks it.
            raise ProcessDiedError(
                f"the process that ran it {_fatal(status)}",
                status=status,
                stack=stack,
                began=began or not isinstance(error, BrokenPipeError | ConnectionResetError),
            ) from None

    def cancel(self, number: int, position: int) -> None:
        """Tell it that a job of a call is cancelled. Any thread may; it does not wait."""
        with self._lock, suppress(OSError):  # It has ended, or has not read for a thousand times.
            self._bell.send(_CANCEL.pack(number, position))

    def has_died(self) -> bool:
        if self._process.poll() is None:
            return False
        self._kill_group()
        return True

    def dismiss(self) -> None:
        """Ask it to end in order."""
        with suppress(OSError):
            self._channel.send("end", until=monotonic() + _LOOK_S)

    def wait(self, until: float) -> None:
        """Let it end until then (monotonic), and end it by force otherwise."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - monotonic(), 0))
        self.end()

    def end(self, written: bytes = b"") -> tuple[int, str]:
        """End it at once, with all that it has started. Its exit status, and what faulthandler wrote, also before."""
        self._kill_group()
        status = self._process.wait()
        written += self._read_stack()
        self.let_go()
        lines = written.decode("utf-8", "replace").splitlines()
        # The most recent call comes first, and our own come last.
        own = next((at for at, line in enumerate(lines) if _CHILD_FILE in line), len(lines))
        return status, "\n".join(lines[:own])

    def forget(self) -> None:
        """After a fork, in the child that it made."""
        self._lock = threading.Lock()  # Another thread may have held it.
        self._process.returncode = 0  # It is nobody's to wait for here.
        self.let_go()

    def let_go(self) -> None:
        """Close what leads to it."""
        self._channel.close()
        with self._lock:
            self._bell.close()
        for name in ("_stacks", "_life"):
            file = getattr(self, name)
            setattr(self, name, -1)
            if file >= 0:
                os.close(file)

    def _kill_group(self) -> None:
        """Kill it and all that it has started, once: its number may be another's later."""
        if not self._group_is_gone:
            self._group_is_gone = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, answer: Answer, message: Message, until: float | None) -> None:
        if message[0] == "progress":  # It waits for no reply.
            answer(*message)
            return
        try:
            reply, error = answer(*message), None
        except Exception as raised:  # noqa: BLE001 (it is the handler's to see)
            reply, error = None, _picklable(raised)
        self._channel.send(reply, error, until=until)

    def _end_of_file(self) -> Message:
        raise EOFError

    def _where(self) -> bytes:
        """Where its main thread stands, if it can still say so: faulthandler needs no GIL for it."""
        self._read_stack()
        if self.has_died():
            return b""
        self._process.terminate()
        poll = select.poll()
        poll.register(self._stacks, select.POLLIN)
        ends_at = monotonic() + _STACK_S
        written = b""
        while (left := ends_at - monotonic()) > 0 and poll.poll(left * 1000) and (more := self._read_stack()):
            written += more
            ends_at = min(ends_at, monotonic() + _STACK_S / 10)  # It writes piece by piece.
        return written

    def _read_stack(self) -> bytes:
        data = b""
        with suppress(OSError):
            while len(data) < _LONGEST_STACK and (more := os.read(self._stacks, _LONGEST_STACK)):
                data += more
        return data


class _Cancelled(threading.Event):
    """Reaches the process, too, when it is set."""

    def __init__(self, child: _Child, number: int, position: int) -> None:
        super().__init__()
        self._tell = partial(child.cancel, number, position)

    def set(self) -> None:
        super().set()
        self._tell()


def _packed(record: JobRecord) -> tuple[Any, ...]:
    """What a child needs of a job."""
    return (
        record.id,
        record.token,
        record.queue,
        record.priority,
        record.attempts,
        record.max_attempts,
        record.created_at_ms,
        record.group,
        record.ref,
        record.task,
        record.encoding,
        dict(record.headers),
        record.payload,
    )


def unpacked(fields: tuple[Any, ...]) -> JobRecord:
    """The job, as far as a child needs it."""
    (
        job_id,
        token,
        queue,
        priority,
        attempts,
        max_attempts,
        created_at_ms,
        group,
        ref,
        task,
        encoding,
        headers,
        payload,
    ) = fields
    return JobRecord(
        id=job_id,
        queue=queue,
        state=State.ACTIVE,
        priority=priority,
        due_at_ms=created_at_ms,
        attempts=attempts,
        max_attempts=max_attempts,
        created_at_ms=created_at_ms,
        token=token,
        lease_until_ms=None,
        claimed_at_ms=None,
        ended_at_ms=None,
        group=group,
        dedupe_key=None,
        ref=ref,
        task=task,
        encoding=encoding,
        headers=headers,
        error=None,
        history=(),
        payload=payload,
    )


def _pickled(name: str, part: object) -> bytes:
    try:
        return pickle.dumps(part)
    except Exception as error:
        raise TypeError(
            f"{name}={part!r} cannot be given to a child process: {error}. Define it at the top level of a module"
        ) from error


def _picklable(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 (our own)
    except Exception:  # noqa: BLE001 (whatever the exception's class makes of it)
        data = pickle.dumps(RuntimeError(f"{type(error).__qualname__}: {error}"))
    return data


def _main_module(handler: object) -> tuple[str, str]:
    """Where a child finds what the program's main module defines: by the module's name, or by its file."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):  # noqa: PTH113 (sys.path holds strings)
        raise TypeError(
            f"handler={handler!r} is defined where no other process can find it: put it in a file, and import it"
        )
    return "path", os.path.abspath(path)  # noqa: PTH100 (as above)


def _flags() -> list[str]:
    """How this interpreter was called, as far as it matters for a handler."""
    flags = sys.flags
    found = ["-" + "O" * flags.optimize] if flags.optimize else []
    for letter, is_set in (("E", flags.ignore_environment), ("I", flags.isolated), ("s", flags.no_user_site)):
        found += [f"-{letter}"] if is_set else []
    found += [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():  # noqa: SLF001 (documented, in spite of its name)
        found += ["-X", name if value is True else f"{name}={value}"]
    return found


def _fatal(status: int) -> str:
    hint = ": by hand, or since memory ran out" if status == -signal.SIGKILL else ""
    return f"{ended(status)}{hint}"


_all: weakref.WeakSet[Children] = weakref.WeakSet()


def _after_fork() -> None:
    for children in list(_all):
        children.forget()
    _all.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

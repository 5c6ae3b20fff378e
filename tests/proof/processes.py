"""Processes that are started to be killed, and of which none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.proof.ledger import Ledger

# Started beside the campaign: when that is killed itself, the pipe is closed, and this kills what it had started.
_WATCHDOG = """
import sys
from tests.proof.processes import kill_session
sessions = [line for line in sys.stdin]
for session in sessions:
    kill_session(*map(int, session.split()))
"""


_PR_SET_PDEATHSIG = 1  # prctl(2)


def members(session: int) -> list[int]:
    """The living processes of a session, which a process becomes the leader of when it is started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _parent, _group, its_session = _status(int(entry.name))
                if int(its_session) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]


def _lives(pid: int) -> bool:
    try:
        return _status(pid)[0] not in {"Z", "X"}
    except OSError:
        return False


def started_at(pid: int) -> int:
    """When a process was started, in ticks of the machine's: with its number, that names it for good."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def kill_session(session: int, started: int) -> None:
    """Kill whatever is left of it. ``started``: when its leader was; after its end the number may be another's."""
    now = started_at(session)
    if now not in {0, started}:
        return
    for _ in range(100):
        living = members(session)
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.01)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends, and though this one be stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Herd:
    """Processes, each the leader of a session of its own, with all that they start in it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", **environment}
        self._started: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._count = 0
        self._watchdog = subprocess.Popen(
            [sys.executable, "-c", _WATCHDOG], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        self._count += 1
        with (self._folder / f"output-{self._count:04}.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[process.pid] = process, started_at(process.pid)
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.write(f"{process.pid} {self._started[process.pid][1]}\n")
            self._watchdog.stdin.flush()
        return process

    def kill(self, pids: Sequence[int], ledger: Ledger) -> int:
        """SIGKILL to all of them at once; how many it hit.

        Each is noted before, since it was alive until then, and again when it is gone.
        """
        now = time.monotonic_ns()
        for pid in pids:
            ledger.tell("kill", pid, now)
        hit = 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                hit += 1
        for pid in pids:
            while _lives(pid):
                time.sleep(0.0005)
            ledger.tell("gone", pid, time.monotonic_ns())
        return hit

    def stop(self, process: subprocess.Popen[bytes], *, seconds: float = 10) -> bool:
        """End one in order, and whatever it left by force. Whether it ended by itself."""
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        in_order = process.returncode is not None
        self.clear(process)
        return in_order

    def clear(self, process: subprocess.Popen[bytes]) -> None:
        """Kill all that is left of its session."""
        kill_session(*(process.pid, self._started[process.pid][1]))
        process.wait()
        del self._started[process.pid]

    def close(self) -> None:
        for process, _ in list(self._started.values()):
            self.clear(process)
        assert self._watchdog.stdin is not None
        self._watchdog.kill()
        self._watchdog.wait()
        self._watchdog.stdin.close()

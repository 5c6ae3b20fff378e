"""Processes that are killed while they stand inside a step: the hook, and the three who take part.

A child runs a scenario, and stops itself (SIGSTOP) at the n-th arrival at a step. Its parent sees that, kills it, and
another process looks at the file. The steps are not written down anywhere: a first run records where it came through.
The hook lies in the child only; the product knows nothing of it.
"""

# The steps lie inside of modules that tests have no business in otherwise.
# ruff: noqa: SLF001, N802 (apsw's methods have such names)

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.proof.processes import die_with_parent

from litebroker.sqlite import connection

# What changes something outside of the process.
_SYSTEM_CALLS = frozenset(
    {"close", "fdatasync", "flock", "fsync", "link", "mkdir", "mkfifo", "open", "rename", "replace", "unlink", "write"}
)
_LIMIT_S = 30
Step = tuple[str, int]


class Steps:
    """Where a process came through, and where it is to stand still."""

    def __init__(self, stand_at: Step | None) -> None:
        self._stand_at = stand_at
        self._armed = False
        self._counts: Counter[str] = Counter()
        self.seen: list[Step] = []

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def reach(self, name: str) -> None:
        if not self._armed:
            return
        self._counts[name] += 1
        step = name, self._counts[name]
        self.seen.append(step)
        if step == self._stand_at:
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:  # another thread may have got the signal, and this one a moment
                time.sleep(1)

    # -- where the steps are --

    def at_statements(self) -> None:
        """Before and after each SQL statement, of either driver."""
        for driver in (connection._Stdlib, connection._Apsw):
            for name in ("rows", "change", "many"):
                self._around(driver, name)

    def _around(self, owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def around(db: object, sql: str, *rest: object) -> object:
            words = " ".join(sql.split()[:4])
            self.reach(f"before {words}")
            result = original(db, sql, *rest)
            self.reach(f"after {words}")
            return result

        setattr(owner, name, around)

    def at_system_calls(self, *packages: str) -> None:
        """Before and after what changes files, and at the begin and end of the functions of these packages."""

        def profile(frame: FrameType, event: str, argument: object) -> None:
            module = frame.f_globals.get("__name__", "")
            if event in {"c_call", "c_return"}:
                name = getattr(argument, "__name__", "")
                if name in _SYSTEM_CALLS and module.startswith("litebroker"):
                    self.reach(f"{'before' if event == 'c_call' else 'after'} {name} in {frame.f_code.co_name}")
            elif packages and event in {"call", "return"} and module.startswith(packages):
                self.reach(f"{event} of {module}.{frame.f_code.co_name}")

        threading.setprofile(profile)
        sys.setprofile(profile)

    def at_writes(self) -> None:
        """Before, halfway through, and after each write of SQLite to its files. It takes apsw."""
        import apsw

        steps = self

        class File(apsw.VFSFile):
            def __init__(self, name: Any, flags: list[int]) -> None:
                super().__init__("unix", name, flags)
                path = name.filename() if hasattr(name, "filename") else name
                self.kind = str(path).rpartition("jobs.db")[2].lstrip("-") or "file"

            def xWrite(self, data: bytes, offset: int) -> None:
                steps.reach(f"before a write to the {self.kind}")
                half = len(data) // 2
                super().xWrite(data[:half], offset)
                steps.reach(f"within a write to the {self.kind}")
                super().xWrite(data, offset)
                steps.reach(f"after a write to the {self.kind}")

            def xSync(self, flags: int) -> None:
                steps.reach(f"before a sync of the {self.kind}")
                super().xSync(flags)

            def xTruncate(self, size: int) -> None:
                steps.reach(f"before a truncation of the {self.kind}")
                super().xTruncate(size)

        class Files(apsw.VFS):
            def __init__(self) -> None:
                super().__init__("litebroker-proof", "unix", makedefault=True)

            def xOpen(self, name: Any, flags: list[int]) -> Any:
                return File(name, flags)

            def xDelete(self, name: str, sync: bool) -> None:
                steps.reach("before a removal")
                super().xDelete(name, sync)

        _kept.append(Files())


_kept: list[object] = []  # SQLite goes on using it


class Child:
    """A process that was forked to run something; what that answers comes back as JSON."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with_parent()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                answer = json.dumps(work(), default=repr).encode()
                with open(writing, "wb") as pipe:  # noqa: PTH123 - a descriptor
                    pipe.write(answer)
                code = 0
            except BaseException:  # noqa: BLE001 - whatever it is, this process goes no further
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(writing)

    def answer(self) -> Any:
        """What it answered. Raises ``ChildProcessError`` when it failed, or took too long."""
        text = b""
        deadline = time.monotonic() + _LIMIT_S
        with open(self._reading, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                more = pipe.read(2**20)
                if not more:
                    break
                text += more
        if time.monotonic() > deadline:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self._check(status)
        return json.loads(text)

    def stands(self) -> bool:
        """Wait until it stands, or has ended. Nobody reads its answer: it has to be short."""
        deadline = time.monotonic() + _LIMIT_S
        pid = status = 0
        while not pid:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            time.sleep(0 if pid else 0.001)
        if os.WIFSTOPPED(status):
            return True
        os.close(self._reading)
        self._check(status)
        return False

    def _check(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            raise ChildProcessError(f"it had not ended after {_LIMIT_S} s, or was killed")
        if code:
            raise ChildProcessError(f"it ended with {code}; see above")

    def kill(self) -> None:
        """SIGKILL, while it stands."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reading)


def ask(work: Callable[[], object]) -> Any:
    """Run it in a process of its own, which ends without closing anything; its answer."""
    return Child(work).answer()


def content(path: Path) -> dict[str, list[dict[str, Any]]]:
    """All that a stranger sees in the file's tables. For a process of its own: it leaves the connection open."""
    found: dict[str, list[dict[str, Any]]] = {}
    with contextlib.suppress(sqlite3.OperationalError):  # there is no file yet
        db = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=1, isolation_level=None)
        _kept.append(db)
        db.execute("begin")  # one moment for all
        names = [name for (name,) in db.execute("select name from sqlite_master where type = 'table' order by name")]
        for name in names:
            if name != "litebroker_boot":
                cursor = db.execute(f"select * from {name}")
                columns = [column[0] for column in cursor.description]
                rows = [dict(zip(columns, map(repr, row), strict=True)) for row in cursor]
                found[name] = sorted(rows, key=str)
        db.execute("rollback")
    return found

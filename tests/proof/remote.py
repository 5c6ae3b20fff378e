"""A storage in another process, whose verbs are called from here: two processes interleaved, one call at a time."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from litebroker.sqlite import SQLiteStorage
from litebroker.testing import ManualClock

Request = tuple[str, tuple[Any, ...], dict[str, Any], int, int]


class RemoteStorage:
    """Every verb of `SQLiteStorage` but those that need a ``with`` block.

    The other process is started once, and opens file after file.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.proof.remote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._clock = ManualClock()

    def open(self, path: str, driver: str, clock: ManualClock) -> None:
        """Begin with another file, on this clock."""
        self._clock = clock
        self._call("open", path, driver)

    def close(self) -> None:
        self._call("close")

    def end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not hasattr(SQLiteStorage, name):
            raise AttributeError(name)
        return lambda *args, **options: self._call(name, *args, **options)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        request: Request = (name, args, options, self._clock.now_ms(), self._clock.steady_ms())
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer, error = pickle.load(self._process.stdout)  # noqa: S301 - of our own process
        if error is not None:
            raise error
        return answer


def main() -> None:
    """Answer calls until the pipe ends."""
    clock = ManualClock()
    storage: SQLiteStorage | None = None
    while True:
        try:
            name, args, options, now_ms, steady_ms = pickle.load(sys.stdin.buffer)  # noqa: S301 - as above
        except EOFError:
            return
        try:
            if name == "open":
                clock = ManualClock(now_ms, steady_ms)
                storage = SQLiteStorage(args[0], driver=args[1], clock=clock, durability="relaxed")
                answer: Any = None
            else:
                clock.advance((steady_ms - clock.steady_ms()) / 1000)
                clock.step((now_ms - clock.now_ms()) / 1000)
                answer = getattr(storage, name)(*args, **options)
            said = pickle.dumps((answer, None))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            said = pickle.dumps((None, error))
        sys.stdout.buffer.write(said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

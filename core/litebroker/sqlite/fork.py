"""Around a fork: no thread is inside SQLite, and no connection crosses it, unless it is asked to (crossing.py).

A child that inherits a connection inherits its locks' bookkeeping without its locks: its commits vanish, or it hangs in
a mutex that no thread of it will open (sqlite.org/howtocorrupt.html, section 2.6).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import threading
import time
import weakref
from typing import Protocol

from litebroker.sqlite import crossing


class Forked(Protocol):
    """What has connections to close before a fork."""

    def locks_for_fork(self) -> tuple[threading.RLock, ...]:
        """What `before_fork` needs to hold: then no thread is inside SQLite. Called before they are taken."""

    def before_fork(self) -> None:
        """Close everything, but for what may cross."""

    def after_fork_in_parent(self) -> None:
        """Release the locks."""

    def after_fork_in_child(self) -> None:
        """Begin anew, with new locks."""


_all: weakref.WeakSet[Forked] = weakref.WeakSet()
_forking: list[Forked] = []
_waits: list[bool] = []
_kept: list[object] = []
_COURTESY_S = 0.005


def register(forked: Forked) -> None:
    """Have its hooks called at each fork from now on."""
    _all.add(forked)


def unregister(forked: Forked) -> None:
    """It has nothing to close any more."""
    _all.discard(forked)


def give_way() -> None:
    """Let a thread that is about to fork have the locks first. To be called before they are taken."""
    if _waits:
        time.sleep(_COURTESY_S)


def keep_for_ever(*objects: object) -> None:
    """Let nothing close them, the interpreter's end included."""
    _kept.extend(objects)


@atexit.register
def _keep_beyond_the_end() -> None:
    # Not before it: ctypes takes a tenth of a millisecond in a process that has just been forked.
    for kept in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _before() -> None:
    _forking[:] = list(_all)
    locks = [lock for forked in _forking for lock in forked.locks_for_fork()]
    _waits.append(True)
    try:
        while not _take_all(locks):
            # Of uneven length, or two threads that take turns could keep a third away for ever.
            time.sleep(random.uniform(0.001, 0.01))  # noqa: S311
    finally:
        _waits.clear()
    crossing.begin()
    for forked in _forking:
        forked.before_fork()


def _take_all(locks: list[threading.RLock]) -> bool:
    """Take all of them, or none. A thread that holds one may be waiting for another, in whatever order."""
    for number, lock in enumerate(locks):
        if not lock.acquire(timeout=0.005):
            for taken in locks[:number]:
                taken.release()
            return False
    return True


def _after_in_parent() -> None:
    for forked in reversed(_forking):
        forked.after_fork_in_parent()
    _forking.clear()


def _after_in_child() -> None:
    crossing.take_locks()
    for forked in reversed(_forking):
        forked.after_fork_in_child()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)

"""All memory of a worker from one arena of glibc's malloc, so that the thread for its work horses does not let it grow.

glibc gives each thread an arena (mallopt(3), M_ARENA_MAX). Of the memory that passes from one thread to another a
little stays where it keeps what lies around it from being used again: `setenv` never frees an old value, and RQ sets a
job's id in the environment before each job. With two arenas a worker grew by a kilobyte a job; with one it grows by a
tenth of that, as on Redis. Work horses inherit the setting.
"""

from __future__ import annotations

import ctypes
import threading

_M_ARENA_MAX = -8
_is_one = False


def keep_to_one() -> bool:
    """To be called before there is a second thread. False: it was too late."""
    global _is_one  # noqa: PLW0603 - of the process
    if not _is_one and threading.active_count() == 1:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        _is_one = mallopt is None or bool(mallopt(_M_ARENA_MAX, 1))  # other mallocs have no arenas
    return _is_one

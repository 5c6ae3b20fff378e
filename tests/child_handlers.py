"""Handlers for tests/test_children.py, in a module that child processes import."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from litebroker import AsyncContext, Context, Group, GroupConflictError, NewJob, PayloadError, current_job

_kept: list[bytearray] = []
_initialized: list[str] = []


def write(path: str, *words: object) -> None:
    """A line of a file that several processes append to."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def tell_pid(path: str) -> None:
    write(path, os.getpid())


def print_it(data: object) -> None:
    print("seen:", data)


def fail(data: str) -> None:
    try:
        int("beneath")
    except ValueError as error:
        raise LookupError(data) from error


def leave(_: object) -> None:
    sys.exit("no more")


def exit_at_once(_: object) -> None:
    os._exit(7)


def kill_itself(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash(_: object) -> None:
    ctypes.string_at(0)


def crash_once(path: str, context: Context) -> None:
    if context.attempt == 1:
        os._exit(1)
    write(path, "attempt", context.attempt)


def by_name(data: list[str], context: Context) -> None:
    """Calls the function of that name."""
    name, *arguments = data
    globals()[name](arguments[0] if arguments else None)


def spin(_: object) -> None:
    while True:
        pass


def match_for_ever(path: str | None) -> None:
    """Holds the GIL, in C, for years."""
    if path:
        tell_pid(path)
    re.match(r"(a+)+b", "a" * 60)


def wait_for(path: str) -> None:
    """Tells its pid, and waits for a second file."""
    tell_pid(path)
    while not Path(f"{path}.open").exists():
        time.sleep(0.005)


def start_another(path: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        write(path, process.pid)
        process.wait()


def start_another_and_crash(path: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    write(path, process.pid)
    os._exit(1)


def write_where_it_should_not(_: object) -> None:
    for file in range(3, 300):  # The program that has started it may have many open.
        try:
            socket.socket(fileno=os.dup(file)).send((5).to_bytes(8, "little") + b"hello")
        except OSError:
            continue
    threading.Event().wait(30)


def fork_and_crash(path: str) -> None:
    """Crashes while another process holds all its descriptors."""
    pid = os.fork()
    if not pid:
        threading.Event().wait()
    write(path, pid)
    os._exit(1)


def fork_and_terminate(path: str) -> None:
    """Ends a process that it has forked by the signal that it does not end by itself."""
    for _ in range(20):
        pid = os.fork()
        if not pid:
            threading.Event().wait()
        os.kill(pid, signal.SIGTERM)
        write(path, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def fork_and_return(path: str) -> None:
    """Comes back twice."""
    if os.fork():
        time.sleep(0.05)
    tell_pid(path)


def grow(data: list[Any]) -> None:
    path, megabytes = data
    _kept.append(bytearray(b"x") * (megabytes * 2**20))
    tell_pid(path)


def tell_facts(path: str, context: Context) -> None:
    job = current_job()
    facts = [context.queue, context.attempt, context.max_attempts, context.priority, context.task, context.ref]
    write(path, *facts, dict(context.headers), context.group, job is not None and job.id == context.job_id)


def complete_with_followers(path: str, context: Context) -> None:
    followers = [NewJob("next", queue="others"), NewJob("later", queue="others", priority=3, headers={"a": "b"})]
    done = context.complete(then=followers)
    write(path, done, context.complete())


def complete_in_a_transaction(data: list[str], context: Context) -> None:
    database, what = data
    db = sqlite3.connect(database, timeout=30)
    db.execute("create table if not exists mine(word text)")
    db.execute("insert into mine values(?)", [what])
    context.complete(connection=db, then=[NewJob("follower", queue="others")])
    if what == "crash":
        os._exit(1)
    if what == "commit":
        db.commit()
    db.close()


def fail_for_good(_: object, context: Context) -> None:
    context.fail(LookupError("not there"), retry=False)


def release_at_first(path: str, context: Context) -> None:
    if not Path(path).exists():
        tell_pid(path)
        context.release()
    else:
        write(path, "attempt", context.attempt)


def be_refused(path: str, context: Context) -> None:
    for options in ({"connection": 5}, {"then": [float("nan")]}, {"then": [NewJob(1, group=Group("g", 2))]}):
        try:
            context.complete(**options)
        except (GroupConflictError, PayloadError, TypeError) as error:
            write(path, type(error).__name__, error)


def wait_to_be_cancelled(path: str, context: Context) -> None:
    tell_pid(path)
    write(path, "cancelled", context.cancelled.wait(30))


def settle_in_a_thread(path: str, context: Context) -> None:
    thread = threading.Thread(target=context.complete)
    thread.start()
    thread.join()
    write(path, "completed")


def complete_and_crash(_: object, context: Context) -> None:
    context.complete(then=[NewJob("follower", queue="others")])
    os._exit(1)


def report_and_wait(path: str, context: Context) -> None:
    for percent in range(100):
        context.progress(percent / 100, "early")
    context.progress(0.99, "late")
    wait_for(path)


def double(data: Any) -> Any:
    return data * 2


def return_what_cannot_be_kept(_: object) -> object:
    return object()


def tell_batch(data: list[list[str]]) -> None:
    write(data[0][0], *(word for _, word in data))


def settle_some(data: list[list[str]], contexts: list[Context]) -> None:
    for (path, word), context in zip(data, contexts, strict=True):
        if word == "bad":
            context.fail("bad one", retry=False)
        else:
            write(path, word)


def crash_in_batch(_: list[str]) -> None:
    os._exit(1)


async def tell_async(path: str, context: AsyncContext) -> None:
    write(path, "async", context.attempt)
    await context.complete(then=[NewJob("follower", queue="others")])


async def wait_async(path: str, context: AsyncContext) -> None:
    import asyncio

    tell_pid(path)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        write(path, "cancelled")
        raise


def initialize() -> None:
    _initialized.append("initialized")


def fail_to_initialize() -> None:
    raise OSError("no model")


def tell_initialized(path: str) -> None:
    write(path, *_initialized)


def tell_at_the_end(path: str) -> None:
    atexit.register(write, path, "ended in order")


class Reversing:
    """A serializer of text."""

    name = "reversing"

    def dumps(self, value: str, /) -> bytes:
        return value.encode()[::-1]

    def loads(self, data: bytes, /) -> str:
        return data[::-1].decode()


class Unreadable(Reversing):
    """Its payloads cannot be read in child processes, unless they are short."""

    def loads(self, data: bytes, /) -> str:
        if len(data) > 100:
            raise ValueError("too long to be read")
        return super().loads(data)


class Callable:
    """It goes along with its method."""

    def __init__(self, word: str) -> None:
        self.word = word

    def method(self, path: str) -> None:
        write(path, self.word)


def copy_length(data: bytes) -> None:
    Path(data[:200].rstrip(b" ").decode()).write_text(str(len(data)))

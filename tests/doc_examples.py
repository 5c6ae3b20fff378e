"""Run the examples of a Markdown file in the order in which a reader would: ``python doc_examples.py FILE``.

What is written as...

* ```` ```python ```` runs, all such blocks of a file in one namespace.
* ```` ```console ````: each line behind ``$ `` (and its continuations behind ``> ``) runs in bash and must succeed. The
  lines between are output: they must come, in this order, whatever comes between them. ``...`` in a line stands for
  any text.
* A block whose first line is nothing but a comment with a file name, such as ``# tasks.py``, is saved under that name
  in the current folder, in whatever language, and not run.
* Any other language (``text``, ``sql``, ``toml``) is for the eyes only. Python and shell under other names (``py``,
  ``bash``) are refused, since they would never be run.

A comment on the line before a block says what differs:

* ``<!-- test: skip (why) -->``: it is not run.
* ``<!-- test: background -->``: it goes on until the file's end, as in another terminal; its output is awaited then.
* ``<!-- test: exit 2 -->``: each of its commands ends with that status.

Commands that prepare a machine, or run the project's tests, are left out (`NOT_RUN`): `.ci/run` does those.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = ("apt-get ", "brew ", "cd ", "git ", "pip ", "pytest && ", "python -m venv ", "source ", "uv ")
REFUSED = {"bash": "console", "sh": "console", "shell": "console", "zsh": "console", "py": "python", "pycon": "python"}
TIME_LIMIT = int(os.environ.get("DOC_EXAMPLES_TIME_LIMIT", "120"))  # seconds for a whole file
OUTPUT_LIMIT = 30.0  # seconds that output may be late, while something still runs

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"( *)(`{3,}|~{3,}) *([^\s`{]*)")
DIRECTIVE = re.compile(r"<!-- test: (?:(skip) \(.+\)|(background)|exit (\d+)) -->")
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)")


class ExampleError(Exception):
    """An example does not do what its document says."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        line: The number, from 1, of the first line inside it.
        exit_status: What each of its commands should end with.
    """

    line: int
    language: str
    text: list[str]
    skipped: bool
    background: bool
    exit_status: int


def blocks_of(markdown: str) -> list[Block]:
    """All fenced blocks, in order."""
    blocks: list[Block] = []
    lines = iter(enumerate(markdown.splitlines(), 1))
    before = ""
    for number, line in lines:
        opening = FENCE.match(line)
        if not opening:
            before = line.strip()
            continue
        indent, fence, language = opening.groups()
        text: list[str] = []
        for _, inner in lines:
            if re.fullmatch(rf" *{fence[0]}{{{len(fence)},}} *", inner):
                break
            text.append(inner.removeprefix(indent))
        else:
            raise ExampleError(f"line {number}: this block never ends")
        directive = DIRECTIVE.fullmatch(before)
        if "<!-- test" in before and not directive:
            raise ExampleError(f"line {number - 1}: this is not understood: {before}")
        skip, background, exit_status = directive.groups() if directive else (None, None, None)
        if (background or exit_status) and language != "console":
            raise ExampleError(f"line {number - 1}: only a console block can be so: {before}")
        if language in REFUSED and not skip:
            raise ExampleError(f"line {number}: write ```{REFUSED[language]}, so that it is run")
        blocks.append(
            Block(
                line=number + 1,
                language=language,
                text=text,
                skipped=bool(skip),
                background=bool(background),
                exit_status=int(exit_status or 0),
            )
        )
        before = ""
    return blocks


def commands_and_output(block: Block) -> tuple[list[str], list[str]]:
    """What a console block says to run, and the lines that it shows as printed."""
    commands: list[str] = []
    output: list[str] = []
    for line in block.text:
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif not commands:
            raise ExampleError(f"line {block.line}: a console block begins with a command, `$ ...`")
        elif line.startswith("> "):
            commands[-1] += "\n" + line.removeprefix("> ")
        elif commands[-1].endswith("\\"):
            commands[-1] += "\n" + line
        elif line.strip() and not commands[-1].startswith(NOT_RUN):
            output.append(line.strip())
    return [command for command in commands if not command.startswith(NOT_RUN)], output


class Shell:
    """A bash that runs one block's commands. `end` it, or what it started goes on."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.commands, self.expected = commands_and_output(block)
        self.printed: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Each command's status comes on a channel of its own, so that no output can be taken for it.
        self._statuses, channel = os.pipe()
        os.set_blocking(self._statuses, False)
        self._process = subprocess.Popen(
            ["bash", "-c", "".join(f"{command}\necho $? >&{channel}\n" for command in self.commands)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            pass_fds=[channel],
            start_new_session=True,  # A process group, which can be ended whole.
        )
        os.close(channel)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def check(self) -> None:
        """See the commands to their end, unless they run in the background, and await what they should print."""
        if not self.block.background:
            self._process.wait()
        missing = self._await_output()
        try:
            statuses = [int(status) for status in os.read(self._statuses, 65_536).split()]
        except BlockingIOError:
            statuses = []
        for command, status in zip(self.commands, statuses, strict=False):
            if status != self.block.exit_status:
                self._fail(f"`{command}` ended with status {status}, not {self.block.exit_status}")
        if not self.block.background and len(statuses) < len(self.commands):
            self._fail(f"`{self.commands[len(statuses)]}` was never reached, or ended the shell")
        if missing:
            self._fail(f"this line did not come, or not after those above it: {missing}")

    def _await_output(self) -> str | None:
        """The first expected line that does not come, or None."""
        deadline = time.monotonic() + OUTPUT_LIMIT
        for expected in self.expected:
            pattern = ".*".join(re.escape(part) for part in expected.split("..."))
            while True:
                try:
                    line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    return expected
                if line is None:
                    return expected
                self.printed.append(line)
                if re.fullmatch(pattern, line.strip()):
                    break
        return None

    def _fail(self, why: str) -> None:
        self.end()
        while not self._lines.empty():
            self.printed.append(self._lines.get() or "")
        raise ExampleError(f"line {self.block.line}: {why}\n\nIt printed:\n{''.join(self.printed)}")

    def end(self) -> None:
        """End what still runs: by SIGTERM, and what does not heed that within ten seconds, by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._reader.join(timeout=10)  # Until nobody is left who could print.
        self._process.wait()


def run_python(block: Block, path: Path, namespace: dict[str, object]) -> None:
    """Run a block in the namespace that it shares with the others of its file."""
    # The empty lines in front make a traceback show the line of the document.
    code = "\n" * (block.line - 1) + "\n".join(block.text)
    exec(compile(code, path, "exec", dont_inherit=True), namespace)  # noqa: S102 - our own text


def refuse_leftover_threads() -> None:
    """Complain of a thread that would keep a reader's program from ending."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            raise ExampleError(f"{thread.name} still runs: the examples must close what they open")


def run_file(path: Path) -> None:
    """Run one file's examples in the current folder."""
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # Where dataclasses and pickle look.
    shells: list[Shell] = []
    ran = 0
    try:
        for block in blocks:
            name = FILE_NAME.fullmatch(block.text[0]) if block.text else None
            if block.skipped:
                continue
            if name:
                Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(name[1]).write_text("\n".join([*block.text, ""]), encoding="utf-8")
            elif block.language == "python":
                run_python(block, path, module.__dict__)
                ran += 1
            elif block.language == "console":
                shells.append(Shell(block))
                ran += len(shells[-1].commands)
                if not block.background:
                    shells[-1].check()
        for shell in shells:
            if shell.block.background:
                shell.check()
        refuse_leftover_threads()
    finally:
        for shell in shells:
            shell.end()
    print(f"{path.name}: ran {ran}, skipped {sum(block.skipped for block in blocks)}")


def prepare_environment(folder: Path) -> None:
    """Let examples find the packages and the command, also in a bare checkout, where nothing is installed."""
    scripts = Path(sys.executable).parent
    roots = [str(ROOT / "core"), str(ROOT / "integrations")]
    path = [str(scripts)]
    if not (scripts / "litebroker").exists():
        command = folder / "litebroker"
        command.write_text(f"#!{sys.executable}\nfrom litebroker.cli import main\nmain()\n", encoding="utf-8")
        command.chmod(0o755)
        path.append(str(folder))
    os.environ["PATH"] = os.pathsep.join([*path, os.environ["PATH"]])
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)
    os.environ["PYTEST_PLUGINS"] = "litebroker_pytest"  # Which pytest finds by itself where it is installed.
    os.environ["PYTHONUNBUFFERED"] = "1"  # A worker's lines are seen as they are printed.
    sys.path[:] = ["", *roots, *(entry for entry in sys.path if entry != str(ROOT / "tests"))]


def ring(_signal: int, _frame: types.FrameType | None) -> None:
    """End the example that takes too long."""
    raise ExampleError(f"not done within {TIME_LIMIT} seconds")


def main(path: Path) -> int:
    """Run the file in a new folder. Answers the exit status."""
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(TIME_LIMIT)
    with tempfile.TemporaryDirectory() as commands, tempfile.TemporaryDirectory() as folder:
        prepare_environment(Path(commands))
        os.chdir(folder)
        try:
            run_file(path)
        except (Exception, SystemExit):  # noqa: BLE001 - whatever an example does is told
            print(f"{path.name} FAILED\n{traceback.format_exc()}")
            return 1
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]).resolve())
    sys.stdout.flush()
    os._exit(status)  # Not sys.exit, which would wait for threads that the examples left behind.

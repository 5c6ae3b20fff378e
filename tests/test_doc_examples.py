"""What `doc_examples.py` runs, leaves out, and finds wrong."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("doc_examples.py")


def run(tmp_path: Path, markdown: str, **environment: str) -> subprocess.CompletedProcess[str]:
    document = tmp_path / "document.md"
    document.write_text(markdown, encoding="utf-8")
    return subprocess.run(
        [sys.executable, RUNNER, document],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_python_blocks_share_one_namespace(tmp_path: Path) -> None:
    result = run(tmp_path, "```python\nx = 2\n```\nand then\n```python\nassert x == 2\n```\n")

    assert (result.returncode, result.stdout) == (0, "document.md: ran 2, skipped 0\n")


def test_a_block_that_begins_with_a_file_name_is_saved_for_the_others(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "```python\n# tasks.py\ndef answer():\n    return 42\n```\n"
        "```python\nimport tasks\nassert tasks.answer() == 42\n```\n"
        "```console\n$ python -c 'import tasks; print(tasks.answer())'\n42\n```\n",
    )

    assert (result.returncode, result.stdout) == (0, "document.md: ran 2, skipped 0\n")


def test_a_failing_python_block_is_shown_with_its_line_in_the_document(tmp_path: Path) -> None:
    result = run(tmp_path, "# Title\n\n```python\nx = 1\nassert x == 2\n```\n")

    assert result.returncode == 1
    assert 'document.md", line 5, in <module>\n    assert x == 2\n' in result.stdout


def test_an_example_cannot_end_the_run_halfway(tmp_path: Path) -> None:
    result = run(tmp_path, "```python\nraise SystemExit(0)\n```\n")

    assert result.returncode == 1
    assert "SystemExit: 0" in result.stdout


def test_output_is_compared_line_by_line_with_dots_for_what_varies(tmp_path: Path) -> None:
    result = run(tmp_path, "```console\n$ printf 'one 1\\nnoise\\ntwo 2\\n'\none ...\n...\ntwo 2\n```\n")

    assert (result.returncode, result.stdout) == (0, "document.md: ran 1, skipped 0\n")


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```console\n$ echo one\ntwo\n```\n", "this line did not come, or not after those above it: two"),
        ("```console\n$ printf 'b\\na\\n'\na\nb\n```\n", "this line did not come, or not after those above it: b"),
        ("```console\n$ false\n$ true\n```\n", "`false` ended with status 1, not 0"),
        ("```console\n$ true\n$ exit 0\n$ true\n```\n", "`exit 0` was never reached, or ended the shell"),
        ("<!-- test: exit 3 -->\n```console\n$ true\n```\n", "`true` ended with status 0, not 3"),
        ("<!-- test: background -->\n```console\n$ false\n$ echo on\non\n```\n", "`false` ended with status 1, not 0"),
        ("```console\necho one\n```\n", "a console block begins with a command"),
        ("```bash\necho one\n```\n", "write ```console"),
        ("<!-- test: skip -->\n```python\n1 / 0\n```\n", "this is not understood: <!-- test: skip -->"),
        ("<!-- test: exit 1 -->\n```python\n1 / 0\n```\n", "only a console block can be so"),
        ("```python\nx = 1\n", "this block never ends"),
        (
            "```python\nimport threading\nthreading.Thread(target=threading.Event().wait, name='idle').start()\n```\n",
            "idle still runs",
        ),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, block: str, complaint: str) -> None:
    result = run(tmp_path, block)

    assert result.returncode == 1
    assert complaint in result.stdout


def test_commands_go_on_over_several_lines(tmp_path: Path) -> None:
    result = run(
        tmp_path, "```console\n$ for i in 1 2; do\n>   echo $i\n> done\n1\n2\n$ echo \\\n  three\nthree\n```\n"
    )

    assert (result.returncode, result.stdout) == (0, "document.md: ran 2, skipped 0\n")


def test_a_command_may_be_said_to_fail(tmp_path: Path) -> None:
    result = run(tmp_path, "<!-- test: exit 3 -->\n```console\n$ (echo sorry >&2; exit 3)\nsorry\n```\n")

    assert (result.returncode, result.stdout) == (0, "document.md: ran 1, skipped 0\n")


def test_a_background_block_runs_beside_the_others_and_shows_its_output_in_the_end(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "```console\n$ mkfifo pipe\n```\n"
        "<!-- test: background -->\n```console\n$ while read line < pipe; do echo got $line; done\ngot a job\n```\n"
        "```console\n$ echo a job > pipe\n```\n",
    )

    assert (result.returncode, result.stdout) == (0, "document.md: ran 3, skipped 0\n")


def test_what_runs_in_the_background_is_ended(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    hold = f"""python -c 'import fcntl; f = open("{lock}", "a"); fcntl.flock(f, 2); print("held"); input()' < pipe"""

    result = run(
        tmp_path,
        f"```console\n$ mkfifo pipe; exec 3<>pipe; {hold} &\nheld\n```\n"
        "<!-- test: background -->\n```console\n$ sleep 1000\n```\n",
    )

    assert (result.returncode, result.stdout) == (0, "document.md: ran 2, skipped 0\n")
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("block", ["```python\nwhile True: pass\n```\n", "```console\n$ sleep 1000\n```\n"])
def test_a_file_has_a_time_limit(tmp_path: Path, block: str) -> None:
    result = run(tmp_path, block, DOC_EXAMPLES_TIME_LIMIT="1")

    assert result.returncode == 1
    assert "not done within 1 seconds" in result.stdout


def test_what_is_skipped_prepares_or_is_no_example_does_not_run(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "<!-- test: skip (needs a server) -->\n```python\n1 / 0\n```\n"
        "```console\n$ pip install no-such-package\nsome output\n```\n"
        "```sql\nselect 1\n```\n",
    )

    assert (result.returncode, result.stdout) == (0, "document.md: ran 0, skipped 1\n")

"""The examples in the README and in the documentation do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_its_examples_run(document: Path) -> None:
    runner = subprocess.run(
        [sys.executable, ROOT / "tests" / "doc_examples.py", document],
        capture_output=True,
        text=True,
        check=False,
    )

    # The last line is printed after the last example: that no example ended the run halfway is part of the test.
    assert runner.returncode == 0, f"{runner.stdout}\n{runner.stderr}"
    assert runner.stdout.splitlines()[-1].startswith(f"{document.name}: ran ")

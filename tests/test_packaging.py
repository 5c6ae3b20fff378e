"""The distribution: what is in it, and what a type checker sees of it once it is installed."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "litebroker": ROOT / "core",
    "litebroker_dramatiq": ROOT / "integrations",
    "litebroker_huey": ROOT / "integrations",
    "litebroker_pytest": ROOT / "integrations",
    "litebroker_rq": ROOT / "integrations",
}

# Nothing of the checkout may be seen where the installed package is looked at.
CLEAN = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, as an index's users get it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def requirements(metadata: email.message.Message) -> dict[str, set[str]]:
    """What each extra needs; under "" what is always needed, on every platform."""
    by_extra: dict[str, set[str]] = {"": set()}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition("; ")
        if marker.startswith("extra == "):
            by_extra.setdefault(marker.removeprefix("extra == ").strip("'"), set()).add(requirement)
        elif not marker:
            by_extra[""].add(requirement)
    return by_extra


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True, env=CLEAN)
    return python


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    files = {
        str(path.relative_to(root))
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == files
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert [name for name in packed if name.startswith("litebroker/sqlite/migrations/") and name.endswith(".sql")]


def test_the_core_needs_croniter_alone(requirements: dict[str, set[str]]) -> None:
    needed = {re.split(r"[<>=]", requirement)[0] for requirement in requirements[""]}

    assert needed == {"croniter"}


def test_the_extra_all_is_all_of_the_others(requirements: dict[str, set[str]]) -> None:
    others = [wanted for extra, wanted in requirements.items() if extra not in {"", "all"}]

    everything = requirements["all"]

    assert everything == set().union(*others)


def test_the_licence_comes_with_it(wheel: Path, metadata: email.message.Message) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        text = archive.read(licence)

    assert metadata["License-Expression"] == "MIT"
    assert text == (ROOT / "LICENSE").read_bytes()


def test_the_packages_are_imported_from_the_wheel_and_the_command_is_there(installed: Path) -> None:
    script = """
import importlib.metadata, importlib.util, sys
for name in ("litebroker", "litebroker_dramatiq", "litebroker_huey", "litebroker_rq"):
    assert importlib.util.find_spec(name).origin.startswith(sys.prefix), name
(command,) = importlib.metadata.entry_points(group="console_scripts", name="litebroker")
print(command.value)
"""

    result = subprocess.run([installed, "-c", script], capture_output=True, text=True, check=True, env=CLEAN)

    assert result.stdout == "litebroker.cli:main\n"
    assert (installed.parent / "litebroker").exists()


def test_tools_find_the_inspector_of_each_adapter(installed: Path) -> None:
    script = """
import importlib.metadata, importlib.util
for entry in sorted(importlib.metadata.entry_points(group="litebroker.inspectors")):
    (folder,) = importlib.util.find_spec(entry.value.partition(".")[0]).submodule_search_locations
    source = open(folder + "/inspector.py")
    assert f"class {entry.attr}(Inspector)" in source.read(), entry
    print(entry.name)
"""

    result = subprocess.run([installed, "-c", script], capture_output=True, text=True, check=True, env=CLEAN)

    assert result.stdout.split() == ["dramatiq", "huey", "rq"]


def test_mypy_sees_the_payload_type_of_an_installed_queue(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
from typing import TypedDict

from litebroker import Queue


class Email(TypedDict):
    to: str


queue: Queue[Email] = Queue("emails", "jobs.db")
queue.add({"to": "a@example.com"})
queue.add("a@example.com")  # type: ignore[arg-type]
for job in queue.claim(limit=1, lease=30):
    address: str = job.data["to"]
    number: int = job.data["to"]  # type: ignore[assignment]
""",
        encoding="utf-8",
    )

    # --strict warns of an ignore that is not needed: so the two wrong lines must be found wrong.
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", installed, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=CLEAN,
    )

    assert (result.returncode, result.stdout) == (0, "Success: no issues found in 1 source file\n")

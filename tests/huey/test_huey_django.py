"""djhuey: Django's settings, its management commands, and the backend for ``django.tasks``."""

# mypy: disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# Huey has no types.

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("django")

SETTINGS = """
import os
SECRET_KEY = "tests"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.db"}}
INSTALLED_APPS = ["huey.contrib.djhuey", "shop"]
HUEY = {
    "huey_class": "litebroker_huey.SQLiteHuey",
    "name": "shop",
    "immediate": False,
    "connection": {"filename": "jobs.db"} if "REDIS_OPTIONS" not in os.environ else {"host": "localhost", "port": 6379},
    "consumer": {"workers": 2, "worker_type": os.environ.get("WORKER_TYPE", "thread"), "periodic": True},
}
TASKS = {"default": {"BACKEND": "huey.contrib.djhuey.tasks_backend.HueyBackend"}}
"""

TASKS = """
from huey.contrib.djhuey import db_task, task, HUEY

@task()
def add(a, b):
    return a + b

@db_task(dedupe_key=lambda order: f"order-{order}", max_receives=2)
def ship(order):
    return order

try:
    from django.tasks import task as django_task
except ImportError:
    try:
        from django_tasks import task as django_task
    except ImportError:
        django_task = None
if django_task is not None:
    @django_task()
    def greet(name):
        return f"hello {name}"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "settings",
        "PYTHONPATH": f".{os.pathsep}{os.environ['PYTHONPATH']}",
        **more,
    }


def in_django(project: Path, script: str) -> str:
    script = f"import django; django.setup()\nfrom shop.tasks import *\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=40,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(params=["thread", "process"])
def consumer(project: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with (project / "consumer.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "run_huey"],
            cwd=project,
            env=environment(WORKER_TYPE=request.param),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.usefixtures("consumer")
def test_run_huey_runs_the_tasks_of_a_project(project: Path) -> None:
    answer = in_django(
        project,
        "print(add(1, 2).get(blocking=True, timeout=30), ship(7).get(blocking=True, timeout=30), type(HUEY).__name__)",
    )

    assert answer == "3 7 SQLiteHuey"


def test_run_huey_stops_when_it_is_told_to(consumer: subprocess.Popen[bytes], project: Path) -> None:
    in_django(project, "add(1, 2).get(blocking=True, timeout=30)")

    consumer.send_signal(signal.SIGINT)

    assert consumer.wait(15) == 0


@pytest.mark.usefixtures("consumer")
def test_the_backend_for_django_tasks_works(project: Path) -> None:
    script = """
import time
try:
    from huey.contrib.djhuey import tasks_backend
    assert django_task is not None
except (ImportError, AssertionError):
    print("missing")
else:
    result = greet.enqueue("you")
    end = time.monotonic() + 30
    while not result.is_finished and time.monotonic() < end:
        time.sleep(0.05)
        result.refresh()
    print(result.return_value)
"""
    answer = in_django(project, script)

    if answer == "missing":
        pytest.skip("this huey or this Django has no django.tasks")
    assert answer == "hello you"


def test_the_command_that_makes_tables_makes_the_file(project: Path) -> None:
    command = [sys.executable, "-m", "django", "create_huey_tables"]
    done = subprocess.run(
        command, cwd=project, env=environment(), stderr=subprocess.PIPE, text=True, timeout=30, check=False
    )

    if "Unknown command" in done.stderr:
        pytest.skip("this huey has no such command")
    assert done.returncode == 0
    assert (project / "jobs.db").exists()


def test_redis_options_in_the_settings_are_named(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import django; django.setup(); import huey.contrib.djhuey"],
        cwd=project,
        env=environment(REDIS_OPTIONS="1"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 1
    assert "remove these options" in done.stderr
    assert "host, port (no Redis server is used)" in done.stderr

"""What every test may rely on: processes that find the packages, and servers that are there or said to be missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent

# So that scripts which tests start find the packages in a bare checkout, where nothing is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "core"), str(ROOT / "integrations"), str(ROOT)])

# How long an example takes says nothing on a machine that others use too; each test has a time limit anyway.
hypothesis.settings.register_profile("litebroker", deadline=None, print_blob=True)
hypothesis.settings.load_profile("litebroker")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """An RQ worker that ran in this process leaves its handlers behind, which would hear the signals of other tests."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty Redis, for comparisons with what litebroker replaces.

    Skips the test where there is no redis-server, unless LITEBROKER_REQUIRE_SERVERS says that there has to be one.
    """
    if not shutil.which("redis-server"):
        if os.environ.get("LITEBROKER_REQUIRE_SERVERS"):
            pytest.fail("redis-server is not installed, and LITEBROKER_REQUIRE_SERVERS is set")
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("redis")
    options = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(["redis-server", *options], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            log = []
            for line in server.stdout:
                log.append(line)
                if "eady to accept connections" in line:
                    break
            else:
                pytest.fail(f"redis-server did not start:\n{''.join(log)}")
            yield f"unix://{folder}/redis.sock"
        finally:
            server.kill()

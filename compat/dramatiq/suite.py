"""Dramatiq's own released test-suites, unmodified, on litebroker's broker, result backend and rate limiter backend.

The sdist comes from PyPI when this runs, into a cache outside of this repository. It has no conftest.py and no
common.py, so `overlay/` supplies them: there the fixtures are ours. What cannot apply to any broker but Redis,
RabbitMQ or the StubBroker is listed in `expected/*.txt`, one a line:

    tests/test_redis.py::test_name [<2.1]: the reason

A listed test that passes, or is not there, is as much an error as a failure that is not listed. The condition in
brackets is for a line that speaks only of some releases.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MATRIX = ("1.17.0", "1.18.0", "2.0.0", "2.1.0", "2.2.1")
NEWEST = MATRIX[-1]

# What the suites import. watchdog 7.1 does not see the changes that test_watch makes; pkg_resources, which an old
# prometheus_client needs, is not wanted by any of these.
REQUIREMENTS = ("pytest<9", "pytest-timeout", "redis", "pika", "prometheus_client", "watchdog<7", "croniter")

_LINE = re.compile(r"(?P<test>\S+::[^\s:]+)(?: \[(?P<op>[<>=]+)(?P<version>[\d.]+)\])?: (?P<reason>.+)")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Outcome:
    """What a run of one release came to.

    Attributes:
        results: "passed", "failed" or "skipped" by test id.
        expected: The reason by test id, of the lines that speak of this release.
        unsteady: Failed in the whole run, and passed when run again by themselves.
    """

    version: str
    results: dict[str, str]
    expected: dict[str, str]
    unsteady: Sequence[str] = ()

    @property
    def failed(self) -> list[str]:
        return sorted(test for test, result in self.results.items() if result == "failed" and test not in self.expected)

    @property
    def passed_though_listed(self) -> list[str]:
        return sorted(test for test in self.expected if self.results.get(test) == "passed")

    @property
    def listed_but_missing(self) -> list[str]:
        return sorted(test for test in self.expected if test not in self.results)

    @property
    def ok(self) -> bool:
        return bool(self.results) and not (self.failed or self.passed_though_listed or self.listed_but_missing)

    def report(self) -> str:
        others = [result for test, result in self.results.items() if test not in self.expected]
        summary = f"{others.count('passed')} passed, {len(self.failed)} failed, {others.count('skipped')} skipped"
        lines = [f"dramatiq {self.version}: {summary}, {len(self.expected)} cannot apply"]
        lines += [f"  UNSTEADY {test}: failed once, passed when run again" for test in self.unsteady]
        lines += [f"  FAILED   {test}" for test in self.failed]
        lines += [f"  PASSED   {test}, but it is listed as one that cannot" for test in self.passed_though_listed]
        lines += [f"  NO SUCH  {test}, but it is listed" for test in self.listed_but_missing]
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compat/dramatiq/run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {NEWEST}")
    parser.add_argument("--matrix", action="store_true", help=f"all of {', '.join(MATRIX)}")
    parser.add_argument("--cache", type=Path, default=_default_cache(), help="sdists and environments (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to run the suites with")
    parser.add_argument("-k", dest="keyword", help="as pytest's -k")
    parser.add_argument("--jobs", type=int, default=1, help="test processes at a time, by file")
    parser.add_argument("--pytest", dest="extra", nargs=argparse.REMAINDER, default=[], help="more for pytest")
    args = parser.parse_args(argv)

    outcomes = []
    for version in args.versions or (MATRIX if args.matrix else (NEWEST,)):
        outcome = run(version, args.cache, args.python, keyword=args.keyword, jobs=args.jobs, extra=args.extra)
        print(outcome.report(), flush=True)
        outcomes.append(outcome)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def run(version: str, cache: Path, python: str, *, keyword: str | None, jobs: int, extra: Sequence[str]) -> Outcome:
    """Run one release's suite."""
    cache = cache.resolve()
    if cache.is_relative_to(REPOSITORY):
        raise SystemExit(f"the cache {cache} lies in the repository: give --cache a folder outside of it")
    listed = expected(version)
    interpreter = _environment(version, cache, python, jobs)
    with tempfile.TemporaryDirectory(prefix=f"litebroker-dramatiq-{version}-") as folder:
        work = Path(folder)
        shutil.copytree(_sdist(version, cache) / "tests", work / "tests")
        for overlay in HERE.joinpath("overlay").glob("*.py"):
            shutil.copy(overlay, work / "tests" / overlay.name)
        results = work / "results.json"
        command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(work)]
        command += ["-c", os.devnull, "--timeout", "60", "--tb", "native", "-o", "log_level=CRITICAL", *extra]
        environment = {
            **os.environ,
            # Some tests, and SIGHUP's re-exec, start `python` and `dramatiq` from PATH.
            "PATH": f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ("core", "integrations")),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COMPAT_FOLDER": str(work),
            "COMPAT_RESULTS": str(results),
            "COMPAT_EXPECTED": json.dumps(sorted(listed)),
        }
        log = cache / f"dramatiq-{version}.log"
        print(f"dramatiq {version}: the whole output goes to {log}", flush=True)
        with log.open("wb") as stream:

            def test(*what: str) -> dict[str, str]:
                results.unlink(missing_ok=True)
                subprocess.run([*command, *what], cwd=work, env=environment, check=False, stdout=stream, stderr=stream)
                found: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
                return found

            selection = ["-k", keyword] if keyword else []
            spread = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
            found = test("tests", *selection, *spread)
            if keyword:
                listed = {name: reason for name, reason in listed.items() if name in found}
            outcome = Outcome(version, found, listed)
            # Many of these tests measure time, and the machine may have had other things to do.
            if outcome.failed:
                again = test(*outcome.failed)
                unsteady = [name for name in outcome.failed if again.get(name) == "passed"]
                outcome = Outcome(version, {**found, **again}, listed, unsteady)
    return outcome


def expected(version: str) -> dict[str, str]:
    """The listed tests that speak of this release, with their reasons."""
    reasons = {}
    for page in sorted(HERE.joinpath("expected").glob("*.txt")):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                raise SystemExit(f"{page}:{number}: not `test id [condition]: reason`")
            condition = match["op"]
            if condition is None or _OPERATORS[condition](_numbers(version), _numbers(match["version"])):
                reasons[match["test"]] = match["reason"]
    return reasons


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "litebroker-compat"


def _sdist(version: str, cache: Path) -> Path:
    folder = cache / f"dramatiq-{version}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "dramatiq"]
            subprocess.run([*command, "--dest", temporary, f"dramatiq=={version}"], check=True)
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
            (Path(temporary) / f"dramatiq-{version}").rename(folder)
    return folder


def _environment(version: str, cache: Path, python: str, jobs: int) -> Path:
    tag = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    folder = cache / f"env-{tag}-dramatiq-{version}"
    interpreter = folder / "bin" / "python"
    ready = folder / "ready"
    wanted = "\n".join((f"dramatiq=={version}", *REQUIREMENTS, *(("pytest-xdist",) if jobs > 1 else ())))
    if not ready.exists() or not set(wanted.splitlines()) <= set(ready.read_text().splitlines()):
        if python == sys.executable:
            venv.create(folder, with_pip=True, clear=True)
        else:
            subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *wanted.splitlines()], check=True)
        ready.write_text(wanted)
    return interpreter

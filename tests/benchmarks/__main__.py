"""``python -m tests.benchmarks [WORK ...]``: litebroker beside bare SQLite and beside its peers, here and now."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tests.benchmarks import ROOT, frameworks, profiling, report, several, single, tools
from tests.benchmarks.contestants import PEERS
from tests.benchmarks.measuring import OURS, RAW, Bench, Entry, Line, told

WORKS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "add": single.add,
    "add_many": single.add_many,
    "claim": single.claim,
    "loop": single.loop,
    "depth": single.depth,
    "dedupe": single.dedupe,
    "retention": single.retention,
    "threads": single.threads,
    "tasks": single.tasks,
    "process": single.process,
    "coroutines": single.coroutines,
    "children": single.children,
    "growth": single.growth,
    "processes": several.processes,
    "wakeup": several.wakeup,
    "writers": several.writers,
    "memory": several.memory,
    "tools": tools.tools,
    "dramatiq": frameworks.dramatiq,
    "huey": frameworks.huey,
    "rq": frameworks.rq,
}
DOCUMENT = ROOT / "docs" / "benchmarks.md"
PATIENCE_S = 10
FRAMEWORKS = ("dramatiq", "huey", "rq")


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None and sys.argv[1:2] == ["profile"]:
        return profiling.main(sys.argv[2:])
    options = _options(arguments)
    # Ended from outside, it tidies up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    where: dict[str, str] = {}
    lines: list[Line] = []
    for source in options.sources or ():
        found = json.loads(source.read_text(encoding="utf-8"))
        where = found["where"]
        lines = merged(lines, [Line.from_json(line) for line in found["lines"]])
    interrupted = False
    if options.works:
        try:
            with tempfile.TemporaryDirectory(prefix=".benchmarks-", dir=options.folder) as folder:
                bench = _bench(Path(folder), options.rounds, quick=options.quick)
                where = surroundings(bench)
                _print(where)
                there = [name for name in options.works if name not in absent()]
                for line in measure(bench, there):
                    lines = merged(lines, [line])
        except KeyboardInterrupt:
            print("interrupted: what was measured so far is kept", file=sys.stderr)
            interrupted = True
            _end_children()
    lines.sort(key=lambda line: list(WORKS).index(line.work))
    _write(options, where, lines)
    if interrupted:
        return 128 + signal.SIGINT
    if options.docs:
        report.into_docs(DOCUMENT, where, lines)
    return 1 if any(line.entries.get(name, Entry()).failure for line in lines for name in (OURS, RAW)) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        epilog="python -m tests.benchmarks profile: where the time of add, claim + complete and process goes",
    )
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"{', '.join(WORKS)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="less of everything: about two minutes")
    parser.add_argument("--rounds", type=int, help="rounds of five turns for each contestant (3; 1 with --quick)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the databases lie: on a real disk (.)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the chart there")
    parser.add_argument("--docs", action="store_true", help="write tables and chart into docs/benchmarks.md")
    parser.add_argument(
        "--from",
        type=Path,
        action="append",
        dest="sources",
        metavar="FILE",
        help="take the figures of an earlier run, as --json wrote them, and measure only what is named",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.works if name not in WORKS]
    if unknown:
        parser.error(f"there is no work {unknown[0]!r}; there are {', '.join(WORKS)}")
    if not options.works and not options.sources:
        options.works = list(WORKS)
    return options


def _write(options: argparse.Namespace, where: dict[str, str], lines: list[Line]) -> None:
    if options.json:
        options.json.write_text(json.dumps(report.as_json(where, lines), indent=1), encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(f"{report.markdown(where, lines)}\n", encoding="utf-8")
    if options.svg:
        options.svg.write_text(report.svg(lines), encoding="utf-8")
    print(f"\n{report.figures(lines)}\n\n{report.took_part(lines)}")


def measure(bench: Bench, works: Sequence[str]) -> Iterator[Line]:
    """Do the works one after the other, and say what is found; one that fails is said, and the others go on."""
    for name in works:
        began, load = time.perf_counter(), os.getloadavg()[0]
        try:
            for line in WORKS[name](bench):
                print(f"  {said(line)}", flush=True)
                yield dataclasses.replace(line, load=load)
        except Exception as error:  # noqa: BLE001 (whatever a framework, or a peer, raises)
            failed = Line(work=name, title=name, entries={OURS: Entry(failure=told(error))}, load=load)
            print(f"  {said(failed)}", flush=True)
            yield failed
        print(f"  ({name}: {time.perf_counter() - began:.0f} s, load {load:.1f})", flush=True)


def said(line: Line) -> str:
    """A line of what is printed while it goes on."""
    who = [
        f"{name} {'FAILED: ' + entry.failure if entry.failure else entry.text}"
        f"{'' if entry.times is None else f' ({entry.times:.2f} x)'}"
        for name, entry in line.entries.items()
    ]
    verdict = "" if line.reached is None else f"; {line.wanted}: {'reached' if line.reached else 'NOT REACHED'}"
    return f"{line.title} [{line.level}]: {', '.join(who)}{verdict}"


def merged(lines: Sequence[Line], more: Sequence[Line]) -> list[Line]:
    """The lines, those that were measured again replaced."""
    by_name = {(line.work, line.title, line.level): line for line in lines}
    by_name |= {(line.work, line.title, line.level): line for line in more}
    return list(by_name.values())


def absent() -> list[str]:
    """The frameworks that are not installed."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]


def _end_children() -> None:
    """Those whose start was interrupted, so that nobody knows of them. Where there is no /proc, they are left."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                until = time.monotonic() + PATIENCE_S
                while os.waitpid(pid, os.WNOHANG) == (0, 0):
                    if time.monotonic() > until:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)


def _bench(folder: Path, rounds: int | None, *, quick: bool) -> Bench:
    if quick:
        return Bench(folder=folder, rounds=rounds or 1, turn_s=0.05, scale=0.1)
    return Bench(folder=folder, rounds=rounds or 3)


def _print(where: dict[str, str]) -> None:
    print("\n".join(f"{name}: {value}" for name, value in where.items()), flush=True)
    if where["file system"] == "tmpfs":
        print("This is memory: what waits for the disk is not measured. Give another --folder.")
    missing = {kind.package: kind.how for kind in PEERS if kind.missing()}
    if importlib.util.find_spec("dramatiq_sqlite") is None:
        missing["dramatiq-sqlite"] = "--group benchmarks"
    for package, how in missing.items():
        print(f"left out, since it is not installed: {package} (pip install {how})")
    for name in absent():
        print(f"left out, since it is not installed: {name} (pip install -e '.[{name}]')")
    if shutil.which("redis-server") is None:
        print("left out, since there is no redis-server on PATH: Redis (apt install redis-server)")


def surroundings(bench: Bench) -> dict[str, str]:
    """On what it was measured."""
    kind = subprocess.run(["df", "--output=fstype", bench.folder], capture_output=True, text=True, check=False)
    names = [*(kind.package for kind in PEERS), "dramatiq-sqlite", *FRAMEWORKS, "redis"]
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "system": f"{_system()}, {platform.machine()}, {os.cpu_count()} cores",
        "file system": (kind.stdout.split() or ["unknown"])[-1],
        "load before": f"{os.getloadavg()[0]:.1f}",
        "peers": ", ".join(version for name in dict.fromkeys(names) if (version := _version(name))) or "none",
        "turns": f"{bench.rounds} x 5 of {bench.turn_s:g} s, sizes x {bench.scale:g}",
    }


def _system() -> str:
    kernel = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _version(package: str) -> str:
    if package == "redis" and shutil.which("redis-server"):
        told_version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"v=([\d.]+)", told_version)
        return f"redis-server {found[1]}" if found else ""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())

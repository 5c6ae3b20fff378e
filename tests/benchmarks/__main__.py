"""``python -m tests.benchmarks [WORK ...]``: the table of docs/benchmarks.md, measured here and now."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks import several, single, tools
from tests.benchmarks.measuring import Bench, Row, table

WORKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "add": single.add,
    "add_many": single.add_many,
    "claim": single.claim,
    "loop": single.loop,
    "depth": single.depth,
    "threads": single.threads,
    "tasks": single.tasks,
    "process": single.process,
    "coroutines": single.coroutines,
    "processes": several.processes,
    "wakeup": several.wakeup,
    "writers": several.writers,
    "memory": several.memory,
    "tools": tools.tools,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"{', '.join(WORKS)}; all when none is named")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is run (5)")
    parser.add_argument("--quick", action="store_true", help="less of everything, and three rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the databases lie: on a real disk (.)")
    options = parser.parse_args()
    unknown = [name for name in options.works if name not in WORKS]
    if unknown:
        parser.error(f"there is no work {unknown[0]!r}; there are {', '.join(WORKS)}")
    with tempfile.TemporaryDirectory(prefix=".benchmarks-", dir=options.folder) as folder:
        bench = Bench(
            folder=Path(folder), rounds=min(options.rounds, 3) if options.quick else options.rounds, quick=options.quick
        )
        where = surroundings(bench)
        print("\n".join(f"{name}: {value}" for name, value in where.items()), flush=True)
        if where["file system"] == "tmpfs":
            print("This is memory: what waits for the disk is not measured. Give another --folder.")
        rows: list[Row] = []
        for name in options.works or WORKS:
            began = time.perf_counter()
            for row in WORKS[name](bench):
                rows.append(row)
                print(
                    f"  {row.work} [{row.level}]: {row.raw or '-'} raw, {row.ours} ours, {row.ratio}"
                    f"{'' if row.reached is None else ', reached' if row.reached else ', NOT REACHED'}",
                    flush=True,
                )
            print(f"  ({name}: {time.perf_counter() - began:.0f} s, load {os.getloadavg()[0]:.1f})", flush=True)
            if options.json:
                found = {"where": where, "rows": [row.as_json() for row in rows]}
                options.json.write_text(json.dumps(found, indent=1))
    print(f"\n{table(rows)}")
    return 0


def surroundings(bench: Bench) -> dict[str, str]:
    """On what it was measured."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", bench.folder], capture_output=True, text=True, check=False)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "file system": kind.stdout.strip() or "unknown",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "rounds": f"{bench.rounds}{' (quick)' if bench.quick else ''}",
    }


if __name__ == "__main__":
    sys.exit(main())

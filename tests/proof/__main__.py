"""``python -m tests.proof --minutes N``: the campaign, and its report.

It needs Linux. It works on a copy of the sources, in a folder of its own, with low priority, and leaves nothing behind;
no process even when it is killed, by `kill -9`, too.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.proof import ROOT, report
from tests.proof.figures import Figures
from tests.proof.parts import PARTS, Part
from tests.proof.processes import die_with_parent

_COPIED = "LITEBROKER_PROOF_COPY"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long all of it takes, about (10)")
    parser.add_argument("--only", action="append", metavar="PART", help=f"of {', '.join(PARTS)}; may be repeated")
    parser.add_argument("--seed", type=int, help="to repeat what failed: the seed that was printed, with --only PART")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the figures there, a line of JSON a round")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the table of all that is recorded between FILE's marks"
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the databases lie")
    parser.add_argument("--committed", action="store_true", help="try what git has, not what is being edited")
    parser.add_argument("--keep", action="store_true", help="leave the databases of rounds that found something")
    options = parser.parse_args()
    unknown = [name for name in options.only or () if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if options.report and not options.record:
        parser.error("--report writes what is in --record FILE: give that, too")
    if _COPIED not in os.environ:
        return _on_a_copy(options.folder, committed=options.committed)
    os.nice(10)
    die_with_parent()
    signal.signal(signal.SIGTERM, _end)
    parts = [PARTS[name] for name in options.only or PARTS]
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    rounds = _rounds(parts, options, seed)
    good = all(figures.good for figures in rounds)
    print(report.table(rounds))
    if options.report:
        report.write(options.report, options.record)
    return 0 if good else 1


def _rounds(parts: list[Part], options: argparse.Namespace, seed: int) -> list[Figures]:
    found: list[Figures] = []
    deadline = time.monotonic() + options.minutes * 60
    # The first pass has room for each part, also where there is little time; more time gives more passes.
    share = min(1.0, options.minutes * 60 / sum(part.seconds for part in parts))
    passes = 0
    while time.monotonic() < deadline:
        for part in parts:
            if passes and time.monotonic() + part.seconds / 2 > deadline:
                return found
            its_seed = seed if passes == 0 and options.seed is not None else _seed(seed, passes, part.name)
            figures = _round(part, options, its_seed, max(part.seconds * share, 1.0))
            found.append(figures)
            if options.record:
                with options.record.open("a") as record:
                    record.write(figures.as_json() + "\n")
        passes += 1
    return found


def _seed(seed: int, number: int, name: str) -> int:
    return random.Random(f"{seed}/{number}/{name}").randrange(2**31)


def _round(part: Part, options: argparse.Namespace, seed: int, seconds: float) -> Figures:
    folder = Path(tempfile.mkdtemp(prefix=f"litebroker-proof-{part.name.replace(' ', '-')}-", dir=options.folder))
    figures = Figures(part.name, seed)
    try:
        figures = part.run(folder, seconds, seed)
    except Exception as error:  # noqa: BLE001 - the campaign goes on, and counts it
        figures.wrong("unexplained", f"{type(error).__name__}: {error}")
    finally:
        if options.keep and not figures.good:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(figures.line(), flush=True)
    for what in figures.found[:20]:
        print(f"    {what[:1000]}", flush=True)
    return figures


def _on_a_copy(folder: Path, *, committed: bool) -> int:
    """Run it again on a copy of the sources, which nobody edits meanwhile."""
    copy = Path(tempfile.mkdtemp(prefix="litebroker-proof-sources-", dir=folder))
    try:
        names = ["core", "integrations", "tests"]
        if committed:
            with (copy / "all.tar").open("wb") as archive:
                subprocess.run(["git", "archive", "HEAD", *names], cwd=ROOT, stdout=archive, check=True)
            shutil.unpack_archive(copy / "all.tar", copy)
        else:
            for name in names:
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        environment = {**os.environ, _COPIED: "1", "PYTHONPATH": "", "PROOF_DATA": str(ROOT)}
        program = (
            f"import sys; sys.path.insert(0, {str(copy)!r}); from tests.proof.__main__ import main; sys.exit(main())"
        )
        with subprocess.Popen([sys.executable, "-c", program, *sys.argv[1:]], env=environment) as child:
            signal.signal(signal.SIGTERM, lambda *_: child.terminate())
            while True:
                try:
                    return child.wait()
                except KeyboardInterrupt:  # the terminal has told the child, too
                    continue
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _end(*_: object) -> None:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())

"""Run a tool that takes nothing but a URL, on a file: ``python -m litebroker_rq rq_dashboard -u sqlite:///jobs.db``."""

from __future__ import annotations

import runpy
import sys

from litebroker_rq.client import install


def main() -> None:
    """Teach redis-py the scheme, and run the module with the arguments that follow its name."""
    if len(sys.argv) < 2:  # noqa: PLR2004 - the program's own name is one
        sys.exit("usage: python -m litebroker_rq MODULE [ARGUMENT ...], such as: rq_dashboard -u sqlite:///jobs.db")
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

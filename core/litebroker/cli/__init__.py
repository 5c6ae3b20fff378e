"""The `litebroker` command. It needs the extra `cli`; nothing else in litebroker imports click or rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command with these arguments, or those of the process, and exit."""
    try:
        from litebroker.cli.app import run

        status = run(sys.argv[1:] if args is None else args)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"click", "rich"}:
            raise
        sys.stderr.write("litebroker: the command needs click and rich: pip install 'litebroker[cli]'\n")
        status = 1
    sys.exit(status)

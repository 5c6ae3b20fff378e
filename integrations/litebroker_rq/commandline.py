"""RQ's own command line on a file: `litebroker rq worker --db jobs.db high default`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from litebroker_rq.database import join, split


def main(db: str | None, argv: Sequence[str]) -> int:
    """Run a command of `rq` with its connection to the file; its exit status.

    Args:
        db: The database file, or a ``sqlite:///`` URL; None, for help, is what the environment says.
        argv: What stands behind ``rq``: ``["worker", "high", "default"]``.
    """
    import click
    from rq.cli.cli import main as rq

    # Not as options: some commands start processes of their own, which read the environment too.
    if db is not None:
        os.environ["RQ_CONNECTION_CLASS"] = "litebroker_rq.SQLiteConnection"
        os.environ["RQ_REDIS_URL"] = join(*split(db))
    try:
        status = rq.main(args=list(argv), prog_name="litebroker rq", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return status if isinstance(status, int) else 0

"""``python -m litebroker_huey carry-over``: move to a litebroker file, or back."""

from __future__ import annotations

import argparse
import sys

from litebroker_huey.carry_over import CarryOverError, carry_over, load_huey, open_source


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Answers its exit status."""
    parser = argparse.ArgumentParser(prog="python -m litebroker_huey")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    carry = commands.add_parser(
        "carry-over",
        help="copy the waiting tasks, the schedule and the results of one huey to another",
        description="Copy the waiting tasks, the schedule and the results of one huey to another. The source is left as"
        " it is. Stop its consumers first.",
    )
    carry.add_argument("source", help="a file of huey's SqliteHuey, or the import path of a huey")
    carry.add_argument("target", help="the import path of a huey, as for huey_consumer: app.tasks.huey")
    carry.add_argument("--name", help="the huey's name in the source file, if it is not the target's")
    carry.add_argument("--again", action="store_true", help="even if this source was carried over before")
    options = parser.parse_args(arguments)
    try:
        huey = load_huey(options.target)
        carried = carry_over(open_source(options.source, options.name or huey.name), huey, again=options.again)
    except CarryOverError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 1
    print(  # noqa: T201
        f"carried over: {carried.tasks} waiting, {carried.scheduled} scheduled, {carried.values} results and flags,"
        f" {carried.counters} counters; left behind: {carried.locks} locks"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What commands share that show queues: once, or again and again with rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import click

from litebroker.cli.options import database_option, named_queues, opened, queues_option
from litebroker.cli.output import print_json, print_table
from litebroker.cli.watch import RATES, Flow, Look, check, now_of, plain_rates, rate_cells, repeat, watch_options
from litebroker.jobs import Counts, QueueInfo
from litebroker.storage import Storage

_F = TypeVar("_F", bound=Callable[..., Any])


class _Shown(Protocol):
    @property
    def info(self) -> QueueInfo: ...
    @property
    def counts(self) -> Counts: ...


_Q = TypeVar("_Q", bound=_Shown)


@dataclass(frozen=True, kw_only=True)
class Overview(Generic[_Q]):
    """What a command shows of queues.

    Attributes:
        read: Looks at these queues.
        row: The cells under ``head``, at this time (epoch milliseconds).
        as_json: The same for programs.
    """

    head: Sequence[str]
    read: Callable[[Storage, Sequence[QueueInfo]], Sequence[_Q]]
    row: Callable[[_Q, int], tuple[str, ...]]
    as_json: Callable[[_Q], dict[str, object]]

    def show(
        self,
        ctx: click.Context,
        names: tuple[str, ...],
        *,
        watch: bool,
        interval: float | None,
        count: int | None,
        as_json: bool,
    ) -> None:
        """Do what the options of `overview_options` say."""
        interval = check(ctx, watch=watch, interval=interval, count=count)
        with opened(ctx, must_exist=True) as storage:
            known = named_queues(storage, names)
            if watch:
                flow = Flow(storage)
                repeat(
                    lambda: self._look(storage, names, flow),
                    (*self.head, *RATES),
                    interval=interval,
                    count=count,
                    as_json=as_json,
                    flow=flow,
                )
                return
            queues = self.read(storage, known)
            location, now_ms = storage.location, storage.clock.now_ms()
        if as_json:
            print_json({"database": location, "queues": [self.as_json(it) for it in queues]})
        elif not queues:
            click.echo(f"{location} has no queues yet")
        else:
            print_table(self.head, [self.row(it, now_ms) for it in queues])

    def _look(self, storage: Storage, names: tuple[str, ...], flow: Flow) -> Look:
        # Named ones are checked at the start only; others may come into being.
        queues = self.read(storage, [info for info in storage.queues() if not names or info.name in names])
        rates = flow.rates({it.info.name: it.counts for it in queues})
        now_ms = storage.clock.now_ms()
        return Look(
            [(*self.row(it, now_ms), *rate_cells(rates.get(it.info.name))) for it in queues],
            {
                "at": now_of(storage),
                "database": storage.location,
                "queues": [{**self.as_json(it), **plain_rates(rates.get(it.info.name))} for it in queues],
            },
        )


def overview_options(command: _F) -> _F:
    """Add ``--queue``, those of a watch, ``--json`` and ``--db``."""
    for option in (
        database_option,
        click.option("--json", "as_json", is_flag=True, help="One line of JSON; with --watch, one for each look."),
        watch_options,
        queues_option,
    ):
        command = option(command)
    return command

"""Pub/sub: how a worker hears of "stop that job" and "shut down" at once."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Literal

from litebroker_rq import processes
from litebroker_rq.keyspace import Reply

if TYPE_CHECKING:
    from litebroker_rq.database import Database
    from litebroker_rq.keyspace import Session

Kind = Literal["channel", "pattern"]

_TOPIC = "litebroker_rq:publish"
_KEPT_MS = 60_000
_WORDS = {"channel": (b"subscribe", b"unsubscribe"), "pattern": (b"psubscribe", b"punsubscribe")}


def publish(database: Database, channel: bytes, payload: bytes) -> int:
    """Send it to all who are subscribed now; how many."""
    with database.writing() as session:
        session.write("delete from litebroker_rq_messages where published_at_ms < ?", session.now_ms - _KEPT_MS)
        receivers = 0
        for row, pattern, kind, process in session.select(
            "select id, pattern, kind, process from litebroker_rq_subscriptions"
        ):
            if not processes.is_alive(process):
                session.write("delete from litebroker_rq_subscriptions where id = ?", row)
            elif pattern == channel if kind == "channel" else _matches(pattern, channel):
                receivers += 1
        if receivers:
            session.write(
                "insert into litebroker_rq_messages (channel, payload, published_at_ms) values (?, ?, ?)",
                channel,
                payload,
                session.now_ms,
            )
            session.topics.append(_TOPIC)
    return receivers


def _matches(pattern: bytes, channel: bytes) -> bool:
    return re.match(fnmatch.translate(pattern.decode("latin-1")), channel.decode("latin-1")) is not None


class Inbox:
    """What one client is subscribed to, and what has come for it.

    `wake` and `subscribe` may be called by another thread than the one that waits.
    """

    def __init__(self, database: Database, client: int) -> None:
        self._database = database
        self._client = client
        self._listener = database.storage.listener(topics=[_TOPIC])
        self._patterns: dict[Kind, dict[bytes, int]] = {"channel": {}, "pattern": {}}
        with database.reading() as session:
            self._last = _newest(session)

    def subscribe(self, names: list[bytes], kind: Kind) -> list[Reply]:
        replies: list[Reply] = []
        with self._database.writing() as session:
            for name in names:
                if name not in self._patterns[kind]:
                    ((row,),) = session.write(
                        "insert into litebroker_rq_subscriptions (client, pattern, kind, process)"
                        " values (?, ?, ?, ?) returning id",
                        self._client,
                        name,
                        kind,
                        processes.own(),
                    )
                    self._patterns[kind][name] = row
                replies.append([_WORDS[kind][0], name, self._count()])
        return replies

    def unsubscribe(self, names: list[bytes], kind: Kind) -> list[Reply]:
        patterns = self._patterns[kind]
        replies: list[Reply] = []
        with self._database.writing() as session:
            for name in names or list(patterns):
                row = patterns.pop(name, None)
                if row is not None:
                    session.write("delete from litebroker_rq_subscriptions where id = ?", row)
                replies.append([_WORDS[kind][1], name, self._count()])
        return replies or [[_WORDS[kind][1], None, self._count()]]

    def _count(self) -> int:
        return sum(len(patterns) for patterns in self._patterns.values())

    def fetch(self) -> list[Reply]:
        """The messages that have come since."""
        found = self._database.storage.execute(
            "select id, channel, payload from litebroker_rq_messages where id > ? order by id", (self._last,)
        )
        replies: list[Reply] = []
        for number, channel, payload in found:
            self._last = number
            if channel in self._patterns["channel"]:
                replies.append([b"message", channel, payload])
            replies.extend(
                [b"pmessage", pattern, channel, payload]
                for pattern in self._patterns["pattern"]
                if _matches(pattern, channel)
            )
        return replies

    def wait(self, timeout_s: float | None) -> None:
        """Until something may have come."""
        self._listener.wait(timeout_s)

    def wake(self) -> None:
        self._listener.wake()

    def close(self) -> None:
        self.unsubscribe([], "channel")
        self.unsubscribe([], "pattern")
        self._listener.close()


def _newest(session: Session) -> int:
    ((newest,),) = session.select("select coalesce(max(id), 0) from litebroker_rq_messages")
    return int(newest)

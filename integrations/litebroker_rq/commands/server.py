"""What a client asks of the server itself."""

from __future__ import annotations

import os
import time

from litebroker_rq.keyspace import Reply, Session, command

# LMOVE, BLMOVE and LPOS came with Redis 6.2: RQ reads the version to know that it may use them.
REDIS_VERSION = "7.2.0"


@command("PING")
def ping(session: Session, args: list[bytes]) -> Reply:
    del session
    return args[0] if args else b"PONG"


@command("ECHO", least=1)
def echo(session: Session, args: list[bytes]) -> Reply:
    del session
    return args[0]


@command("TIME")
def time_(session: Session, args: list[bytes]) -> Reply:
    del session, args
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    return [b"%d" % seconds, b"%d" % micros]


@command("INFO")
def info(session: Session, args: list[bytes]) -> Reply:
    del args
    lines = [
        "# Server",
        f"redis_version:{REDIS_VERSION}",
        "redis_mode:standalone",
        "os:litebroker",
        f"process_id:{os.getpid()}",
        f"litebroker_location:{session.storage.location}",
        "# Clients",
        "connected_clients:1",
        "# Memory",
        "used_memory:0",
        "used_memory_human:0B",
        "# Stats",
        "total_connections_received:1",
        "",
    ]
    return "\r\n".join(lines).encode()

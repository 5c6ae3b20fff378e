"""Giving the space of deleted jobs back to the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from litebroker.errors import StorageError
from litebroker.sqlite.connection import Connection
from litebroker.sqlite.engine import Engine, Tx

# So much can be written anew while writers hardly notice: 8 MB, about 30 ms.
_SMALL_PAGES = 2000
# Pages of a bite: about 5 ms.
_BITE_PAGES = 200
_NONE, _FULL, _INCREMENTAL = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """How a file's space is used, in bytes.

    Attributes:
        size: The whole database, without its WAL.
        free: What deleted jobs have left in it. It is used again before the file grows.
        incremental: It can give space back in bites.
    """

    size: int
    free: int
    incremental: bool


def space(db: Connection) -> Space:
    """Look, without a walk."""
    pages, free, size, mode = (
        int(db.rows(f"pragma {name}")[0][0]) for name in ("page_count", "freelist_count", "page_size", "auto_vacuum")
    )
    return Space(size=pages * size, free=free * size, incremental=mode == _INCREMENTAL)


def vacuum(
    engine: Engine,
    *,
    full: bool = False,
    incremental: bool = False,
    on_bite: Callable[[int, int], object] = lambda _left, _total: None,
) -> tuple[Space, Space]:
    """Give free space back to the disk; how it was used before and after.

    What jobs there are is written anew as a whole where that is 8 MB at most, or with ``full``; then all writers wait
    for as long as it takes. Otherwise the free pages are cut off in bites of a few milliseconds, which a file must have
    been prepared for.

    Args:
        full: Write it anew whatever its size.
        incremental: With ``full``: prepare it, so that later times can do it in bites. Each write costs a little more
            from then on.
        on_bite: Is told after each bite how many bytes are left to be given back, and how many there were.

    Raises:
        StorageError: It is too large, and not prepared. Nothing was done.
    """
    before = engine.read(space)
    if full or (not before.incremental and before.free and before.size - before.free <= _SMALL_PAGES << 12):
        engine.alone(lambda tx: _rewrite(tx.db, incremental=incremental), durable=True)
    elif before.incremental:
        _in_bites(engine, before, on_bite)
    elif before.free:
        raise StorageError(
            f"{engine.path}: {before.free:,} of its {before.size:,} bytes are free, and cannot be given back in bites,"
            " as it was not made for that. They are used again before the file grows. To write it anew while all"
            " writers wait: --full",
            path=engine.path,
        )
    _checkpoint(engine)
    return before, engine.read(space)


def _rewrite(db: Connection, *, incremental: bool) -> None:
    # The copy that VACUUM makes on its way would lie in memory, as our connections keep temporary tables there.
    db.rows("pragma temp_store = file")
    try:
        if incremental:
            db.rows(f"pragma auto_vacuum = {_INCREMENTAL}")
        db.rows("vacuum")
    finally:
        db.rows("pragma temp_store = memory")


def _in_bites(engine: Engine, before: Space, on_bite: Callable[[int, int], object]) -> None:
    def bite(tx: Tx) -> Space:
        # A page at a time: the standard library's driver takes the first step of such a statement only.
        for _ in range(_BITE_PAGES):
            tx.db.rows("pragma incremental_vacuum(1)")
        tx.pages += _BITE_PAGES
        return space(tx.db)

    left = before.free
    while left:
        now = engine.write(bite)
        on_bite(now.free, before.free)
        if now.free >= left:  # others free pages as fast
            return
        left = now.free


def _checkpoint(engine: Engine) -> None:
    """The file shrinks when the WAL is copied back. Under the writer lock, as every checkpoint."""
    if engine.path is not None:
        engine.alone(lambda tx: tx.db.rows("pragma wal_checkpoint(passive)"))

"""Where a database is, as users write it: a path, or a URL with options."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

Durability = Literal["relaxed", "durable", "full"]

MEMORY = ":memory:"
_LEVELS = get_args(Durability)
_HOUR = 3600
_YES, _NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a file is opened; the same wherever one is, and in URLs.

    Attributes:
        durability: What a power cut can take. "relaxed": the last moments. "durable": never a job that `add` has
            returned for, nor a change by hand; a claim or an acknowledgement may be forgotten, which only runs the job
            again. "full": nothing. A killed process loses nothing at any level.
        driver: "sqlite3", the standard library's, or "apsw".
        busy_timeout: Seconds to wait for other writers, until `DatabaseBusyError`.
        shared: Keep the jobs beside another application's tables in the same file.
        network: Open it on a network file system all the same; jobs can be lost there.
    """

    durability: Durability = "durable"
    driver: str = "sqlite3"
    busy_timeout: float = 30.0
    shared: bool = False
    network: bool = False

    def __post_init__(self) -> None:
        if self.durability not in _LEVELS:
            msg = f"durability={self.durability!r}: use one of {', '.join(map(repr, _LEVELS))}"
            raise ValueError(msg)
        if self.driver not in {"sqlite3", "apsw"}:
            msg = f"driver={self.driver!r}: use 'sqlite3' (the standard library's) or 'apsw'"
            raise ValueError(msg)
        if (
            isinstance(self.busy_timeout, bool)
            or not isinstance(self.busy_timeout, (int, float))
            or not 0 <= self.busy_timeout <= _HOUR
        ):
            msg = f"busy_timeout={self.busy_timeout!r}: give seconds, from 0 to 3600"
            raise ValueError(msg)


_FIELDS = {field.name: field for field in fields(Options)}


def parse(where: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The path and the options in it; ``:memory:`` for a database in memory.

    ``sqlite:///jobs.db`` is relative, ``sqlite:////var/lib/jobs.db`` absolute, as SQLAlchemy has it.

    Raises:
        ValueError: The URL is not understood, or an option in it.
    """
    text = os.fspath(where)
    if not isinstance(text, str) or not text:
        msg = f"{where!r}: give the path of a database file, or a URL such as sqlite:///jobs.db"
        raise ValueError(msg)
    if "\0" in text:
        msg = f"{where!r}: a path cannot hold a NUL character"
        raise ValueError(msg)
    if "://" not in text:
        if re.search(r"\?\w+=", text):
            msg = f"{text!r}: options need a URL: write sqlite:///{text}"
            raise ValueError(msg)
        return text, {}
    url = urlsplit(text)
    if url.scheme != "sqlite" or url.netloc or url.fragment:
        hint = "sqlite:///jobs.db (relative) or sqlite:////var/lib/app/jobs.db (absolute)"
        msg = f"{text!r}: write it as {hint}"
        raise ValueError(msg)
    path = unquote(url.path)[1:] or MEMORY
    options: dict[str, Any] = {}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        options[name] = _option(text, name, value)
    return path, options


def _option(url: str, name: str, value: str) -> object:
    field = _FIELDS.get(name)
    if field is None:
        msg = f"{url!r}: there is no option {name!r}; there are {', '.join(sorted(_FIELDS))}"
        raise ValueError(msg)
    if isinstance(field.default, bool):
        if value.lower() in _YES:
            return True
        if value.lower() in _NO:
            return False
        msg = f"{url!r}: {name}={value}: write 1 or 0"
        raise ValueError(msg)
    if isinstance(field.default, float):
        try:
            return float(value)
        except ValueError:
            msg = f"{url!r}: {name}={value}: give a number of seconds"
            raise ValueError(msg) from None
    return value


def file_identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Which file lies there now, whatever it is called; None when there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino

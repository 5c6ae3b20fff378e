"""Payloads as bytes: exactly what was given comes back, or it is refused before it is stored."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from litebroker.errors import PayloadError

__all__ = ["JSON", "RAW", "Serializer"]

# Python 3.11 and before have 1,000 levels of recursion, for a reader's stack and the payload together.
_MAX_DEPTH = 500

# Python reads and writes no integer of more digits, unless its limit was lifted (sys.set_int_max_str_digits).
_MAX_DIGITS = 4300

# A path that is longer is cut in messages.
_LONG = 200

_LEAVES = frozenset((str, int, float, bool, type(None)))


class Serializer(Protocol):
    """How a queue's payloads become bytes, and values again. Any thread may call it."""

    @property
    def name(self) -> str:
        """Kept with each job, for tools. "json" and "bytes" are taken."""

    def dumps(self, value: Any, /) -> bytes:
        """The value as bytes.

        Raises:
            PayloadError: `loads` would not give it back as it is. Nothing is stored then.
        """

    def loads(self, data: bytes, /) -> Any:
        """The value. Whatever this raises, the job fails with reason "parse", and the next one runs."""


class _Json:
    """JSON in UTF-8. A value comes back equal, and of the same types throughout, or it is refused.

    Refused are what JSON cannot hold: NaN and infinities, objects, lone surrogates, circles. What it changes: keys
    that are no strings, tuples, and subclasses (an ``IntEnum``, a ``defaultdict``, a ``numpy.float64``), of which the
    base would come back. And what not every reader can read: nesting deeper than 500, integers of over 4,300 digits.
    """

    __slots__ = ("_decode", "_encode", "_scan")

    name = "json"

    def __init__(self) -> None:
        decoder = json.JSONDecoder(parse_constant=_no_constant)
        self._encode = _encoder()
        self._decode = decoder.decode
        self._scan = decoder.raw_decode

    def dumps(self, value: Any, /) -> bytes:
        # The encoder, which is in C, goes first. It refuses what JSON cannot hold, but not what JSON changes; the quick
        # look finds that. Where and what it is, is sought only once something is known to be wrong.
        try:
            data = self._encode(value).encode()
        except Exception as error:
            fault = _fault(value)
            if fault is None:
                raise
            raise fault from error
        if not (_is_flat(value) or _is_plain(value)) or (len(data) > _MAX_DIGITS and not _digits_are_limited()):
            fault = _fault(value)
            if fault is not None:
                raise fault
        return data

    def loads(self, data: bytes, /) -> Any:
        text = data.decode()
        try:
            # Without the two searches for white space that `decode` makes: what we wrote has none.
            value, end = self._scan(text)
        except ValueError:
            return self._decode(text)  # white space before it; or it says what is wrong
        return value if end == len(text) else self._decode(text)

    def __reduce__(self) -> str:
        return "JSON"  # The one that there is, in other processes, too.


class _Raw:
    """Bytes as they stand."""

    __slots__ = ()

    name = "bytes"

    def dumps(self, value: Any, /) -> bytes:
        if type(value) is not bytes:
            raise PayloadError(f"$ is {_named(value)}, and this queue takes bytes only")
        return value

    def loads(self, data: bytes, /) -> Any:
        return data

    def __reduce__(self) -> str:
        return "RAW"


def _encoder() -> Callable[[Any], str]:
    """JSON in one go: `JSONEncoder.encode` makes a C encoder for each value, which takes longer than its work."""
    # Without check_circular a circle ends in a RecursionError, and everything else is done sooner.
    public = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)  # not public: used where it is what it has been since 3.6
    sample = {"text": "ä\n", "list": [1, 2.5, True, None]}
    try:
        chunks = make(None, public.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)  # type: ignore[misc]
        same = "".join(chunks(sample, 0)) == public.encode(sample)
    except (AttributeError, TypeError):
        return public.encode
    return (lambda value: "".join(chunks(value, 0))) if same else public.encode


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _digits_are_limited() -> bool:
    # Pythons before 3.10.7 have neither the function nor the limit.
    limit: int = getattr(sys, "get_int_max_str_digits", lambda: 0)()
    return 0 < limit <= _MAX_DIGITS


def _is_flat(value: Any) -> bool:
    """Whether it is a dict as JSON gives it back, with nothing nested in it: what most payloads are."""
    if type(value) is not dict:
        return False
    for key, inner in value.items():  # noqa: SIM110  # As below.
        if type(key) is not str or type(inner) not in _LEAVES:
            return False
    return True


def _is_plain(value: Any) -> bool:  # noqa: C901  # Plain loops, since all that reads better is slower.
    """Whether the value consists of nothing but what JSON gives back, and is not nested too deep."""
    if type(value) in _LEAVES:
        return True
    level = [value]
    for _ in range(_MAX_DEPTH):
        deeper = []
        for item in level:
            if type(item) is dict:
                for key, inner in item.items():
                    if type(key) is not str:
                        return False
                    if type(inner) not in _LEAVES:
                        deeper.append(inner)
            elif type(item) is list:
                for inner in item:
                    if type(inner) not in _LEAVES:
                        deeper.append(inner)  # noqa: PERF401
            else:
                return False
        if not deeper:
            return True
        level = deeper
    return False


def _fault(value: Any) -> PayloadError | None:
    """What is wrong with the first part of the value, in its own order, that would not come back as it is."""
    todo: list[tuple[Any, str, tuple[Any, ...]]] = [(value, "$", ())]
    while todo:
        item, where, around = todo.pop()
        problem = _problem(item, around)
        if problem is not None:
            short = where if len(where) <= _LONG else f"{where[: _LONG // 2]}...{where[-_LONG // 2 :]}"
            return PayloadError(f"{short} {problem}", where=where)
        if type(item) is dict:
            todo += reversed([(inner, where + _step(key), (*around, item)) for key, inner in item.items()])
        elif type(item) is list:
            todo += reversed([(inner, f"{where}[{i}]", (*around, item)) for i, inner in enumerate(item)])
    return None


def _step(key: str) -> str:
    return f".{key}" if key.isascii() and key.isidentifier() else f"[{json.dumps(key)}]"


def _problem(item: Any, around: tuple[Any, ...]) -> str | None:
    if type(item) is dict or type(item) is list:
        if any(item is outer for outer in around):
            return "contains itself"
        if len(around) == _MAX_DEPTH:
            return f"is nested deeper than {_MAX_DEPTH} levels"
        return next(filter(None, map(_key_problem, item)), None) if type(item) is dict else None
    return _leaf_problem(item)


def _key_problem(key: Any) -> str | None:
    if type(key) is not str:
        return f"has a key that is {_named(key)}, where JSON has strings only: convert it with str(...)"
    return "has a key with a lone surrogate, which UTF-8 cannot hold" if _has_surrogate(key) else None


def _leaf_problem(item: Any) -> str | None:
    problem = None
    if type(item) is str and _has_surrogate(item):
        problem = "has a lone surrogate, which UTF-8 cannot hold"
    elif type(item) is float and not math.isfinite(item):
        problem = f"is {item}, which JSON cannot hold: send None or a string"
    elif type(item) is int and abs(item) >= 10**_MAX_DIGITS:
        problem = f"has more than {_MAX_DIGITS:,} digits: send a string"
    elif type(item) not in _LEAVES:
        problem = f"is {_named(item)}, {_advice(item)}"
    return problem


def _advice(item: Any) -> str:
    if isinstance(item, tuple):
        return "which would come back as a list: send list(...)"
    for base in (str, int, float, list, dict):
        if isinstance(item, base):
            return f"which would come back as a plain {base.__name__}: send one"
    return "for which JSON has nothing: send strings, numbers, lists and dicts, or pass a serializer"


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _named(item: Any) -> str:
    kind = type(item)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {module}{kind.__qualname__}"


JSON: Serializer = _Json()
RAW: Serializer = _Raw()

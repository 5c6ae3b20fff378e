"""What goes into a queue comes out of it exactly, or does not go in."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import math
import re
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from litebroker.errors import PayloadError
from litebroker.serializer import JSON, RAW

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


class Colour(enum.IntEnum):
    RED = 1


class Level(str, enum.Enum):
    HIGH = "high"


class Name(str):
    __slots__ = ()


class Ratio(float):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Order:
    id: int


class Awkward(dict[str, int]):
    def items(self) -> Any:
        raise KeyError("no items today")


FOREIGN: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    "\ud800",
    "a\udfffb",
    "\ud83d\ude00",  # A pair, but of two halves: UTF-8 would make one character of it.
    (),
    (1, 2),
    Point(1, 2),
    b"bytes",
    bytearray(b"bytes"),
    {1, 2},
    frozenset([1]),
    range(3),
    1j,
    ...,
    object(),
    Colour.RED,
    Level.HIGH,
    Name("x"),
    Ratio(0.5),
    Order(1),
    Awkward(a=1),
    decimal.Decimal("0.1"),
    dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    dt.timedelta(1),
    uuid.UUID(int=1),
    collections.OrderedDict(a=1),
    collections.defaultdict(int),
    collections.Counter("aab"),
    10**4300,
    -(10**4300),
    {1: "int"},
    {1.5: "float"},
    {True: "bool"},
    {None: "none"},
    {(1, 2): "tuple"},
    {b"k": "bytes"},
    {Name("k"): "subclass"},
    {"\udc00": "surrogate"},
]
# By index, since an integer of too many digits has no repr either, and hypothesis shows what it samples from.
foreign = st.integers(0, len(FOREIGN) - 1).map(lambda index: FOREIGN[index])


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all through; also in the order of keys, and in the sign of zero."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def looked_up(value: Any, where: str) -> Any:
    """What is at a path such as `PayloadError.where`."""
    assert where.startswith("$")
    for step in re.findall(r"\.([A-Za-z_]\w*)|\[(\d+)\]|\[\"(.*?)\"\]", where):
        name, index, quoted = step
        value = value[int(index)] if index else value[name or quoted]
    return value


@given(plain)
@example(-0.0)
@example(5e-324)
@example(1.7976931348623157e308)
@example(10**4300 - 1)
@example(-(10**4300) + 1)
@example({"": {"\0": "\u2028", "\ufeff": "\U0010ffff"}})
def test_json_gives_back_exactly_what_it_took(value: Any) -> None:
    data = JSON.dumps(value)

    assert type(data) is bytes
    assert same(JSON.loads(data), value)


@given(
    st.recursive(
        plain | foreign,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=20,
    )
)
def test_json_gives_back_anything_exactly_or_refuses_it(value: Any) -> None:
    try:
        data = JSON.dumps(value)
    except PayloadError:
        return

    assert same(JSON.loads(data), value)


@given(value=foreign, around=st.lists(st.sampled_from(["a", "b_1", "[]", "list"]), max_size=6))
def test_a_refusal_says_where(value: Any, around: list[str]) -> None:
    payload = value
    for step in around:
        payload = ["before", payload] if step == "list" else {"before": 0, step: payload, "after": [math.nan]}

    with pytest.raises(PayloadError) as caught:
        JSON.dumps(payload)

    assert looked_up(payload, caught.value.where) is value
    assert str(caught.value).startswith(f"{caught.value.where} ")


@pytest.mark.parametrize(
    ("value", "where", "message"),
    [
        (math.nan, "$", "is nan, which JSON cannot hold"),
        ({"a": [1, math.inf]}, "$.a[1]", "is inf, which JSON cannot hold"),
        ({"user": {"name": "x\ud800"}}, "$.user.name", "has a lone surrogate"),
        ({"user": {"x\ud800": 1}}, "$.user", "has a key with a lone surrogate"),
        ({"user": {7: 1}}, "$.user", "has a key that is of type int"),
        ({"at": (1, 2)}, "$.at", "is of type tuple, which would come back as a list"),
        ({"c": Colour.RED}, "$.c", "Colour, which would come back as a plain int"),
        ([{"first name": {1}}], '$[0]["first name"]', "is of type set, for which JSON has nothing"),
        ({"é": 1j}, '$["\\u00e9"]', "is of type complex, for which JSON has nothing"),
        ([0, 10**4300], "$[1]", "has more than 4,300 digits"),
        (nested(501), "$" + "[0]" * 500, "is nested deeper than 500 levels"),
        (nested(100_000), "$" + "[0]" * 500, "is nested deeper than 500 levels"),
    ],
)
def test_a_refusal_says_what_is_wrong(value: Any, where: str, message: str) -> None:
    with pytest.raises(PayloadError, match=re.escape(message)) as caught:
        JSON.dumps(value)

    assert caught.value.where == where


def test_the_first_of_several_faults_is_named() -> None:
    payload = {"fine": [1, 2], "first": {"a": [(), math.nan]}, "second": object()}

    with pytest.raises(PayloadError) as caught:
        JSON.dumps(payload)

    assert caught.value.where == "$.first.a[0]"


def test_a_message_stays_short_however_long_the_path() -> None:
    payload = {"k" * 100_000: math.nan}

    with pytest.raises(PayloadError) as caught:
        JSON.dumps(payload)

    assert len(str(caught.value)) < 400
    assert len(caught.value.where) > 100_000


def test_the_deepest_nesting_that_is_taken_comes_back() -> None:
    payload = nested(500)

    data = JSON.dumps(payload)

    assert JSON.loads(data) == payload


def test_what_contains_itself_is_refused() -> None:
    payload: dict[str, Any] = {"list": [1]}
    payload["list"] += [payload, payload]

    with pytest.raises(PayloadError, match="contains itself") as caught:
        JSON.dumps(payload)

    assert caught.value.where == "$.list[1]"


def test_what_occurs_twice_side_by_side_is_taken() -> None:
    shared = {"a": [1]}

    data = JSON.dumps([shared, shared, {"again": shared}])

    assert data == b'[{"a":[1]},{"a":[1]},{"again":{"a":[1]}}]'


def test_json_is_compact_utf_8() -> None:
    data = JSON.dumps({"name": "Zoë", "tags": [1, 2.5, True, None]})

    assert data == '{"name":"Zoë","tags":[1,2.5,true,null]}'.encode()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"\xff", b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b"1 2", b"'a'"],
)
def test_what_is_not_json_in_utf_8_is_not_read(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # Whatever it is: the caller takes it as "parse".
        JSON.loads(data)


def test_an_integer_that_only_this_process_can_read_is_refused() -> None:
    script = """if True:
        import sys
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)
        from litebroker.errors import PayloadError
        from litebroker.serializer import JSON
        assert JSON.loads(JSON.dumps({"n": [10**4300 - 1, "9" * 5000]})) == {"n": [10**4300 - 1, "9" * 5000]}
        try:
            JSON.dumps({"n": [0, -10**4300]})
        except PayloadError as error:
            print(error.where)
    """

    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )

    assert done.stdout == "$.n[1]\n"


def test_many_threads_encode_the_same_value_at_once() -> None:
    payload = {"rows": [{"id": n, "tags": ["a", "b"]} for n in range(200)]}
    expected = JSON.dumps(payload)
    results: list[bool] = []
    start = threading.Barrier(8)

    def encode() -> None:
        start.wait(10)
        results.extend(JSON.dumps(payload) == expected for _ in range(50))

    threads = [threading.Thread(target=encode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert results == [True] * 400


@given(st.binary())
def test_raw_gives_back_the_bytes(value: bytes) -> None:
    assert RAW.loads(RAW.dumps(value)) == value


@pytest.mark.parametrize(
    "value", ["text", bytearray(b"x"), memoryview(b"x"), None, 1, [b"x"], type("B", (bytes,), {})()]
)
def test_raw_refuses_all_but_bytes(value: object) -> None:
    with pytest.raises(PayloadError, match=r"^\$ is of type .*, and this queue takes bytes only"):
        RAW.dumps(value)


def test_serializers_have_the_names_that_jobs_carry() -> None:
    assert (JSON.name, RAW.name) == ("json", "bytes")

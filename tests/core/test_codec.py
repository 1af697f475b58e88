"""The codec: one table a rule, then properties over JSON values, arbitrary Python values and damaged text."""

import dataclasses
import enum
import json
import math
import os
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict
from unittest.mock import MagicMock, Mock
from uuid import UUID

import numpy as np
import pydantic
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from outlast.core import codec
from outlast.core.codec import Unstorable, block_content, canonical, clean, decode, digest, encode, result_content, stored


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "yes"


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not this"


class Whole(int):
    def __repr__(self) -> str:
        return "not this"


class Rows(list[int]):
    def __iter__(self) -> Iterator[int]:  # json asks a subclass for its iterator
        return iter([9, 9])


class Ticket(TypedDict):
    id: str


@dataclasses.dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


class Person(pydantic.BaseModel):
    name: str
    born: date
    score: float = 1.0

    @pydantic.field_serializer("name", when_used="json")
    def _name(self, name: str) -> str:
        return f"{name}!"


class Root(pydantic.RootModel[list[int]]):
    pass


class Point(NamedTuple):
    x: int
    y: int


CEST = timezone(timedelta(hours=2))

FORMS: list[tuple[Any, Any]] = [
    # text
    ("a\x00b", "a\ufffdb"),
    ("literal \\u0000 stays", "literal \\u0000 stays"),
    ("x\ud83d", "x\ufffd"),
    ("\ude00\ud83d", "\ufffd\ufffd"),
    ("\ud83d\ude00", "\U0001f600"),  # a pair is not lone
    (os.fsdecode(b"\xff"), "\ufffd"),
    ("line\u2028sep \x7f \x1f \ue000 é", "line\u2028sep \x7f \x1f \ue000 é"),
    ({"k\x00": 1, "\udc80": 2}, {"k\ufffd": 1, "\ufffd": 2}),
    (Text("this"), "this"),
    (Word.YES, "yes"),
    # numbers
    (math.nan, "NaN"),
    ([math.inf, -math.inf], ["Infinity", "-Infinity"]),
    ({math.nan: 1, 1.5: 2}, {"NaN": 1, "1.5": 2}),
    (1.0, 1.0),
    (-0.0, -0.0),
    (10**20, 10**20),
    (10**codec.MAX_INT_DIGITS - 1, 10**codec.MAX_INT_DIGITS - 1),
    (True, True),
    (Level.HIGH, 3),
    (Whole(7), 7),
    (Decimal("1.10"), "1.10"),
    (Decimal("NaN"), "NaN"),
    # time
    (datetime(2026, 3, 1, 9, 30, tzinfo=UTC), "2026-03-01T09:30:00+00:00"),
    (datetime(2026, 3, 1, 9, 30, 0, 5, tzinfo=CEST), "2026-03-01T09:30:00.000005+02:00"),
    (datetime(2026, 3, 1, 9, 30), "2026-03-01T09:30:00"),  # noqa: DTZ001 - a tool may return one
    (date(2026, 3, 1), "2026-03-01"),
    (time(9, 30, tzinfo=CEST), "09:30:00+02:00"),
    (timedelta(days=1, hours=2), "P1DT2H"),
    (timedelta(minutes=3, seconds=4, microseconds=500_000), "PT3M4.5S"),
    (timedelta(microseconds=-500_000), "-PT0.5S"),
    (timedelta(days=-2), "-P2D"),
    (timedelta(0), "PT0S"),
    # bytes and names
    (b"\x00\xff", "AP8="),
    (bytearray(b"hi"), "aGk="),
    (memoryview(b"hi"), "aGk="),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Path("/a/b"), "/a/b"),
    # lists
    ((1, (2,)), [1, [2]]),
    (Point(1, 2), [1, 2]),
    (deque([1, 2]), [1, 2]),
    (Rows([1, 2]), [9, 9]),
    ({"b": 1, "a": 2}.keys(), ["b", "a"]),
    ({"b": 1}.items(), [["b", 1]]),
    ({"b": 1}.values(), [1]),
    ({10, 9, 1.5, -1}, [-1, 1.5, 9, 10]),
    ({"b", "a", 2, None, (3, 4), (1, 2)}, [2, "a", "b", [1, 2], [3, 4], None]),
    (frozenset(), []),
    # objects
    ({1: "a", True + 1: "b", None: "c", False: "d", 1.0 + 0.5: "e"}, {"1": "a", "2": "b", "null": "c", "false": "d", "1.5": "e"}),
    ({Word.YES: 1, Level.HIGH: 2, Colour.RED: 3}, {"yes": 1, "3": 2, "red": 3}),
    ({UUID(int=1): 1, date(2026, 3, 1): 2, b"hi": 3}, {"00000000-0000-0000-0000-000000000001": 1, "2026-03-01": 2, "aGk=": 3}),
    ({("a", 2): 1}, {'["a", 2]': 1}),
    (OrderedDict(z=1, a=2), {"z": 1, "a": 2}),
    (defaultdict(int, a=1), {"a": 1}),
    (UserDict(a=(1,)), {"a": [1]}),
    (MappingProxyType({"a": b"hi"}), {"a": "aGk="}),
    (Ticket(id="K"), {"id": "K"}),
    (Money(Decimal("1.10")), {"amount": "1.10", "currency": "EUR"}),
    (Person(name="Ada\x00", born=date(1815, 12, 10), score=math.inf), {"name": "Ada\ufffd!", "born": "1815-12-10", "score": "Infinity"}),
    (Root([1]), [1]),
    (Colour.RED, "red"),
    (Colour.PAIR, [1, 2]),
    # numpy
    (np.float64("nan"), "NaN"),
    ({"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True)}, {"f": 0.5, "i": 3, "b": True}),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.datetime64("2026-03-01T00:00:00.000000001"), "2026-03-01T00:00:00.000000001"),
    (np.timedelta64(90, "s"), "PT1M30S"),
    (np.timedelta64(90_000_000_000, "ns"), "PT1M30S"),
]


@pytest.mark.parametrize("value, plain", FORMS, ids=lambda value: ascii(type(value).__name__))
def test_a_value_has_one_json_form(value: Any, plain: Any) -> None:
    assert same(clean(value), plain)
    text, read = stored(value)
    assert same(read, plain)
    assert text == encode(value) == json.dumps(plain, ensure_ascii=False, allow_nan=False)
    text.encode()
    assert "\x00" not in text


class Node:
    """An object without a JSON form."""


class Broken:
    """A mapping-like model whose serializer fails."""

    def model_dump(self, **_: Any) -> Any:
        raise RuntimeError("no \ud83d")


class Endless:
    def model_dump(self, **_: Any) -> Any:
        return Endless()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


class BrokenDict(dict[str, int]):
    def items(self) -> Any:
        raise Unprintable


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {"at": datetime(2026, 3, 1, tzinfo=UTC)}
    value["self"] = [value]
    return value


@dataclasses.dataclass
class Linked:
    next: Any = None


def linked() -> Linked:
    node = Linked()
    node.next = node
    return node


def shared(depth: int) -> Any:
    value: Any = (b"",)
    for _ in range(depth):
        value = {"a": value, "b": value}
    return value


def deep(levels: int, inner: Any = None) -> Any:
    value: Any = [] if inner is None else [inner]
    for _ in range(levels - 1):
        value = [value]
    return value


REFUSED: list[tuple[Any, str]] = [
    (Node(), "type Node at $"),
    ({"a": [1, 2, {"b": Node()}]}, "type Node at $.a[2].b"),
    ({"odd key": {"": Node()}}, 'type Node at $["odd key"][""]'),
    ({1: Node()}, 'type Node at $["1"]'),
    ({"a": threading.Lock()}, "type lock at $.a"),
    ({"a": {Node(): 1}}, "type Node at $.a"),
    (Node, "type type at $"),
    (Person, "type ModelMetaclass at $"),
    (Money, "type type at $"),
    ((n for n in [1]), "type generator at $"),
    (1j, "type complex at $"),
    (np.longdouble(1), "type longdouble at $"),
    (cyclic(), "type dict (contains itself) at $.self[0]"),
    (linked(), "type Linked (contains itself) at $.next"),
    ([10**codec.MAX_INT_DIGITS], "type int (over 4300 digits) at $[0]"),
    ([-(10**codec.MAX_INT_DIGITS)], "type int (over 4300 digits) at $[0]"),
    ({"a": {1: "a", "1": "b"}}, 'type dict (two keys become "1") at $.a'),
    ({None: 1, "null": 2}, 'type dict (two keys become "null") at $'),
    ({"\x00": 1, "\ufffd": [2]}, 'type dict (two keys become "\ufffd") at $'),
    ([Broken()], "type Broken (RuntimeError: no \ufffd) at $[0]"),
    ({"a": BrokenDict(b=1)}, "type BrokenDict (Unprintable) at $.a"),
    (Mock(spec=str), "type Mock (TypeError: descriptor '__str__' requires a 'str' object but received a 'Mock') at $"),
    (MagicMock(), "type MagicMock at $"),
]


@pytest.mark.parametrize("value, message", REFUSED, ids=lambda value: ascii(type(value).__name__))
def test_a_value_without_a_json_form_is_refused_with_its_path(value: Any, message: str) -> None:
    for function in (clean, encode, stored, canonical, digest):
        with pytest.raises(Unstorable) as caught:
            function(value)
        assert str(caught.value) == message
        assert message.endswith(f" at {caught.value.path}")
    assert result_content(value) == (f"ran, but the result could not be stored: {message}", True)


def test_depth_ends_at_the_limit_on_the_way_in_and_out() -> None:
    for wrap in (lambda v: v, lambda v: {"a": v}):
        limit = codec.MAX_DEPTH - (1 if wrap([]) != [] else 0)
        for inner in (None, "[[[[{{{{" * 100, b"slow way"):
            assert decode(encode(wrap(deep(limit, inner)))) is not None
            with pytest.raises(Unstorable, match="nested deeper than 200"):
                encode(wrap(deep(limit + 1, inner)))
    clean(deep(200))
    for too_deep in (deep(201), deep(201, b"slow way")):
        with pytest.raises(Unstorable, match=r"^type list \(nested deeper than 200\) at \$\[0\]\[0\]"):
            clean(too_deep)
    decode("[" * 200 + "]" * 200)
    for levels in (201, 1_000, 10_000, 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            with pytest.raises(Unstorable, match=r"^JSON nested deeper than 200 at \$$|^not JSON"):
                decode(opening * levels + "1" + closing * levels)
    decode(json.dumps([{"a": []}] * 500))  # wide is not deep


def test_a_list_nested_past_the_recursion_limit_is_refused() -> None:
    for value in (deep(100_000), Endless()):
        with pytest.raises(Unstorable, match="nested"):
            encode(value)


def test_parts_shared_without_being_cyclic_are_written_each_time() -> None:
    part = [b"hi"]
    assert clean({"a": part, "b": [part, part]}) == {"a": ["aGk="], "b": [["aGk="], ["aGk="]]}


def test_a_value_that_grows_by_sharing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_VALUES", 10_000)
    with pytest.raises(Unstorable, match="more than 10000 values"):
        clean(shared(40))


@pytest.mark.filterwarnings("error")
def test_a_model_that_holds_the_wrong_type_is_stored_without_a_warning() -> None:
    assert clean(Person.model_construct(name="Ada", born="unknown")) == {"name": "Ada!", "born": "unknown", "score": 1.0}


def test_clean_copies() -> None:
    value = {"a": [1]}
    copy = clean(value)
    assert copy == value
    assert copy is not value
    assert copy["a"] is not value["a"]


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1,]", "not JSON"),
        ("'a'", "not JSON"),
        ("1 2", "not JSON"),
        ('"\x00"', "not JSON"),
        ('"\n"', "not JSON"),
        ("\ufeff1", "not JSON"),
        ("NaN", "JSON with NaN"),
        ("[Infinity]", "JSON with Infinity"),
        ("-Infinity", "JSON with -Infinity"),
        ("1e400", "a number that no float holds"),
        ("-1e400", "a number that no float holds"),
        ("9" * 400 + ".0", "a number that no float holds"),
        ("1" * 4_301, "over 4300 digits"),
        ("-" + "1" * 4_301, "over 4300 digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'two keys "c" in one object'),
        ('{"a": 1, "\\u0061": 1}', 'two keys "a" in one object'),
        ('{"\\u0000": 1, "\ufffd": 1}', "two keys become"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(text: str, why: str) -> None:
    with pytest.raises(Unstorable) as caught:
        decode(text)
    assert why in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize("text", [None, 1, 1.5, b"{}", {}])
def test_a_row_that_holds_no_text_is_refused(text: Any) -> None:
    with pytest.raises(Unstorable, match="not JSON text"):
        decode(text)


@pytest.mark.parametrize(
    "text, value",
    [
        ('"a\\u0000b"', "a\ufffdb"),
        ('"\\ud83d"', "\ufffd"),
        ('"\\uDe00"', "\ufffd"),
        ('"\ud83d"', "\ufffd"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ('"\\\\u0000 \\\\ud83d"', "\\u0000 \\ud83d"),
        (' { "a" : 1.0 } ', {"a": 1.0}),
        ("1" * 4_300, int("1" * 4_300)),
        ("-" + "1" * 4_300, -int("1" * 4_300)),
        ("1E2", 100.0),
    ],
)
def test_text_from_elsewhere_comes_back_clean(text: str, value: Any) -> None:
    assert same(decode(text), value)


def test_the_digit_limit_is_ours_whatever_the_process_allows() -> None:
    before = sys.get_int_max_str_digits()
    try:
        sys.set_int_max_str_digits(0)
        for refused in (lambda: encode(10**5_000), lambda: decode("1" * 5_000)):
            with pytest.raises(Unstorable, match="over 4300 digits"):
                refused()
        sys.set_int_max_str_digits(640)
        for refused in (lambda: encode([10**1_000]), lambda: decode("1" * 1_000)):
            with pytest.raises(Unstorable, match="640 digits"):
                refused()
    finally:
        sys.set_int_max_str_digits(before)


def test_thinking_blocks_kept_byte_for_byte() -> None:
    content = [
        {"type": "thinking", "thinking": "ends in spaces  \u2028 \U0001f600", "signature": "Er+/ab=="},
        {"type": "text", "text": "é", "unknown": None},
        {"type": "tool_use", "id": "toolu_1", "name": "t", "input": {"z": 1.0, "a": 10**20, "e": 1e-7}},
    ]
    text, read = stored(content)
    assert text == json.dumps(content, ensure_ascii=False)
    assert same(read, content)
    assert list(read[2]["input"]) == ["z", "a", "e"]


@pytest.mark.parametrize(
    "one, other, equal",
    [
        ({"a": 1, "b": [2]}, {"b": (2,), "a": 1}, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        ("é", "e\u0301", False),
        (None, "null", False),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, True),
        ([1, 2], [2, 1], False),
        ("a\x00", "a\ufffd", True),
    ],
)
def test_a_digest_tells_values_apart_but_not_key_orders(one: Any, other: Any, equal: bool) -> None:
    assert (canonical(one) == canonical(other)) is equal
    assert (digest(one) == digest(other)) is equal


def test_the_digest_is_a_plain_sha256() -> None:
    assert canonical({"b": [1, 1.0], "a": "é"}) == '{"a":"é","b":[1,1.0]}'
    # printf '{"a":"é","b":[1,1.0]}' | sha256sum
    assert digest({"b": [1, 1.0], "a": "é"}) == "sha256:67cbe8cbd0f9c216e90fd1e8519d67a3e3daf8b72abc38f1835adb2300199a9b"


@pytest.mark.parametrize(
    "value, content",
    [
        ("plain", "plain"),
        ("", ""),
        ("a\x00\ud83d", "a\ufffd\ufffd"),
        (Word.YES, "yes"),
        ({"reply_id": 1, "status": "sent"}, '{"reply_id": 1, "status": "sent"}'),
        (None, "null"),
        (0, "0"),
        (False, "false"),
        ([], "[]"),
        ("null", "null"),
        (b"hi", '"aGk="'),
        ({"score": math.nan}, '{"score": "NaN"}'),
        ([{"type": "text", "text": "é"}], '[{"type": "text", "text": "é"}]'),
    ],
)
def test_a_result_is_its_string_or_its_json_text(value: Any, content: str) -> None:
    assert result_content(value) == (content, False)


def test_a_result_of_everything_at_once_is_stored_or_says_where_not() -> None:
    value = {"at": datetime(2026, 3, 1, tzinfo=UTC), "amount": Decimal("1.10"), "who": Person(name="Ada", born=date(1815, 12, 10))}
    value |= {"raw": b"hi", "s": {2, 1}}
    assert result_content(value) == (
        (
            '{"at": "2026-03-01T00:00:00+00:00", "amount": "1.10", "who": {"name": "Ada!", "born": "1815-12-10", "score": 1.0}, '
            '"raw": "aGk=", "s": [1, 2]}'
        ),
        False,
    )
    value["self"] = value
    assert result_content(value) == ("ran, but the result could not be stored: type dict (contains itself) at $.self", True)


@pytest.mark.parametrize("text", ["\U0001f600" * 12_500_000, "x" + "é" * 200_000, "a" * (256 * 1024 + 1)], ids=["emoji", "é", "a"])
def test_huge_output_is_cut_between_two_characters(text: str) -> None:
    content, is_error = result_content(text)
    total = len(text.encode())
    note = f"\n[truncated, {total} bytes total]"
    assert not is_error
    assert isinstance(content, str)
    assert content.endswith(note)
    assert text.startswith(content.removesuffix(note))
    assert codec.MAX_TOOL_TEXT_BYTES - 4 < len(content.encode()) <= codec.MAX_TOOL_TEXT_BYTES


def test_text_of_exactly_the_limit_is_not_cut() -> None:
    text = "é" * (codec.MAX_TOOL_TEXT_BYTES // 2)
    assert result_content(text) == (text, False)
    content, _ = result_content([text])
    assert isinstance(content, str)
    assert content.endswith(" bytes total]")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    "blocks, content",
    [
        (
            [IMAGE, {"type": "text", "text": "a\x00", "cache_control": {}}],
            [IMAGE, {"type": "text", "text": "a\ufffd", "cache_control": {}}],
        ),
        ((IMAGE,), [IMAGE]),
        ([{"type": "text", "text": ""}, IMAGE], [IMAGE]),
        ([{"type": "text", "text": ""}], ""),
        ([], ""),
    ],
)
def test_content_blocks_are_kept_but_for_empty_text(blocks: Any, content: Any) -> None:
    assert block_content(blocks) == (content, False)


@pytest.mark.parametrize(
    "blocks, why",
    [
        ([{**IMAGE, "data": "A" * codec.MAX_BLOCK_BYTES}], r"a content block of \d+ bytes \(limit 5242880\) at \$\[0\]"),
        (
            [{**IMAGE, "data": "A" * (codec.MAX_BLOCK_BYTES - 200)}] * 5,
            r"content blocks of \d+ bytes together \(limit 20971520\) at \$\[4\]",
        ),
        ([IMAGE, "text"], r"a content block without a type at \$\[1\]"),
        ([{"text": "x"}], r"a content block without a type at \$\[0\]"),
        ([{"type": "text"}], r"a text block without text at \$\[0\]"),
        ({"type": "text", "text": "x"}, r"content that is no list of blocks at \$"),
        ([{**IMAGE, "x": Node()}], r"type Node at \$\[0\].x"),
    ],
)
def test_content_that_the_provider_would_refuse_is_an_error_result(blocks: Any, why: str) -> None:
    content, is_error = block_content(blocks)
    assert is_error
    with pytest.raises(AssertionError, match=f"^ran, but the result could not be stored: {why}$"):
        raise AssertionError(content)


def test_all_text_blocks_together_are_cut() -> None:
    texts = [{"type": "text", "text": letter * 200_000} for letter in "abc"]
    content, is_error = block_content([texts[0], IMAGE, texts[1], texts[2]])
    assert not is_error
    assert isinstance(content, list)
    assert [block["type"] for block in content] == ["text", "image", "text"]
    assert content[0] == texts[0]
    assert content[2]["text"].endswith("bb\n[truncated, 600000 bytes total]")
    assert sum(len(block["text"]) for block in content if block["type"] == "text") == codec.MAX_TOOL_TEXT_BYTES


def test_an_error_is_short_and_can_be_stored_itself() -> None:
    value: Any = Node()
    for _ in range(150):
        value = {"key \ud83d": value}
    with pytest.raises(Unstorable) as caught:
        encode(value)
    assert len(str(caught.value)) < 500
    assert stored(str(caught.value))[1] == str(caught.value)


# --- properties ------------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(), max_size=8)  # surrogates and NUL too
clean_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | clean_text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(clean_text, inner, max_size=5),
    max_leaves=25,
)
hashable = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.integers(4_299, 4_301).map(lambda digits: 10**digits)
    | st.floats()
    | any_text
    | st.sampled_from([Word.YES, Level.HIGH, Colour.RED, Colour.PAIR, Node(), Text("t"), Whole(1), 1j, Node, object(), ...])
    | st.binary(max_size=3)
    | st.decimals().filter(lambda number: not number.is_snan())
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.fractions()
    | any_text.map(Text)
)
keys = hashable | st.tuples(hashable, hashable) | st.frozensets(hashable, max_size=3)
python_values = st.recursive(
    keys,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=2).map(deque)
        | inner.map(Linked)
        | st.lists(inner, max_size=2).map(lambda parts: np.array([*parts, None], dtype=object))
    ),
    max_leaves=20,
)


def assert_storable(text: Any) -> None:
    assert stored(text) == (json.dumps(text, ensure_ascii=False), text)


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and key order, with nothing but plain types in it."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one) and all(type(key) is str for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return type(one) in (str, int, bool, type(None)) and one == other


@given(json_values)
def test_json_values_come_back_as_they_were(value: Any) -> None:
    text = encode(value)
    assert same(decode(text), value)
    assert same(clean(value), value)
    assert text == json.dumps(value, ensure_ascii=False, allow_nan=False)
    assert same(decode(canonical(value)), json.loads(json.dumps(value, sort_keys=True)))
    assert same(decode(json.dumps(value)), value)  # text written by others, with escapes


@settings(max_examples=400, deadline=None)
@given(python_values)
def test_any_python_value_is_stored_once_for_all_or_refused(value: Any) -> None:
    try:
        text, read = stored(value)
    except Unstorable as error:
        with pytest.raises(Unstorable):
            clean(value)
        event("refused")
        assert_storable(str(error))
        assert_storable(result_content(value)[0])
        return
    text.encode()
    assert same(read, clean(value))  # the fast way and the slow way agree
    assert same(decode(text), read)
    assert stored(read) == (text, read)
    assert canonical(read) == canonical(value)


DAMAGE = ["[", "{", '"', "\\", ",", "-", "0", "\0", "\ud83d", "\\u0000", "\\ud83d", "e999", "NaN", '{"a":1,"a":2}', "[" * 300, "9" * 5_000]


@settings(max_examples=400, deadline=None)
@given(json_values, st.data())
def test_damaged_text_is_read_clean_or_refused(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 3))
        text = text[:start] + data.draw(st.sampled_from(DAMAGE) | st.characters()) + text[end:]
    try:
        read = decode(text)
    except Unstorable as error:
        str(error).encode()
        return
    assert same(decode(encode(read)), read)
    assert same(clean(read), read)


@given(st.sets(st.booleans() | st.integers() | st.floats() | any_text | st.tuples(st.integers(), any_text), max_size=6), st.randoms())
def test_a_set_has_one_order(members: set[Any], random: Any) -> None:
    shuffled = list(members)
    random.shuffle(shuffled)
    assert encode(set(shuffled)) == encode(members) == encode(sorted(clean(members), key=codec._rank))

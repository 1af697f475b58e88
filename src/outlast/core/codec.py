"""The one boundary between Python values and what is stored: strict JSON text, the same on every store.

Pure: no I/O, no clock. Rules, in the order in which they bite:

1. What `encode` writes, `decode` reads back equal, and `encode` then writes the same text again. So a value in memory never
   differs from the value that a later process reads: fold `stored(value)[1]`, not the value itself.
2. Nothing here raises anything but `Unstorable`, whatever a tool returned and whatever stands in a row.
3. Text is Unicode without NUL and without lone surrogates: each becomes U+FFFD (a surrogate pair becomes its character).
4. Numbers keep their kind and every digit: 1.0 stays a float, 10**20 exact. NaN and infinities become the strings "NaN",
   "Infinity", "-Infinity"; JSON text that holds them, or a number out of a float's range, is refused.
5. Key order is kept. A key that is not a string becomes its JSON text (`true`, `null`, `1`, `["a", 2]`), or the string its
   value turns into; two keys that become equal are refused, on the way in and on the way out.
6. Nesting, integers and (for tool results) bytes have limits, below.

JSON form of what is not JSON:

    datetime, date, time            ISO 8601; the offset is kept, a naive one stays naive
    timedelta                       ISO 8601 duration: "P1DT2H", "-PT0.5S"
    Decimal, UUID, path             its string
    bytes, bytearray, memoryview    base64 (standard alphabet, padded)
    tuple, named tuple, deque       list; also a dict's keys(), values(), items()
    set, frozenset                  list: numbers by size, then strings, then the rest by canonical text
    other mappings                  object
    dataclass                       object of its fields
    pydantic model                  model_dump(mode="json"): a model's own serializers rule inside it
    Enum                            its value; an Enum that is a str or int is written as that str or int
    numpy scalar or array           the Python value it holds; datetime64 ISO 8601

Anything else (open files, locks, generators, exceptions, complex numbers) is `Unstorable`, as is whatever contains itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import deque
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite, isnan
from pathlib import PurePath
from typing import Any, NoReturn
from uuid import UUID

MAX_DEPTH = 200  # lists and objects inside each other; Python's own reader gives up near 1,000, other readers sooner
MAX_INT_DIGITS = 4_300  # Python's default limit for int <-> str, which is quadratic; a process may lower it, never raise ours
MAX_TOOL_TEXT_BYTES = 256 * 1024  # UTF-8, note included: what one tool result may put before the model
MAX_BLOCK_BYTES = 5 * 1024 * 1024  # JSON text of one content block, such as an image
MAX_INPUT_BYTES = 20 * 1024 * 1024  # JSON text of a run's input, and of all content blocks of one result

_TOO_LONG_INT = 10**MAX_INT_DIGITS
_MAX_VALUES = MAX_INPUT_BYTES  # each takes a byte at least: stops a value that shares its parts from growing without end
_MAX_WHY_CHARS = 200  # an error's path and reason may reach a model
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")  # may name a NUL or a surrogate (or be text about one)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Unstorable(ValueError):
    """`{why} at {path}`: the value has no JSON form here, or the text is not JSON as this codec writes it.

    `path` says where, from `$` down: `$.rows[3].lock`. Both are cleaned and cut, so the message can be stored and shown.
    """

    def __init__(self, path: str, why: str) -> None:
        self.path = _brief(path)
        self.why = _brief(why)
        super().__init__(self.path, self.why)

    def __str__(self) -> str:
        return f"{self.why} at {self.path}"


def clean(value: Any) -> Any:
    """Turn a Python value into plain JSON values (dict with str keys, list, str, int, float, bool, None), as a new copy.

    Raises:
        Unstorable: with the path of the first part that has no JSON form, or whose conversion failed.
    """
    cleaner = _Cleaner()
    try:
        return cleaner.value(value)
    except Unstorable:
        raise
    except RecursionError:
        raise Unstorable(cleaner.where(), f"type {cleaner.kind} (nested too deep)") from None
    except Exception as error:  # code of the value itself ran: a property, an iterator, a serializer
        raise Unstorable(cleaner.where(), f"type {cleaner.kind} ({_said(error)})") from error


def encode(value: Any) -> str:
    """The JSON text that a store keeps: as `json.dumps` writes it, but with non-ASCII characters as they are.

    Raises:
        Unstorable: the value has no JSON form.
    """
    return stored(value)[0]


def decode(text: str) -> Any:
    """Read JSON text strictly: what comes back is plain, clean and within the limits.

    NUL and lone surrogates (which `encode` never writes) become U+FFFD. Refused: what is not JSON, NaN and infinities,
    numbers too large, two equal keys in one object (readers disagree on which one counts), too deep nesting, text that is no `str`.
    """
    if not isinstance(text, str):
        raise Unstorable("$", f"type {_kind(text)} (not JSON text)")
    value = _parse(text)
    if _ESCAPED.search(text) or not _is_utf8(text):
        return clean(value)
    return value


def stored(value: Any) -> tuple[str, Any]:
    """What a store will hold of `value`, and the value as any later reader will see it.

    Raises:
        Unstorable: the value has no JSON form.
    """
    # Values that are clean already, nearly all, never leave C. json also takes tuples, subclasses of str, int, float and dict,
    # and keys that are numbers, bool or None: each is written as `clean` would turn it, and _parse refuses keys that collide.
    try:
        text = _dumps(value)
        if "\\u0000" not in text and _is_utf8(text):
            return text, _parse(text)
    except Exception:  # noqa: BLE001, S110 - not clean: the slow way below converts it, or says what is wrong and where
        pass
    plain = clean(value)
    try:
        text = _dumps(plain)
    except (ValueError, RecursionError) as error:  # a process with a lower limit on digits or on recursion
        raise Unstorable("$", _said(error)) from None
    return text, _parse(text)


def canonical(value: Any) -> str:
    """JSON text for comparing: keys sorted by code point, no spaces. 1 and 1.0 differ, as do "é" in its two Unicode forms."""
    return _canonical(stored(value)[1])


def digest(value: Any) -> str:
    """`sha256:` and the hex SHA-256 of the canonical text. Equal for any key order; differs for 1 and 1.0."""
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()


def result_content(value: Any) -> tuple[str | list[dict[str, Any]], bool]:
    """A tool's return value as the content of its `tool_result`, and whether that is an error. Never raises.

    A string stays bare (an empty one too); anything else is its JSON text, so None is `null`. Text over MAX_TOOL_TEXT_BYTES
    is cut between two characters, with a note. A value that cannot be stored becomes an error that says so: the tool *ran*.
    """
    try:
        text = clean(value) if isinstance(value, str) else encode(value)
    except Unstorable as error:
        return _not_stored(error)
    return _cut(text), False


def block_content(blocks: Sequence[Mapping[str, Any]]) -> tuple[str | list[dict[str, Any]], bool]:
    """Content blocks (images, documents, text) as the content of a `tool_result`, and whether that is an error. Never raises.

    Blocks are kept as they are, except: all text together is cut as in `result_content`; empty text blocks, which the provider
    refuses, are left out. A block over MAX_BLOCK_BYTES, blocks over MAX_INPUT_BYTES together, and what is no block at all
    (an object with a `type`) become an error.
    """
    try:
        return _blocks(stored(blocks)[1]), False
    except Unstorable as error:
        return _not_stored(error)


def _blocks(plain: Any) -> str | list[dict[str, Any]]:
    if not isinstance(plain, list):
        raise Unstorable("$", "content that is no list of blocks")
    kept: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    size = 0
    for index, block in enumerate(plain):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise Unstorable(f"$[{index}]", "a content block without a type")
        if block["type"] == "text":
            if not isinstance(block.get("text"), str):
                raise Unstorable(f"$[{index}]", "a text block without text")
            if block["text"]:
                texts.append(block)
                kept.append(block)
            continue
        bytes_ = len(_dumps(block).encode())
        size += bytes_
        if bytes_ > MAX_BLOCK_BYTES:
            raise Unstorable(f"$[{index}]", f"a content block of {bytes_} bytes (limit {MAX_BLOCK_BYTES})")
        if size > MAX_INPUT_BYTES:
            raise Unstorable(f"$[{index}]", f"content blocks of {size} bytes together (limit {MAX_INPUT_BYTES})")
        kept.append(block)
    total = sum(len(block["text"].encode()) for block in texts)
    if total <= MAX_TOOL_TEXT_BYTES:
        return kept or ""
    note = _note(total)
    left = MAX_TOOL_TEXT_BYTES - len(note)
    for block in texts:
        text = _head(block["text"], left)
        left = left - len(text.encode()) if text == block["text"] else 0
        block["text"] = text
    last = [block for block in texts if block["text"]][-1]
    last["text"] += note
    return [block for block in kept if block["type"] != "text" or block["text"]]


def _not_stored(error: Unstorable) -> tuple[str, bool]:
    return f"ran, but the result could not be stored: {error}", True


def _cut(text: str) -> str:
    total = len(text.encode())
    if total <= MAX_TOOL_TEXT_BYTES:
        return text
    note = _note(total)
    return _head(text, MAX_TOOL_TEXT_BYTES - len(note)) + note


def _note(total: int) -> str:
    return f"\n[truncated, {total} bytes total]"


def _head(text: str, limit: int) -> str:
    """As many whole characters of the beginning as fit into `limit` bytes."""
    return text[:limit].encode()[:limit].decode(errors="ignore")


class _Cleaner:
    """One pass over one value. `path` and `kind` say where it stands, and stay there when anything is raised."""

    def __init__(self) -> None:
        self.path: list[str | int] = []
        self.kind = ""
        self.inside: set[int] = set()  # ids of what is being converted: meeting one again means a cycle
        self.depth = 0
        self.values_left = _MAX_VALUES

    def value(self, value: Any) -> Any:
        self.kind = _kind(value)
        self.values_left -= 1
        if self.values_left < 0:
            self.fail(f"more than {_MAX_VALUES} values")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, int):
            number = int.__int__(value)  # a subclass as the int it is
            if -_TOO_LONG_INT < number < _TOO_LONG_INT:
                return number
            return self.fail(f"over {MAX_INT_DIGITS} digits")
        if isinstance(value, float):
            return _float(float.__float__(value))
        if isinstance(value, Mapping):
            return self.object(value, value.items())
        if isinstance(value, (list, tuple, deque, KeysView, ItemsView, ValuesView)):
            return self.array(value, value)
        if isinstance(value, AbstractSet):
            return sorted(self.array(value, value), key=_rank)
        return self.convert(value)

    def convert(self, value: Any) -> Any:
        """What JSON has no kind of its own for."""
        if isinstance(value, (datetime, date, time)):
            return _text(value.isoformat())
        if isinstance(value, timedelta):
            return _duration(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return base64.b64encode(bytes(value)).decode()
        if isinstance(value, (Decimal, UUID, PurePath)):
            return _text(str(value))
        if isinstance(value, Enum):
            return self.instead(value, value.value)
        if isinstance(value, type):
            return self.fail()
        if callable(getattr(type(value), "model_dump", None)):
            return self.instead(value, value.model_dump(mode="json", warnings=False))
        if is_dataclass(value):
            return self.object(value, ((field.name, getattr(value, field.name)) for field in fields(value)))
        if _from_numpy(value) and not _from_numpy(held := _unnumpy(value)):  # a longdouble holds itself
            return self.instead(value, held)
        return self.fail()

    def object(self, value: Any, items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        self.enter(value)
        kind = self.kind
        made: dict[str, Any] = {}
        for key, part in items:
            name = self.key(key)
            self.kind = kind
            if name in made:
                self.fail(f"two keys become {_canonical(name)}")
            self.path.append(name)
            made[name] = self.value(part)
            self.path.pop()
            self.kind = kind
        self.leave(value)
        return made

    def array(self, value: Any, items: Iterable[Any]) -> list[Any]:
        self.enter(value)
        kind = self.kind
        made: list[Any] = []
        for index, part in enumerate(items):
            self.path.append(index)
            made.append(self.value(part))
            self.path.pop()
            self.kind = kind
        self.leave(value)
        return made

    def instead(self, value: Any, other: Any) -> Any:
        """Convert `other`, which stands for `value`."""
        if id(value) in self.inside:
            self.fail("contains itself")
        self.inside.add(id(value))
        made = self.value(other)
        self.inside.discard(id(value))
        return made

    def key(self, key: Any) -> str:
        name = self.value(key)
        return name if isinstance(name, str) else _dumps(name)

    def enter(self, value: Any) -> None:
        if id(value) in self.inside:
            self.fail("contains itself")
        if self.depth == MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")
        self.inside.add(id(value))
        self.depth += 1

    def leave(self, value: Any) -> None:
        self.inside.discard(id(value))
        self.depth -= 1

    def fail(self, why: str = "") -> NoReturn:
        raise Unstorable(self.where(), f"type {self.kind} ({why})" if why else f"type {self.kind}")

    def where(self) -> str:
        return "$" + "".join(map(_step, self.path))


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if _NAME.fullmatch(step) else f"[{_canonical(step)}]"


def _kind(value: Any) -> str:
    return type(value).__name__


def _said(error: BaseException) -> str:
    try:
        return f"{_kind(error)}: {error}"
    except Exception:  # noqa: BLE001 - an exception that cannot be printed
        return _kind(error)


def _brief(text: str) -> str:
    text = _text(text)
    if len(text) <= _MAX_WHY_CHARS:
        return text
    half = _MAX_WHY_CHARS // 2
    return f"{text[:half]}...{text[-half:]}"


def _text(text: str) -> str:
    text = str.__str__(text).replace("\0", "\ufffd")  # a subclass as the str it is
    if _is_utf8(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")  # joins pairs
    return _SURROGATE.sub("\ufffd", joined)


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _float(number: float) -> float | str:
    if isfinite(number):
        return number
    if isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _duration(value: timedelta) -> str:
    sign = "-" if value < timedelta(0) else ""
    value = abs(value)
    hours, rest = divmod(value.seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    clock = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "") + (f"{seconds}{fraction}S" if seconds or fraction else "")
    days = f"{value.days}D" if value.days else ""
    return f"{sign}P{days}{'T' + clock if clock else ''}" if days or clock else "PT0S"


def _rank(plain: Any) -> tuple[int, float, str]:
    """Sort key that puts the members of a set into one order, whatever order Python's hashes gave them."""
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        return 0, plain, _canonical(plain)
    if isinstance(plain, str):
        return 1, 0, plain
    return 2, 0, _canonical(plain)


def _from_numpy(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist") and hasattr(value, "dtype")


def _unnumpy(value: Any) -> Any:
    if value.dtype.kind == "M":  # tolist() would give plain integers for nanoseconds
        return value.astype(str).tolist()
    if value.dtype.kind == "m":
        return value.astype("timedelta64[us]").tolist()
    return value.tolist()


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)  # what `encode` makes anew for every value; PyPy has none
_pieces = (
    _make_encoder(None, _encoder.default, json.encoder.encode_basestring, None, ": ", ", ", False, False, False) if _make_encoder else None
)


def _dumps(value: Any) -> str:
    """What contains itself is a RecursionError here, not a ValueError."""
    return _encoder.encode(value) if _pieces is None else "".join(_pieces(value, 0))


_canonical = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


def _parse(text: str) -> Any:
    try:
        value = _loads(text)
    except Unstorable:
        raise
    except RecursionError:
        raise Unstorable("$", f"JSON nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise Unstorable("$", f"not JSON: {error}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper_than_allowed(value):
        raise Unstorable("$", f"JSON nested deeper than {MAX_DEPTH}")
    return value


def _deeper_than_allowed(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            if isinstance(whole, (list, dict))
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (list, dict))
        ]
        if not level:
            return False
    return True


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unstorable("$", f"JSON with two keys {_canonical(twice)} in one object")
    return made


def _read_int(digits: str) -> int:
    if len(digits) - digits.startswith("-") > MAX_INT_DIGITS:
        raise Unstorable("$", f"JSON with an integer over {MAX_INT_DIGITS} digits")
    return int(digits)


def _read_float(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise Unstorable("$", f"JSON with a number that no float holds ({digits})")
    return number


def _read_constant(name: str) -> NoReturn:
    raise Unstorable("$", f"JSON with {name}")


_loads = json.JSONDecoder(
    object_pairs_hook=_read_object, parse_int=_read_int, parse_float=_read_float, parse_constant=_read_constant
).decode

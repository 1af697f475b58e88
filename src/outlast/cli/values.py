"""What people type, as values: durations, instants, tags, JSON. Each raises a UsageError that names the option."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outlast.errors import UsageError

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration(text: str, option: str) -> timedelta:
    """45s, 30m, 4h, 90d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip(), re.ASCII)
    if not match:
        raise UsageError(f"{option} is {text!r}: a duration is written like 45s, 30m, 4h or 90d")
    try:
        return timedelta(**{UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise UsageError(f"{option} is {text!r}: that is longer than any duration can be") from None


def when(text: str, option: str) -> datetime:
    """A date (its beginning, UTC), an instant with its offset, or a duration ago."""
    text = text.strip()
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            return datetime.fromisoformat(text).replace(tzinfo=UTC)
        if re.fullmatch(r"[\d.]+[smhd]", text, re.ASCII):
            return datetime.now(UTC) - duration(text, option)
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        forms = "a date (2026-11-30), an instant (2026-11-30T11:00:00Z) or a duration ago (4h)"
        raise UsageError(f"{option} is {text!r}: write {forms}") from None
    if at.tzinfo is None:
        raise UsageError(f"{option} is {text!r}: say which time zone, as in {text}Z")
    return at


def tags(pairs: Sequence[str] | None) -> dict[str, str]:
    """K=V, each key once."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--tag is {pair!r}: write it as KEY=VALUE")
        if key in found:
            raise UsageError(f"--tag {key} is given twice")
        found[key] = value
    return found


def json_value(text: str, option: str, *, hint: str | None = None) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{option} is no JSON: {e}", hint=hint or f"a text needs its quotes: {option} '\"like this\"'") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def json_object(text: str, option: str) -> dict[str, Any]:
    value = json_value(text, option)
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object with all the arguments, not {type(value).__name__}")
    return value


def text(argument: str) -> str:
    """The argument, or for `-` what stands on stdin. Not empty, and valid Unicode."""
    if argument != "-":
        given = argument
    elif sys.stdin is None:
        raise UsageError("TEXT is '-', and stdin is closed")
    else:
        given = _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")
    try:
        given.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8 come in as lone surrogates
        raise UsageError("TEXT is not valid UTF-8") from None
    if not given.strip():
        raise UsageError("TEXT is empty")
    return given


def input_file(file: str) -> Any:
    """What --input says: a text, content blocks or a message list, as JSON."""
    value = json_value(file_text(file, "--input"), f"--input {file}")
    if not isinstance(value, str | list):
        raise UsageError(f"--input {file} holds {type(value).__name__}: a text, a list of content blocks or a list of messages is needed")
    return value


def file_text(file: str, option: str) -> str:
    """What stands in a file that an option names, or for `-` on stdin."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as e:
        raise UsageError(f"{option} {file} cannot be read: {e.strerror}") from None
    return _decoded(data, f"{option} {file}")


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(f"{what} is not valid UTF-8: byte {e.start}") from None

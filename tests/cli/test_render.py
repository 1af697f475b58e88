"""What is printed cannot act on a terminal, and a message's one line says what happened."""

from __future__ import annotations

import sys
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outlast.cli import render, values
from outlast.errors import UsageError

INVISIBLE_LETTERS = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe00\U000e0100"


def test_every_control_and_format_character_is_escaped() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    dangerous = [c for c in every if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and c not in "\n\t"]
    assert len(dangerous) > 2048
    assert [c for c in [*dangerous, *INVISIBLE_LETTERS] if c in render.safe(f"a{c}b")] == []
    assert render.safe("\n\té\U0001f642❤️中") == "\n\té\U0001f642❤️中"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\x1b[2Kb", "a\\x1b[2Kb"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("one\ntwo\tthree", "one\\ntwo\\tthree"),
        ("[bold]not markup[/bold] :smile:", "[bold]not markup[/bold] :smile:"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert render.line(text) == shown


def use(name: str, **args: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_01", "name": name, "input": args}


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_01", "content": content}


@pytest.mark.parametrize(
    "role, content, line",
    [
        ("user", "Ticket\n  KITE-142", "user: Ticket KITE-142"),
        ("user", [{"type": "text", "text": "look"}, {"type": "image", "source": {}}], "user: look [image]"),
        ("assistant", [{"type": "text", "text": "ok"}, use("get", id="K", n=1)], 'model asks for get(id="K", n=1)'),
        ("assistant", [use("a"), use("b", x=None)], "model asks for a(), b(x=null)"),
        ("assistant", [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Done."}], "model: Done."),
        ("assistant", [{"type": "thinking", "thinking": "hm"}], "model: [thinking]"),
        ("assistant", [], "model: "),
        ("user", [result('{"id": 1}'), result([{"type": "text", "text": "two"}])], 'tool result: {"id": 1}, two'),
        ("user", [result(None), {"type": "text", "text": "and you?"}], "tool result: "),
    ],
)
def test_summary(role: str, content: Any, line: str) -> None:
    assert render.summary({"role": role, "content": content}) == line


def test_checkpoint_line() -> None:
    line = render.checkpoint_line(6, "waiting_for_approval", {"role": "user", "content": "x" * 200})
    assert line == "checkpoint 6  waiting_for_approval  user: " + "x" * 51 + "..."
    assert render.checkpoint_line(1, "running", {"role": "user", "content": "y" * 54}).endswith(" user: " + "y" * 54)


def test_a_long_value_says_how_much_is_missing_and_where() -> None:
    long = "a" * 5000 + "DANGER"
    assert render.value(long) == f'"{long}"'
    shown = render.value(long, "outlast show run-1 --json")
    assert len(shown) < 2200 and "3,008 more characters here: outlast show run-1 --json" in shown and shown.endswith('DANGER"')


@pytest.mark.parametrize("text, seconds", [("45s", 45), ("30m", 1800), ("4h", 14400), ("90d", 7776000), ("1.5h", 5400), ("0s", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert values.duration(text, "--grace") == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "45", "-1s", "1 h", "1w", "１s", "99999999999999999d", "4h30m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="--grace"):
        values.duration(text, "--grace")


def test_when() -> None:
    assert values.when("2026-11-30", "--since") == datetime(2026, 11, 30, tzinfo=UTC)
    assert values.when("2026-11-30T11:00:00Z", "--since") == datetime(2026, 11, 30, 11, tzinfo=UTC)
    assert values.when("2026-11-30T12:00:00+01:00", "--since") == datetime(2026, 11, 30, 11, tzinfo=UTC)
    ago = datetime.now(UTC) - values.when("4h", "--since")
    assert abs(ago - timedelta(hours=4)) < timedelta(minutes=1)
    for wrong in ("2026-11-30T11:00:00", "yesterday", "2026-13-01", ""):
        with pytest.raises(UsageError, match="--since"):
            values.when(wrong, "--since")


def test_tags_and_json() -> None:
    assert values.tags(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--tag"):
            values.tags(wrong)
    for wrong_json in ("", "{", "NaN", "[1,]", "[" * 100_000):
        with pytest.raises(UsageError, match="--data"):
            values.json_value(wrong_json, "--data")
    for no_object in ("[]", '"yes"', "1", "null", "false"):
        with pytest.raises(UsageError, match="JSON object"):
            values.json_object(no_object, "--args")

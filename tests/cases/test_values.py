"""Values that are no plain text or JSON: results after an effect, inputs, errors. Saved in one form, or said to be unsavable; never run again."""

from __future__ import annotations

import json
import math
import os
import threading
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.cases.conftest import BOTH, MakeApp, Provider, size_on_disk
from tests.support.world import Ledger, assert_whole, use

from outlast import Agent, ToolContext, ToolResult, tool
from outlast.core.codec import MAX_TOOL_TEXT_BYTES
from outlast.models import ScriptedModel

STORES = BOTH


class Person(BaseModel):
    name: str
    born: date


class Weird:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def deep(n: int) -> Any:
    value: Any = 0
    for _ in range(n):
        value = [value]
    return value


GOOD: dict[str, tuple[Any, Any]] = {
    "datetime": (datetime(2026, 11, 30, 12, tzinfo=UTC), "2026-11-30T12:00:00+00:00"),
    "decimal": (Decimal("1.10"), "1.10"),
    "pydantic": (Person(name="Ada", born=date(1815, 12, 10)), {"name": "Ada", "born": "1815-12-10"}),
    "bytes": (b"\x00\xff", "AP8="),
    "set": ({2, 1}, [1, 2]),
    "nested": ({"at": [timedelta(seconds=1)], (1, 2): None}, {"at": ["PT1S"], "[1, 2]": None}),
    "path": (Path("a/b"), "a/b"),
    "none": (None, None),
}
BAD: dict[str, Any] = {"cyclic": cyclic(), "too deep": deep(300), "very deep": deep(5000), "lock": {"a": [threading.Lock()]}, "weird": Weird(),
                       "generator": (x for x in ()), "complex": 1j, "class": Weird, "huge int": 10**5000}  # fmt: skip


def played(value: Any, make_app: MakeApp, ledger: Ledger, *, effect: str = "at_most_once") -> Any:
    @tool(effect=effect)  # type: ignore[call-overload]  # all three in turn
    def give(ctx: ToolContext) -> Any:
        ledger.write("give", ctx.idempotency_key)
        return value

    agent = Agent("a", model=ScriptedModel([[use("give")], "Done."]), tools=[give])
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "done", (run.status, run.reason)
    assert len(ledger.lines()) == 1
    assert app.resume_sync("r").messages == run.messages
    assert_whole(app, "r")
    return run.messages[2]["content"][0]


@pytest.mark.parametrize("name", GOOD)
def test_save_failure_after_effect_then_retry(name: str, make_app: MakeApp, ledger: Ledger) -> None:
    value, expected = GOOD[name]
    result = played({"v": value}, make_app, ledger)
    assert json.loads(result["content"]) == {"v": expected}
    assert "is_error" not in result


@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
@pytest.mark.parametrize("name", BAD)
def test_a_result_that_cannot_be_stored_is_not_made_again(name: str, effect: str, make_app: MakeApp, ledger: Ledger) -> None:
    """It ran, and the model is told that its result could not be kept."""
    result = played(BAD[name], make_app, ledger, effect=effect)
    assert result["is_error"] is True
    assert "could not be stored" in result["content"]


def test_nul_character_in_a_result(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    """A NUL becomes a visible character wherever it comes from; the text that only names one stays."""

    @tool
    def give(ctx: ToolContext, text: str) -> str:
        ledger.write("give", ctx.idempotency_key)
        return "a\x00b and \\u0000"

    _, model = provider([use("give", text="in\x00put")], "Do\x00ne.")
    agent = Agent("a", model=model, tools=[give], instructions="Be brief.")
    app = make_app(agent)
    run = app.run_sync(agent, "g\x00o", run_id="r", tags={"t": "x\x00y"}, by="pri\x00ya")
    assert run.status == "done"
    assert run.messages[0]["content"] == "g\ufffdo"
    assert run.messages[1]["content"][0]["input"] == {"text": "in\ufffdput"}
    assert run.messages[2]["content"][0]["content"] == "a\ufffdb and \\u0000"
    assert run.output == "Do\ufffdne."
    assert (dict(run.tags), run.started_by) == ({"t": "x\ufffdy"}, "pri\ufffdya")
    assert len(ledger.lines()) == 1
    assert_whole(app, "r")


SURROGATES = ["x\ud83d", os.fsdecode(b"\xff"), "\udc00\ud800", "ok\ud83d\ude00"]


@pytest.mark.parametrize("text", SURROGATES, ids=ascii)
@pytest.mark.parametrize("where", ["result", "error", "input", "answer", "name", "note", "person"])
def test_lone_surrogate_poisons_a_thread(where: str, text: str, make_app: MakeApp, ledger: Ledger, capfd: Any) -> None:
    """Mended once, at the boundary: the next request encodes, and so does everything that shows the run."""

    @tool
    def give(ctx: ToolContext) -> str:
        ledger.write("give", ctx.idempotency_key)
        if where == "error":
            raise ValueError(text)
        return text if where == "result" else "ok"

    name = f"give{text}" if where == "name" else "give"
    agent = Agent("a", model=ScriptedModel([[use(name)], text if where == "answer" else "Done."]), tools=[give])
    app = make_app(agent)
    run = app.run_sync(agent, text if where == "input" else "go", run_id="r")
    if where == "error":
        assert run.status == "waiting_for_verification"
        app.verify("r", outcome="give_up", decided_by="priya", note=text)
        run = app.resume_sync("r")
    if where in ("note", "person"):
        app.send("r", "more", by=text if where == "person" else None)
        app.cancel("r", by=text if where == "person" else "priya", note=text)
        app.retry("r", by=text if where == "person" else None)
        app.cancel("r")
    assert run.status == "done"
    json.dumps(run.to_dict(messages=True), ensure_ascii=False).encode()
    for row in app.journal("r"):
        f"{row.body}{row.meta}".encode()
    assert len(ledger.lines()) == (where != "name")
    assert_whole(app, "r")


class NotANumber(float):
    """As numpy's float64: a float by inheritance."""


def test_nan_and_infinity(make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    value = {"score": float("nan"), "max": math.inf, "min": -math.inf, "np": NotANumber("nan"), "big": 1e308}
    result = played(value, make_app, ledger)

    def strict(text: str) -> Any:
        raise AssertionError(text)

    found = json.loads(result["content"], parse_constant=strict)
    assert found == {"score": "NaN", "max": "Infinity", "min": "-Infinity", "np": "NaN", "big": 1e308}


@pytest.mark.parametrize("character", ["x", "é", "🦉", "\u0301"])
def test_huge_output_wedges_the_run(character: str, make_app: MakeApp, ledger: Ledger, store_url: str) -> None:
    """Fifty megabytes of one line: cut between two characters, with a note that says how much there was; the store stays small."""
    size = 50 * 1024 * 1024
    text = character * (size // len(character.encode()))
    content = played(text, make_app, ledger)["content"]
    assert len(content.encode()) <= MAX_TOOL_TEXT_BYTES
    assert f"{len(text.encode()):,}" in content or str(len(text.encode())) in content
    assert content.startswith(character * 10)
    assert size_on_disk(store_url) < 8 * MAX_TOOL_TEXT_BYTES


def test_huge_blocks_and_inputs_are_refused_by_name(make_app: MakeApp, ledger: Ledger) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * (6 * 1024 * 1024)}}
    result = played(ToolResult([image]), make_app, ledger)
    assert result["is_error"] is True
    agent = Agent("b", model=ScriptedModel(["Done."]))
    with pytest.raises(Exception, match="bytes"):
        make_app(agent).start(agent, "x" * (21 * 1024 * 1024))

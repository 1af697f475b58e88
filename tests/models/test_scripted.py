"""ScriptedModel: the right answer after any crash, the script exactly as written, calls counted across processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import pytest

from outlast.errors import ModelError, UsageError
from outlast.models import Anthropic, ModelRequest, ScriptedModel, resolve

USER: dict[str, Any] = {"role": "user", "content": "Hello"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}
CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_01", "name": "f", "input": {"z": 1.0, "a": 10**20}, "future_field": None}


def ask(model: ScriptedModel, *messages: dict[str, Any], emitted: list[str] | None = None) -> dict[str, Any]:
    pieces: list[str] = [] if emitted is None else emitted
    return asyncio.run(model(ModelRequest(messages=list(messages) or [USER], emit=pieces.append)))


def test_the_answer_is_chosen_by_the_number_of_assistant_messages() -> None:
    model = ScriptedModel(["one", "two", "three"])
    texts = [ask(model, *[USER, ANSWER] * n, USER)["content"][0]["text"] for n in (2, 0, 1, 0)]
    assert texts == ["three", "one", "two", "one"]


@pytest.mark.parametrize(
    "turn,content,stop_reason",
    [
        ("Hello", [{"type": "text", "text": "Hello"}], "end_turn"),
        ("", [], "end_turn"),
        ([CALL], [CALL], "tool_use"),
        (CALL, [CALL], "tool_use"),
        ({"content": [CALL], "stop_reason": "max_tokens"}, [CALL], "max_tokens"),
        ({"content": "Hi", "stop_reason": None}, [{"type": "text", "text": "Hi"}], None),
        (lambda messages: f"{len(messages)} so far", [{"type": "text", "text": "1 so far"}], "end_turn"),
        (lambda _: [CALL], [CALL], "tool_use"),
        (lambda _: {"content": [], "stop_reason": "refusal"}, [], "refusal"),
        (lambda _: anthropic.types.TextBlock(type="text", text="sdk"), [{"text": "sdk", "type": "text"}], "end_turn"),
        ([{"type": "server_tool_use", "id": "srv_1", "name": "web", "input": {}}], None, "end_turn"),
    ],
)
def test_a_turn_becomes_a_whole_message(turn: Any, content: list[Any] | None, stop_reason: str | None) -> None:
    message = ask(ScriptedModel([turn]))
    if content is not None:
        assert json.dumps(message["content"]) == json.dumps(content)
    assert message["stop_reason"] == stop_reason
    assert (message["role"], message["type"], message["model"]) == ("assistant", "message", "scripted")
    assert message["usage"]["input_tokens"] > 0
    assert message["usage"]["output_tokens"] > 0


def test_what_a_whole_message_says_itself_stays() -> None:
    message = ask(
        ScriptedModel([{"content": "x", "id": "msg_own", "usage": {"input_tokens": 3120, "output_tokens": 5}, "container": {"id": "c"}}])
    )
    assert message["id"] == "msg_own"
    assert message["usage"] == {"input_tokens": 3120, "output_tokens": 5}
    assert message["container"] == {"id": "c"}


def test_an_async_function_is_awaited() -> None:
    async def turn(_: list[dict[str, Any]]) -> str:
        await asyncio.sleep(0)
        return "awaited"

    assert ask(ScriptedModel([turn]))["content"][0]["text"] == "awaited"


def test_nobody_can_change_the_script() -> None:
    for turn in ([{**CALL, "input": {"a": 1}}], {"content": [{**CALL, "input": {"a": 1}}]}):
        model = ScriptedModel([turn])
        ask(model)["content"][0]["input"]["a"] = "changed"
        assert ask(model)["content"] == [{**CALL, "input": {"a": 1}}]


def test_a_function_may_raise() -> None:
    def overloaded(_: list[dict[str, Any]]) -> str:
        raise ModelError("overloaded", retryable=True)

    with pytest.raises(ModelError, match="overloaded") as raised:
        ask(ScriptedModel([overloaded]))
    assert raised.value.retryable


def test_past_the_end_says_which_turn_was_asked() -> None:
    with pytest.raises(ModelError, match="has 1 turns, and turn 2 was asked") as raised:
        ask(ScriptedModel(["only"]), USER, ANSWER, USER)
    assert not raised.value.retryable


@pytest.mark.parametrize("turn", [42, None, b"bytes", [1], lambda _: None])
def test_what_is_no_turn_is_named(turn: Any) -> None:
    with pytest.raises(TypeError, match="turn 1 of the script"):
        ask(ScriptedModel([turn]))


def test_text_is_emitted() -> None:
    emitted: list[str] = []
    ask(ScriptedModel([[{"type": "text", "text": "Looking."}, CALL]]), emitted=emitted)
    assert emitted == ["Looking."]


def test_the_log_counts_calls_across_processes(tmp_path: Path) -> None:
    log = tmp_path / "model.log"
    code = (
        "import asyncio, sys; from outlast.models import ModelRequest, ScriptedModel\n"
        "m = ScriptedModel(['a'], log=sys.argv[1]); asyncio.run(m(ModelRequest(messages=[])))"
    )
    subprocess.run([sys.executable, "-c", code, str(log)], check=True)
    ask(ScriptedModel(["one"], log=log))
    with pytest.raises(ModelError):
        ask(ScriptedModel([], log=log))  # a call that gets no answer is a call
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["n"] for line in lines] == [0, 0, 0]
    assert lines[0]["pid"] != os.getpid() == lines[1]["pid"]


def test_resolve() -> None:
    model = ScriptedModel(["x"])
    assert resolve(model) is model
    found = resolve("anthropic:claude-sonnet-5-5")
    assert isinstance(found, Anthropic)
    assert found.model == "claude-sonnet-5-5"


@pytest.mark.parametrize("name", ["openai:gpt", "claude-sonnet-5-5", "anthropic:", "anthropic: ", "", ":x", 7])
def test_resolve_names_the_known_providers(name: Any) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(name)
    assert "anthropic:NAME" in raised.value.hint


def test_importing_models_loads_no_sdk() -> None:
    code = (
        "import sys, outlast.models as m\n"
        "m.resolve('anthropic:x')\n"
        "found = [n for n in sys.modules if n.split('.')[0] in {'anthropic', 'httpx', 'httpx2', 'pydantic'}]\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

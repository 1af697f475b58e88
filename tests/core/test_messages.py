"""The format of the Messages API: which histories stand, and how an answer is brought into it before it is saved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.build import use

from outlast.core import messages as m

USER = {"role": "user", "content": "hello"}
CALLS = {"role": "assistant", "content": [m.text("one moment"), use("a", "look"), use("b", "look")]}
ANSWERED = m.user(m.tool_result("a", "1"), m.tool_result("b", "2"), m.text("and hurry"))

GOOD = [
    [],
    [USER],
    [USER, {"role": "assistant", "content": "hi"}, USER],
    [USER, USER],
    [USER, CALLS],
    [USER, CALLS, ANSWERED],
    [USER, CALLS, m.user(m.tool_result("b", "2"), m.tool_result("a", "1"))],
    [
        USER,
        {"role": "assistant", "content": [{"type": "some_future_block", "foo": 1}, {"type": "server_tool_use", "id": "", "name": "web"}]},
    ],
]

BAD = [
    ("message 0: a history begins with a user message", [{"role": "assistant", "content": "hi"}]),
    ("message 1: role 'tool'", [USER, {"role": "tool", "content": "x"}]),
    ("message 0: content must be", [{"role": "user", "content": []}]),
    ("message 0: content must be", [{"role": "user", "content": ""}]),
    ("message 0: block 0 is not an object", [{"role": "user", "content": ["x"]}]),
    ("message 0: block 1 is an empty text", [m.user(m.text("x"), m.text(" \n"))]),
    ("message 2: no tool_result for a, b of message 1", [USER, CALLS, USER]),
    ("message 2: no tool_result for b of message 1", [USER, CALLS, m.user(m.tool_result("a", "1"))]),
    ("message 2: no tool_result for a, b", [USER, CALLS, {"role": "assistant", "content": "hi"}]),
    (
        "message 2: its tool_result blocks must come first",
        [USER, CALLS, m.user(m.text("x"), m.tool_result("a", "1"), m.tool_result("b", "2"))],
    ),
    ("message 2: tool_result for c", [USER, CALLS, m.user(*(m.tool_result(i, "1") for i in "abc"))]),
    ("message 2: tool_result for", [USER, CALLS, m.user(*(m.tool_result(i, "1") for i in "abb"))]),
    ("message 0: tool_result for a answers no call", [m.user(m.tool_result("a", "1"))]),
    ("message 1: an assistant message holds a tool_result", [USER, {"role": "assistant", "content": [m.tool_result("a", "1")]}]),
    ("message 0: a user message holds a tool_use", [m.user(use("a", "look"))]),
    ("message 1: tool_use id ''", [USER, {"role": "assistant", "content": [use("", "look")]}]),
    ("message 1: tool_use id 'a\\n'", [USER, {"role": "assistant", "content": [use("a\n", "look")]}]),
    ("message 1: tool_use id 'a' is missing, repeated", [USER, {"role": "assistant", "content": [use("a", "look"), use("a", "look")]}]),
    ("message 3: tool_use id 'a' is missing, repeated", [USER, CALLS, ANSWERED, CALLS]),
    ("message 1: tool_use a needs a name and an input", [USER, {"role": "assistant", "content": [use("a", "look", "{}")]}]),
]


@pytest.mark.parametrize("history", GOOD)
def test_histories_that_stand(history: list[Any]) -> None:
    m.check_history(history)


@pytest.mark.parametrize("why, history", BAD)
def test_an_invalid_history_is_refused_with_the_index_of_the_bad_message(why: str, history: list[Any]) -> None:
    with pytest.raises(m.BadMessage) as refused:
        m.check_history(history)
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize("value", ["hello", [m.text("hello")], ({"type": "image", "source": {}},), [USER, CALLS, ANSWERED]])
def test_what_may_start_a_run(value: Any) -> None:
    m.check_history(m.as_input(value))


NO_INPUT = [
    "",
    " ",
    [],
    {},
    7,
    None,
    b"x",
    ["x"],
    [{"text": "x"}],
    [m.text("")],
    [use("a", "look")],
    [m.tool_result("a", "1")],
    [USER, CALLS, USER],
]


@pytest.mark.parametrize("value", NO_INPUT)
def test_what_may_not(value: Any) -> None:
    with pytest.raises(m.BadMessage):
        m.as_input(value)


def answer(value: Any, *used: str) -> tuple[m.Message, dict[str, Any]]:
    return m.as_answer(value, used=used, seq=7)


class Sdk:
    """An object as a provider's SDK gives it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def to_dict(self, *, mode: str, warnings: bool) -> Any:
        assert mode == "json" and not warnings
        return self.value


ANSWERS = [
    ("a text", "hi", [m.text("hi")], {"stop_reason": "end_turn"}),
    ("blocks", [m.text("hi")], [m.text("hi")], {"stop_reason": "end_turn"}),
    ("calls", [use("a", "look")], [use("a", "look")], {"stop_reason": "tool_use"}),
    ("null stays null", {"content": "hi", "stop_reason": None}, [m.text("hi")], {"stop_reason": None}),
    ("what came beside", {"id": "msg_1", "type": "message", "role": "assistant", "content": "hi", "usage": {"x": 1}}, [m.text("hi")],
     {"id": "msg_1", "usage": {"x": 1}, "stop_reason": "end_turn"}),
    ("an object of the SDK", Sdk({"content": [{"type": "text", "text": "hi"}], "stop_reason": "refusal"}), [m.text("hi")], {"stop_reason": "refusal"}),
    ("empty text blocks go", [m.text(" "), m.text("hi"), m.text("")], [m.text("hi")], {"stop_reason": "end_turn"}),
    ("no content at all", {"content": [], "stop_reason": "refusal"}, [m.text(m.NO_ANSWER)], {"stop_reason": "refusal", "empty": True}),
    ("an empty text", "", [m.text(m.NO_ANSWER)], {"stop_reason": "end_turn", "empty": True}),
    ("an id that is odd", [use("a b", "look")], [use("call-7-1", "look")], {"stop_reason": "tool_use", "renumbered": {"call-7-1": "a b"}}),
    ("a line break", [use("a\n", "look")], [use("call-7-1", "look")], {"stop_reason": "tool_use", "renumbered": {"call-7-1": "a\n"}}),
    ("none", [{"type": "tool_use", "name": "look", "input": {}}], [{**use("call-7-1", "look")}], {"stop_reason": "tool_use", "renumbered": {"call-7-1": None}}),
    ("a server's block is untouched", [{"type": "server_tool_use", "id": "", "name": "web", "input": "x"}],
     [{"type": "server_tool_use", "id": "", "name": "web", "input": "x"}],
     {"stop_reason": "end_turn"}),
    ("arguments as text", [use("a", "look", '{"n": 1.0}')], [use("a", "look", {"n": 1.0})], {"stop_reason": "tool_use"}),
    ("arguments that are none", [use("a", "look", "null")], [use("a", "look")],
     {"stop_reason": "tool_use", "malformed": {"a": {"raw": "null", "problem": "the arguments must be a JSON object, not NoneType"}}}),
    ("no name", [use("a", "")], [use("a", "unnamed")], {"stop_reason": "tool_use"}),
]  # fmt: skip


@pytest.mark.parametrize("value, content, meta", [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_as_answer(value: Any, content: list[Any], meta: dict[str, Any]) -> None:
    assert answer(value) == ({"role": "assistant", "content": content}, meta)


@pytest.mark.parametrize(
    "value", [7, None, {"role": "user", "content": "hi"}, {"content": {"type": "text"}}, {"content": 7}, [7], [None], [{"text": "hi"}]]
)
def test_what_is_no_answer(value: Any) -> None:
    with pytest.raises(m.BadMessage):
        answer(value)


def test_duplicate_tool_use_ids_across_turns() -> None:
    message, meta = answer([use("a", "look"), use("a", "look"), use("x" * 64, "look")], "a", "x" * 64)
    assert [c["id"] for c in m.tool_uses(message)] == ["a-2", "a-3", "x" * 56 + "-2"]
    assert meta["renumbered"] == {"a-2": "a", "a-3": "a", "x" * 56 + "-2": "x" * 64}


def test_blocks_and_fields_that_nobody_knows_are_kept_in_order() -> None:
    content = [
        {"type": "redacted_thinking", "data": "Eu+/=="},
        {"type": "thinking", "thinking": "a \u2028 ", "signature": "s+/="},
        {"type": "some_future_block", "foo": 1},
        {**use("a", "look", {"z": 1, "a": 1.0}), "caller": {"type": "direct"}},
    ]
    assert answer({"content": content, "stop_reason": "tool_use"})[0]["content"] == content


words = st.sampled_from(["tool_use", "text", "assistant", "a"])
keys = st.sampled_from(["type", "id", "name", "input", "text", "content", "role", "stop_reason"])
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | words


@given(st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=6)))
def test_any_answer_is_valid_or_refused(value: Any) -> None:
    try:
        message, meta = answer(value, "a")
    except m.BadMessage:
        return
    assert "stop_reason" in meta
    m.check_history([USER, message])

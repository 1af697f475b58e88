"""What the model said comes back to it exactly as it was said, after a crash and in another process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.deaths import dying_at
from tests.support.world import Ledger, assert_whole, tools

from outlast import Agent
from outlast.models import ScriptedModel
from outlast.testing.protocol import canonical

THINKING: list[Any] = [
    {"type": "thinking", "thinking": "Trailing spaces   \n\u2028 and 🦉  ", "signature": "Eq+/ab==cd/+=="},
    {"type": "text", "text": "Looking it up. "},
    {
        "type": "tool_use",
        "id": "toolu_01",
        "name": "look",
        "input": {"text": "x", "z": 1.0, "a": 1, "big": 10**20, "tiny": 1e-7, "n": -0.0},
    },
]
REDACTED: list[Any] = [
    {"type": "redacted_thinking", "data": "EmwK+AhgB/EAEY=="},
    {"type": "thinking", "thinking": "", "signature": "x"},
    {"type": "some_future_block", "foo": 1, "deep": {"z": [None, True, 1.0], "a": "  "}},
    {"type": "tool_use", "id": "toolu_01", "name": "look", "input": {"text": "x"}, "caller": {"type": "direct"}},
]


@pytest.mark.parametrize("at", ["commit.after", "tool.before:look", "tool.after:look"])
@pytest.mark.parametrize("content", [THINKING, REDACTED], ids=["thinking_blocks_kept_byte_for_byte", "redacted_thinking_dropped"])
def test_an_answer_comes_back_as_it_was_sent(content: list[Any], at: str, make_app: MakeApp, provider: Provider, ledger: Ledger) -> None:
    """The stand-in compares every block with what it sent (order, unknown fields, 1.0 and 10**20, signatures); so do we, on the saved text."""
    api, model = provider(content, "Done.")
    agent = Agent("a", model=model, tools=[tools()["look"]])
    with dying_at(at, 2 if at.startswith("commit") else 1):
        make_app(agent).run_sync(agent, "go", run_id="r")
    app = make_app(agent)
    run = app.resume_sync("r")
    assert run.status == "done"
    assert canonical(run.messages[1]["content"]) == canonical(content)
    assert canonical(api.requests[-1]["messages"][1]["content"]) == canonical(content)
    assert_whole(app, "r")


def test_extra_arguments_are_kept_in_the_history_whatever_the_tool_takes(make_app: MakeApp, ledger: Ledger) -> None:
    agent = Agent("a", model=ScriptedModel([THINKING, "Done."]), tools=[tools()["look"]])
    run = make_app(agent).run_sync(agent, "go", run_id="r")
    assert list(run.messages[1]["content"][2]["input"]) == ["text", "z", "a", "big", "tiny", "n"]

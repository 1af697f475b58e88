"""The example that everybody sees, with a reply tool that makes a key of its own for each attempt: red, and both keys are named."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import apsw
import pytest

from outlast import Agent, ToolContext, approval, tool
from outlast.models import ScriptedModel
from outlast.testing.crashmatrix import matrix

KITEBASE = Path(__file__).parents[2] / "examples" / "kitebase"
REPLY = [{"type": "tool_use", "id": "toolu_03", "name": "reply_to_customer", "input": {"ticket_id": "KITE-142", "message": "Hello."}}]


@pytest.fixture
def helpdesk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's help desk: what it does about a repeated request follows from the key alone."""
    spec = importlib.util.spec_from_file_location("kitebase_helpdesk_of_this_test", KITEBASE / "helpdesk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_key_of_its_own_for_each_attempt_is_red_and_both_are_named(helpdesk: Any, tmp_path: Path) -> None:
    used: list[str] = []

    @tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
    def reply_to_customer(ctx: ToolContext[Any], ticket_id: str, message: str) -> dict[str, Any]:
        """Send the customer a reply on a ticket."""
        reply = ctx.deps.send_reply(ticket_id, message, str(uuid4()))
        return {"status": reply["status"]}

    def seen(folder: Path) -> list[tuple[Any, ...]]:
        with closing(apsw.Connection(str(folder / "helpdesk.db"))) as db:
            rows = db.execute("SELECT ticket_id, message, idempotency_key FROM replies ORDER BY id").fetchall()
        if len(rows) > 1:
            used[:] = [row[2] for row in rows]
        return rows

    agent = Agent("kitebase-support", model="anthropic:no-model-is-asked", tools=[reply_to_customer])
    report = matrix.crash_matrix(
        agent, "Ticket KITE-142 just came in.", model=ScriptedModel([{"content": REPLY, "stop_reason": "tool_use"}, "Done."]),
        deps=lambda folder: helpdesk.HelpDesk(folder / "helpdesk.db"), observe=seen, at=("tool.after:reply_to_customer",), folder=tmp_path)  # fmt: skip
    [finding] = [f for f in report.findings if "killed at tool.after:reply_to_customer: sent 2 times, each time with another key: " in f]
    assert "reply_to_customer" in finding
    assert len(used) == 2
    assert all(key in finding for key in used), (used, finding)

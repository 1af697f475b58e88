"""8. Tests of my agent."""

import asyncio
from pathlib import Path
from typing import Any

from outlast import Outlast
from outlast.models import ScriptedModel
from outlast.testing import CrashMatrix, tool_context
from p02_kitebase import HelpDesk, get_ticket, support


class FileDesk(HelpDesk):
    """A help desk in a folder: a reply is a line of a file, and a key that it has seen sends nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def ticket(self, ticket_id: str) -> dict[str, Any]:
        return {"id": ticket_id, "title": "Customer locked out after SSO change"}

    async def send_reply(self, ticket_id: str, message: str, idempotency_key: str) -> dict[str, Any]:
        log = self.path / "sent.log"
        line = f"{ticket_id} {idempotency_key}"
        if not log.exists() or line not in log.read_text().splitlines():
            with log.open("a") as file:
                file.write(line + "\n")
        return {"ticket_id": ticket_id, "status": "sent"}


SCRIPT = ScriptedModel(
    [[{"type": "tool_use", "id": "toolu_01", "name": "reply_to_customer", "input": {"ticket_id": "KITE-142", "message": "Hi"}}], "Replied."]
)


def test_tool(tmp_path: Path) -> None:
    result: dict[str, Any] = asyncio.run(get_ticket(tool_context(FileDesk(tmp_path)), "KITE-142"))
    assert result["id"] == "KITE-142"


def test_rejection(tmp_path: Path) -> None:
    agent = support.replace(model=SCRIPT)
    with Outlast(tmp_path / "a.db", agents=[agent], deps=FileDesk(tmp_path)) as app:
        run = app.run_sync(agent, "KITE-142", run_id="r1")
        assert run.status == "waiting_for_approval" and run.waiting
        app.decide("r1", approved=False, decided_by="priya", note="Loop in their IT admin first.")
        run2 = app.resume_sync("r1")
        assert run2.messages[-2]["content"][0]["content"] == "A support lead rejected this reply: Loop in their IT admin first."


def test_every_crash_point(crash_matrix: CrashMatrix) -> None:
    report = crash_matrix(support, "KITE-142", model=SCRIPT, deps=FileDesk, observe=lambda d: (d / "sent.log").read_text().splitlines())
    report.assert_ok()

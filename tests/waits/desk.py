"""A desk for the tests of waiting: one gated reply, a clock moved by hand, and what the world and the journal say afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outlast import Agent, Hours, Notice, Outlast, Tool, ToolContext, approval, tool
from outlast.models import ScriptedModel
from outlast.testing import ManualClock

FRIDAY = datetime(2026, 11, 27, 15, tzinfo=UTC)  # 16:00 in Berlin
MONDAY_NOON = datetime(2026, 11, 30, 11, tzinfo=UTC)  # 12:00 in Berlin
OFFICE = Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")
HOUR = timedelta(hours=1)
MS = timedelta(milliseconds=1)
FOUR_WORKING_HOURS = approval(to="support-lead", noun="reply", within=4 * HOUR, hours=OFFICE)
LADDER = approval(
    to="support-lead", noun="reply", within=4 * HOUR, hours=OFFICE, remind_every=2 * HOUR,
    then=approval(to="duty-manager", noun="reply", within=2 * HOUR, hours=OFFICE),
)  # fmt: skip


def use(name: str, call_id: str = "toolu_01", **args: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


@dataclass
class Desk:
    """`sent` is the world: what the tool did. `app()` is a process: each has connections, agents and code of its own."""

    folder: Path
    gate: Any = FOUR_WORKING_HOURS
    turns: Sequence[Any] = ([use("reply", text="Hello.")], "Done.")
    clock: ManualClock = field(default_factory=lambda: ManualClock(FRIDAY))
    sent: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool[..., Any]] = ()
    url: str = ""  # empty: a file in the folder

    @property
    def store(self) -> str:
        return self.url or str(self.folder / "outlast.db")

    @property
    def model_log(self) -> list[str]:
        log = self.folder / "model.log"
        return log.read_text().splitlines() if log.exists() else []

    def agent(self) -> Agent[str]:
        @tool(effect="idempotent", gate=self.gate)
        def reply(ctx: ToolContext, text: str) -> dict[str, str]:
            """Send the customer a reply."""
            self.sent.append(ctx.idempotency_key)
            return {"status": "sent"}

        return Agent("desk", model=ScriptedModel(self.turns, log=self.folder / "model.log"), tools=[reply, *self.tools])

    def app(self, **more: Any) -> Outlast:
        return Outlast(self.store, agents=[self.agent()], clock=self.clock, **{"notify": [self.notices.append], **self.more, **more})

    def waiting(self, run_id: str = "run-1") -> Outlast:
        """A process in which the run has come as far as its gate."""
        app = self.app()
        run = app.run_sync(app.agents["desk"], "A ticket came in.", run_id=run_id, by="helpdesk")
        assert run.status.startswith("waiting_"), run.reason
        return app

    def at(self, when: datetime) -> None:
        self.clock.move(when - self.clock.now)


def kinds(app: Outlast, run_id: str = "run-1") -> Counter[str]:
    """How often each kind of entry stands in the journal."""
    return Counter(row.kind for row in app.journal(run_id))


def results(app: Outlast, run_id: str = "run-1") -> list[dict[str, Any]]:
    """The tool results that the model got."""
    messages = [x for x in app.get(run_id).messages if x["role"] == "user" and isinstance(x["content"], list)]
    return [block for x in messages for block in x["content"] if block["type"] == "tool_result"]

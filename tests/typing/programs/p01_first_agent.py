"""1. README: the first agent, offline (30 lines)."""

from typing import Any

from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel


@tool(effect="read")
def get_ticket(ticket_id: str) -> dict[str, Any]:
    """Look up a ticket."""
    return {"id": ticket_id, "title": "Customer locked out after SSO change"}


model = ScriptedModel(
    [
        [{"type": "tool_use", "id": "toolu_01", "name": "get_ticket", "input": {"ticket_id": "KITE-142"}}],
        "Northwind Studio is locked out since its SSO change.",
    ]
)
support = Agent("support", model=model, instructions="Answer from the ticket.", tools=[get_ticket])
app = Outlast(agents=[support])

if __name__ == "__main__":
    run = app.run_sync(support, "What is KITE-142 about?", run_id="run-kite-142")
    print(run.status, run.output)  # done Northwind Studio is locked out ...
    for checkpoint in app.checkpoints("run-kite-142"):
        print(checkpoint.seq, checkpoint.status, checkpoint.message)

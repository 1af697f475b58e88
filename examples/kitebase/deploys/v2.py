"""Version 2: the reply tool has a better name. Deployed like this it strands every run that waits for `reply_to_customer`.

`outlast check v2` says so before the deploy, and `v2_alias.py` is the mend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from v1 import INSTRUCTIONS, TICKET, HelpDesk, add_internal_comment, choose_model, folder, get_ticket, search_help

from outlast import Agent, Limits, Outlast, ToolContext, approval, tool


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def answer_ticket(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Answer a ticket: the customer gets this message."""
    reply = ctx.deps.send_reply(ticket_id, message, ctx.idempotency_key)
    return {"reply_id": reply["reply_id"], "status": reply["status"]}


agent = Agent(
    "kitebase-support",
    version="2",
    model=choose_model(folder, TICKET, scripted=True),
    instructions=INSTRUCTIONS.replace("reply_to_customer", "answer_ticket"),
    tools=[get_ticket, search_help, answer_ticket, add_internal_comment],
    limits=Limits(model_calls=20),
)
app = Outlast(folder / "agent.db", agents=[agent], deps=HelpDesk(folder / "helpdesk.db"))

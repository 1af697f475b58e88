"""2. Kitebase with approval: working hours, a second rung, deps instead of a global."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from outlast import Agent, Hours, Limits, Outlast, ToolContext, approval, tool


class HelpDesk:
    async def send_reply(self, ticket_id: str, message: str, idempotency_key: str) -> dict[str, Any]:
        raise NotImplementedError

    async def ticket(self, ticket_id: str) -> dict[str, Any]:
        raise NotImplementedError


@asynccontextmanager
async def lifespan() -> AsyncIterator[HelpDesk]:
    yield HelpDesk()


OFFICE = Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")


@tool(effect="read")
async def get_ticket(ctx: ToolContext[HelpDesk], ticket_id: str) -> dict[str, Any]:
    """Look up a ticket."""
    return await ctx.deps.ticket(ticket_id)


@tool(
    effect="idempotent",
    gate=approval(
        to="support-lead",
        noun="reply",
        within=timedelta(hours=4),
        hours=OFFICE,
        remind_every=timedelta(hours=2),
        then=approval(to="duty-manager", within=timedelta(hours=1), then="reject"),
    ),
)
async def reply_to_customer(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Send a reply to the customer on a ticket."""
    return await ctx.deps.send_reply(ticket_id, message, idempotency_key=ctx.idempotency_key)


support = Agent(
    "kitebase-support",
    model="anthropic:claude-sonnet-5-5",
    instructions="You are ...",
    tools=[get_ticket, reply_to_customer],
    limits=Limits(model_calls=10),
    model_settings={"max_tokens": 4096},
)
app = Outlast(agents=[support], lifespan=lifespan)

if __name__ == "__main__":
    run = app.run_sync(support, "Ticket KITE-142 just came in. ...", run_id="run-kite-142")
    if run.status == "waiting_for_approval":
        print(run.gates[0].text, run.gates[0].args)
    app.decide("run-kite-142", "toolu_03", approved=True, decided_by="priya")
    done = app.resume_sync("run-kite-142")
    print(done.status, done.output, done.messages)

"""11. A sub-agent and a wait for an event."""

import asyncio
from datetime import timedelta
from typing import Any

from fastapi import FastAPI, Request

from outlast import Agent, Outlast, ToolContext, Wait, tool


class Stripe:
    async def create(self, amount: int, key: str, metadata: dict[str, str]) -> str:
        raise NotImplementedError


@tool(effect="read")
def search(query: str) -> list[str]:
    """Search."""
    return []


@tool(effect="idempotent", key_ttl=timedelta(hours=24))
async def charge(ctx: ToolContext[Stripe], amount: int) -> Wait:
    """Charge the customer; the answer comes when the bank has settled."""
    await ctx.deps.create(amount, key=ctx.idempotency_key, metadata={"run_id": ctx.run_id, "call_id": ctx.call_id})
    return Wait(within=timedelta(days=3), otherwise="Not settled within 3 days.")


researcher = Agent("researcher", model="anthropic:claude-haiku-5-5", tools=[search])
boss = Agent("boss", model="anthropic:claude-opus-5-5", tools=[charge, researcher.as_tool(description="Finds facts about a customer.")])
app = Outlast(agents=[boss], deps=Stripe())
api = FastAPI()


@api.post("/stripe")
async def settled(request: Request) -> dict[str, Any]:
    event = await request.json()
    meta = event["data"]["object"]["metadata"]
    first = await asyncio.to_thread(app.event, meta["run_id"], meta["call_id"], {"settled": True}, event_id=event["id"])
    return {"first": first}

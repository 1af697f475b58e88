"""5. Refund agent: at_most_once + check, gate above 100, structured output, fails instead of asking at the cap."""

from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal

from pydantic import BaseModel

from outlast import Agent, Limits, Outcome, Outlast, Run, ToolContext, ToolFailed, approval, tool


class Decision(BaseModel):
    order_id: str
    verdict: Literal["refunded", "refused"]
    amount: Decimal


class Psp:
    async def find_refund(self, reference: str) -> dict[str, Any] | None: ...
    async def refund(self, order_id: str, amount: Decimal, reference: str) -> dict[str, Any]:
        raise NotImplementedError


class CardError(Exception): ...


async def look_first(ctx: ToolContext[Psp], order_id: str, amount: Decimal) -> Outcome:
    try:
        found = await ctx.deps.find_refund(ctx.idempotency_key)
    except TimeoutError:
        return Outcome.unknown("the payment provider does not answer")
    return Outcome.happened(found) if found else Outcome.not_happened()


@tool(
    effect="at_most_once",
    check=look_first,
    gate=approval(to="finance", noun="refund", within=timedelta(hours=8), when=lambda run, amount, **_: amount > 100),
)
async def refund(ctx: ToolContext[Psp], order_id: str, amount: Decimal) -> dict[str, Any]:
    """Refund an order."""
    try:
        return await ctx.deps.refund(order_id, amount, reference=ctx.idempotency_key)
    except CardError as e:
        raise ToolFailed(f"card declined: {e}") from e  # surely not done: the model sees an error result


refunds = Agent(
    "refunds",
    model="anthropic:claude-sonnet-5-5",
    tools=[refund],
    output=Decision,
    limits=Limits(model_calls=10, cost_usd=0.50, then="fail"),
)
app = Outlast(agents=[refunds], deps=Psp())
run = app.run_sync(refunds, "Refund order 42", run_id="refund-42")
decision: Decision | None = run.output
again: Run[Decision] = app.resume_sync("refund-42")
if run.output is not None:
    amount: Decimal = run.output.amount

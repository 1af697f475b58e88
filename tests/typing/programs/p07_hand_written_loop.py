"""7. The loop stays mine: open, append, call."""

from datetime import timedelta

import anthropic

from outlast import Outlast, ToolContext, approval, tool

client = anthropic.Anthropic()


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply_to_customer(ctx: ToolContext, ticket_id: str, message: str) -> str:
    """Send a reply."""
    return f"sent with {ctx.idempotency_key}"


app = Outlast("agent.db")

with app.open("run-kite-142", "Ticket KITE-142 just came in.", tools=[reply_to_customer]) as run:
    while run.status == "running":
        if run.pending:
            for call in run.pending:
                run.call_sync(call)
        else:
            answer = client.messages.create(
                model="claude-sonnet-5-5",
                max_tokens=2000,
                messages=run.messages,  # type: ignore[arg-type]  # the SDK's TypedDicts; these are plain dicts of that form
                tools=run.tools,  # type: ignore[arg-type]  # the same for the tools
            )
            run.append(answer)
print(run.status)

for run_id in app.unfinished_runs():
    print("still to do:", run_id)

"""The support agent of Kitebase, a project planning service: its tools, its instructions, and what it says when scripted.

The tools are thin: each one is a call of the help desk (`ctx.deps`, see helpdesk.py) with a declaration of what a crash may
do to it. Nothing here knows about processes, files of checkpoints or people who approve: that is Outlast's business.

`app` at the end is what the command line takes (`outlast --app agent inbox`), on the files of the last demo.
Environment: `KITEBASE_DIR` (the folder of those files), `KITEBASE_TICKET` (whose script answers), `KITEBASE_NO_KEY=1`
(the reply tool sends no idempotency key: see what happens then), `OUTLAST_STORE` (a `postgresql://` URL, instead of agent.db).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from helpdesk import HelpDesk, UnknownTicket
from outlast import Agent, Event, Limits, Outlast, ToolContext, ToolFailed, approval, tool
from outlast.models import Anthropic, Model, ModelRequest, ScriptedModel

DEFAULT_MODEL = "claude-sonnet-5-5"
POSTGRES_SCHEMA = "kitebase_demo"  # the demo empties it at its start, so it is never the schema of anything else

INSTRUCTIONS = """\
You are the support agent of Kitebase, a project planning service.
Look the ticket up, search the help articles, and answer the customer with reply_to_customer: friendly, short, numbered steps.
Use only what the help articles say. A support lead approves each reply; if one is rejected, do not send another: say why.
When you are done, say in one or two sentences what you did.\
"""

# --- tools -----------------------------------------------------------------------------------------------------------


@tool(effect="read")
def get_ticket(ctx: ToolContext[HelpDesk], ticket_id: str) -> dict[str, Any]:
    """Look up a ticket."""
    return ctx.deps.get_ticket(ticket_id)


@tool(effect="read")
def search_help(ctx: ToolContext[HelpDesk], query: str) -> str:
    """Search the help articles. Gives the best passages, best first."""
    return ctx.deps.search_help(query)


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply_to_customer(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Send the customer a reply on a ticket."""
    key = None if os.environ.get("KITEBASE_NO_KEY") == "1" else ctx.idempotency_key
    try:
        reply = ctx.deps.send_reply(ticket_id, message, key)
    except UnknownTicket as e:
        raise ToolFailed(str(e)) from e  # surely not sent
    return {"reply_id": reply["reply_id"], "status": reply["status"]}  # the same answer whether it is the first or a repeated one


@tool(effect="idempotent")
def add_internal_comment(ctx: ToolContext[HelpDesk], ticket_id: str, text: str) -> dict[str, Any]:
    """Leave a comment on a ticket that only colleagues see."""
    try:
        return {"comment_id": ctx.deps.add_comment(ticket_id, text, ctx.idempotency_key)["comment_id"]}
    except UnknownTicket as e:
        raise ToolFailed(str(e)) from e


def support_agent(model: Model) -> Agent[str]:
    """The agent, with this model."""
    return Agent(
        "kitebase-support",
        model=model,
        instructions=INSTRUCTIONS,
        tools=[get_ticket, search_help, reply_to_customer, add_internal_comment],
        limits=Limits(model_calls=20),
        model_settings={"max_tokens": 2048},
    )


# --- the script: what the model says when no real one is asked -----------------------------------------------------------

Turn = str | Sequence[dict[str, Any]] | Callable[[list[dict[str, Any]]], Any]


def call(call_id: str, name: str, **args: Any) -> list[dict[str, Any]]:
    """An answer that asks for one tool."""
    return [{"type": "tool_use", "id": call_id, "name": name, "input": args}]


def closing(customer: str, ticket_id: str, sent: str) -> Callable[[list[dict[str, Any]]], str]:
    """The last answer: it depends on what became of the reply."""

    def turn(messages: list[dict[str, Any]]) -> str:
        result = messages[-1]["content"][0]
        if not result.get("is_error"):
            return f"Replied to {customer} on {ticket_id} with {sent}."
        why = result["content"]
        if "support lead" in why:  # rejected, or nobody decided in time: either way the call never ran
            return f"I sent nothing to {customer} on {ticket_id}. {why}"
        return f"I cannot say that {customer} has a reply on {ticket_id}: {why}"

    return turn


SCRIPTS: dict[str, list[Turn]] = {
    "KITE-142": [
        call("toolu_01", "get_ticket", ticket_id="KITE-142"),
        call("toolu_02", "search_help", query="locked out after SSO change"),
        call(
            "toolu_03",
            "reply_to_customer",
            ticket_id="KITE-142",
            message=(
                "Hi Northwind team,\n\n"
                "sorry that you are locked out, and right before a deadline. Your accounts are still linked to Okta; relinking them "
                "takes a few minutes:\n\n"
                "1. An admin opens /recover and confirms by email.\n"
                "2. Choose 'Relink identity provider' and pick Entra ID.\n"
                "3. Everyone signs in as usual; boards, comments and settings are as you left them.\n\n"
                "If it still says 'account not linked', answer here: we are around until seven and relink it with you.\n\n"
                "Kitebase Support"
            ),
        ),
        closing("Northwind Studio", "KITE-142", "the SSO recovery steps; the ticket stays open until they are in"),
    ],
    "KITE-157": [
        call("toolu_01", "get_ticket", ticket_id="KITE-157"),
        call("toolu_02", "search_help", query="CSV export custom columns"),
        call(
            "toolu_03",
            "add_internal_comment",
            ticket_id="KITE-157",
            text="Third ticket on hidden columns this month: worth a hint in the dialog?",
        ),
        call(
            "toolu_04",
            "reply_to_customer",
            ticket_id="KITE-157",
            message=(
                "Hello,\n\nthe export takes the columns of the view it was started from. Choose 'All columns' in the export dialog, "
                "and the custom ones are back.\n\nKitebase Support"
            ),
        ),
        closing("Halden Clinic", "KITE-157", "the export setting that brings the columns back"),
    ],
}


# --- models and the application ------------------------------------------------------------------------------------------


class LoggedModel(Model):
    """A real model that leaves one line per call in a file, as ScriptedModel does, so that calls are counted across processes."""

    def __init__(self, model: Model, log: Path) -> None:
        self.model, self.log = model, log

    async def __call__(self, request: ModelRequest, /) -> Any:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"model call after {len(request.messages)} messages\n")
        return await self.model(request)


def choose_model(folder: Path, ticket_id: str, *, name: str | None = None, scripted: bool = False) -> Model:
    """The script of this ticket, unless a model is named or an API key is set; `scripted` forces the script."""
    log = folder / "model.log"
    if name is None and os.environ.get("ANTHROPIC_API_KEY"):
        name = DEFAULT_MODEL
    if scripted or name is None:
        return ScriptedModel(SCRIPTS[ticket_id], log=log)
    return LoggedModel(Anthropic(name.removeprefix("anthropic:")), log)


def store_url(folder: Path) -> str:
    """agent.db in this folder, or the demo's own schema of the Postgres database that OUTLAST_STORE names."""
    url = os.environ.get("OUTLAST_STORE", "")
    if not url.startswith(("postgresql://", "postgres://")):
        return str(folder / "agent.db")
    parts = urlsplit(url)
    query = {**dict(parse_qsl(parts.query)), "schema": POSTGRES_SCHEMA}
    return urlunsplit(parts._replace(query=urlencode(query)))


def open_app(folder: Path, model: Model, *, on_event: Callable[[Event], None] | None = None) -> Outlast:
    """The application on the files of this folder. No I/O before it is used."""
    return Outlast(store_url(folder), agents=[support_agent(model)], deps=HelpDesk(folder / "helpdesk.db"), on_event=on_event)


_folder = Path(os.environ.get("KITEBASE_DIR", ".demo"))
app = open_app(_folder, choose_model(_folder, os.environ.get("KITEBASE_TICKET", "KITE-142")))

"""An application with one of everything that a page shows, and a real server around it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from outlast import Agent, Limits, Outlast, ToolContext, Wait, approval, tool
from outlast.cli.web import listening, names
from outlast.models import ScriptedModel
from outlast.testing import ManualClock
from outlast.web.app import Served, build
from outlast.web.security import Door, Tokens

T = TypeVar("T")
TOKEN = "t" * 43
BIG = 20261109000000004711  # more than a float holds
LETTER = "Hello,\n\nyour workspace moved to single sign-on on Thursday.\n\n  1. Open the recovery page.\n\nKitebase support"


def call(call_id: str, name: str, **args: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


@dataclass
class Kite:
    """The application; what its tools did stands in `effects`."""

    folder: Path
    clock: ManualClock
    may_decide: Any = None
    store: str = ""  # empty: a file in the folder
    effects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    down: bool = True  # the payment provider
    turns: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kite = self
        lead = approval(to="support-lead", noun="reply", within=timedelta(hours=4), remind_every=timedelta(hours=1))

        @tool(effect="read")
        def get_ticket(ticket_id: str) -> dict[str, Any]:
            """Look up a ticket."""
            return {"id": ticket_id, "title": "Customer locked out after SSO change"}

        @tool(effect="idempotent", gate=lead)
        def reply_to_customer(ctx: ToolContext[Any], ticket_id: str, message: str) -> dict[str, Any]:
            """Send a reply."""
            kite.effects.append((ctx.idempotency_key, {"ticket_id": ticket_id, "message": message}))
            return {"reply_id": 1, "status": "sent"}

        @tool(effect="idempotent", gate=approval(to="finance", noun="credit", within=timedelta(days=1)))
        def credit_invoice(
            ctx: ToolContext[Any], invoice: int, amount_eur: float, lines: list[int], memo: str = "", urgent: bool = False
        ) -> str:
            """Credit an invoice.

            Args:
                invoice: its number
            """
            args = {"invoice": invoice, "amount_eur": amount_eur, "lines": lines, "memo": memo, "urgent": urgent}
            kite.effects.append((ctx.idempotency_key, args))
            return "credited"

        @tool
        def issue_refund(ctx: ToolContext[Any], payment_id: int, amount_eur: float) -> str:
            """Pay money back."""
            kite.effects.append((ctx.idempotency_key, {"attempt": ctx.attempt}))
            if kite.down:
                raise ConnectionError("the provider did not answer")
            return "paid"

        @tool
        def await_statement(ctx: ToolContext[Any]) -> Wait:
            """Wait for the bank."""
            return Wait("bank.statement", within=timedelta(days=3))

        self.tools = [get_ticket, reply_to_customer, credit_invoice, issue_refund, await_statement]
        self.turns |= {
            "support": [
                [{"type": "thinking", "thinking": "Read the ticket first.", "signature": "s"}, call("toolu_01", "get_ticket", ticket_id="KITE-142")],
                [{"type": "text", "text": "I would like to send this:"}, call("toolu_02", "reply_to_customer", ticket_id="KITE-142", message=LETTER)],
                "Replied to Northwind Studio on KITE-142.",
            ],
            "credit": [[call("toolu_01", "credit_invoice", invoice=BIG, amount_eur=1.0, lines=[1, 2], memo="as agreed", urgent=True)], "Credited."],
            "billing": [[call("toolu_01", "issue_refund", payment_id=BIG, amount_eur=48.0)], "Refunded."],
            "import": [[call("toolu_01", "get_ticket", ticket_id="KITE-1")], "Imported."],
            "waiter": [[call("toolu_01", "await_statement")], "The statement is there."],
            "short": ["All is well."],
            "failing": [],
        }  # fmt: skip
        limits = {"import": Limits(model_calls=1, to="duty-manager")}
        self.agents = {
            name: Agent(name, model=ScriptedModel(turns), tools=self.tools, limits=limits.get(name, Limits()))
            for name, turns in self.turns.items()
        }
        self.store = self.store or str(self.folder / "agent.db")
        self.app = Outlast(self.store, agents=list(self.agents.values()), may_decide=self.may_decide, clock=self.clock)

    def run(self, agent: str, run_id: str, text: str = "Ticket KITE-142 just came in.", **more: Any) -> None:
        """As far as it comes by itself."""
        elsewhere(lambda: self.app.run_sync(self.agents[agent], text, run_id=run_id, by="helpdesk", **more))

    def resume(self, run_id: str) -> None:
        elsewhere(lambda: self.app.resume_sync(run_id))


def elsewhere(f: Callable[[], T]) -> T:
    """In a thread of its own: a test that drives a browser has an event loop running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result(timeout=60)


@dataclass
class Running:
    """A server on a free port of this machine."""

    kite: Kite
    served: Served
    url: str
    port: int
    tokens: Tokens | None

    @property
    def app(self) -> Outlast:
        return self.kite.app

    def link(self) -> str:
        assert self.tokens is not None
        return f"{self.url}/login?code={self.tokens.link()}"


@contextlib.contextmanager
def serving(kite: Kite, **more: Any) -> Iterator[Running]:
    """`more`: of `build`; `get_user` takes the token's place."""
    sock = listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    get_user = more.pop("get_user", None)
    tokens = Tokens(TOKEN, "priya") if get_user is None else None
    served = build(kite.app, Door(hosts=names("127.0.0.1", port, None), tokens=tokens, get_user=get_user), **more)
    server = uvicorn.Server(
        uvicorn.Config(served, log_config=None, access_log=False, server_header=False, lifespan="on", timeout_graceful_shutdown=1)
    )
    ready = threading.Event()
    begin = server.startup

    async def startup(*args: Any, **kwargs: Any) -> None:
        await begin(*args, **kwargs)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]  # a signal instead of asking again and again
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Running(kite, served, f"http://127.0.0.1:{port}", port, tokens)
    finally:
        served.site.hub.close()
        server.should_exit = True
        thread.join(20)
        sock.close()
        kite.app.close()


def new_kite(folder: Path, **more: Any) -> Kite:
    return Kite(folder, ManualClock(datetime.now(UTC)), **more)

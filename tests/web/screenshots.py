"""The pictures of the documentation: a week of Kitebase in a store of its own, and Chromium in front of it.

python -m web.screenshots FOLDER
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from outlast import Agent, Limits, Outlast, ToolContext, approval, tool
from outlast.models import ModelRequest, ScriptedModel
from outlast.testing import ManualClock
from web.conftest import find_chromium, visiting
from web.kite import Kite, call, elsewhere, serving

NOW = datetime(2026, 11, 30, 9, 18, tzinfo=UTC)
REPLY = (
    "Hello,\n\nyour workspace moved to single sign-on on Thursday, so passwords\nno longer sign anyone in. Nobody has lost an account:\n\n"
    '  1. Open the recovery page from the sign-in form.\n  2. Choose "I use single sign-on".\n'
    "  3. Enter your work address. The link you get works for 30 minutes.\n\nKitebase support"
)


@dataclass
class Week(Kite):
    """Agents with the names that the documentation uses, and enough of their runs for the charts."""

    slow: bool = False  # model and tools take the time that they would
    dies: bool = False  # in the midst of a reply

    def __post_init__(self) -> None:
        lead = approval(to="support-lead", noun="reply", within=timedelta(hours=4), remind_every=timedelta(hours=2),
                        then=approval(to="duty-manager", noun="reply", within=timedelta(hours=2)))  # fmt: skip
        week = self

        class Slow(ScriptedModel):
            async def __call__(self, request: ModelRequest, /) -> dict[str, Any]:
                await asyncio.to_thread(week.work, 0.7 + 0.35 * (len(request.messages) % 3))
                return await super().__call__(request)

        @tool(effect="read")
        def get_ticket(ticket_id: str) -> dict[str, Any]:
            """Look up a ticket."""
            week.work(0.09)
            return {"id": ticket_id, "title": "Customer locked out after SSO change", "customer": "Northwind Studio", "status": "open"}

        @tool(effect="idempotent", gate=lead)
        def reply_to_customer(ticket_id: str, message: str) -> dict[str, Any]:
            """Send a reply."""
            week.work(0.41)
            if week.dies:
                os._exit(1)  # the reply went out, and nobody saved it
            return {"reply_id": 1, "status": "sent"}

        @tool(effect="idempotent", gate=approval(to="finance", noun="credit", within=timedelta(hours=30)))
        def credit_invoice(invoice: str, amount_eur: float) -> str:
            """Credit an invoice."""
            return "credited"

        @tool
        def issue_refund(ctx: ToolContext[Any], payment_id: int, amount_eur: float, memo: str) -> str:
            """Pay money back."""
            if week.down:
                raise ConnectionError("the provider did not answer")
            return "paid"

        read = [
            {"type": "thinking", "thinking": "The ticket id is given, so read the ticket first.", "signature": "s"},
            call("toolu_01", "get_ticket", ticket_id="KITE-142"),
        ]
        turns: dict[str, list[Any]] = {
            "kitebase-support": [
                read,
                [
                    {"type": "text", "text": "I found the article. I would like to send this:"},
                    call("toolu_02", "reply_to_customer", ticket_id="KITE-142", message=REPLY),
                ],
                "Replied to Northwind Studio on KITE-142 with the SSO recovery steps.",
            ],
            "kitebase-billing": [
                [call("toolu_01", "issue_refund", payment_id=20261109000000004711, amount_eur=48.0, memo="Duplicate seat, October\u200b")], "Refunded."],
            "kitebase-credit": [[call("toolu_01", "credit_invoice", invoice="2026-1107", amount_eur=48.0)], "Credited."],
            "kitebase-import": [read, "Sorted."],
        }  # fmt: skip
        tools = [get_ticket, reply_to_customer, credit_invoice, issue_refund]
        limits = {"kitebase-import": Limits(model_calls=1, to="duty-manager")}
        self.agents = {
            name: Agent(name, model=Slow(t), tools=tools, limits=limits.get(name, Limits()), version="2026.11.3")
            for name, t in turns.items()
        }
        prices = {"scripted": {"input": Decimal(3), "output": Decimal(15), "cache_read": Decimal("0.3"), "cache_write": Decimal("3.75")}}
        self.app = Outlast(self.folder / "agent.db", agents=list(self.agents.values()), clock=self.clock, prices=prices)

    def work(self, seconds: float) -> None:
        """What a tool does."""
        if self.slow:
            threading.Event().wait(seconds)
            self.clock.move(timedelta(seconds=seconds))

    def live(self) -> None:
        """Seven days, and then this morning."""
        dice = random.Random(142)
        self.clock.move(-timedelta(days=3))
        for n in range(60):
            self.clock.move(timedelta(minutes=dice.randint(20, 90)))
            self.run("kitebase-support", f"run-kite-{n + 40}", f"Ticket KITE-{n + 40} just came in.", tags={"tenant": "northwind"})
            self.clock.move(timedelta(minutes=dice.randint(2, 200)) if dice.random() < 0.93 else timedelta(hours=7))
            if self.app.reader.gates(f"run-kite-{n + 40}")[0].deadline and dice.random() < 0.9:
                self._decide(f"run-kite-{n + 40}", dice)
                self.resume(f"run-kite-{n + 40}")
            if self.clock.now > NOW - timedelta(hours=20):
                break
        self._killed("run-kite-141")
        self.clock.move(NOW - self.clock.now - timedelta(minutes=148))
        self.app.sweep()
        elsewhere(lambda: self.app.work_sync(until_idle=True))
        self.run("kitebase-support", "run-kite-142", "Ticket KITE-142 just came in. Look it up, find the right help article, and reply to the customer.",
                 tags={"tenant": "northwind", "ticket": "KITE-142"})  # fmt: skip
        self.clock.move(timedelta(minutes=97))
        self.run("kitebase-credit", "run-bill-2208", "Invoice 2026-1107 was charged twice, please check")
        self.clock.move(timedelta(minutes=30))
        self.run("kitebase-billing", "run-bill-2199", "Refund the duplicate seat of October")
        self.clock.move(timedelta(minutes=12))
        self.run("kitebase-import", "run-import-88", "Sort the 2,040 help articles of the old site")
        self.clock.move(NOW - self.clock.now)

    def _killed(self, run_id: str) -> None:
        """A run whose process ends after the reply went out; another process goes on."""
        self.slow = True
        self.run("kitebase-support", run_id, "Ticket KITE-141 just came in. Look it up, find the right help article, and reply to the customer.",
                 tags={"tenant": "northwind", "ticket": "KITE-141"})  # fmt: skip
        self.clock.move(timedelta(hours=2, minutes=45, seconds=9))
        self.app.decide(run_id, approved=True, decided_by="priya", note="Matches what I told their admin on the phone.")
        self.clock.move(timedelta(seconds=2))
        command = [sys.executable, "-m", "web.screenshots", "--die", str(self.folder), run_id, self.clock.now.isoformat()]
        assert subprocess.run(command, check=False).returncode == 1
        self.clock.move(timedelta(seconds=8))
        self.resume(run_id)
        self.slow = False

    def _decide(self, run_id: str, dice: random.Random) -> None:
        from outlast.errors import GateClosed

        approved = dice.random() < 0.85
        try:
            self.app.decide(
                run_id,
                approved=approved,
                decided_by=dice.choice(["priya", "sam"]),
                note=None if approved else "Ask for the invoice number first.",
            )
        except GateClosed:
            self.app.sweep()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        week = Week(Path(place), ManualClock(NOW))
        week.live()
        with serving(week) as running, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            for scheme, width, suffix in (("light", 1280, ""), ("dark", 1280, "-dark"), ("light", 390, "-phone")):
                with visiting(
                    browser, running, color_scheme=scheme, viewport={"width": width, "height": 800}, device_scale_factor=1
                ) as visit:
                    for name, path in (
                        ("inbox", "/inbox"),
                        ("runs", "/runs"),
                        ("run", "/runs/run-kite-141"),
                        ("charts", "/charts?since=7d"),
                    ):
                        if suffix and name == "charts":
                            continue
                        page = visit.go(path)
                        page.evaluate("document.querySelector('.topbar-store').textContent = 'sqlite:///agent.db'")
                        if name == "inbox":
                            page.locator("details.ask summary").first.click()
                            page.mouse.move(0, 0)
                        page.screenshot(path=folder / f"{name}{suffix}.png", full_page=name != "runs", animations="disabled")
            browser.close()


def die(folder: Path, run_id: str, now: datetime) -> None:
    """In a process of its own."""
    week = Week(folder, ManualClock(now))
    week.slow = week.dies = True
    week.resume(run_id)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--die", place, run, at]:
            die(Path(place), run, datetime.fromisoformat(at))
        case [place]:
            main(Path(place))

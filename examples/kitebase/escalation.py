"""Nobody answers: a ladder of working hours, climbed with a clock that is moved by hand.

    python escalation.py                       both stories
    python escalation.py --story nobody        nobody decides: the reply is not sent, and the ticket is closed with a comment
    python escalation.py --story duty-manager  the duty manager decides in time

A reply needs a support lead, within four working hours and with a reminder halfway; then the duty manager, within two more;
then it is not sent. It is asked for on Friday at 16:00 in Berlin, so four working hours end on Monday at 12:00.

While it waits, nothing runs: at each instant below the store is opened anew, what is due is done, and it is closed, as cron would do with
`outlast sweep`. In real life nobody moves a clock, and a worker does all of this by itself. Needs the extra `hours`.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from agent import SCRIPTS, Turn, call, get_ticket, search_help
from helpdesk import HelpDesk
from main import NotOurs, empty, say, show_event
from outlast import Agent, Hours, Notice, Outlast, ToolContext, approval, tool
from outlast.models import ScriptedModel
from outlast.testing import ManualClock

TICKET, CUSTOMER, RUN = "KITE-142", "Northwind Studio", "run-kite-142"
BERLIN = ZoneInfo("Europe/Berlin")
FRIDAY = datetime(2026, 11, 27, 16, tzinfo=BERLIN)
OFFICE = Hours("Mo-Fr 09:00-17:00; PH off", tz="Europe/Berlin", country="DE")
DUTY_MANAGER = approval(to="duty-manager", noun="reply", within=timedelta(hours=2), hours=OFFICE)
LADDER = approval(
    to="support-lead", noun="reply", within=timedelta(hours=4), hours=OFFICE, remind_every=timedelta(hours=2), then=DUTY_MANAGER)  # fmt: skip

# --- the agent -------------------------------------------------------------------------------------------------------------


@tool(effect="idempotent", gate=LADDER)
def reply_to_customer(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Send the customer a reply on a ticket."""
    reply = ctx.deps.send_reply(ticket_id, message, ctx.idempotency_key)
    return {"reply_id": reply["reply_id"], "status": reply["status"]}


@tool(effect="idempotent")
def close_ticket(ctx: ToolContext[HelpDesk], ticket_id: str, comment: str) -> dict[str, Any]:
    """Close a ticket with a comment that only colleagues see."""
    return ctx.deps.close_ticket(ticket_id, comment, ctx.idempotency_key)


def after_the_reply(messages: list[dict[str, Any]]) -> Any:
    """What the model does next depends on what became of its reply."""
    result = messages[-1]["content"][0]
    if result.get("is_error"):
        return call("toolu_04", "close_ticket", ticket_id=TICKET, comment=f"Please answer this one yourselves. {result['content']}")
    return f"Replied to {CUSTOMER} on {TICKET}."


SCRIPT: list[Turn] = [*SCRIPTS[TICKET][:3], after_the_reply, f"I sent nothing to {CUSTOMER} and closed {TICKET} with a comment."]


def open_app(folder: Path, clock: ManualClock) -> Outlast:
    """A new process: the store is all that it knows."""
    agent = Agent("kitebase-support", model=ScriptedModel(SCRIPT), tools=[get_ticket, search_help, reply_to_customer, close_ticket])
    return Outlast(
        folder / "agent.db", agents=[agent], deps=HelpDesk(folder / "helpdesk.db"), notify=[tell], on_event=show_event, clock=clock
    )


async def tell(notice: Notice) -> None:
    """In real life: a webhook, a mail, a chat message. What is asked, and until when, is in its text."""
    first, second, *_ = notice.text.splitlines()
    say(f"  notice ({notice.kind}): {first}" + (f" | {second}" if notice.kind != "expired" else ""))


# --- the stories -------------------------------------------------------------------------------------------------------------


def play(folder: Path, story: str) -> None:
    """From Friday afternoon until the run is done."""
    clock = ManualClock(FRIDAY.astimezone(UTC))
    show_time(clock)
    with open_app(folder, clock) as app:
        app.run_sync(app.agents["kitebase-support"], f"Ticket {TICKET} just came in. Reply to the customer.", run_id=RUN)
    while True:
        with open_app(folder, clock) as app:
            if app.head(RUN).finished:
                break
            (gate,) = app.inbox()
            if story == "duty-manager" and gate.role == "duty-manager":
                move(clock, clock.now + timedelta(minutes=30))
                app.decide(RUN, gate.call_id, approved=True, decided_by="sam", note="Fine, and next time sooner.", digest=gate.digest)
                say("  sam, the duty manager, approves")
            else:
                wake_at = app.head(RUN).wake_at
                assert wake_at is not None  # it waits for a clock
                move(clock, wake_at)
            app.sweep()  # what cron does: the ladder moves, people are told
            app.work_sync(until_idle=True)  # what a worker does: whatever follows from it
    desk = HelpDesk(folder / "helpdesk.db")
    say(f"Replies {CUSTOMER} got on {TICKET}: {desk.replies_to(TICKET)}")
    say(f"{TICKET} is {desk.get_ticket(TICKET)['status']}" + "".join(f"; comment: {text}" for text in desk.comments_on(TICKET)))


def move(clock: ManualClock, to: datetime) -> None:
    clock.move(to - clock.now)
    show_time(clock)


def show_time(clock: ManualClock) -> None:
    say(f"{clock.now.astimezone(BERLIN):%A %H:%M}")


STORIES = {"nobody": "== Nobody answers ==", "duty-manager": "== The duty manager answers =="}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A reply that nobody approves climbs a ladder of working hours.")
    parser.add_argument("--story", choices=[*STORIES, "both"], default="both")
    parser.add_argument("--keep", type=Path, default=Path(".demo-escalation"), metavar="DIR", help="the folder of the files")
    args = parser.parse_args(argv)
    for n, story in enumerate([args.story] if args.story != "both" else STORIES):
        try:
            empty(args.keep)
        except NotOurs as e:
            print(f"error: {e}\nhint: name another folder with --keep, or move those files away", file=sys.stderr)
            return 2
        say(("\n" if n else "") + STORIES[story])
        play(args.keep, story)
    return 0


if __name__ == "__main__":
    sys.exit(main())

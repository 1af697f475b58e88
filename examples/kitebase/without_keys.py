"""When the other system takes no idempotency key: two ways, each with a process killed right after the reply went out.

    python without_keys.py                          both ways
    python without_keys.py --way check              find the reply by its marker
    python without_keys.py --way person --answer give_up

The reply tool is declared `at_most_once` here, so no machine ever sends twice on a guess. With `check=`, the tool's author
says how to find out: the key travels as the reply's reference, and the check looks for it. Without one, the run waits in
`waiting_for_verification`, its call stands in the view `in_doubt`, and a person looks at the help desk and says what happened.

Before anybody concludes that a reply did *not* go out, Outlast waits until the killed attempt can no longer act: a few seconds
where the process is provably dead. So the check's way takes about five seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent import call, closing
from helpdesk import HelpDesk
from main import NotOurs, empty, say, show_checkpoint, show_event
from outlast import Agent, Outcome, Outlast, Tool, ToolContext, tool
from outlast.models import ScriptedModel

TICKETS = {"check": "KITE-142", "person": "KITE-163"}
CUSTOMERS = {"KITE-142": "Northwind Studio", "KITE-163": "Brisk Couriers"}

# --- the tool, twice -------------------------------------------------------------------------------------------------------


def look_for_reply(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> Outcome:
    """Is there a reply that carries this call's key?"""
    found = ctx.deps.find_reply(ticket_id, ctx.idempotency_key)
    say(f"  check: looked for reference {ctx.idempotency_key}, found {'reply #{}'.format(found['reply_id']) if found else 'nothing'}")
    return Outcome.happened(found) if found else Outcome.not_happened()


@tool(effect="at_most_once", check=look_for_reply, name="send_reply")
def send_marked_reply(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Send the customer a reply on a ticket."""
    return ctx.deps.send_reply(ticket_id, message, reference=ctx.idempotency_key)


@tool(effect="at_most_once", name="send_reply")
def send_bare_reply(ctx: ToolContext[HelpDesk], ticket_id: str, message: str) -> dict[str, Any]:
    """Send the customer a reply on a ticket."""
    return ctx.deps.send_reply(ticket_id, message)


TOOLS: dict[str, Tool[..., Any]] = {"check": send_marked_reply, "person": send_bare_reply}


def open_app(folder: Path, way: str) -> Outlast:
    """The application of one way. It stays on SQLite; no I/O before it is used."""
    ticket_id = TICKETS[way]
    model = ScriptedModel(
        [
            call("toolu_01", "send_reply", ticket_id=ticket_id, message="Hello, we have your report and are on it. Kitebase Support"),
            closing(CUSTOMERS[ticket_id], ticket_id, "a first answer"),
        ],
        log=folder / "model.log",
    )
    agent = Agent(f"without-keys-{way}", model=model, tools=[TOOLS[way]])
    return Outlast(folder / "agent.db", agents=[agent], deps=HelpDesk(folder / "helpdesk.db"), on_event=show_event)


# --- the processes ---------------------------------------------------------------------------------------------------------


def first_process(folder: Path, way: str) -> None:
    """Start the run and drive it; the crash point in the environment ends this process."""
    with open_app(folder, way) as app:
        app.start(f"without-keys-{way}", f"Tell the customer on {TICKETS[way]} that we are on it.", run_id=run_id(way))
        first = app.latest(run_id(way))
        show_checkpoint(first.seq, first.status, first.message)
        app.resume_sync(run_id(way))


def fresh_worker(folder: Path, way: str) -> None:
    """Take up whatever is unfinished, until it ends or waits."""
    with open_app(folder, way) as app:
        app.work_sync(until_idle=True)
        head = app.head(run_id(way))
        say(f"{head.run_id} is {head.status}" + (f": {head.reason}" if head.reason else ""))


def show_doubt(folder: Path, way: str) -> None:
    """What any SQLite shell sees. A process of its own: two SQLite libraries must not have one file open in one process."""
    db = sqlite3.connect(f"file:{(folder / 'agent.db').absolute()}?mode=ro", uri=True)
    for call_id, name, state in db.execute("SELECT call_id, tool, state FROM in_doubt WHERE run_id = ?", (run_id(way),)):
        say(f"in_doubt: {call_id} {name} {state}")
    db.close()


PROCESSES: dict[str, Callable[[Path, str], None]] = {"first": first_process, "worker": fresh_worker, "doubt": show_doubt}

# --- the parent ------------------------------------------------------------------------------------------------------------


def play(folder: Path, way: str, answer: str) -> None:
    """One way, from the start to the end."""
    say({"check": "== With a check: the reply is found by its marker ==", "person": "== Without a check: a person is asked =="}[way])
    if spawn("first", folder, way, crash_at="tool.after:send_reply") != -signal.SIGKILL:
        raise SystemExit("error: the first process was not killed\nhint: send_reply never ran; see the lines above")
    say("CRASH: killed after send_reply ran, before its result was saved")
    spawn("worker", folder, way)
    if way == "person":
        spawn("doubt", folder, way)
        verify(folder, answer)
        spawn("worker", folder, way)
    say(f"Replies {CUSTOMERS[TICKETS[way]]} got on {TICKETS[way]}: {HelpDesk(folder / 'helpdesk.db').replies_to(TICKETS[way])}")


def verify(folder: Path, answer: str) -> None:
    """The person's part: look at the help desk, then say what happened."""
    with open_app(folder, "person") as app:
        (gate,) = app.inbox(agent="without-keys-person")
        say(f"inbox: {gate.text}")
        reply = HelpDesk(folder / "helpdesk.db").last_reply(TICKETS["person"])
        say(f"priya looks at {TICKETS['person']} in the help desk, finds {reply}, and answers: {answer}")
        if answer == "happened":
            app.verify(gate.run_id, gate.call_id, outcome="happened", decided_by="priya", result=reply)
        else:
            app.verify(gate.run_id, gate.call_id, outcome="give_up", decided_by="priya", note="I answer this one myself.")


def spawn(process: str, folder: Path, way: str, *, crash_at: str | None = None) -> int:
    """Run one process to its end; 0, or minus SIGKILL where a crash point was set. Any other end: SystemExit."""
    env = {k: v for k, v in os.environ.items() if k != "OUTLAST_CRASH_AT"} | ({"OUTLAST_CRASH_AT": crash_at} if crash_at else {})
    sys.stdout.flush()
    command = [sys.executable, __file__, "--keep", str(folder), "--way", way, "--process", process]
    code = subprocess.run(command, env=env, check=False).returncode
    if code == 0 or (crash_at and code == -signal.SIGKILL):
        return code
    raise SystemExit(f"error: the process '{process}' ended with {code}\nhint: outlast --store {folder / 'agent.db'} show {run_id(way)}")


def run_id(way: str) -> str:
    return f"without-keys-{way}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What happens when the other system takes no idempotency key.")
    parser.add_argument("--way", choices=TICKETS, help="only this one (default: both)")
    parser.add_argument("--answer", choices=["happened", "give_up"], default="happened", help="what the person says (default: happened)")
    parser.add_argument("--keep", type=Path, default=Path(".demo"), metavar="DIR", help="the folder of the files (default: .demo)")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.process:
        PROCESSES[args.process](args.keep, args.way)
        return 0
    try:
        empty(args.keep)
    except NotOurs as e:
        print(f"error: {e}\nhint: name another folder with --keep, or move those files away", file=sys.stderr)
        return 2
    for way in [args.way] if args.way else TICKETS:
        play(args.keep, way, args.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

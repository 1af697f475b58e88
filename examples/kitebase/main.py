"""The demo: one support run, three operating-system processes, one of them killed at the worst moment.

    python main.py                                             the story
    python main.py --no-idempotency-key                        the same without a key: the customer gets two replies
    python main.py --reject "Loop in their IT admin first."    the support lead says no

The parent below plays the operator: it starts the processes, records the support lead's decision between the first and the
second, and counts at the end. The processes share nothing but the files in the demo's folder: `agent.db` (the runs),
`helpdesk.db` (the other system) and `model.log` (one line per model call).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from agent import POSTGRES_SCHEMA, SCRIPTS, choose_model, open_app, store_url
from helpdesk import HelpDesk
from outlast import Checkpoint, Event, Message, Outlast

APPROVER = "priya"
KILLED_AFTER = "reply_to_customer"
OUR_FILES = frozenset({"helpdesk.db", "helpdesk.db-journal", "model.log", *(f"agent.db{end}" for end in ("", "-wal", "-shm", "-journal"))})
STATUS_WIDTH = 20  # and two spaces
LINE_WIDTH = 60

# --- the three processes ---------------------------------------------------------------------------------------------------


def process_1(app: Outlast, args: argparse.Namespace) -> None:
    """Start the run and go on until a person is needed."""
    text = f"Ticket {args.ticket} just came in. Look it up, find the right help article, and reply to the customer."
    app.start("kitebase-support", text, run_id=run_id(args))
    first = app.latest(run_id(args))
    show_checkpoint(first.seq, first.status, first.message)
    show_loaded(first)
    run = app.resume_sync(run_id(args))
    if run.status == "waiting_for_approval":
        say(f"paused: {run.gates[0].tool} needs a human, so process 1 exits")
    else:
        say(f"process 1 ends: the run is {run.status}" + (f" ({run.reason})" if run.reason else ""))


def process_2(app: Outlast, args: argparse.Namespace) -> None:
    """Resume. The parent has set a crash point, unless the reply was rejected."""
    show_loaded(app.latest(run_id(args)))
    app.resume_sync(run_id(args))


def process_3(app: Outlast, args: argparse.Namespace) -> None:
    """A fresh worker that knows no run by name: it asks the store what is unfinished."""
    unfinished = app.unfinished_runs()
    for each in unfinished:
        show_loaded(app.latest(each))
    if not unfinished:
        say("nothing is unfinished")
    app.work_sync(until_idle=True)
    for head in app.runs(unfinished=True):  # a real model may ask for a second reply
        say(f"{head.run_id} is {head.status}: {head.reason}")


PROCESSES = {1: process_1, 2: process_2, 3: process_3}


def be_process(number: int, args: argparse.Namespace) -> None:
    with app_for(args, on_event=show_event) as app:
        PROCESSES[number](app, args)


def app_for(args: argparse.Namespace, *, on_event: Callable[[Event], None] | None = None) -> Outlast:
    model = choose_model(args.keep, args.ticket, name=args.model, scripted=args.scripted)
    return open_app(args.keep, model, on_event=on_event)


# --- the parent ------------------------------------------------------------------------------------------------------------


def play(args: argparse.Namespace) -> int:
    """The whole story. Returns the exit code."""
    try:
        empty(args.keep)
    except NotOurs as e:
        print(f"error: {e}\nhint: name another folder with --keep, or move those files away", file=sys.stderr)
        return 2
    if store_url(args.keep).startswith("postgres"):
        empty_postgres_schema(store_url(args.keep))

    say("== Process 1: start the run ==")
    spawn(1, args)
    decide(args)

    if args.reject is None:
        say("\n== Process 2: resume, then get killed right after the reply goes out ==")
        if spawn(2, args, crash_at=f"tool.after:{KILLED_AFTER}") == -signal.SIGKILL:
            say(f"CRASH: killed after {KILLED_AFTER} ran, before its result was saved")
        else:
            say(f"process 2 ended by itself: {KILLED_AFTER} never ran")
    else:
        say("\n== Process 2: resume with the rejection ==")
        spawn(2, args)

    say("\n== Process 3: a fresh worker picks up unfinished runs ==")
    spawn(3, args)

    desk = HelpDesk(args.keep / "helpdesk.db")
    say("\n== Result ==")
    say(f"Replies {desk.get_ticket(args.ticket)['customer']} got on {args.ticket}: {desk.replies_to(args.ticket)}")
    say(f"Model calls across all three processes: {len((args.keep / 'model.log').read_text(encoding='utf-8').splitlines())}")
    return 0


def spawn(number: int, args: argparse.Namespace, *, crash_at: str | None = None) -> int:
    """Run one of the three as a process of its own and wait for its end.

    Returns 0, or minus SIGKILL where a crash point was set. Any other end is an error of the demo: SystemExit.
    """
    env = {k: v for k, v in os.environ.items() if k != "OUTLAST_CRASH_AT"}
    if args.no_idempotency_key:
        env["KITEBASE_NO_KEY"] = "1"
    if crash_at:
        env["OUTLAST_CRASH_AT"] = crash_at  # the library kills its own process there: nothing is flushed, closed or handed back
    command = [sys.executable, __file__, "--process", str(number), "--keep", str(args.keep), "--ticket", args.ticket]
    command += ["--model", args.model] if args.model else []
    command += ["--scripted"] if args.scripted else []
    sys.stdout.flush()
    code = subprocess.run(command, env=env, check=False).returncode
    if code == 0 or (crash_at and code == -signal.SIGKILL):
        return code
    raise SystemExit(f"error: process {number} ended with {code}\nhint: outlast --store {store_url(args.keep)} show {run_id(args)}")


def decide(args: argparse.Namespace) -> None:
    """The support lead reads the inbox and decides what it shows: this call, with these very arguments."""
    with app_for(args) as app:
        for gate in app.inbox():
            approved = args.reject is None
            app.decide(gate.run_id, gate.call_id, approved=approved, decided_by=APPROVER, note=args.reject, digest=gate.digest)


class NotOurs(Exception):
    """The folder holds something that the demo did not make."""


def empty(folder: Path) -> None:
    """Make the folder, or empty it where it holds nothing but an earlier demo's files. Raises NotOurs; nothing is removed then."""
    if folder.exists() and not folder.is_dir():
        raise NotOurs(f"{folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(folder.iterdir())
    others = [path.name for path in there if path.name not in OUR_FILES or not path.is_file()]
    if others:
        raise NotOurs(f"{folder} holds files that are not this demo's: {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}")
    for path in there:
        path.unlink()


def empty_postgres_schema(url: str) -> None:
    """Drop the demo's own schema in this database and make it anew. No other schema is touched, whatever OUTLAST_STORE says."""
    import psycopg  # only here: the demo on SQLite needs no driver
    from psycopg import sql

    from outlast.settings import parse_store
    from outlast.stores.postgres import PostgresStore

    store = parse_store(url)
    with psycopg.connect(without_our_options(store.url)) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(POSTGRES_SCHEMA)))
    PostgresStore(store.url, schema=store.schema, shown=store.shown).migrate()  # elsewhere: `outlast store migrate`, once


def without_our_options(url: str) -> str:
    """What the driver understands of a store's address."""
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name not in {"allow_async", "listen_url"}]
    return urlunsplit(parts._replace(query=urlencode(kept, quote_via=quote)))


# --- what is printed -------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)  # flushed: several processes write to one output, and one is killed


def show_event(event: Event) -> None:
    if event.type == "checkpoint" and event.message is not None and event.status is not None:
        show_checkpoint(event.seq, event.status, event.message)


def show_checkpoint(seq: int, status: str, message: Message) -> None:
    say(f"checkpoint {seq}  {status:<{STATUS_WIDTH}}  {cut(summary(message))}")


def show_loaded(checkpoint: Checkpoint) -> None:
    say(f"loaded checkpoint {checkpoint.seq} ({checkpoint.status})")


def cut(text: str) -> str:
    return text if len(text) <= LINE_WIDTH else text[: LINE_WIDTH - 3] + "..."


def summary(message: Message) -> str:
    """One message on one line."""
    blocks = message["content"]
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    if calls := [block for block in blocks if block["type"] == "tool_use"]:
        return "model asks for " + ", ".join(f"{call['name']}({arguments(call['input'])})" for call in calls)
    if results := [block for block in blocks if block["type"] == "tool_result"]:
        return "tool result: " + ", ".join(one_line(result.get("content", "")) for result in results)
    who = "user" if message["role"] == "user" else "model"
    return f"{who}: {one_line(blocks)}"


def arguments(args: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in args.items())


def one_line(content: Any) -> str:
    if not isinstance(content, str):
        content = " ".join(block["text"] if block["type"] == "text" else f"[{block['type']}]" for block in content)
    return " ".join(content.split())


# --- command line ----------------------------------------------------------------------------------------------------------


def run_id(args: argparse.Namespace) -> str:
    return f"run-{args.ticket.lower()}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One support run, three processes, one of them killed right after the reply went out.")
    parser.add_argument("--ticket", default="KITE-142", metavar="ID", help="the ticket to work on; scripted: " + ", ".join(SCRIPTS))
    parser.add_argument("--reject", metavar="NOTE", help="the support lead rejects the reply with this note; nobody is killed")
    parser.add_argument("--no-idempotency-key", action="store_true", help="send the help desk no key, and see two replies")
    parser.add_argument("--keep", type=Path, default=Path(".demo"), metavar="DIR", help="the folder of the demo's files (default: .demo)")
    parser.add_argument("--model", metavar="NAME", help="ask this model instead of the script (default where ANTHROPIC_API_KEY is set)")
    parser.add_argument("--scripted", action="store_true", help="the script, even where ANTHROPIC_API_KEY is set")
    parser.add_argument("--process", type=int, choices=PROCESSES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.scripted and args.model:
        parser.error("--scripted and --model exclude each other")
    if args.ticket not in SCRIPTS and (args.scripted or not (args.model or os.environ.get("ANTHROPIC_API_KEY"))):
        parser.error(f"no script for {args.ticket}; there is one for {', '.join(SCRIPTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.process:
        be_process(args.process, args)
        return 0
    return play(args)


if __name__ == "__main__":
    sys.exit(main())

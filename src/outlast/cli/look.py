"""`runs`, `show`, `inbox`: what is there. Nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import settings
from outlast.cli import costs, render, sweep, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened, or_empty
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast import Run, RunHead

LIMIT = 50  # runs on a page


def register(cli: typer.Typer) -> None:
    command(cli, "runs")(runs)
    command(cli, "show")(show)
    command(cli, "inbox")(inbox)


def runs(
    options: Options,
    *,
    status: Annotated[str | None, typer.Option("--status", metavar="S", help="done, failed, waiting_for_approval, ...")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="A")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="may be repeated: all must fit")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="WHEN", help="a date, an instant, or a duration ago (4h)")] = None,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="waiting ones too")] = False,
    stuck: Annotated[bool, typer.Option("--stuck", help="what does not go on by itself: why, and the command that mends it")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="at most so many")] = LIMIT,
    before: Annotated[str | None, typer.Option("--before", metavar="RUN", help="the page after this run")] = None,
    cost: Annotated[bool, typer.Option("--cost", help="what each used and cost, runs of sub-agents included")] = False,
) -> int:
    """List runs, newest first."""
    if limit < 1:
        raise UsageError(f"--limit is {limit}: it must be at least 1")
    wanted: dict[str, Any] = {"status": status, "agent": agent, "tags": values.tags(tag), "unfinished": unfinished, "stuck": stuck, "before": before,
                              "since": values.when(since, "--since") if since else None}  # fmt: skip
    with opened(options, only_reads=True) as app:
        found = or_empty(app).runs(**wanted, limit=limit)
        why = [x for x in app.stuck() if x.run_id in {r.run_id for r in found}] if stuck and found else []
    if options.json:
        for head in found:
            reasons = [x.to_dict() for x in why if x.run_id == head.run_id]
            render.document({**head.to_dict(), **({"stuck": reasons} if stuck else {})})
    elif stuck and why:
        sweep.stuck_table(why, options)
    elif stuck and any(value for name, value in wanted.items() if name != "stuck"):
        render.say("none that fits is stuck\nsee all with: outlast runs --stuck" + options.repeated())
    elif stuck:
        render.say("every run goes on by itself, or waits for somebody who was asked, until a deadline")
    elif not found:
        if any(wanted.values()):
            render.say("no run fits\nsee all with: outlast runs" + options.repeated())
        else:
            where = settings.store(app._given).shown  # often the answer to "but I did start one"
            render.say(render.line(f"no runs yet in {where}") + '\nstart one with: outlast run MODULE:ATTR "TEXT"')
    else:
        if cost:
            spent = [(r.run_id, r.agent, r.status, *used(r)) for r in found]
            render.table(("RUN", "AGENT", "STATUS", "CALLS", "TOKENS IN", "OUT", "CACHE READ", "WRITTEN", "USD"), spent)
        else:
            rows = [(r.run_id, r.agent, r.status, str(r.seq), render.instant(r.updated_at), r.reason or "") for r in found]
            render.table(("RUN", "AGENT", "STATUS", "CHECKPOINT", "UPDATED", "REASON"), rows)
        if len(found) == limit:
            render.say(f"\nmore: outlast runs --before {found[-1].run_id}{options.repeated()} (and the same filters)")
    return 0


def used(head: RunHead) -> tuple[str, ...]:
    tokens = (head.model_calls, head.input_tokens, head.output_tokens, head.cache_read_tokens, head.cache_write_tokens)
    return (*(str(n) for n in tokens), costs.money(head.cost_usd) if head.model_calls else "0.00")


def show(
    options: Options,
    *,
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    messages: Annotated[bool, typer.Option("--messages", help="every message, whole")] = False,
    journal: Annotated[bool, typer.Option("--journal", help="every entry of the journal")] = False,
) -> int:
    """Show one run: where it is, what is asked of whom, and what goes on."""
    from outlast.documents import entry_document

    with opened(options, only_reads=True, run_id=run_id) as app:
        run = app.get(run_id)
        entries = [entry_document(run_id, row) for row in app.journal(run_id)] if journal else []
        steps = app.reader.steps(run_id)
    if options.json:
        extra: dict[str, Any] = {"steps": [step.to_dict() for step in steps], "journal": entries} if journal else {}
        render.document({**run.to_dict(messages=messages), **extra})
        return 0
    render.say("\n".join(described(run)))
    if steps:
        render.say("\ncost and latency")
        render.table(costs.STEPS_HEAD, costs.steps_table(steps))
    if messages:
        render.say("\nmessages")
        for number, message in enumerate(run.messages, 1):
            render.say("\n".join(message_lines(number, message)))
    if journal:
        render.say("\njournal")
        rows = [
            (str(e["entry_no"]), str(e["seq"]), e["at"], e["kind"], e["by"] or "", e["status"], render.json_text(e["body"]))
            for e in entries
        ]
        render.table(("ENTRY", "CHECKPOINT", "AT", "KIND", "BY", "STATUS", "BODY"), rows)
    lines = words.go_on(words.commands(run, run.gates, options))
    if lines:
        render.say("\n".join(lines))
    return 0


def described(run: Run[Any]) -> list[str]:
    """The run's facts, one a line, and its gates with whole arguments."""
    usage = f"{run.model_calls} model calls, {run.input_tokens} tokens in, {run.output_tokens} out"
    tokens = [f"{n} cached tokens {how}" for n, how in ((run.cache_read_tokens, "read"), (run.cache_write_tokens, "written")) if n]
    facts = {
        "run": run.run_id,
        "agent": run.agent + (f" {run.agent_version}" if run.agent_version else ""),
        "status": run.status,
        "reason": run.reason,
        "checkpoint": str(run.seq),
        "usage": ", ".join([usage, *tokens]),
        "tags": ", ".join(f"{k}={v}" for k, v in run.tags.items()) or None,
        "started by": run.started_by,
        "part of": f"{run.parent_run_id} ({run.parent_call_id})" if run.parent_run_id else None,
        "driven by": f"{run.lease_owner} until {render.instant(run.lease_until)}" if run.lease_owner else None,
        "wakes at": render.instant(run.wake_at) or None,
        "attempts": str(run.attempts) if run.attempts else None,
        "created": render.instant(run.created_at),
        "updated": render.instant(run.updated_at),
    }
    out = [render.line(f"{name:<11} {fact}") for name, fact in facts.items() if fact is not None]
    if run.status == "done":
        said = run.output if isinstance(run.output, str) else render.json_text(run.to_dict()["output"])
        out += ["", "output", *(f"  {each}" for each in said.splitlines())]
    for gate in run.gates:
        out += ["", *(words.gate_lines(gate) if gate.outcome is None else [words.decided_line(gate)])]
    return out


def message_lines(number: int, message: dict[str, Any]) -> list[str]:
    """One message, whole: texts as they are, other blocks as JSON."""
    out = [f"{number} {render.line(str(message.get('role')))}"]
    content = message.get("content") or []
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        text = block.get("text") if block.get("type") == "text" else None
        out += [f"  {each}" for each in text.splitlines()] if isinstance(text, str) else [f"  {render.line(render.json_text(block))}"]
    return out


def inbox(
    options: Options,
    *,
    role: Annotated[str | None, typer.Option("--role", metavar="R", help="what is asked of this role")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="A")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="may be repeated: all must fit")] = None,
) -> int:
    """List what waits for a person, soonest deadline first, with every argument."""
    with opened(options, only_reads=True) as app:
        gates = or_empty(app).inbox(role=role, agent=agent, tags=values.tags(tag))
        siblings = {run_id: app.get(run_id).gates for run_id in {g.run_id for g in gates}} if not options.json else {}
    if options.json:
        for gate in gates:
            render.document(gate.to_dict())
        return 0
    if not gates:
        render.say(f"nothing waits for a person\nsee what runs with: outlast runs --unfinished{options.repeated()}")
        return 0
    blocks = []
    for gate in gates:
        lines = words.gate_lines(gate, where=words.show_command(gate.run_id, options))
        mine = words.decisions(gate.run_id, siblings[gate.run_id], options.repeated(), only=gate.gate_id)
        blocks.append("\n".join([*lines, *(f"  {each}" for each in mine)]))
    render.say("\n\n".join(blocks))
    if len(gates) == LIMIT:
        render.say(f"\nthere may be more than these {LIMIT}: narrow it with --role, --agent or --tag")
    return 0

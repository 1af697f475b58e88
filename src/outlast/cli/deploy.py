"""`check`, `plan`, `fork`: before a deploy, before a resume, and second thoughts. Only `fork` writes anything."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import settings
from outlast.cli import render, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened, or_empty
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.app import deploy, plans

WORDS = {
    "held": "would be held",
    "stuck": "do not go on by themselves, whatever the code",
    "changes": "go on with a change",
    "continues": "go on",
}


def register(cli: typer.Typer) -> None:
    command(cli, "check")(check)
    command(cli, "plan")(plan)
    command(cli, "fork")(fork)


def check(
    options: Options,
    *,
    app_name: Annotated[str | None, typer.Argument(metavar="[APP]", help="MODULE:ATTR, as --app: the code that is to be deployed")] = None,
    agent: Annotated[list[str] | None, typer.Option("--agent", metavar="A", help="only runs of this agent; may be repeated")] = None,
) -> int:
    """Say what this code would do with every unfinished run. Changes nothing; exit code 1 if any run would be held."""
    if app_name is not None:
        if options.app is not None:
            raise UsageError("the app is named twice: by --app and as APP")
        options = dataclasses.replace(options, app=app_name)
    with opened(options, need_agents=True) as app:
        report = or_empty(app).check_deploy(agents=agent or [])
    if options.json:
        for group in report.groups:
            render.document(group.to_dict())
        counts = {outcome: report.count(outcome) for outcome in WORDS}  # type: ignore[arg-type]  # its keys are the outcomes
        render.document({"type": "deploy", "ok": report.ok, **counts})
        return 0 if report.ok else 1
    if not report.groups:
        render.say("no run is unfinished: nothing to carry over")
    for group in report.groups:
        render.say("\n".join(group_lines(group, options)))
    return 0 if report.ok else 1


def group_lines(group: deploy.Group, options: Options) -> list[str]:
    out = [render.line(f"{group.runs} of {group.agent} {WORDS[group.outcome]}: {group.why}")]
    if group.outcome == "continues":
        return out
    out += [render.line(f"  {run_id}" + (f"  {call_id}" if call_id else "")) for run_id, call_id in group.examples]
    if group.runs > len(group.examples):
        out.append(f"  and {group.runs - len(group.examples)} more")
    if group.outcome in ("held", "stuck"):
        out.append(render.line(f"  see: outlast plan {shlex.quote(group.examples[0][0])}{options.repeated()}"))
    return out


def plan(options: Options, *, run_id: Annotated[str, typer.Argument(metavar="RUN")]) -> int:
    """Say what resume would do with this run, call by call, what it would cost, and what is missing. Changes nothing."""
    with opened(options, run_id=run_id) as app:
        found = app.plan(run_id)
    if options.json:
        render.document(found.to_dict())
        return 0
    render.say("\n".join(plan_lines(found)))
    return 0


def plan_lines(found: plans.Plan) -> list[str]:
    until = f", until {render.instant(found.until)}" if found.until else ""
    out = [
        render.line(
            f"{found.run_id} is {found.status}: next is to {found.next}" if found.next != "nothing" else f"{found.run_id} is {found.status}"
        )
    ]
    if found.reason:
        out.append(render.line(f"  {found.reason}{until}"))
    if found.held_by:
        out.append(render.line(f"  {found.held_by} drives it at this moment"))
    if found.changed:
        out.append("  other code than before goes on with it")
    for item in found.items:
        out += ["", render.line(f"{item.call_id}  {item.tool}: {item.action}"), render.line(f"  {item.why}")]
        if item.action in ("run", "run again with the same key", "check first"):
            out.append(render.line(f"  key {item.key}"))
        if item.role:
            out.append(render.line(f"  asked is {item.role}"))
    if found.tokens is not None:
        cost = f", at most {found.cost_usd:f} USD" if found.cost_usd is not None else ", at an unknown price"
        out += ["", f"the model call that follows begins with about {found.tokens} tokens{cost}"]
    for one in found.missing:
        out += ["", render.line(f"missing: {one.what} {one.name}"), render.line(f"  {one.why}")]
    return out


def fork(
    options: Options,
    *,
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    at: Annotated[int, typer.Option("--at", metavar="SEQ", help="the last checkpoint that the new run begins with")],
    new_id: Annotated[str | None, typer.Option("--id", metavar="NEW", help="of the new run")] = None,
    edit_message: Annotated[
        str | None, typer.Option("--edit-message", metavar="FILE", help="a message as JSON, instead of message SEQ; '-': stdin")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="do not ask a person before every new call that has an effect")] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="WHO", help="who starts it; default: OUTLAST_BY, the login name")] = None,
) -> int:
    """Start a new run with this run's history up to a checkpoint. Its new calls that have an effect ask a person first."""
    who = settings.who(by)
    message: Any = (
        values.json_object(values.file_text(edit_message, "--edit-message"), "--edit-message") if edit_message is not None else None
    )
    with opened(options, run_id=run_id) as app:
        head = app.fork(run_id, at=at, new_run_id=new_id, edit_message=message, live=live, by=who)
    if options.json:
        render.document(head.to_dict())
        return 0
    render.say(render.line(f"{head.run_id} begins where {run_id} was at checkpoint {at}"))
    render.say("\n".join(words.go_on([words.resume_command(head.run_id, options)])))
    return 0

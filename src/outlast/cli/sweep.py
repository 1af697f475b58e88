"""`sweep`, `event`: the clock and the world, from outside. And what does not go on by itself, with the command that mends it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import render, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened

if TYPE_CHECKING:
    from outlast.documents import Stuck


def register(cli: typer.Typer) -> None:
    command(cli, "sweep")(sweep)
    command(cli, "event")(event)


def sweep(options: Options) -> int:
    """Apply the deadlines that have passed, send the notices that are due (with an app that has notify=), and say what is stuck. For cron."""
    with opened(options) as app:
        done = app.sweep()
        found = app.stuck()
    if options.json:
        render.document({"type": "sweep", "done": done, "stuck": len(found)})
        for one in found:
            render.document(one.to_dict())
        return 0
    render.say(f"{done} deadlines applied and notices sent" if done else "no deadline has passed and no notice is due")
    if found:
        render.say(f"\n{len(found)} do not go on by themselves")
        stuck_table(found, options)
    return 0


def event(
    options: Options,
    *,
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="what the tool's Wait is named; by default its call id")],
    data: Annotated[str | None, typer.Option("--data", metavar="JSON", help="becomes the call's result")] = None,
    event_id: Annotated[str | None, typer.Option("--event-id", metavar="ID", help="the same event again changes nothing")] = None,
) -> int:
    """Tell a run that something happened. An event that comes before its wait is kept."""
    value = values.json_value(data, "--data") if data is not None else None
    with opened(options, run_id=run_id) as app:
        first = app.event(run_id, name, value, event_id=event_id)
        head = app.head(run_id)
    if options.json:
        render.document({"type": "event", "run_id": run_id, "name": name, "first": first})
        return 0
    if not first:
        render.say(render.line(f"{run_id}: the event {event_id} was there already"))
        return 0
    render.say(words.head_line(head))
    if head.waiting:  # it set nothing going by itself
        render.say(render.line(f"the event {name} is kept: the call that waits for it gets it, now or later"))
    if head.status == "running" and head.lease_owner is None:
        render.say("\n".join(words.go_on([words.resume_command(run_id, options)])))
    return 0


def stuck_table(found: Sequence[Stuck], options: Options) -> None:
    """One below the other: a reason is a sentence, and a command is there to be copied."""
    for one in found:
        render.say("\n" + render.line(f"{shlex.quote(one.run_id)}  {one.status}  since {render.instant(one.since)}"))
        render.say(render.line(f"  {one.reason}"))
        render.say(render.line(f"  {one.command}{options.repeated()}"))

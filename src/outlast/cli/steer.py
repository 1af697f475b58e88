"""`send`, `cancel`, `retry`, `move`: what a person does to a run from outside. Whoever drives it hears of it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outlast import settings
from outlast.cli import render, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened

if TYPE_CHECKING:
    from outlast import RunHead

RUN = Annotated[str, typer.Argument(metavar="RUN")]
BY = Annotated[str | None, typer.Option("--by", metavar="WHO", help="who says so; default: OUTLAST_BY, the login name")]


def register(cli: typer.Typer) -> None:
    command(cli, "send")(send)
    command(cli, "cancel")(cancel)
    command(cli, "retry")(retry)
    command(cli, "move")(move)


def send(
    options: Options,
    *,
    run_id: RUN,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="a user message; '-': from stdin")],
    by: BY = None,
) -> int:
    """Say something to a run: it reads it at its next step, a finished one goes on with it."""
    what, who = values.text(text), settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.send(run_id, what, by=who), options)


def cancel(
    options: Options,
    *,
    run_id: RUN,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="why")] = None,
    by: BY = None,
) -> int:
    """End a run. Of a finished one nothing changes."""
    who = settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.cancel(run_id, by=who, note=note), options)


def retry(options: Options, run_id: RUN, by: BY = None) -> int:
    """Take up a failed run from its last checkpoint, once the cause is mended."""
    who = settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.retry(run_id, by=who), options)


def move(
    options: Options,
    *,
    run_id: RUN,
    to: Annotated[str, typer.Option("--to", metavar="DRIVER", help="built-in, temporal, restate, dbos or inngest")],
) -> int:
    """Give a run that waits to another driver. An engine is the one that the app, or OUTLAST_ENGINE, names."""
    with opened(options, run_id=run_id) as app:
        head = app.move(run_id, to)
        if options.json:
            render.document(head.to_dict())
        else:
            render.say(words.head_line(head))
            render.say(f"driven by {to} from now on")
    return 0


def said(head: RunHead, options: Options) -> int:
    if options.json:
        render.document(head.to_dict())
        return 0
    render.say(words.head_line(head))
    if head.status == "running" and head.lease_owner is None:
        render.say("\n".join(words.go_on([words.resume_command(head.run_id, options)])))
    return 0

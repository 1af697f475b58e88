"""`approve`, `reject`, `verify`: what a person says. What stands afterwards is printed as one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outlast import settings
from outlast.cli import render, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast import Gate

RUN = Annotated[str, typer.Argument(metavar="RUN")]
CALL = Annotated[str | None, typer.Argument(metavar="[CALL]", help="a call or gate id; may be left out while only one is open")]
BY = Annotated[str | None, typer.Option("--by", metavar="WHO", help="who decides; default: OUTLAST_BY, the login name")]
NOTE = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="why; the model reads it")]
DIGEST = Annotated[str | None, typer.Option("--digest", metavar="D", help="refuse what is not what was shown")]


def register(cli: typer.Typer) -> None:
    command(cli, "approve")(approve)
    command(cli, "reject")(reject)
    command(cli, "verify")(verify)


def approve(
    options: Options,
    *,
    run_id: RUN,
    call: CALL = None,
    by: BY = None,
    note: NOTE = None,
    args: Annotated[str | None, typer.Option("--args", metavar="JSON", help="run it with these arguments instead; needs the app")] = None,
    digest: DIGEST = None,
) -> int:
    """Let a call run as it was shown, or grant a raise of a limit."""
    edited = values.json_object(args, "--args") if args is not None else None
    who = settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.decide(run_id, call, approved=True, decided_by=who, note=note, args=edited, digest=digest), options)


def reject(
    options: Options,
    *,
    run_id: RUN,
    call: CALL = None,
    by: BY = None,
    note: NOTE = None,
    digest: DIGEST = None,
) -> int:
    """Refuse a call: it does not run, and the model reads the note."""
    if not note or not note.strip():
        raise UsageError("--note is missing: the model reads why, and goes on from there", hint=f'outlast reject {run_id} --note "why"')
    who = settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.decide(run_id, call, approved=False, decided_by=who, note=note, digest=digest), options)


def verify(
    options: Options,
    *,
    run_id: RUN,
    call: CALL = None,
    happened: Annotated[bool, typer.Option("--happened", help="it was done: it is not run again")] = False,
    run_again: Annotated[bool, typer.Option("--run-again", help="it was not done: run it")] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="nobody knows: do not run it, and tell the model so")] = False,
    result: Annotated[str | None, typer.Option("--result", metavar="JSON", help="with --happened: what the tool gave")] = None,
    by: BY = None,
    note: NOTE = None,
) -> int:
    """Say what became of a call whose outcome is unknown: exactly one of --happened, --run-again, --give-up."""
    answers: dict[Literal["happened", "run_again", "give_up"], bool] = {"happened": happened, "run_again": run_again, "give_up": give_up}
    given = [name for name, is_given in answers.items() if is_given]
    if len(given) != 1:
        raise UsageError("exactly one of --happened, --run-again and --give-up is needed")
    if result is not None and not happened:
        raise UsageError("--result goes with --happened only")
    value: Any = values.json_value(result, "--result") if result is not None else None
    who = settings.who(by)
    with opened(options, run_id=run_id) as app:
        return said(app.verify(run_id, call, outcome=given[0], decided_by=who, result=value, note=note), options)


def said(gate: Gate, options: Options) -> int:
    if options.json:
        render.document(gate.to_dict())
    else:
        render.say(words.decided_line(gate))
    return 0

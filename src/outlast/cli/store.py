"""`store ...`: the database itself."""

from __future__ import annotations

import typer

from outlast.cli import render
from outlast.cli.options import Options, command, group
from outlast.cli.target import absent_file, opened


def register(cli: typer.Typer) -> None:
    store = typer.Typer(help="Look after the database.", no_args_is_help=False)
    group(store)
    command(store, "check")(check)
    cli.add_typer(store, name="store")


def check(options: Options) -> int:
    """Read everything and say what is wrong. Exit code 1 if anything is."""
    with opened(options, only_reads=True) as app:
        file = absent_file(app)
        findings = [(str(file), "there is no such file", "name the store: --store sqlite:///FILE")] if file else app.store_check()
    for where, what, remedy in findings:
        if options.json:
            render.document({"type": "finding", "where": where, "what": what, "remedy": remedy})
        else:
            render.say(f"{render.line(where)}: {render.line(what)}\n  {render.line(remedy)}")
    if not findings and not options.json:
        render.say("all is well")
    return 1 if findings else 0

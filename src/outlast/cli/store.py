"""`store ...`: the database itself."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from outlast.cli import care, render, values
from outlast.cli.options import Options, command, group
from outlast.cli.pages import Group
from outlast.cli.target import absent_file, opened, or_empty
from outlast.errors import UsageError


def register(cli: typer.Typer) -> None:
    store = typer.Typer(cls=Group, rich_markup_mode=None, help="Look after the database.", no_args_is_help=False)
    group(store)
    command(store, "check")(check)
    command(store, "heads")(heads)
    care.register(store)
    cli.add_typer(store, name="store")


def heads(options: Options) -> int:
    """Print every run's head: its entries and the digest of the last one. Kept elsewhere, `store check --heads FILE` compares with it."""
    with opened(options, only_reads=True) as app:
        for run_id, entries, digest in or_empty(app).store_heads():
            if options.json:
                render.document({"type": "store_head", "run_id": run_id, "entries": entries, "digest": digest})
            else:
                render.say(f"{render.line(run_id)}\t{entries}\t{digest}")
    return 0


def kept_heads(file: str | None) -> list[tuple[str, int, str]]:
    """Lines of `store heads`, plain or as documents."""
    out = []
    for number, line in enumerate(values.file_text(file, "--heads").splitlines() if file is not None else (), 1):
        try:
            if line.startswith("{"):
                one = json.loads(line)
                run_id, entries, digest = one["run_id"], one["entries"], one["digest"]
            else:
                run_id, entries, digest = line.split("\t")
            out.append((str(run_id), int(entries), str(digest)))
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"--heads {file}: line {number} is none of `outlast store heads`") from None
    return out


def check(
    options: Options,
    *,
    heads: Annotated[str | None, typer.Option("--heads", metavar="FILE", help="what `store heads` printed once; '-': stdin")] = None,
) -> int:
    """Read everything and say what is wrong. Exit code 1 if anything is."""
    kept = kept_heads(heads)
    with opened(options, only_reads=True) as app:
        file = absent_file(app)
        findings = [(str(file), "there is no such file", "name the store: --store sqlite:///FILE")] if file else app.store_check(kept)
    for where, what, remedy in findings:
        if options.json:
            render.document({"type": "finding", "where": where, "what": what, "remedy": remedy})
        else:
            render.say(f"{render.line(where)}: {render.line(what)}\n  {render.line(remedy)}")
    if not findings and not options.json:
        render.say("all is well")
    return 1 if findings else 0

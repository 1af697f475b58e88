"""`store migrate, backup, export, import, copy, prune, erase`: what changes the database as a whole. What removes anything asks for `--yes`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from outlast import settings
from outlast.cli import render, values
from outlast.cli.options import Options, command
from outlast.cli.target import opened, or_empty
from outlast.errors import UsageError

RUN = Annotated[str, typer.Argument(metavar="RUN")]
ENDED = ("done", "failed", "cancelled")
YES = Annotated[bool, typer.Option("--yes", help="do it; without it is only said what would be done")]


def register(store: typer.Typer) -> None:
    command(store, "migrate")(migrate)
    command(store, "backup")(backup)
    command(store, "export")(export)
    command(store, "import")(import_)
    command(store, "copy")(copy)
    command(store, "prune")(prune)
    command(store, "erase")(erase)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun if n == 1 else {'entry': 'entries'}.get(noun, noun + 's')}"


def migrate(
    options: Options, *, sql: Annotated[bool, typer.Option("--sql", help="print what makes the schema, and change nothing")] = False
) -> int:
    """Make the schema, or bring it up to date. SQLite does it by itself; Postgres only by this command."""
    with opened(options, only_reads=True) as app:
        if sql:
            text = app.store_migration_sql()
            if options.json:
                render.document({"type": "migration", "sql": text})
            else:
                render.say(text)
            return 0
        before, now = app.store_migrate()
    if options.json:
        render.document({"type": "migrated", "before": before, "now": now})
    else:
        render.say(f"the schema is version {now}{f', it was {before}' if before != now else ': there was nothing to do'}")
    return 0


def backup(options: Options, file: Annotated[str, typer.Argument(metavar="FILE", help="a new file")]) -> int:
    """Copy the database as it is at this moment, while others work. (Postgres has its own programs: the command is said.)"""
    with opened(options, only_reads=True) as app:
        or_empty(app).store_backup(Path(file))
    if options.json:
        render.document({"type": "backup", "file": str(Path(file).absolute())})
    else:
        render.say(f"backed up to {render.line(file)}")
    return 0


def export(
    options: Options,
    run_id: RUN,
    *,
    move: Annotated[bool, typer.Option("--move", help="end it here first, so that it can go on elsewhere")] = False,
) -> int:
    """Print a run as one JSON document, for `store import`."""
    who = settings.who() if move else None
    with opened(options, only_reads=True, run_id=run_id) as app:
        render.document(app.store_export(run_id, move=move, by=who))
    return 0


def import_(
    options: Options,
    file: Annotated[str, typer.Argument(metavar="FILE", help="what `store export` printed; '-': stdin")],
    *,
    run_id: Annotated[str | None, typer.Option("--id", metavar="NEW", help="as another run, with keys of its own")] = None,
) -> int:
    """Put an exported run in: a moved one under its own id, any other one under a new id."""
    text = values.file_text(file, "FILE")
    with opened(options, only_reads=True) as app:
        head = app.store_import(text, run_id=run_id)
    if options.json:
        render.document(head.to_dict())
    else:
        render.say(f"run {render.line(head.run_id)}  {head.status}  checkpoint {head.seq}")
    return 0


def copy(
    options: Options, url: Annotated[str, typer.Argument(metavar="URL", help="the other store, of either kind; its schema is there")]
) -> int:
    """Carry every run to another store, waiting ones too, and end it here. Stop the workers first; cut off, the same again goes on."""
    settings.parse_store(url, origin="URL")
    who = settings.who()
    with opened(options, only_reads=True) as app:
        done = or_empty(app).store_copy(url, by=who)
    if options.json:
        left = [{"run_id": run_id, "why": why} for run_id, why in done.left]
        render.document({"type": "copied", "runs": done.runs, "elsewhere": done.elsewhere, "left": left})
    else:
        render.say(f"{_counted(done.runs, 'run')} carried to {render.line(settings.without_password(url))}, and ended here")
        if done.elsewhere:
            render.say(f"{_counted(done.elsewhere, 'run')} had been moved to another place before")
        for run_id, why in done.left:
            render.say(f"stays: run {render.line(run_id)}: {render.line(why)}", err=True)
        if done.left:
            render.say("until these are carried too, none goes on there: mend that, then the same command again", err=True)
    return 1 if done.left else 0


def prune(
    options: Options,
    *,
    older_than: Annotated[str, typer.Option("--older-than", metavar="D", help="since their last entry: 90d")],
    keep: Annotated[list[str] | None, typer.Option("--keep", metavar="S", help="a status that is kept; may be repeated")] = None,
    yes: YES = False,
) -> int:
    """Remove finished runs, with their gates and notices."""
    age = values.duration(older_than, "--older-than")
    kept = _statuses(keep or ())
    if age <= timedelta(0):
        raise UsageError(f"--older-than is {older_than!r}: it must be longer than nothing")
    with opened(options, only_reads=True) as named:
        app = or_empty(named)
        runs, entries = app.store_old(age, keep=kept)
        removed, left = app.store_prune(age, keep=kept) if yes else (0, None)
    if options.json:
        render.document({"type": "pruned", "runs": removed if yes else runs, "entries": entries, "done": yes, "left_to_do": left})
    elif yes:
        render.say(f"{_counted(removed, 'run')} removed")
        if left:
            render.say(left)
    else:
        render.say(f"{_counted(runs, 'run')} with {_counted(entries, 'entry')} would be removed{'; do it: --yes' if runs else ''}")
    return 0


def _statuses(given: Sequence[str]) -> list[str]:
    if unknown := [s for s in given if s not in ENDED]:
        raise UsageError(f"--keep is {unknown[0]!r}: it must be one of {', '.join(ENDED)}")
    return list(given)


def erase(options: Options, run_id: RUN, *, yes: YES = False) -> int:
    """Wipe what a finished run says, and the runs that it started: that they existed stays. Backups from before still hold it."""
    with opened(options, only_reads=True, run_id=run_id) as app:
        if not yes:
            head = app.head(run_id)
            what = f"run {render.line(run_id)} ({head.status}, {_counted(head.seq, 'checkpoint')}) would be wiped for good"
            if options.json:
                render.document({"type": "erased", "runs": [run_id], "done": False, "left_to_do": None})
            else:
                render.say(f"{what}; do it: --yes")
            return 0
        ids, left = app.store_erase(run_id)
    if options.json:
        render.document({"type": "erased", "runs": ids, "done": True, "left_to_do": left})
    else:
        render.say(f"wiped: {', '.join(map(render.line, ids))}")
        if left:
            render.say(left)
    return 0

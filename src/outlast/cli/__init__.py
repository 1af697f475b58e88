"""The command line: `outlast COMMAND`.

Each group of commands has a file of its own with `register(cli)`; a new group is one more in `GROUPS`. What costs time to import is
imported inside the commands. `main` turns every error into its lines and exit code; nothing below it prints errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from outlast.cli import costs, crashtest, decide, deploy, init, look, options, pages, render, run, steer, store, sweep, watch, web, worker
from outlast.errors import GateClosed, OutlastError

GROUPS = (run, look, costs, watch, decide, steer, sweep, worker, web, store, crashtest, deploy, init)
INTERRUPTED = 130


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        render.say(f"outlast {version('outlast')}")
        raise typer.Exit


def everything(
    _options: options.Options,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version")] = False,
) -> int:
    """Keeps LLM agents alive past the process they run in."""
    return 0


def build() -> typer.Typer:
    cli = typer.Typer(
        cls=pages.Group, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    options.group(cli, everything)
    for group in GROUPS:
        group.register(cli)
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives the exit code."""
    options.forget()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code: Any = build()(args=given, prog_name="outlast", standalone_mode=False)
        return int(code or 0)
    except OutlastError as e:
        return failed(e, given)
    except TyperException as e:
        context = getattr(e, "ctx", None)
        hint = f"{context.command_path} --help" if context is not None else "outlast --help"
        return told("usage_error", e.format_message(), hint, e.exit_code, given)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as e:
        return crashed(e, given, f"{e.strerror or e}" + (f": {e.filename}" if e.filename else ""))
    except Exception as e:  # noqa: BLE001 - the last line of defence: one line for a person instead of a traceback
        return crashed(e, given, f"{type(e).__name__}: {e}")


def failed(e: OutlastError, given: Sequence[str]) -> int:
    gate = e.gate.to_dict() if isinstance(e, GateClosed) and e.gate is not None else None
    if options.present.debug:
        traceback_of(e)
    return told(e.type, str(e), e.hint, e.exit_code, given, run_id=e.run_id, gate=gate)


def crashed(e: Exception, given: Sequence[str], what: str) -> int:
    """Something that we did not foresee."""
    if options.present.debug or "--debug" in given:
        traceback_of(e)
        return told("internal_error", f"internal error: {what}", "", 1, given)
    return told("internal_error", f"internal error: {what} (run with --debug for the traceback)", "", 1, given)


def told(kind: str, message: str, hint: str, code: int, given: Sequence[str], *, run_id: str | None = None, gate: Any = None) -> int:
    try:
        if options.present.json or "--json" in given:
            error = {"type": kind, "message": message, "hint": hint, "run_id": run_id, "gate": gate}
            render.document({"type": "error", "error": error}, err=True)
        else:
            render.say(f"outlast: {render.line(message)}", err=True)
            if hint:
                render.say(f"hint: {render.line(hint)}", err=True)
    except OSError:  # stderr cannot be written to either: the exit code has to do
        return code
    return code


def traceback_of(e: BaseException) -> None:
    import traceback

    render.say("".join(traceback.format_exception(e)).rstrip("\n"), err=True)

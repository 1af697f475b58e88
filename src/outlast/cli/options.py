"""The options of every command, which may stand before or after it, and how a command is made.

A command is a function that takes `Options` first; `command` adds the six options to its signature, and `group` to a group's. The value
nearest to the command wins. Whatever a command returns is the exit code.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from outlast.cli.pages import Command

P = ParamSpec("P")
PANEL = "Options of every command"


@dataclass(frozen=True, slots=True)
class Options:
    store: str | None = None
    app: str | None = None
    json: bool = False
    debug: bool = False
    log_level: str | None = None
    log_format: str | None = None

    def repeated(self) -> str:
        """The store and the app as they were given, for a command that goes on: "" or " --store URL --app MODULE:ATTR"."""
        from outlast.settings import without_password

        given = {"--store": self.store and without_password(self.store), "--app": self.app}
        return "".join(f" {flag} {shlex.quote(value)}" for flag, value in given.items() if value)


present = Options()  # as far as the command line was read; an error before any command was found needs it too


def _option(flag: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=PANEL)


_EVERYWHERE: dict[str, Any] = {
    "store": Annotated[str | None, _option("--store", "sqlite:///FILE or postgresql://USER@HOST/DB", "URL")],
    "app": Annotated[str | None, _option("--app", "an Outlast or an Agent", "MODULE:ATTR")],
    "json": Annotated[bool, _option("--json", "documents on stdout, one a line")],
    "debug": Annotated[bool, _option("--debug", "show tracebacks")],
    "log_level": Annotated[str | None, _option("--log-level", "debug, info, warning, error", "L")],
    "log_format": Annotated[str | None, _option("--log-format", "of the log on stderr", "text|json")],
}


def forget() -> None:
    """A new command line is read."""
    global present
    present = Options()


def command(app: typer.Typer, name: str) -> Callable[[Callable[Concatenate[Options, P], int]], Callable[Concatenate[Options, P], int]]:
    def register(fn: Callable[Concatenate[Options, P], int]) -> Callable[Concatenate[Options, P], int]:
        app.command(name, cls=Command)(_with_options(fn, begin))
        return fn

    return register


def group(app: typer.Typer, callback: Callable[..., int] = lambda _: 0) -> None:
    """Let a group take the options too, and those of its callback."""
    app.callback()(_with_options(callback, lambda _: None))


def _with_options(fn: Callable[..., int], before: Callable[[Options], None]) -> Callable[..., int]:
    hints = get_type_hints(fn, include_extras=True)
    own = [p.replace(annotation=hints[name]) for name, p in list(inspect.signature(fn).parameters.items())[1:]]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options(), name), annotation=annotation)
        for name, annotation in _EVERYWHERE.items()
    ]

    @functools.wraps(fn)
    def wrapper(**given: Any) -> int:
        global present
        said = {f.name: given.pop(f.name) for f in fields(Options)}
        present = replace(present, **{name: value for name, value in said.items() if value})
        before(present)
        return fn(present, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return wrapper


def begin(options: Options) -> None:
    """What every command does first."""
    from outlast.cli import logs, render

    if options.json:
        render.documents_only()
    logs.configure(options)

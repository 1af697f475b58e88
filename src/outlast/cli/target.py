"""Which application a command works on: MODULE:ATTR, or only a store."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast import settings
from outlast.cli.options import Options
from outlast.errors import OutlastError, RunNotFound, UsageError

if TYPE_CHECKING:
    from outlast import Outlast

DEFAULT_ATTR = "app"


@contextlib.contextmanager
def opened(options: Options, *, need_agents: bool = False, only_reads: bool = False, run_id: str | None = None) -> Iterator[Outlast]:
    """The application, closed at the end.

    Args:
        need_agents: refuse where no app is named.
        only_reads: with --store the app need not be imported, unless --app names it.
        run_id: a run that must be there: where even the store's file is missing, none is made.
    """
    from outlast import Outlast

    if options.store:
        settings.parse_store(options.store, origin="--store")  # a wrong one is named as the flag that it is
    app = None
    found = settings.app(options.app)
    if found is not None and not (only_reads and options.store and not options.app):
        app = imported(found, options)
        if options.store:
            app = app.with_store(options.store)
    elif need_agents:
        raise UsageError("no app is named: it is what holds the agents",
                         hint="give MODULE:ATTR (or --app MODULE:ATTR), set OUTLAST_APP, or app in [tool.outlast]")  # fmt: skip
    if app is None:
        app = Outlast(options.store)
    if run_id is not None and (file := absent_file(app)):
        raise RunNotFound(
            f"there is no run {run_id!r}: there is no file {file}", hint="another --store, or another directory", run_id=run_id
        )
    with app:
        yield app


def absent_file(app: Outlast) -> Path | None:
    """The SQLite file of this application if it is not there yet, in a folder that is: looking does not make it."""
    path = settings.store(app._given).path
    return path if path is not None and path.parent.is_dir() and not path.exists() else None


def or_empty(app: Outlast) -> Outlast:
    """The application, or where its file is not there yet one that is empty: looking answers, and makes no file."""
    return app.with_store("sqlite:///:memory:") if absent_file(app) else app


def imported(found: settings.Found, options: Options) -> Outlast:
    """Import MODULE:ATTR; an Agent becomes an Outlast of its own. Raises UsageError that says what failed and where."""
    from outlast import Agent, Outlast

    module_name, _, attr = found.value.partition(":")
    attr = attr or DEFAULT_ATTR
    if module_name.endswith(".py") or "/" in module_name:
        name = ".".join(Path(module_name).with_suffix("").parts)
        raise UsageError(f"{found.origin} is {found.value}: name the module, not the file", hint=f"{name}:{attr}")
    if found.folder is not None and str(found.folder) not in sys.path:  # the file's own folder, wherever the command is given
        sys.path.insert(0, str(found.folder))
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    module = _module(module_name, found)
    value: Any = module
    for part in attr.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            there = [name for name, v in vars(module).items() if isinstance(v, Outlast | Agent)]
            hint = "there is " + ", ".join(f"{module_name}:{name}" for name in there) if there else "it must be an Outlast or an Agent"
            raise UsageError(f"{found.origin}: {module_name} has no {attr!r}", hint=hint) from None
    if isinstance(value, Agent):
        value = Outlast(options.store, agents=[value])
    if isinstance(value, Outlast):
        value._target = f"{module_name}:{attr}"  # so that a worker can drive one run alone, in a process of its own
        return value
    raise UsageError(f"{found.origin}: {module_name}:{attr} is {type(value).__name__}, and must be an Outlast or an Agent")


def _module(name: str, found: settings.Found) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            raise UsageError(f"{found.origin}: there is no module {e.name!r}, seen from {Path.cwd()}") from e
        raise _failed(name, found, e) from e
    except OutlastError as e:
        raise UsageError(f"{found.origin}: importing {name} failed{_where(e)}: {e}", hint=e.hint) from e
    except (Exception, SystemExit) as e:
        raise _failed(name, found, e) from e


def _failed(name: str, found: settings.Found, e: BaseException) -> UsageError:
    text = " ".join(str(e).split())
    return UsageError(f"{found.origin}: importing {name} failed{_where(e)}: {type(e).__name__}{': ' if text else ''}{text}",
                      hint="--debug shows the traceback")  # fmt: skip


def _where(e: BaseException) -> str:
    """The last line of the user's own code that was running."""
    if isinstance(e, SyntaxError) and e.filename:
        return f" at {e.filename}, line {e.lineno}"
    not_theirs = ("<frozen", str(Path(__file__).parents[1]), str(importlib.__file__))
    frames = [frame for frame in traceback.extract_tb(e.__traceback__) if not frame.filename.startswith(not_theirs)]
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""

"""`crashtest`, `record`: does this agent do everything once, wherever it is killed?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import settings
from outlast.cli import render, target, values
from outlast.cli.options import Options, command
from outlast.cli.run import chosen
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.testing import CrashReport

INPUT = "crash test"  # a script answers by the number of answers before, whatever was asked
FINISHED = {True: "tool_use", False: "end_turn"}  # the stop reason that an answer with calls, or without any, has by itself


def register(cli: typer.Typer) -> None:
    command(cli, "crashtest")(crashtest)
    command(cli, "record")(record)


def crashtest(
    options: Options,
    *,
    app_name: Annotated[str | None, typer.Argument(metavar="[APP]", help="MODULE:ATTR, as --app")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="A", help="which agent; needed where the app has several")] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE", help="the model's turns as JSON, as `record` prints them")
    ] = None,
    deps: Annotated[str | None, typer.Option("--deps", metavar="MODULE:ATTR", help="deps(folder) is ctx.deps; default: the app's")] = None,
    observe: Annotated[
        str | None, typer.Option("--observe", metavar="MODULE:ATTR", help="observe(folder) must be equal after every case")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="URL", help="through an engine of its own: a worker of it is what is killed")
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="kill twice: every ordered pair of points")] = False,
    list_: Annotated[bool, typer.Option("--list", help="print the crash points and what is at risk at each")] = False,
    junit: Annotated[str | None, typer.Option("--junit", metavar="FILE", help="also write the cases as JUnit XML")] = None,
) -> int:
    """Kill the agent at every crash point, take it up again, and compare. Exit code 1 if anything differs.

    Every case has a working directory of its own, and nobody is notified. What is asked of people is approved.
    """
    if list_:
        return points(options)
    if script is None:
        raise UsageError("--script FILE is missing: the model's turns", hint="outlast record RUN > script.json makes one of a real run")
    if app_name is not None:
        if options.app is not None:
            raise UsageError("the app is named twice: by --app and as APP")
        options = dataclasses.replace(options, app=app_name)
    found = settings.app(options.app)
    if found is None:
        raise UsageError("no app is named: it is what holds the agents",
                         hint="give MODULE:ATTR (or --app MODULE:ATTR), set OUTLAST_APP, or app in [tool.outlast]")  # fmt: skip
    from outlast.testing.crashmatrix.matrix import crash_matrix, scripted

    turns = read_script(script)
    if junit is not None:
        check_writable(junit)
    app = target.imported(found, options)
    done = Progress(shown=sys.stderr.isatty())
    with ended_by_signals():
        try:
            report = crash_matrix(
                chosen(app, agent), INPUT, model=scripted(turns), deps=function(deps, "--deps"), observe=function(observe, "--observe"),
                pairs=pairs, lifespan=app._lifespan, fixed_deps=app._deps, engine=engine, progress=done)  # fmt: skip
        except KeyboardInterrupt:
            render.say(f"outlast: interrupted after {done.of()}; nothing is reported", err=True)
            raise
    if junit is not None:
        report.write_junit(Path(junit))
    tell(report, options)
    return 0 if report.ok else 1


def record(options: Options, *, run_id: Annotated[str, typer.Argument(metavar="RUN")]) -> int:
    """Print what the model answered in a run, as the turns of a script: JSON, for `crashtest --script` and for ScriptedModel."""
    with target.opened(options, only_reads=True, run_id=run_id) as app:
        run = app.get(run_id)
        messages = run.messages
        reasons = [stop_reason(row.meta) for row in app.journal(run_id) if row.kind == "MessageAdded"]
    turns = [turn(m["content"], why) for m, why in zip(messages, reasons, strict=True) if m["role"] == "assistant"]
    if not turns:
        raise UsageError(f"run {run_id} has no answer of a model yet", run_id=run_id)
    render.say(json.dumps(turns, indent=None if options.json else 2))
    if not run.finished:
        render.say(f"outlast: run {run_id} is not over ({run.status}): its script ends with the answers so far", err=True)
    return 0


def stop_reason(meta: str | None) -> str | None:
    reason = json.loads(meta).get("stop_reason") if meta else None
    return str(reason) if reason is not None else None


def turn(content: Any, reason: str | None) -> Any:
    """Content alone, where the stop reason follows from it."""
    calls = isinstance(content, list) and any(block.get("type") == "tool_use" for block in content)
    return content if reason in (None, FINISHED[calls]) else {"content": content, "stop_reason": reason}


# ---- what is given --------------------------------------------------------------------------------------------------------------


def read_script(file: str) -> list[Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except OSError as e:
        raise UsageError(f"--script {file} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UsageError(f"--script {file} is not valid UTF-8: byte {e.start}") from None
    hint = "outlast record RUN > script.json makes one of a real run"
    turns = values.json_value(text, f"--script {file}", hint=hint)
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str | list | dict) for one in turns):
        raise UsageError(f"--script {file} must be a JSON list of turns: each a text, a list of content blocks or a message", hint=hint)
    return turns


def check_writable(file: str) -> None:
    """Before the cases are run: afterwards their report would be lost."""
    try:
        with Path(file).open("a"):
            pass
    except OSError as e:
        raise UsageError(f"--junit {file} cannot be written: {e.strerror}") from None


def function(given: str | None, option: str) -> Callable[[Path], Any] | None:
    """MODULE:ATTR, imported as an app is."""
    if given is None:
        return None
    module_name, colon, attr = given.partition(":")
    if not colon or not module_name or not attr:
        raise UsageError(f"{option} is {given!r}: write it as MODULE:ATTR")
    value = target._module(module_name, settings.Found(given, option))
    for part in attr.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{option}: {module_name} has no {attr!r}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{option}: {given} must be a function of one argument, the folder of a case")
    return value  # type: ignore[no-any-return]  # a person's function: what it takes and gives is seen when it is called


# ---- what is said ---------------------------------------------------------------------------------------------------------------


def points(options: Options) -> int:
    from outlast.testing.crashmatrix import POINTS

    if options.json:
        for name, risk in POINTS.items():
            render.document({"type": "crash_point", "name": name, "at_risk": risk})
        return 0
    render.table(("POINT", "AT RISK THERE"), list(POINTS.items()))
    render.say("\ntool.* and check.* are followed by :TOOL; OUTLAST_CRASH_AT=POINT, or POINT#N for the Nth time, kills any process there")
    return 0


def tell(report: CrashReport, options: Options) -> None:
    if options.json:
        for result in report.results:
            render.document(result.to_dict())
        render.document(report.to_dict())
        return
    render.table(("KILLED AT", "CASES", "RESULT", "AT RISK THERE"), rows(report))
    for title, lines in (("not compared, or worth a look", report.notes), ("findings", report.findings)):
        if lines:
            render.say(f"\n{title}")
            render.say("\n".join(f"  {render.line(line)}" for line in lines))
    render.say(f"\n{render.line(report.headline())}")


def rows(report: CrashReport) -> Sequence[tuple[str, str, str, str]]:
    """One row a point, in the order in which the run first passes them; a pair counts for its last death."""
    from outlast.testing.crashmatrix import POINTS

    by_point: dict[str, list[bool]] = {}
    for result in report.results:
        by_point.setdefault(result.points[-1].partition("#")[0], []).append(result.ok)
    return [
        (name, str(len(ok)), "ok" if all(ok) else f"RED {ok.count(False)}", POINTS[name.partition(":")[0]]) for name, ok in by_point.items()
    ]


class Progress:
    def __init__(self, *, shown: bool) -> None:
        self.shown, self.done, self.known = shown, 0, 0

    def __call__(self, done: int, known: int) -> None:
        self.done, self.known = done, known
        if self.shown:
            sys.stderr.write(f"\r{self.of()}" + (" " * 10 if done < known - 1 else "\r" + " " * 40 + "\r"))
            sys.stderr.flush()

    def of(self) -> str:
        return f"{self.done} of {self.known} cases" if self.known else "no case"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command like an error does: its child process and its folder go with it. Under `nohup` a hang-up is nothing."""

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    heard = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, end) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

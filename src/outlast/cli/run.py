"""`run` and `resume`: drive a run here, one line a checkpoint, until it waits or ends.

The lines come from two sources: what this process saves is heard as events, and what was saved otherwise (the start, another worker)
is read from the store. `Printer` keeps them in order and prints each checkpoint once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import settings
from outlast.cli import render, values, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened
from outlast.errors import RunBusy, UsageError

if TYPE_CHECKING:
    from outlast import Event, Outlast, Run, RunHead

WAITS, FAILED, INTERRUPTED = 3, 4, 130  # exit codes of `run` and `resume`
POLL = timedelta(milliseconds=500)  # --follow: how soon a decision is noticed; one indexed read each


def register(cli: typer.Typer) -> None:
    command(cli, "run")(run)
    command(cli, "resume")(resume)


def run(
    options: Options,
    *,
    words_: Annotated[list[str] | None, typer.Argument(metavar="[APP] TEXT", help="MODULE:ATTR and the input; '-': from stdin")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="which agent; needed where the app has several")] = None,
    run_id: Annotated[str | None, typer.Option("--id", metavar="RUN", help="the run's id; the same id and input is the same run")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="a tag; may be repeated")] = None,
    input_: Annotated[str | None, typer.Option("--input", metavar="FILE", help="the input as JSON; '-': from stdin")] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="WHO", help="who starts it; default: OUTLAST_BY, the login name")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="only start it; a worker drives it")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="stay through every wait")] = False,
) -> int:
    """Start a run and drive it until it waits or ends. Exit code: 0 done, 3 it waits, 4 it failed or was cancelled."""
    if detach and follow:
        raise UsageError("--detach and --follow exclude each other")
    app_name, text = positionals(words_ or [], has_input=input_ is not None)
    if app_name is not None:
        if options.app is not None:
            raise UsageError("the app is named twice: by --app and before TEXT")
        options = dataclasses.replace(options, app=app_name)
    what = values.input_file(input_) if input_ is not None else values.text(text or "")
    tags, who = values.tags(tag), settings.who(by)
    with opened(options, need_agents=not (detach and agent)) as app:
        which = chosen(app, agent)
        if detach:
            return started(app.start(which, what, run_id=run_id, tags=tags, by=who), options)
        printer = Printer(app, options, run_id=run_id)
        return drive(app, printer, options, lambda: app.run(which, what, run_id=run_id, tags=tags, by=who), follow=follow)


def resume(
    options: Options,
    *,
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    follow: Annotated[bool, typer.Option("--follow", help="stay through every wait")] = False,
) -> int:
    """Go on with a run from its last checkpoint. Exit codes as of `run`."""
    with opened(options, need_agents=True, run_id=run_id) as app:
        head = app.head(run_id)
        if not options.json and head.seq:
            latest = app.latest(run_id)
            render.say(f"loaded checkpoint {latest.seq} ({latest.status})")
        printer = Printer(app, options, run_id=run_id, printed=head.seq)
        return drive(app, printer, options, lambda: app.resume(run_id), follow=follow)


def positionals(given: list[str], *, has_input: bool) -> tuple[str | None, str | None]:
    """(APP, TEXT): one is TEXT, two are both; with --input the one is APP."""
    match given, has_input:
        case [], True:
            return None, None
        case [app], True:
            return app, None
        case [text], False:
            return None, text
        case [app, text], False:
            return app, text
        case [], False:
            raise UsageError("TEXT is missing: what the agent is asked", hint='outlast run MODULE:ATTR "TEXT", or --input FILE')
        case _:
            most = "APP" if has_input else "APP and TEXT"
            raise UsageError(f"too many arguments: {most} at most, not {len(given)}", hint="put TEXT in quotes")


def chosen(app: Outlast, name: str | None) -> Any:
    """The agent to run. Without a name the only one; a name that this app lacks is left to `start`, which may name others' agents."""
    agents = app.agents
    if name is not None:
        if agents and name not in agents:
            raise UsageError(f"this app has no agent {name!r}: it has {', '.join(sorted(agents))}")
        return agents.get(name, name)
    parts = {tool.agent.name for agent in agents.values() for tool in agent.tools if tool.agent is not None}
    whole = [agent for agent in agents.values() if agent.name not in parts]  # a sub-agent is started by its parent
    if len(whole) == 1:
        return whole[0]
    if not agents:
        raise UsageError("this app has no agents", hint="Outlast(agents=[...])")
    raise UsageError(f"this app has several agents: {', '.join(sorted(agents))}", hint="choose with --agent NAME")


def started(head: RunHead, options: Options) -> int:
    if options.json:
        render.document(head.to_dict())
    else:
        render.say(words.head_line(head))
        render.say("\n".join(words.go_on([f"outlast worker --until-idle{options.repeated()}", words.resume_command(head.run_id, options)])))
    return 0


# ---- driving ------------------------------------------------------------------------------------------------------------------


def drive(app: Outlast, printer: Printer, options: Options, begin: Callable[[], Awaitable[Run[Any]]], *, follow: bool) -> int:
    from outlast import sync

    app.listen(printer.heard)
    try:
        run = sync.run(driven(app, printer, begin, follow=follow))
    except KeyboardInterrupt:
        return interrupted(printer.run_id, options)
    printer.end(run)
    if run.status == "done":
        return 0
    return WAITS if not run.finished else FAILED


async def driven(app: Outlast, printer: Printer, begin: Callable[[], Awaitable[Run[Any]]], *, follow: bool) -> Run[Any]:
    import asyncio

    run = await begin()
    while follow and not run.finished:
        printer.waits(run)
        head = await moved(app, printer, run)
        try:
            run = await app.resume(run.run_id) if not head.finished else await asyncio.to_thread(app.get, run.run_id)
        except RunBusy:  # a worker was quicker: it drives, we watch
            await asyncio.sleep(POLL.total_seconds())
            run = await asyncio.to_thread(app.get, run.run_id)
    return run


async def moved(app: Outlast, printer: Printer, run: Run[Any]) -> RunHead:
    """Wait until there is something new about a run that waits: somebody wrote to it, or its time has come."""
    import asyncio

    seen = (run.status, run.updated_at)
    while True:
        await asyncio.sleep(POLL.total_seconds())
        head = await asyncio.to_thread(app.head, run.run_id)
        await asyncio.to_thread(printer.catch_up, head.seq)
        due = head.wake_at is not None and head.wake_at <= datetime.now(UTC)
        if head.finished or (head.status, head.updated_at) != seen or (due and head.lease_owner is None):
            return head


def interrupted(run_id: str | None, options: Options) -> int:
    hint = words.resume_command(run_id, options) if run_id else f"outlast runs --unfinished{options.repeated()}"
    what = f"interrupted: {run_id} is kept" if run_id else "interrupted"
    if options.json:
        error = {"type": "interrupted", "message": what, "hint": hint, "run_id": run_id, "gate": None}
        render.document({"type": "error", "error": error}, err=True)
    else:
        render.say(f"\n{what}; go on with\n  {hint}", err=True)
    return INTERRUPTED


class Printer:
    """Prints a run's checkpoints in order, each once, whether it was heard of or read."""

    def __init__(self, app: Outlast, options: Options, *, run_id: str | None, printed: int = 0) -> None:
        self.app = app
        self.options = options
        self.run_id = run_id
        self.printed = printed
        self.told: tuple[str, str | None] | None = None  # the wait that --follow has shown
        self.failed: OSError | None = None  # stdout cannot be written to: said once the run is safe
        self.lock = threading.RLock()

    def heard(self, event: Event) -> None:
        with self.lock:
            self.run_id = self.run_id or event.run_id
            if event.run_id != self.run_id:
                return
            try:
                self._heard(event)
            except OSError as e:
                self.failed = e

    def _heard(self, event: Event) -> None:
        if event.type != "checkpoint":
            self.catch_up(event.seq - 1 if event.type in {"text", "reset"} else event.seq)
            if self.options.json and event.type != "text":
                render.document(event.to_dict())
            return
        self.catch_up(event.seq - 1)
        if event.seq > self.printed and event.message is not None and event.status is not None:
            self.printed = event.seq
            self._print(event.seq, event.status, event.message, event.to_dict)

    def catch_up(self, seq: int) -> None:
        """Print what was saved up to `seq` and not heard of."""
        with self.lock:
            if self.printed >= seq or self.run_id is None:
                return
            for checkpoint in self.app.checkpoints(self.run_id, after=self.printed):
                if checkpoint.seq > seq:
                    return
                self.printed = checkpoint.seq
                self._print(checkpoint.seq, checkpoint.status, checkpoint.message, checkpoint.to_dict)

    def _print(self, seq: int, status: str, message: dict[str, Any], to_dict: Callable[[], dict[str, Any]]) -> None:
        if self.options.json:
            render.document(to_dict())
        else:
            render.say(render.checkpoint_line(seq, status, message))

    def waits(self, run: Run[Any]) -> None:
        """--follow: say once why the run waits."""
        self.run_id = run.run_id
        self.catch_up(run.seq)
        if not self.options.json and run.waiting and self.told != (run.status, run.reason):
            self.told = (run.status, run.reason)
            render.say("\n".join(words.paused(run, self.options)))

    def end(self, run: Run[Any]) -> None:
        """Say how it stopped, and raise what went wrong with printing."""
        self.run_id = run.run_id
        self.catch_up(run.seq)
        if self.failed is not None:
            raise self.failed
        if self.options.json:
            render.document(run.to_dict())
        elif run.status == "done":
            said = run.output if isinstance(run.output, str) else render.json_text(run.to_dict()["output"])
            if "\n" in said.strip() or len(f"model: {said}") > render.LINE_WIDTH:  # the last line did not show all of it
                render.say(f"\n{said}")
        elif run.waiting:
            render.say("\n".join(words.paused(run, self.options)))
        else:
            said = f"{run.status}: {run.reason}" if run.reason else str(run.status)
            render.say("\n".join(["", render.line(said), *words.go_on(words.commands(run, run.gates, self.options))]))

"""`worker`: drive every run that can go on, until told to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import settings
from outlast.cli import render, values
from outlast.cli.options import Options, command
from outlast.cli.target import opened
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast import Outlast

log = logging.getLogger("outlast.worker")

VOLATILE = frozenset({"overlay", "tmpfs", "ramfs"})


def register(cli: typer.Typer) -> None:
    command(cli, "worker")(worker)


def worker(
    options: Options,
    *,
    app_name: Annotated[str | None, typer.Argument(metavar="[APP]", help="MODULE:ATTR, as --app")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", metavar="N", help="runs at once; default 10")] = None,
    agent: Annotated[list[str] | None, typer.Option("--agent", metavar="A", help="only runs of this agent; may be repeated")] = None,
    grace: Annotated[str | None, typer.Option("--grace", metavar="DURATION", help="for running steps at the end; default 25s")] = None,
    health_port: Annotated[int | None, typer.Option("--health-port", metavar="N", help="serve /livez, /readyz and /metrics there")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="URL", help="take the steps for an engine; default: OUTLAST_ENGINE, built-in")
    ] = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="end when every unfinished run waits")] = False,
) -> int:
    """Drive runs. The first SIGTERM or Ctrl-C lets running steps end (exit code 0), the second stops at once."""
    from outlast import sync

    if app_name is not None:
        if options.app is not None:
            raise UsageError("the app is named twice: by --app and as APP")
        options = dataclasses.replace(options, app=app_name)
    at_once = settings.concurrency(concurrency)
    patience = settings.grace(values.duration(grace, "--grace") if grace is not None else None)
    port = settings.health_port(health_port)
    with opened(options, need_agents=True) as app:
        if engine is not None:
            app.use_engine(engine)
        warn_where_volatile(settings.store(app._given).path)
        sync.run(works(app, concurrency=at_once, agents=agent or [], grace=patience, until_idle=until_idle, port=port))
    return 0


def warn_where_volatile(file: Path | None, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Say so where a SQLite file would be gone with its container, or at the next boot."""
    if file is None or not mounts.is_file():
        return
    kind = file_system(file.resolve(), mounts.read_text(encoding="utf-8", errors="replace"))
    if kind in VOLATILE:
        log.warning("%s is on %s and goes with its container or the next boot: mount a volume there, or use Postgres", file, kind)


def file_system(file: Path, mountinfo: str) -> str:
    """The type of the file system that holds this path: of the longest mount point above it, the last one mounted there."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4])  # blanks are written as \040
        if file.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind


async def works(app: Outlast, *, concurrency: int, agents: list[str], grace: timedelta, until_idle: bool, port: int | None) -> None:
    """`app.work` as a task that signals cancel, which drains it, with the health pages beside it."""
    import asyncio

    task = asyncio.create_task(app.work(concurrency=concurrency, agents=agents, until_idle=until_idle, grace=grace))
    asked_to_end = False

    def asked(signum: signal.Signals) -> None:
        nonlocal asked_to_end
        if asked_to_end:
            render.say(f"outlast: second {signum.name}, stopping now; what was saved stands, the same command goes on", err=True)
            os._exit(128 + signum)  # no clean-up: a dead process's leases are over at once
        asked_to_end = True
        log.info("%s: no new runs are taken, running steps have %gs to end", signum.name, grace.total_seconds())
        task.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked, signum)
    async with contextlib.AsyncExitStack() as stack:
        if port is not None:
            from outlast.cli.health import serving

            served = await stack.enter_async_context(serving(app, port, ending=lambda: asked_to_end))
            log.info("health pages on port %d", served)
        try:
            await task
        except asyncio.CancelledError:
            if not asked_to_end:
                raise
    log.info("stopped" if asked_to_end else "idle: every unfinished run waits")

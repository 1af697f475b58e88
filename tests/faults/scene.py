"""The run that the fault tests disturb: three turns, an effect of every kind, on a file of its own."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.world import Ledger, asks, tools, use

from outlast import Agent, Event, Outlast
from outlast.errors import RunNotFound
from outlast.models import ScriptedModel

Tell = Callable[[Any], None]
Life = Callable[[Tell], None]  # of a process; it tells what the test is to know
RUN = "run-faulty"
SCRIPT: list[Any] = [
    asks(use("look", "toolu_01", text="a"), use("deliver", "toolu_02", text="b")),
    asks(use("act_checked", "toolu_03", text="c")),
    asks(use("deliver", "toolu_04", text="d")),
    "Done.",
]
EXPECTED = {"deliver": 2, "act_checked": 1}


def app_in(folder: Path, heard: Callable[[Event], None] | None = None) -> tuple[Outlast, Agent[str]]:
    agent = Agent("disturbed", model=ScriptedModel(SCRIPT), tools=list(tools().values()))
    return Outlast(folder / "outlast.db", agents=[agent], deps=Ledger(folder / "ledger"), on_event=heard), agent


def effects(folder: Path) -> dict[str, int]:
    ledger = Ledger(folder / "ledger")
    return {name: len(ledger.lines(name)) for name in EXPECTED}


def in_a_child(life: Life, limit_s: int) -> tuple[int, list[Any]]:
    """A life in a process forked from this one: (how it ended, what it told before)."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        signal.alarm(limit_s)
        code = 1
        try:
            life(lambda what: os.write(into, (json.dumps(what) + "\n").encode()) and None)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out) as pipe:
        told = [json.loads(line) for line in pipe]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def taken_up(folder: Path) -> Life:
    """The life after the disturbed one: nothing is in its way."""

    def life(tell: Tell) -> None:
        app, agent = app_in(folder)
        with app:
            try:
                before = app.head(RUN).seq
            except RunNotFound:
                before = 0
            run = app.run_sync(agent, "go", run_id=RUN)
            tell({"before": before, "status": run.status, "reason": run.reason, "messages": run.messages, "effects": effects(folder),
                  "check": app.store_check()})  # fmt: skip

    return life

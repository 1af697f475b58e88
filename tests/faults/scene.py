"""The run that the fault tests disturb: three turns, an effect of every kind, on a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.world import Ledger, asks, tools, use

from outlast import Agent, Event, Outlast
from outlast.models import ScriptedModel

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

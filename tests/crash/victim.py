"""A process that drives one run to its end, if nobody kills it: `python -m tests.crash.victim FOLDER SCRIPT open|gated`.

`OUTLAST_CRASH_AT` in its environment ends it at a point, by SIGKILL.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from tests.crash.scripts import RUN, SCRIPTS
from tests.support.world import GATE, Ledger, finish, tools

from outlast import Agent, Outlast
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock


def app_of(folder: Path, script: str, *, gated: bool, clock: ManualClock) -> tuple[Outlast, Agent[str]]:
    model = ScriptedModel(SCRIPTS[script], log=folder / "model.log")
    agent = Agent("crashing", model=model, tools=list(tools(GATE if gated else None).values()))
    return Outlast(folder / "outlast.db", agents=[agent], deps=Ledger(folder / "ledger"), clock=clock), agent


def main() -> None:
    folder, script, gated = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "gated"
    clock = ManualClock(datetime.now(UTC))
    app, agent = app_of(folder, script, gated=gated, clock=clock)
    with app:
        run = finish(app, app.run_sync(agent, "go", run_id=RUN), Ledger(folder / "ledger"), clock)
        print(run.status)


if __name__ == "__main__":
    main()

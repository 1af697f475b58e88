"""Postgres behind a network and a server that fail: every COMMIT cut or swallowed, servers killed, poolers, standbys.

What counts is the world outside: each effect there once, and each run at its end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.pgproxy import MODES, Mode, Proxy
from support.postgres import Server
from support.world import Ledger, asks, assert_whole, tools, use

from outlast import Agent, Outlast, Run, approval
from outlast.errors import CommitUnknown, OutlastError, RunBusy, StoreError
from outlast.models import ScriptedModel
from outlast.settings import parse_store
from outlast.stores.postgres import PostgresStore

LEASE = timedelta(seconds=1)
SCRIPT = [
    asks(use("deliver", "c1", text="parcel"), use("act", "c2", text="refund")),
    asks(use("deliver", "c3", text="note")),
    "All is done.",
]
GATED = approval(to="support-lead", noun="parcel", within=timedelta(hours=4))
KEYS = ["c1", "c2", "c3"]


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(str(postgres.socket_dir), postgres.port) as proxy:
        yield proxy


@dataclass
class Play:
    """A support agent whose store is behind the proxy; `sure` is the same store, asked directly."""

    app: Outlast
    sure: Outlast
    ledger: Ledger
    unsure: int = 0

    def run(self, run_id: str) -> Run[Any]:
        """As a careful program does it: start, decide and resume are each called again until they are answered."""
        self.again(lambda: self.app.start("courier", "send it", run_id=run_id))
        for _ in range(60):
            run = self.again(lambda: self.app.resume_sync(run_id))
            if run.finished:
                return run
            for gate in [g for g in run.gates if g.outcome is None]:
                assert gate.call_id is not None
                if gate.kind == "approval":
                    self.again(lambda gate=gate: self.app.decide(run_id, gate.call_id, approved=True, decided_by="priya"))
                else:
                    self.verify(run_id, gate.call_id)
        raise AssertionError(f"{run_id} does not end")

    def verify(self, run_id: str, call_id: str) -> None:
        """A person looks whether it happened."""
        if self.ledger.has(f"{run_id}:{call_id}"):
            self.again(lambda: self.app.verify(run_id, call_id, outcome="happened", result={"done": "x"}, decided_by="priya"))
        else:
            self.again(lambda: self.app.verify(run_id, call_id, outcome="run_again", decided_by="priya"))

    def again(self, call: Callable[[], Any]) -> Any:
        for _ in range(400):
            try:
                return call()
            except RunBusy:
                self.sure._store.wait_for_change(None, 0)
                self.sure._store.wait_for_change(-1, 0)
            except StoreError as e:
                self.unsure += isinstance(e, CommitUnknown)
            _pause()
        raise AssertionError("never answered")

    def effects(self, run_id: str) -> list[str]:
        return sorted(line["key"].removeprefix(f"{run_id}:") for line in self.ledger.lines() if line["key"].startswith(f"{run_id}:"))


def _pause() -> None:
    import threading

    threading.Event().wait(0.02)


@pytest.fixture
def play(postgres: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Play]:
    schema, ledger = postgres.fresh_schema(), Ledger(tmp_path / "ledger")
    sure = parse_store(postgres.url(schema=schema))
    PostgresStore(sure.url, schema=sure.schema, shown=sure.shown).migrate()
    courier = Agent("courier", model=ScriptedModel(SCRIPT), tools=[tools(GATED)["deliver"], tools()["act"]])
    with (
        Outlast(postgres.url(schema=schema, port=proxy.port), agents=[courier], deps=ledger, lease=LEASE) as app,
        Outlast(postgres.url(schema=schema), agents=[courier], deps=ledger, lease=LEASE) as direct,
    ):
        yield Play(app, direct, ledger)


@pytest.mark.parametrize("mode", MODES)
def test_every_commit_of_a_run_is_cut(play: Play, proxy: Proxy, mode: Mode) -> None:
    """0 doubled, 0 lost, whichever COMMIT it is."""
    nth, cut = 1, 0
    while True:
        run_id = f"{mode}-{nth}"
        proxy.arm(mode, nth)
        run = play.run(run_id)
        seen, cuts = proxy.seen, proxy.cuts
        proxy.disarm()
        assert (run.status, run.output) == ("done", "All is done."), run_id
        assert play.effects(run_id) == KEYS, run_id
        assert_whole(play.sure, run_id)
        cut += cuts
        if not cuts:  # the run made fewer COMMITs than that
            assert seen < nth
            break
        nth += 1
    assert cut == nth - 1 >= 12

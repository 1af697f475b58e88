"""Every release's database: the current code opens it, finds it whole, and finishes every run in it."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from tests.golden.world import BEGIN, WAITS, make, opened
from tests.support.world import Ledger, assert_whole

from outlast.core import run as r
from outlast.runtime.clock import ManualClock

HERE = Path(__file__).parent
DATABASES = sorted(HERE.glob("*.db"))


def test_there_is_one_for_every_format() -> None:
    assert DATABASES


def test_changelog_says_for_each_format_what_changed() -> None:
    said = re.findall(r"^- Journal format (\d+): \S.{10,}", (HERE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(map(int, said)) == list(range(1, r.FORMAT + 1))


@pytest.fixture(params=[*DATABASES, None], ids=lambda p: p.stem if p else "made now")
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Ledger]:
    path, ledger = tmp_path / "outlast.db", tmp_path / "ledger"
    if request.param is None:
        make(path, ledger)
    else:
        shutil.copy(request.param, path)
        path.chmod(0o600)  # a checkout has its own idea of modes
        shutil.copy(request.param.with_suffix(".ledger"), ledger)
    return path, Ledger(ledger)


def test_current_code_finishes_every_run(database: tuple[Path, Ledger]) -> None:
    path, ledger = database
    clock = ManualClock(BEGIN + timedelta(minutes=30))
    with opened(path, ledger, clock) as app:
        assert {run_id: app.head(run_id).status for run_id in WAITS} == WAITS
        assert app.store_check() == []
        assert {gate.run_id for gate in app.inbox()} >= {"approval", "verification", "budget", "parent:toolu_01"}
        assert app.check_deploy().ok, app.check_deploy().groups
        for run_id in WAITS:
            app.plan(run_id)

        app.decide("approval", approved=True, decided_by="priya")
        app.decide("parent:toolu_01", approved=True, decided_by="priya")
        app.decide("budget", approved=True, decided_by="owner")
        app.verify("verification", outcome="happened", decided_by="priya")
        app.event("event", "shipped", {"parcel": 1})
        app.send("failed", "Please.")
        app.send("done", "And now?")
        clock.move(timedelta(hours=1))
        for _ in range(3):
            app.work_sync(until_idle=True)
            for gate in app.inbox():
                if gate.kind == "verification":
                    app.verify(gate.run_id, gate.gate_id, outcome="happened", decided_by="priya")
                elif gate.run_id == "started":
                    app.decide("started", approved=True, decided_by="priya")
        ends = {run_id: app.head(run_id).status for run_id in WAITS}
        assert ends == dict.fromkeys(WAITS, "done") | {"failed": "failed", "cancelled": "cancelled"}
        for run_id in WAITS:
            assert_whole(app, run_id)
    keys = sorted(line["key"] for line in ledger.lines())
    assert keys == sorted(["approval:toolu_01", "approved:toolu_01", "started:toolu_01", "parent:toolu_01:toolu_01", "budget:toolu_01",
                           "verification:toolu_01", "died:toolu_01", "died:toolu_02"])  # fmt: skip

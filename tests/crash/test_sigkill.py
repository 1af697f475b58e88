"""The same by SIGKILL on a real process: what a simulated death could not show (threads, buffers, locks, leases of a process that is gone)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.crash.scripts import RUN
from tests.crash.test_in_process import Outcome, assert_as_undisturbed, live
from tests.crash.victim import app_of
from tests.support.world import EFFECTS, Ledger, assert_whole, finish

from outlast.runtime.clock import ManualClock

ROOT = Path(__file__).parents[2]


def killed(folder: Path, script: str, *, gated: bool, at: str) -> None:
    """One life in a process of its own, ended by SIGKILL at that point."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.crash.victim", str(folder), script, "gated" if gated else "open"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OUTLAST_CRASH_AT": at}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, f"{at} was not passed: {done.stdout}{done.stderr}"


def taken_up(folder: Path, script: str, *, gated: bool, deaths: list[str]) -> Outcome:
    """The next life, here: it must not wait for the dead process's lease."""
    clock = ManualClock(datetime.now(UTC))
    app, agent = app_of(folder, script, gated=gated, clock=clock)
    with app:
        ledger = Ledger(folder / "ledger")
        run = finish(app, app.run_sync(agent, "go", run_id=RUN), ledger, clock)
        assert run.status == "done", run.reason
        assert_whole(app, RUN)
        return Outcome(run.messages, len((folder / "model.log").read_text().splitlines()), deaths, [], ledger)


@pytest.mark.parametrize("script", EFFECTS)
def test_killed_around_its_effect(tmp_path: Path, script: str) -> None:
    calm = live(tmp_path / "calm", script, gated=False)
    n = Counter(calm.passed[: calm.passed.index(f"tool.after:{script}")])["commit.after"]
    for at in (f"tool.before:{script}", f"tool.after:{script}", f"commit.before#{n + 1}", f"commit.after#{n + 1}"):
        folder = tmp_path / at
        killed(folder, script, gated=False, at=at)
        assert_as_undisturbed(taken_up(folder, script, gated=False, deaths=[at]), calm)


def test_killed_at_every_commit_of_a_gated_call(tmp_path: Path) -> None:
    calm = live(tmp_path / "calm", "act", gated=True)
    commits = Counter(calm.passed)["commit.after"]
    for at in [f"commit.{side}#{n}" for n in range(1, commits + 1) for side in ("before", "after")]:
        folder = tmp_path / at
        killed(folder, "act", gated=True, at=at)
        assert_as_undisturbed(taken_up(folder, "act", gated=True, deaths=[at]), calm)


@pytest.mark.parametrize("at", ["model.before", "model.after", "model.after#2", "release.after"])
def test_killed_around_the_model(tmp_path: Path, at: str) -> None:
    calm = live(tmp_path / "calm", "a batch", gated=False)
    folder = tmp_path / "death"
    killed(folder, "a batch", gated=False, at=at)
    assert_as_undisturbed(taken_up(folder, "a batch", gated=False, deaths=[at]), calm)


def test_killed_again_and_again(tmp_path: Path) -> None:
    calm = live(tmp_path / "calm", "a batch", gated=True)
    deaths = ["claim.after", "tool.after:act_checked", "tool.before:act", "check.after:act_checked"]
    folder, found = tmp_path / "death", []
    for at in ["commit.after#2", *deaths]:
        killed_or_done = subprocess.run(
            [sys.executable, "-m", "tests.crash.victim", str(_made(folder)), "a batch", "gated"], cwd=ROOT,
            env={**os.environ, "OUTLAST_CRASH_AT": at}, capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
        if killed_or_done.returncode == -signal.SIGKILL:
            found.append(at)
    assert len(found) >= 3
    assert_as_undisturbed(taken_up(folder, "a batch", gated=True, deaths=found), calm)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder

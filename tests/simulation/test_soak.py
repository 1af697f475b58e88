"""A short slice of the soak: real workers, real SIGKILLs and SIGSTOPs in windows held open, and the books against the world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.testing import soak, soak_agent
from outlast.testing.soak import GivenUp, Soak
from outlast.testing.soak_agent import VARIABLE, WINDOWS, Windows, World, inside
from support.postgres import Server

SEED = 20261129


@pytest.fixture
def quick_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SETTLE_S", 40.0)


def test_killed_and_stopped_workers_do_nothing_twice_and_lose_nothing(tmp_path: Path, quick_to_give_up: None) -> None:
    report = Soak(tmp_path, kills=10, stops=2, runs=10, workers=3, seed=SEED, windows=1)()
    print("\n".join(report.lines()))
    assert report.problems == []
    assert report.kills >= 10
    assert report.stops == 2
    assert report.effects > 0


def test_clocks_that_are_set_and_a_server_that_is_killed(tmp_path: Path, quick_to_give_up: None, postgres: Server) -> None:
    """The same with the workers' clocks set forward and back, and on a Postgres server of its own that is killed."""
    jumped = Soak(tmp_path / "jumps", kills=4, stops=0, runs=6, workers=2, seed=SEED, windows=0, jumps=3)()
    assert jumped.problems == []
    assert jumped.jumps == 3
    killed = Soak(tmp_path / "server", kills=3, stops=0, runs=6, workers=2, seed=SEED, windows=0, server_kills=2)()
    assert killed.problems == []
    assert killed.server_kills == 2


def test_a_death_inside_a_window_is_told(tmp_path: Path) -> None:
    """What the victim was doing stands in a file when it is gone."""
    program = (
        "import os, signal, sys, threading; from pathlib import Path; from outlast.testing.soak_agent import Windows\n"
        "windows = Windows(Path(sys.argv[1]), {'tool.after': 60000.0}, 1)\n"
        "threading.Thread(target=windows, args=('tool.after:pay',), daemon=True).start()\n"
        "while not windows._shared[:].strip(bytes(1)): threading.Event().wait(0.001)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    assert child.wait(timeout=30) == -9
    assert inside(tmp_path, child.pid) == {"effect"}


def test_a_window_that_was_passed_is_not_counted(tmp_path: Path) -> None:
    windows = Windows(tmp_path, {"model.after": 1.0}, 1)
    for point in ("model.before", "model.after", "claim.after"):
        windows(point)
    assert inside(tmp_path, os.getpid()) == set()
    assert set(soak_agent.OF_POINT.values()) == set(WINDOWS)


class Quiet:
    """A worker of no soak's: it never begins, and ends with this code once somebody waits for it."""

    def __init__(self, code: int | None = None) -> None:
        self.pid, self.code = 2**30, code

    def poll(self) -> None: ...

    def kill(self) -> None: ...

    def last_words(self) -> str:
        return "nothing"

    def wait(self) -> int | None:
        return self.code


def test_a_worker_that_ends_by_itself_is_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing in its log, and it was inside a window."""
    soaked = Soak(tmp_path, kills=1, stops=0, runs=0, workers=1, seed=SEED, windows=0)
    monkeypatch.setattr(soaked, "_worker", Quiet)
    monkeypatch.setattr(soaked, "_aim", lambda *_: None)
    for code, kills in ((70, 0), (0, 0), (-9, 1)):
        soaked.workers[:] = [Quiet(code)]  # type: ignore[list-item]  # what is asked of one here
        soaked._kill([0])
        assert soaked.report.kills == kills
    soaked.app.close()
    assert soaked.report.other == ["a worker ended by itself with 70: nothing", "a worker ended by itself with 0: nothing"]


def test_workers_that_cannot_begin_end_the_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end at once, by an error while they are imported; others hang."""
    monkeypatch.setattr(soak, "SETTLE_S", 1.0)
    soaked = Soak(tmp_path / "ended", kills=1, stops=0, runs=1, workers=2, seed=SEED, windows=0)
    soaked.env[VARIABLE] = "{}"
    report = soaked()
    assert report.kills == 0
    assert sum(problem.startswith("a worker ended by itself with 1: ") for problem in report.problems) == soak.MOST_WRONG
    assert "'world'" in report.other[0]
    monkeypatch.setattr(soak, "STALLED_S", 0.5)
    hanging = Soak(tmp_path / "hanging", kills=1, stops=0, runs=0, workers=1, seed=SEED, windows=0)
    hanging.workers[:] = [Quiet()]  # type: ignore[list-item]  # all that is asked of a worker
    with pytest.raises(GivenUp, match="no fault could be done for 0 s; 0 of 1 workers have begun"):
        hanging._strike()
    hanging.app.close()


def test_the_audit_is_red_for_an_effect_that_happened_twice(tmp_path: Path) -> None:
    """Broken on purpose: the world is told of a call twice, of one never, and a run does not end."""
    soaked = Soak(tmp_path, kills=0, stops=0, runs=0, workers=0, seed=SEED, windows=0)
    world = World(tmp_path)
    soaked.app.start("soaked", "twice", run_id="soak-00000")
    soaked.ids.append("soak-00000")
    world.act("soak-00000:toolu_0_0")
    world.act("soak-00000:toolu_0_0")
    soaked._audit()
    soaked.app.close()
    assert soaked.report.duplicated == ["soak-00000:toolu_0_0 happened 2 times"]
    assert [line.split(":")[0] for line in soaked.report.stuck] == ["soak-00000"]
    assert len(soaked.report.problems) == 2

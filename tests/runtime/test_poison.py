"""A run that kills its workers is driven alone, is given up after five deaths, and takes nobody along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import Outlast

PROGRAM = '''
import os, sys
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel

here = Path(__file__).parent

def note(name):
    with open(here / name, "a") as f:
        f.write(f"{os.getpid()}\\n")

@tool(effect="read")
def die() -> str:
    """End the process."""
    note("deaths")
    os._exit(137)

@tool(effect="at_most_once")
def count() -> str:
    """Count."""
    note("counted")
    return "counted"

def pick(messages):
    return [{"type": "tool_use", "id": "toolu_01", "name": "die" if "bad" in str(messages[0]) else "count", "input": {}}]

agent = Agent("poison", model=ScriptedModel([pick, "done"]), tools=[die, count])
app = Outlast(here / "poison.db", agents=[agent])
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def work(folder: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "worker", "program", "--until-idle"], cwd=folder, env=environment, capture_output=True, timeout=120, check=False
    )
    return done.returncode


def test_crash_attempts_not_counted(folder: Path) -> None:
    with Outlast(folder / "poison.db") as app:
        app.start("poison", "bad", run_id="bad")
        for n in range(5):
            app.start("poison", "good", run_id=f"good-{n}")
    codes = []
    while 0 not in codes:
        codes.append(work(folder))
        assert len(codes) < 6
    with Outlast(folder / "poison.db") as app:
        bad = app.head("bad")
        assert (bad.status, bad.reason) == ("failed", "worker died 5 times while running tool die")
        good = [app.head(f"good-{n}") for n in range(5)]
        assert {(h.status, h.attempts) for h in good if h.status == "done"} == {("done", 0)}
        # whoever was running its at-most-once call in a dying worker is asked about, never run again
        assert {h.status for h in good} <= {"done", "waiting_for_verification"}
    assert len((folder / "deaths").read_text().splitlines()) == 5
    assert codes.count(137) == 2  # the first two deaths took a worker along, the three after them a process of their own
    assert len((folder / "counted").read_text().splitlines()) == 5


def test_retry_takes_a_poison_run_up_again(folder: Path) -> None:
    with Outlast(folder / "poison.db") as app:
        app.start("poison", "bad", run_id="bad")
    while work(folder):
        pass
    with Outlast(folder / "poison.db") as app:
        again = app.retry("bad")
        assert (again.status, again.attempts, again.reason) == ("running", 0, None)

"""A run that kills its workers is driven alone, is given up after five deaths, and takes nobody along."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.waiting import until

from outlast import Outlast, alone
from outlast.stores import owner

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
        [
            sys.executable,
            "-m",
            "outlast",
            "worker",
            "program",
            "--until-idle",
            "--concurrency",
            "3",
        ],  # two good ones at most die with a bad one
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
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
    counted = len((folder / "counted").read_text().splitlines())
    assert sum(h.status == "done" for h in good) <= counted <= 5  # killed between its intent and the act, it never counted


def test_retry_takes_a_poison_run_up_again(folder: Path) -> None:
    with Outlast(folder / "poison.db") as app:
        app.start("poison", "bad", run_id="bad")
    while work(folder):
        pass
    with Outlast(folder / "poison.db") as app:
        again = app.retry("bad")
        assert (again.status, again.attempts, again.reason) == ("running", 0, None)


SLOW = '''
import os, sys, threading
from datetime import timedelta
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel

here = Path(__file__).parent
if sys.argv[0] == "-c":
    threading.Event().wait(7)  # a child that drives alone is long in coming: much longer than the lease

@tool(effect="read")
def die_twice() -> str:
    """End the process, at first."""
    with open(here / "begun", "a") as f:
        f.write("x")
    if (here / "begun").stat().st_size <= 2:
        os._exit(137)
    return "at last"

agent = Agent("slow", model=ScriptedModel([[{"type": "tool_use", "id": "toolu_01", "name": "die_twice", "input": {}}], "done"]), tools=[die_twice])
app = Outlast(here / "poison.db", agents=[agent], lease=timedelta(seconds=3))
'''


def test_a_child_that_starts_slowly_is_no_death(tmp_path: Path) -> None:
    """The worker keeps the lease until the child has it; else the run would be taken again and again, and given up."""
    (tmp_path / "program.py").write_text(SLOW)
    with Outlast(tmp_path / "poison.db") as app:
        app.start("slow", "go", run_id="slow")
    assert [work(tmp_path) for _ in range(3)] == [137, 137, 0]
    with Outlast(tmp_path / "poison.db") as app:
        run = app.get("slow")
        assert (run.status, run.output) == ("done", "done")
        journal = list(app.journal("slow"))
    assert max(row.fence for row in journal) == 4  # three claims, and one child that took the third over


HANGS = '''
import os, signal, sys, threading
from datetime import timedelta
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel

here, how = Path(__file__).parent, (Path(__file__).parent / "how").read_text()
if sys.argv[0] == "-c":
    (here / "child").write_text(str(os.getpid()))
    if how == "import":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()

@tool(effect="read")
def stop() -> str:
    """Stop the whole process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "at last"

agent = Agent("hangs", model=ScriptedModel([[{"type": "tool_use", "id": "toolu_01", "name": "stop", "input": {}}], "done"]), tools=[stop])
app = Outlast(here / "poison.db", agents=[agent], lease=timedelta(seconds=1))
'''


@pytest.mark.parametrize("how", ["import", "stop"])
def test_a_child_that_hangs_is_ended_and_its_lease_kept_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Before it has its lease, and with it."""
    (tmp_path / "hangs_program.py").write_text(HANGS)
    (tmp_path / "how").write_text(how)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(alone, "START_S", 600.0)
    monkeypatch.setattr(alone, "END_S", 1.0)
    monkeypatch.setattr(alone, "KILL_S", 0.5)
    app = runpy.run_path(str(tmp_path / "hangs_program.py"))["app"]
    app._target = "hangs_program:app"
    with app:
        app.start("hangs", "go", run_id="r")
        [lease] = app._store.claim(owner.me(), agents=["hangs"], lease_s=1)
        drive = app._alone(timedelta(0))
        assert drive is not None

        async def play() -> None:
            driving = asyncio.ensure_future(drive(lease, asyncio.Event()))
            child = tmp_path / "child"
            await asyncio.to_thread(until, app, lambda: child.exists() and child.read_text() != "")
            if how == "import":
                monkeypatch.setattr(alone, "START_S", 0)
            await asyncio.wait_for(driving, 90)

        asyncio.run(play())
        child = int((tmp_path / "child").read_text())
        assert not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text()
        assert app._keeper.held() == 0
        assert app._store.head("r").fence == (1 if how == "import" else 2)


LASTS = '''
import os, sys, threading
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel
from outlast.runtime.drive import Drive

here, told = Path(__file__).parent, threading.Event()
drain = Drive.drain

def drains(self, grace):
    (here / "drained").write_text(str(grace.total_seconds()))
    drain(self, grace)
    told.set()

if sys.argv[0] == "-c":
    Drive.drain = drains

@tool(effect="idempotent")
def count() -> str:
    """Count; it kills its worker twice, and then it lasts until it is told that its worker stops."""
    with open(here / "begun", "a") as f:
        f.write("x")
    if (here / "begun").stat().st_size <= 2:
        os._exit(137)
    return "counted" if told.wait(30) else "nobody said so"

def again(messages):
    return [{"type": "tool_use", "id": f"toolu_{len(messages)}", "name": "count", "input": {}}]

agent = Agent("lasts", model=ScriptedModel([again] * 50), tools=[count])
app = Outlast(here / "poison.db", agents=[agent])
'''


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_begins_nothing_new_once_its_worker_stops(tmp_path: Path, signum: signal.Signals) -> None:
    """Its call gets the grace and is saved, the lease goes back: when its worker is told to end, and when it died."""
    (tmp_path / "program.py").write_text(LASTS)
    with Outlast(tmp_path / "poison.db") as app:
        app.start("lasts", "go", run_id="r")
        assert [work(tmp_path) for _ in range(2)] == [137, 137]
        worker = subprocess.Popen(
            [sys.executable, "-m", "outlast", "worker", "program", "--grace", "19s"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, process_group=0)  # fmt: skip
        try:
            until(app, lambda: (tmp_path / "begun").stat().st_size == 3)
            if signum is signal.SIGINT:  # as a terminal does: to both
                os.killpg(worker.pid, signum)
            else:
                worker.send_signal(signum)
            until(app, lambda: app._store.head("r").lease_owner is None)
            assert worker.wait(30) == (-signal.SIGKILL if signum is signal.SIGKILL else 0)
        finally:
            worker.kill()
            worker.wait()
        head = app._store.head("r")
        assert (head.status, head.attempts, head.model_calls) == ("running", 0, 1)
        assert [row.kind for row in app.journal("r")][-2:] == ["CallFinished", "MessageAdded"]
    assert (tmp_path / "begun").stat().st_size == 3
    assert (tmp_path / "drained").read_text() == "19.0"


def test_a_stop_that_comes_while_the_child_starts_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to drive and the stop stand in its stdin together: it begins nothing, and the lease goes back."""
    (tmp_path / "lasts_program.py").write_text(LASTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    app = runpy.run_path(str(tmp_path / "lasts_program.py"))["app"]
    app._target = "lasts_program:app"
    with app:
        app.start("lasts", "go", run_id="r")
        [lease] = app._store.claim(owner.me(), agents=["lasts"], lease_s=30)
        drive = app._alone(timedelta(seconds=20))
        assert drive is not None

        async def play() -> None:
            stopping = asyncio.Event()
            stopping.set()
            await asyncio.wait_for(drive(lease, stopping), 60)

        asyncio.run(play())
        head = app._store.head("r")
        assert (head.status, head.lease_owner, head.attempts, head.model_calls) == ("running", None, 0, 0)
    assert not (tmp_path / "begun").exists()
    assert (tmp_path / "drained").exists()

"""What people and programs hear when they ask twice, too early, or at the wrong door: each hint is one that works."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import use

from outlast import Agent, Outlast, tool
from outlast.errors import GateClosed, Refused, RunBusy
from outlast.models import ScriptedModel


@tool
async def pay() -> str:
    """Pay."""
    raise ValueError("half way")


def in_doubt(folder: Path) -> Outlast:
    agent = Agent("a", model=ScriptedModel([[use("pay", "c")], "Done."]), tools=[pay])
    app = Outlast(folder / "o.db", agents=[agent])
    assert app.run_sync(agent, "go", run_id="r").status == "waiting_for_verification"
    return app


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("other", ["pay-2", None])
def test_it_happened_with_another_result_is_another_decision(tmp_path: Path, later: bool, other: Any) -> None:
    with in_doubt(tmp_path) as app:
        said: Any = {"outcome": "happened", "decided_by": "priya"}
        first = app.verify("r", "c", result="pay-1", **said)
        if later:
            assert app.resume_sync("r").status == "done"
        assert app.verify("r", "c", result="pay-1", **said).outcome == first.outcome == "happened"
        with pytest.raises(GateClosed, match="confirmed by priya, with another result"):
            app.verify("r", "c", result=other, **said)


def test_a_workers_run_is_not_opened_by_a_loop_of_ones_own(tmp_path: Path) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        app.start(agent, "go", run_id="r")
        with pytest.raises(Refused, match="is driven by built-in") as caught, app.open("r"):
            pass
        assert caught.value.hint == "outlast resume r"
        assert app.resume_sync("r").status == "done"
        with app.open("mine", "go"):
            pass
        app._agents["script"] = agent
        with pytest.raises(Refused, match="a program of its own") as caught:
            app.resume_sync("mine")
        assert "app.open('mine')" in caught.value.hint
        with app.open("mine") as run:
            run.append("Done.")
        assert app.head("mine").status == "done"


INTERRUPTED = '''
import signal, sys, threading
from datetime import timedelta
from pathlib import Path
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel

@tool(timeout=timedelta(hours=1))
async def slow() -> str:
    """Be interrupted."""
    import asyncio
    print("begun", flush=True)
    await asyncio.Event().wait()
    return "never"

agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "c", "name": "slow", "input": {}}], "Done."]), tools=[slow])
if __name__ == "__main__":
    Outlast(Path(__file__).parent / "o.db", agents=[agent]).run_sync(agent, "go", run_id="r")
'''


def test_after_ctrl_c_a_call_may_run_again_once_its_process_is_gone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        begun = threading.Event()
        reader = threading.Thread(target=lambda: (program.stdout.readline(), begun.set()))
        reader.start()
        happens(begun)
        with Outlast(tmp_path / "o.db") as app:
            program.send_signal(2)
            program.wait(LIMIT_S)
            reader.join()
            assert app.head("r").status == "waiting_for_verification"
            with pytest.raises(RunBusy, match="what it sent may still land") as e:  # and whoever looked has not seen it
                app.verify("r", outcome="run_again", decided_by="priya")
            assert e.value.until is not None and e.value.until - app._store.now() <= timedelta(seconds=5)

            def accepted() -> bool:
                with suppress(RunBusy):
                    app.verify("r", outcome="run_again", decided_by="priya")
                    return True
                return False

            until(app, accepted)
            [died] = [row for row in app.journal("r") if row.kind == "WorkerDied"]  # seen, and written down, once

            @tool
            async def slow() -> str:
                """Do it now."""
                return "done"

            agent = Agent("a", model=ScriptedModel([[use("slow", "c")], "Done."]), tools=[slow])
            with Outlast(tmp_path / "o.db", agents=[agent]) as other:
                other.work_sync(until_idle=True)
                assert other.head("r").status == "done"
            began = [row.at for row in app.journal("r") if row.kind == "CallStarted"]
            assert len(began) == 2
            assert began[1] - died.at >= timedelta(seconds=5)


def test_while_its_process_lives_it_may_not(tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    @tool(timeout=timedelta(milliseconds=50))
    def slow() -> str:
        """Outlive its time."""
        begun.set()
        happens(release)
        return "at last"

    agent = Agent("a", model=ScriptedModel([[use("slow", "c")], "Done."]), tools=[slow])
    with Outlast(tmp_path / "o.db", agents=[agent]) as app:
        try:
            assert app.run_sync(agent, "go", run_id="r").status == "waiting_for_verification"
            with pytest.raises(RunBusy):
                app.verify("r", outcome="run_again", decided_by="priya")
        finally:
            release.set()


def test_the_file_that_names_the_app_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.outlast]\napp = "named_by_file:app"\nstore = "o.db"\n')
    (tmp_path / "named_by_file.py").write_text(
        "from outlast import Agent, Outlast\nfrom outlast.models import ScriptedModel\n"
        'agent = Agent("a", model=ScriptedModel(["Done."]))\napp = Outlast(agents=[agent])\n'
    )
    below = tmp_path / "some" / "folder"
    below.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "run", "go"], cwd=below, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.db").exists()

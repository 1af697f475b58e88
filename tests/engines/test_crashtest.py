"""The crash test through an engine: the worker of the engine is killed at each point, and the next one ends the run as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engines.drivers import Driver, driver, free_port
from outlast import Agent, Tool, ToolContext, approval, tool
from outlast.cli import main
from outlast.errors import UsageError
from outlast.models import ScriptedModel
from outlast.testing import CrashReport
from outlast.testing.crashmatrix import POINTS
from outlast.testing.crashmatrix.matrix import crash_matrix
from support.world import Ledger, use

LONG = os.environ.get("OUTLAST_TESTS") == "long"
SERVERS = [
    name for name in ("restate", "inngest", "temporal-server") if name != "temporal-server" or "OUTLAST_TEMPORAL_SERVER" in os.environ
]
SHORT = ("claim.after", "tool.after:reply")


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply(ctx: ToolContext[Ledger], text: str) -> str:
    """Send the customer a reply."""
    ctx.deps.deliver("reply", ctx.idempotency_key)
    return "sent"


@tool(effect="at_most_once")
def refund(ctx: ToolContext[Ledger], text: str) -> str:
    """Pay something back."""
    ctx.deps.write("refund", ctx.idempotency_key)
    return "paid"


@tool(effect="idempotent")
def unsafe(ctx: ToolContext[Ledger], text: str) -> str:
    """Say that it may be repeated, and do it twice."""
    ctx.deps.write("unsafe")
    return "done"


def deps(folder: Path) -> Ledger:
    return Ledger(folder / "ledger")


def seen(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deps(folder).lines()
    return found


def agent_of(*tools: Tool[..., Any]) -> Agent[str]:
    return Agent("tested", model="anthropic:no-model-is-asked", tools=list(tools))


def crashed(engine: str, folder: Path, *tools: Tool[..., Any], at: tuple[str, ...] = ()) -> CrashReport:
    calls = [[use(one.name, f"toolu_{n:02}", text=one.name)] for n, one in enumerate(tools, 1)]
    return crash_matrix(
        agent_of(*tools), "go", model=ScriptedModel([*calls, "Done."]), deps=deps, observe=seen, engine=engine, at=at, folder=folder
    )


def green(report: CrashReport, cases: int) -> None:
    report.assert_ok()
    assert report.cases >= cases
    assert all(result.reached for result in report.results)


def test_the_worker_of_dbos_is_killed(tmp_path: Path) -> None:
    green(crashed("dbos:", tmp_path, reply, at=SHORT), len(SHORT))  # the control, an unsafe tool, went red through the engine too
    files = sorted(path.name for path in (tmp_path / "0001").iterdir())
    assert "outlast.dbos.db" in files, "it was the engine that gave the steps out"


def test_an_engine_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be reached.*start the server, or mend --engine") as e:
        crashed(f"restate://127.0.0.1:{free_port()}", tmp_path, reply)
    assert "\n" not in str(e.value)
    with pytest.raises(UsageError, match="built-in"):
        crashed("built-in", tmp_path, reply)
    with pytest.raises(UsageError, match="no engine 'airflow:'"):
        crashed("airflow:", tmp_path, reply)


def test_a_process_that_used_temporals_client_is_refused(tmp_path: Path) -> None:
    """Its native threads are not in the processes that would be forked off: some of them would end with a segmentation fault."""
    program = (
        "import sys, temporalio.runtime; from engines.test_crashtest import *\n"
        "temporalio.runtime.Runtime.default()\n"
        "try: crashed('temporal://127.0.0.1:7233/default', Path(sys.argv[1]), reply)\n"
        "except UsageError as e: print(e, e.hint)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert "was used in this process" in done.stdout and "of its own" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_another_engine_is_taken_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cases of a crash test never reach the engine that an application works on."""
    monkeypatch.setenv("OUTLAST_ENGINE", f"temporal://127.0.0.1:{free_port()}/production")
    report = crash_matrix(
        agent_of(unsafe), "go", model=ScriptedModel(["Done."]), deps=deps, observe=seen, at=("model.after",), folder=tmp_path
    )
    green(report, 1)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crashtest_app.py").write_text(
        "from outlast import Agent, Outlast\napp = Outlast('app.db', agents=[Agent('tested', model='anthropic:no-model-is-asked')])\n"
    )
    (tmp_path / "script.json").write_text(json.dumps(["Done."]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["crashtest", "crashtest_app", "--agent", "tested", "--script", "script.json", "--engine", "airflow:"]) == 2
    assert "no engine 'airflow:'" in capfd.readouterr().err
    if LONG:
        assert main(["crashtest", "crashtest_app", "--agent", "tested", "--script", "script.json", "--engine", "dbos:"]) == 0
        assert "every one ended as the undisturbed run" in capfd.readouterr().out


if LONG:

    @pytest.fixture(scope="module", params=["dbos", *SERVERS])
    def made(request: pytest.FixtureRequest) -> Iterator[Driver]:
        """One server for all cases."""
        with driver(request.param) as made:
            yield made

    def test_every_point_through_an_engine(made: Driver, tmp_path: Path) -> None:
        """With a gate, and with a call that is left in doubt. A death costs Temporal 10 s: there each point once, elsewhere each time it is passed."""
        once = tuple(point for point in POINTS if not point.startswith(("tool.", "check.", "notice.", "renewal.")))
        tools = tuple(f"tool.{side}:{name}" for name in ("reply", "refund") for side in ("before", "after"))
        if made.name == "temporal-server":
            green(crashed(str(made.url), tmp_path, reply, refund, at=(*once, *tools)), len(once) + len(tools))
        else:
            green(crashed(str(made.url), tmp_path, reply, refund), 40)

    def test_what_is_sent_twice_is_red_through_an_engine_too(tmp_path: Path) -> None:
        report = crashed("dbos:", tmp_path, unsafe, at=("tool.after:unsafe",))
        [finding] = report.findings
        assert finding.startswith("unsafe (toolu_01): killed at tool.after:unsafe: sent 2 times; ")

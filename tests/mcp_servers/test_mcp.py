"""Tools of real MCP servers, over stdio and over HTTP: effects by hints and overrides, keys, results, and servers that die in mid-call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters

from outlast import Agent, Outlast, approval
from outlast.errors import UsageError
from outlast.mcp import MCPServer
from outlast.models import ScriptedModel
from support.world import use

SERVER = Path(__file__).parent / "server.py"


class Theirs:
    """A server in a folder of its own; over HTTP it can be started again."""

    def __init__(self, folder: Path, over: str) -> None:
        self.folder, self.over = folder, over
        self.process: subprocess.Popen[bytes] | None = None
        if over == "http":
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.port = int(s.getsockname()[1])
            self.up()

    def up(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(SERVER), str(self.folder), str(self.port)], stderr=subprocess.DEVNULL)
        pause = threading.Event()
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            pause.wait(0.05)
        raise AssertionError("the server does not come up")

    def revive(self) -> None:
        if self.process is not None:
            self.process.wait(30)
            self.up()

    @property
    def target(self) -> Any:
        if self.over == "http":
            return f"http://127.0.0.1:{self.port}/mcp"
        return StdioServerParameters(command=sys.executable, args=[str(SERVER), str(self.folder)])

    def calls(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / "calls"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [x for x in found if x["name"] == name]

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(params=["stdio", "http"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Theirs]:
    server = Theirs(tmp_path, request.param)
    yield server
    server.close()


def app_of(theirs: Theirs, *turns: Any, **options: Any) -> tuple[Outlast, Agent[str]]:
    agent = Agent("triage", model=ScriptedModel([*turns, "Done."]), tools=[MCPServer(theirs.target, **options)])
    return Outlast(theirs.folder / "agent.db", agents=[agent]), agent


def results(app: Outlast, run_id: str) -> list[Any]:
    return [
        b
        for x in app.get(run_id).messages
        if x["role"] == "user" and isinstance(x["content"], list)
        for b in x["content"]
        if b["type"] == "tool_result"
    ]


def test_results_images_and_keys(theirs: Theirs) -> None:
    app, agent = app_of(
        theirs,
        [use("linear_list_issues", "toolu_01", team="core"), use("linear_create_issue", "toolu_02", title="Login"), use("linear_screenshot", "toolu_03")],
        prefix="linear_",
    )  # fmt: skip
    with app:
        run = app.run_sync(agent, "go", run_id="run-1")
        assert run.status == "done"
        listed, created, shown = results(app, "run-1")
        assert listed["content"] == "10 issues of core"
        assert json.loads(created["content"])["id"] == "ISSUE-1"
        assert [b["type"] for b in shown["content"]] == ["text", "image"]
        assert shown["content"][1]["source"]["media_type"] == "image/png"
        assert [x["key"] for x in theirs.calls("create_issue")] == ["run-1:toolu_02"]
        effects = {row.kind: row for row in app.journal("run-1") if row.kind == "CallStarted"}
        assert '"at_most_once"' in effects["CallStarted"].body  # without a hint


def test_invalid_arguments_and_errors_are_read_by_the_model(theirs: Theirs) -> None:
    app, agent = app_of(theirs, [use("list_issues", "toolu_01", team=7)], [use("create_issue", "toolu_02", title="bad")])
    with app:
        assert app.run_sync(agent, "go", run_id="run-1").status == "done"
        invalid, bad = results(app, "run-1")
        assert invalid["is_error"] and "team" in invalid["content"] and theirs.calls("list_issues") == []
        assert bad["is_error"] and "a title must be good" in bad["content"]


def test_gates_and_effects_by_the_servers_names(theirs: Theirs) -> None:
    app, agent = app_of(
        theirs, [use("linear_create_issue", "toolu_01", title="Login")], prefix="linear_", only=["create_issue"], effects={"create_issue": "idempotent"},
        gates={"create_issue": approval(to="team-lead", within=timedelta(days=1))})  # fmt: skip
    with app:
        run = app.run_sync(agent, "go", run_id="run-1")
        assert run.status == "waiting_for_approval" and theirs.calls("create_issue") == []
        app.decide("run-1", approved=True, decided_by="priya")
        assert app.resume_sync("run-1").status == "done"
        assert len(theirs.calls("create_issue")) == 1
        assert [json.loads(row.body)["effect"] for row in app.journal("run-1") if row.kind == "CallFinished"] == ["idempotent"]


def test_gone_in_mid_call_leaves_an_at_most_once_call_in_doubt(theirs: Theirs) -> None:
    app, agent = app_of(theirs, [use("create_issue", "toolu_01", title="crash")])
    with app:
        run = app.run_sync(agent, "go", run_id="run-1")
        assert run.status == "waiting_for_verification", run.reason
        assert len(theirs.calls("create_issue")) == 1
        theirs.revive()
        app.verify("run-1", outcome="happened", result={"id": "ISSUE-1"}, decided_by="priya")
        assert app.resume_sync("run-1").status == "done"
        assert len(theirs.calls("create_issue")) == 1


def test_gone_in_mid_call_an_idempotent_call_is_repeated_with_its_key(theirs: Theirs) -> None:
    """Within one connection's life: the next attempt connects anew."""
    app, agent = app_of(theirs, [use("label_issue", "toolu_01", id="I-1", label="crash")])
    reviver = threading.Thread(target=theirs.revive)
    reviver.start()
    with app:
        run = app.run_sync(agent, "go", run_id="run-1")
        reviver.join()
        if run.status == "waiting_for_verification":  # it came up after the last attempt
            app.verify("run-1", outcome="run_again", decided_by="priya")
            run = app.resume_sync("run-1")
        assert run.status == "done", run.reason
        assert results(app, "run-1")[0]["content"] == "I-1 is crash"
        assert [x["key"] for x in theirs.calls("label_issue")] == ["run-1:toolu_01"] * 2


def test_one_connection_for_the_whole_application(theirs: Theirs) -> None:
    """`async with app`: runs of several tasks share it."""
    app, agent = app_of(theirs, [use("list_issues", "toolu_01", team="core")])

    async def both() -> list[str]:
        async with app:
            runs = await asyncio.gather(*(app.run(agent, "go", run_id=f"run-{n}") for n in range(3)))
            return [run.status for run in runs]

    assert asyncio.run(both()) == ["done"] * 3
    assert len(theirs.calls("list_issues")) == 3


def test_a_worker_brings_the_tools_to_runs_that_others_started(theirs: Theirs) -> None:
    """A process without the server starts the run; whoever drives it is connected, and has not met other code."""
    app, agent = app_of(theirs, [use("list_issues", "toolu_01", team="core")])
    with app:
        app.start(agent, "go", run_id="run-1")
        app.work_sync(until_idle=True)
        assert app.head("run-1").status == "done"
        assert "VersionChanged" not in [row.kind for row in app.journal("run-1")]


def test_what_cannot_be_connected_is_one_line(tmp_path: Path) -> None:
    agent = Agent("triage", model=ScriptedModel(["Done."]), tools=[MCPServer(StdioServerParameters(command="no-such-command"))])
    with Outlast(tmp_path / "agent.db", agents=[agent]) as app:
        with pytest.raises(UsageError, match="no-such-command cannot be reached"):
            app.run_sync(agent, "go", run_id="run-1")
        assert app.head("run-1").lease_owner is None  # given back


def test_names_that_the_server_lacks(theirs: Theirs) -> None:
    app, agent = app_of(theirs, only=["list_issues", "drop_all"])
    with app, pytest.raises(UsageError, match="has no tool drop_all"):
        app.run_sync(agent, "go")


@pytest.mark.parametrize(
    "options",
    [{"prefix": "a b"}, {"only": "list"}, {"effects": {"x": "write"}}, {"gates": {"x": True}}, {"only": ["a"], "effects": {"b": "read"}}],
)
def test_wrong_parameters(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MCPServer("http://127.0.0.1:1/mcp", **options)

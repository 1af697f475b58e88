"""Several workers, locks and stopped processes: one run is one worker's, whatever happens to the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cases.conftest import BOTH, MakeApp, lease_clock_ahead, sqlite_alone
from tests.support.waiting import LIMIT_S, happens, until
from tests.support.world import GATE, Ledger, assert_whole, tools, use

import outlast.stores.sqlite.store as sqlite_store
from outlast import Agent, ToolContext, tool
from outlast.errors import LeaseLost, RunBusy
from outlast.models import ScriptedModel
from outlast.stores import base, owner

STORES = BOTH

ROOT = Path(__file__).parents[2]
LOCK = """
import sys, apsw
db = apsw.Connection(sys.argv[1])
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
db.execute("ROLLBACK")
"""


@sqlite_alone
def test_db_locked_after_effect(make_app: MakeApp, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Another process holds the write lock when the tool returns: the result is kept and saved later, the effect is not repeated.

    (Postgres locks one row, not the store; a server that does not answer is another case.)
    """
    kept, lockers = threading.Event(), []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "it is kept" in record.getMessage():
                kept.set()

    @tool
    def act(ctx: ToolContext) -> str:
        ledger.write("act", ctx.idempotency_key)
        locker = subprocess.Popen(
            [sys.executable, "-c", LOCK, str(tmp_path / "outlast.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert locker.stdout is not None and locker.stdout.readline() == "locked\n"
        lockers.append(locker)
        return "ok"

    def unlock() -> None:
        happens(kept)
        for locker in lockers:
            locker.communicate("go on\n", timeout=LIMIT_S)

    class Impatient(sqlite_store.SQLiteStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, busy_s=0.2)

    monkeypatch.setattr(sqlite_store, "SQLiteStore", Impatient)
    logger, hears = logging.getLogger("outlast.worker"), Hears()
    logger.addHandler(hears)
    thread = threading.Thread(target=unlock)
    thread.start()
    try:
        agent = Agent("a", model=ScriptedModel([[use("act")], "Done."]), tools=[act])
        app = make_app(agent)
        run = app.run_sync(agent, "go", run_id="r")
    finally:
        kept.set()
        thread.join()
        logger.removeHandler(hears)
    assert run.status == "done"
    assert len(ledger.lines()) == 1
    assert_whole(app, "r")


CROWD = """
import json, sys
from outlast import Agent, Outlast
from outlast.errors import GateClosed
from outlast.stores import owner
me, url, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
app = Outlast(url)
sys.stdin.readline()
decided, claimed = [], []
for n in range(runs):
    try:
        app.decide(f"r{n}", approved=True, decided_by=me)
        decided.append(n)
    except GateClosed as closed:
        assert closed.gate.decided_by
while leases := app._store.claim(owner.me(), agents=["a"], limit=3):
    claimed += [lease.run_id for lease in leases]
print(json.dumps({"decided": decided, "claimed": claimed}))
sys.stdin.readline()
"""


def test_busy_on_read_to_write_upgrade(make_app: MakeApp, store_url: str) -> None:
    """A crowd of processes decides and claims at once: no error comes out, each thing is done by exactly one."""
    runs, crowd = 40, 4
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent)
    for n in range(runs):
        app.start(agent, "go", run_id=f"r{n}")
    app.work_sync(until_idle=True, concurrency=20)
    people = [subprocess.Popen([sys.executable, "-c", CROWD, f"p{n}", store_url, str(runs)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True) for n in range(crowd)]  # fmt: skip
    try:
        for p in people:
            assert p.stdin is not None
            p.stdin.write("go\n")
            p.stdin.flush()
        found = [json.loads(p.stdout.readline() or "{}") for p in people if p.stdout is not None]
        errors = [p.communicate("end\n", timeout=LIMIT_S)[1] for p in people]
    finally:
        for p in people:
            p.kill()
    assert errors == [""] * crowd
    assert sorted(n for f in found for n in f["decided"]) == list(range(runs))
    claimed = [run_id for f in found for run_id in f["claimed"]]
    assert sorted(claimed) == sorted(f"r{n}" for n in range(runs))


ZOMBIE = """
import sys, threading
from datetime import timedelta
from outlast import Agent, Outlast, ToolContext, tool
from outlast.errors import LeaseLost
from outlast.models import ScriptedModel
from tests.support.world import Ledger
ledger = Ledger(__import__("pathlib").Path(sys.argv[2]))
@tool(effect=sys.argv[3])
def slow(ctx: ToolContext) -> str:
    "Slow."
    ledger.write("slow", ctx.idempotency_key)
    print("begun", flush=True)
    sys.stdin.readline()
    return "from the zombie"
agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "t", "name": "slow", "input": {}}], "Zombie done."]), tools=[slow])
with Outlast(sys.argv[1], agents=[agent], lease=timedelta(seconds=1)) as app:
    try:
        app.resume_sync("r")
        print("finished", flush=True)
    except LeaseLost as lost:
        print("lost", flush=True)
"""


@pytest.mark.parametrize("effect", ["idempotent", "at_most_once"])
def test_lease_outlived_zombie_commits(effect: str, make_app: MakeApp, store_url: str, ledger: Ledger) -> None:
    """Stopped in a tool past its lease, woken when another worker has gone on: nothing of it is written but evidence."""

    @tool(effect=effect)  # type: ignore[call-overload]  # both in turn
    def slow(ctx: ToolContext) -> str:
        ledger.write("slow", ctx.idempotency_key)
        return "from the living"

    agent = Agent("a", model=ScriptedModel([[use("slow", "t")], "Done."]), tools=[slow])
    app = make_app(agent)
    app.start(agent, "go", run_id="r")
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, store_url, str(ledger.path), effect],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert zombie.stdout is not None and zombie.stdin is not None
        assert zombie.stdout.readline() == "begun\n"
        os.kill(zombie.pid, signal.SIGSTOP)
        lease_clock_ahead(app, timedelta(seconds=200))  # its lease, or that of its effect, has run out
        run = app.resume_sync("r")
        if effect == "at_most_once":
            assert run.status == "waiting_for_verification"
            with pytest.raises(RunBusy):
                app.verify("r", outcome="run_again", decided_by="priya")
        else:
            assert run.status == "done"
        os.kill(zombie.pid, signal.SIGCONT)
        zombie.stdin.write("go on\n")
        zombie.stdin.flush()
        assert zombie.stdout.readline() in ("lost\n", "finished\n")
        assert zombie.wait(LIMIT_S) == 0
    finally:
        zombie.kill()
        zombie.wait()
    until(app, lambda: any(row.kind == "LateResult" for row in app.journal("r")), what="the late result is filed")
    after = app.get("r")
    assert after.messages[: len(run.messages)] == run.messages
    if effect == "at_most_once":  # the late result is the answer that the person was asked for; whoever is first goes on with it
        run = app.resume_sync("r")
        assert run.messages[2]["content"][0]["content"] == "from the zombie"
        assert run.output in ("Done.", "Zombie done.")
    else:
        assert after.messages == run.messages
        assert run.output == "Done."
    assert len(ledger.lines()) == (2 if effect == "idempotent" else 1)
    assert {line["key"] for line in ledger.lines()} == {"r:t"}
    assert_whole(app, "r")


def test_a_lease_that_was_taken_by_the_same_owner_is_another_lease(make_app: MakeApp) -> None:
    """Every write of the former holder is refused: append, mark, renew, release. Its name alone gives no right."""
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app, other = make_app(agent), make_app(agent)
    app.start(agent, "go", run_id="r")
    old = app._store.claim_run("r", owner.me())
    lease_clock_ahead(other, timedelta(seconds=60))
    new = other._store.claim_run("r", owner.me())
    assert (new.owner, new.taken_over) == (old.owner, True)
    head = base.NewHead("done", None, release=True)
    entries, place = app._store.load(old.run_no)
    assert entries
    with pytest.raises(LeaseLost):
        app._store.append(old, place, base.Batch([], head, seq=place.seq), now=app._store.now())
    with pytest.raises(LeaseLost):
        app._store.mark(old, head)
    with pytest.raises(LeaseLost):
        app._store.reclaim(old)
    assert [r.held for r in app._store.renew([old])] == [False]
    app._store.release(old)
    assert app._store.head("r").lease_owner == new.owner
    assert [r.held for r in other._store.renew([new])] == [True]


@pytest.mark.parametrize("colour", ["sync", "blocks the loop", "cpu"])
def test_heartbeat_starved_by_sync_tool(colour: str, make_app: MakeApp, ledger: Ledger) -> None:
    """However a tool hogs its process, the lease is renewed, and nobody else takes the run."""
    watcher = make_app()

    def hog(ctx: ToolContext) -> str:
        ledger.write("hog", ctx.idempotency_key)
        first = watcher._store.head("r").lease_until
        assert first is not None

        def renewed() -> bool:
            if colour == "cpu":
                sum(n * n for n in range(200_000))
            now = watcher._store.head("r").lease_until
            return now is not None and now > first + timedelta(seconds=2)

        until(watcher, renewed, what="the lease is renewed past its first end")
        assert watcher._store.claim("rival", agents=["a"]) == []
        assert watcher._store.reap() == 0
        return "ok"

    async def hog_async(ctx: ToolContext) -> str:
        return hog(ctx)

    slow = tool(effect="read", name="slow")(hog if colour == "sync" else hog_async)
    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app = make_app(agent, lease=timedelta(seconds=3))
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.attempts) == ("done", 0)
    assert len(ledger.lines()) == 1


def test_sweeper_times_out_run_waiting_for_human(make_app: MakeApp, ledger: Ledger) -> None:
    """Ten workers come and go: a run that waits for a person burns no attempt and is still there."""
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent)
    app.run_sync(agent, "go", run_id="r")
    entries = app._store.head("r").entries
    for _ in range(10):
        make_app(agent, lease=timedelta(seconds=1)).work_sync(until_idle=True)
    head = app._store.head("r")
    assert (head.status, head.attempts, head.entries) == ("waiting_for_approval", 0, entries)
    app.decide("r", approved=True, decided_by="priya")
    app.work_sync(until_idle=True)
    assert app.head("r").status == "done"
    assert len(ledger.lines()) == 1


FORK = """
import os, sys
from outlast import Agent, Outlast, tool
from outlast.models import ScriptedModel
@tool(effect="read")
def forks() -> str:
    "Forks."
    child = os.fork()
    if child == 0:
        app.start(agent, "from a tool's child", run_id="tool-child")
        sys.exit(0)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
agent = Agent("a", model=ScriptedModel([[{"type": "tool_use", "id": "t", "name": "forks", "input": {}}], "Done."]), tools=[forks])
plain = Agent("b", model=ScriptedModel(["Done."]))
app = Outlast(sys.argv[1], agents=[agent, plain])
app.start(plain, "go", run_id="before")
child = os.fork()
me = "child" if child == 0 else "parent"
for n in range(60):
    app.start(plain, "go", run_id=f"{me}-{n}")
if child == 0:
    app.run_sync(plain, "go", run_id="driven-in-the-child")
    assert app._keeper is not None
    sys.exit(0)  # with all destructors
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, app.run_sync(agent, "go", run_id="forking").status, flush=True)
"""


def test_connection_carried_across_fork(make_app: MakeApp, store_url: str) -> None:
    """Opened before a fork and used on both sides, a child that ends normally, a tool that forks: no row is lost, the file is whole."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, store_url], cwd=ROOT, capture_output=True, text=True, check=False, timeout=2 * LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, "0 done\n"), done.stderr
    app = make_app()
    ids = {r.run_id for r in app.runs(limit=500)}
    assert ids == {"before", "driven-in-the-child", "forking"} | {f"{me}-{n}" for me in ("child", "parent") for n in range(60)} | (
        ids & {"tool-child"}
    )
    assert app.get("forking").messages[2]["content"][0]["content"] == "0"
    assert "tool-child" in ids
    assert app.head("driven-in-the-child").status == "done"
    assert app.store_check() == []


def test_run_while_another_process_holds_it(make_app: MakeApp, ledger: Ledger) -> None:
    """Refused with who and until when; the run is not disturbed."""
    begun, release = threading.Event(), threading.Event()

    @tool(effect="read")
    def slow(ctx: ToolContext) -> str:
        begun.set()
        happens(release)
        return "ok"

    agent = Agent("a", model=ScriptedModel([[use("slow")], "Done."]), tools=[slow])
    app, other = make_app(agent), make_app(agent)

    async def play() -> Any:
        running = asyncio.ensure_future(app.run(agent, "go", run_id="r"))
        await asyncio.to_thread(happens, begun)
        for verb in (lambda: other.resume("r"), lambda: other.run(agent, "go", run_id="r"), lambda: app.resume("r")):
            with pytest.raises(RunBusy) as busy:
                await verb()
            assert busy.value.owner == owner.me()
            assert busy.value.until > app._store.now()
            assert "until" in str(busy.value)
        release.set()
        return await running

    assert asyncio.run(play()).status == "done"

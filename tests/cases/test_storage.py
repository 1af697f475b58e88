"""A store that is full, was edited by hand, or has grown: the run that it concerns stops by name, the others go on, effects are not repeated."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import psycopg
import pytest
from tests.cases.conftest import BOTH, Edit, MakeApp, size_on_disk, sqlite_alone
from tests.support.waiting import LIMIT_S, happens
from tests.support.world import GATE, Ledger, assert_whole, tools, use

from outlast import Agent, Limits, Outlast, ToolContext, tool
from outlast.errors import OutlastError
from outlast.models import ScriptedModel
from outlast.settings import parse_store

STORES = BOTH


def pages(app: Outlast, most: int) -> None:
    """Let the file have at most so many pages: what a full disk is to SQLite."""
    app._store._files._writer.db.execute(f"PRAGMA max_page_count = {most}")  # type: ignore[attr-defined]  # SQLite's own


@sqlite_alone
def test_disk_full_mid_step(make_app: MakeApp, ledger: Ledger, store_url: str) -> None:
    """Full when the result is saved: it is kept and saved once there is room, the message names the file, and nothing runs again.

    (A server that is full says so in the same way; that what it refused is kept and saved later is shown with servers that are killed.)
    """
    said: list[str] = []
    full = threading.Event()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "it is kept" in record.getMessage():
                said.append(record.getMessage())
                full.set()

    @tool
    def act(ctx: ToolContext) -> str:
        ledger.write("act", ctx.idempotency_key)
        pages(app, 1)
        return "x" * 200_000

    def make_room() -> None:
        happens(full)
        pages(app, 1_000_000)

    agent = Agent("a", model=ScriptedModel([[use("act")], "Done."]), tools=[act])
    app = make_app(agent)
    logger, hears = logging.getLogger("outlast.worker"), Hears()
    logger.addHandler(hears)
    thread = threading.Thread(target=make_room)
    thread.start()
    try:
        run = app.run_sync(agent, "go", run_id="r")
    finally:
        full.set()
        thread.join(LIMIT_S)
        logger.removeHandler(hears)
    assert run.status == "done"
    assert "full" in said[0] and store_url.removeprefix("sqlite:///") in said[0]
    assert len(ledger.lines()) == 1
    assert_whole(app, "r")


@sqlite_alone
def test_disk_full_before_anything_is_done(make_app: MakeApp, ledger: Ledger) -> None:
    """Nothing was written, and the caller hears which file; with room the same call works."""
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    app.start(agent, "go", run_id="first")
    pages(app, 1)
    with pytest.raises(OutlastError, match="full"):
        app.start(agent, "x" * 500_000, run_id="r")
    assert [r.run_id for r in app.runs()] == ["first"]
    pages(app, 1_000_000)
    assert app.run_sync(agent, "x" * 500_000, run_id="r").status == "done"


EDITS = {
    "no json": "{",
    "another json": "[1, 2]",
    "a number": "7",
    "null": "null",
    "deep": "[" * 10_000 + "]" * 10_000,
    "deep message": json.dumps({"role": "user", "content": None}).replace("null", "[" * 5_000 + "]" * 5_000),
    "no role": '{"content": "x"}',
    "wrong role": '{"role": "robot", "content": "x"}',
    "wrong content": '{"role": "user", "content": 5}',
    "a call without id": '{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}',
    "a huge number": '{"role": "user", "content": "x", "n": 1e999}',
    "a python object": '{"role": "user", "content": "x", "py/object": "os.system"}',
}


@pytest.mark.parametrize("text", EDITS)
def test_pickle_or_typed_loading_from_the_db(text: str, make_app: MakeApp, edit: Edit) -> None:
    """A row that somebody edited: its run is stopped with the entry named, or goes on where the row is still a message; never the others.

    (Postgres takes no text into the column that is no JSON, or that is nested too deeply for it.)
    """
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    for run_id in ("before", "bad", "after"):
        app.start(agent, "go", run_id=run_id)
    taken = edit(
        "UPDATE entry SET body = ? WHERE kind = 'MessageAdded' AND run_no = (SELECT run_no FROM run WHERE run_id = 'bad')", EDITS[text]
    )
    app.work_sync(until_idle=True)
    assert [app.head(run_id).status for run_id in ("before", "after")] == ["done", "done"]
    head = app.head("bad")
    if text == "a python object" or not taken:
        assert head.status == "done"
        return
    assert head.status == "failed"
    assert "entry" in (head.reason or ""), head.reason
    assert len(head.reason or "") < 1000
    with pytest.raises(OutlastError):
        app.get("bad")
    assert app.store_check() != []
    assert {r.run_id for r in app.runs()} == {"after", "bad", "before"}


@pytest.mark.parametrize("column, value", [("kind", "NeverHeardOf"), ("kind", ""), ("meta", "{"), ("meta", "[1]"), ("meta", '"x"')])
def test_an_entry_of_an_unknown_kind_or_with_odd_meta(column: str, value: str, make_app: MakeApp, edit: Edit) -> None:
    agent = Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])
    app = make_app(agent)
    app.run_sync(agent, "go", run_id="bad")
    app.run_sync(agent, "go", run_id="good")
    taken = edit(
        f"UPDATE entry SET {column} = ? WHERE kind = 'GateOpened' AND run_no = (SELECT run_no FROM run WHERE run_id = 'bad')", value
    )
    app.decide("good", approved=True, decided_by="priya")
    said = []
    for verb in (lambda: app.decide("bad", approved=True, decided_by="priya"), lambda: app.resume_sync("bad"), lambda: app.get("bad")):
        try:
            verb()
        except OutlastError as e:
            said.append(str(e))
    assert bool(said) == taken and all("entry" in text for text in said), said
    app.work_sync(until_idle=True)
    assert app.head("good").status == "done"
    assert app.head("bad").status in (("failed", "waiting_for_code", "waiting_for_approval") if taken else ("done",))


def test_an_unknown_status_in_a_row(make_app: MakeApp, edit: Edit) -> None:
    agent = Agent("a", model=ScriptedModel(["Done."]))
    app = make_app(agent)
    app.start(agent, "go", run_id="odd")
    app.start(agent, "go", run_id="good")
    edit("UPDATE run SET status = 'dancing' WHERE run_id = 'odd'")
    app.work_sync(until_idle=True)
    assert app.head("good").status == "done"


@contextmanager
def open_reader(store_url: str) -> Iterator[None]:
    """A page that stays open: it has seen one row, and goes on seeing that moment."""
    if store_url.startswith("sqlite"):
        reader = apsw.Connection(store_url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READONLY)
        cursor = reader.execute("SELECT * FROM run")
        next(cursor)
        yield
        cursor.close()
        reader.close()
        return
    parsed = parse_store(store_url)
    with psycopg.connect(parsed.url) as db:
        db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        db.execute("SELECT 1")
        yield


def test_runaway_growth(make_app: MakeApp, store_url: str) -> None:
    """Three hundred turns of 20 KB, with a reader that stays open: the store grows by what is said, the step's time stays.

    On Postgres it is a transaction that stays open: no version of a row that is newer than it can be removed meanwhile.
    """
    turns, noise = 300, random.Random(7)

    @tool(effect="read")
    def big(ctx: ToolContext) -> str:
        return noise.randbytes(10_000).hex()  # nothing that a server can compress well

    took: list[float] = []
    last = [time.perf_counter()]

    def turn(messages: list[dict[str, Any]]) -> Any:
        now = time.perf_counter()
        took.append(now - last[0])
        last[0] = now
        return [use("big", f"c{len(messages)}")] if len(messages) < 2 * turns else "Done."

    async def model(request: Any) -> Any:
        return turn(request.messages)

    agent = Agent("a", model=model, tools=[big], limits=Limits(model_calls=None, repeats=None))
    app = make_app(agent)
    app.start(agent, "go", run_id="other")
    with open_reader(store_url):
        run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.seq) == ("done", 2 * turns + 2)
    payload = len(json.dumps(run.messages))
    size = size_on_disk(store_url)
    assert size < 3 * payload, (size, payload)
    early, late = sorted(took[10:60])[25], sorted(took[-50:])[25]
    assert late < 5 * early, (early, late)
    assert_whole(app, "r")

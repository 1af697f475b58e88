"""Runs that are carried to another store: byte by byte, none twice, none lost, wherever the copy is cut off."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outlast.core import run as r
from outlast.errors import Refused, RunBusy, RunExists, UsageError
from outlast.stores import moving
from outlast.stores.base import Head, genesis
from outlast.stores.care import CareStore
from outlast.testing.store_contract import ME, Driving, asks, begin, calls, new, send, take
from stores.keepers import START, Clock, a_bit_of_everything, ended, journals, postgres_store, sqlite
from support.postgres import Server

Make = Callable[[str], CareStore]
LONG = os.environ.get("OUTLAST_TESTS") == "long"


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    clock = Clock()
    made: list[CareStore] = []

    def make(kind: str) -> CareStore:
        if kind == "sqlite":
            made.append(sqlite(tmp_path / f"{len(made)}.db", clock))
        else:
            server: Server = request.getfixturevalue("postgres")
            made.append(postgres_store(server, clock))
        return made[-1]

    yield make
    for store in made:
        store.close()


KINDS = [("sqlite", "sqlite"), ("sqlite", "postgres"), ("postgres", "sqlite"), ("postgres", "postgres")]


def seen(head: Head, *but: str) -> dict[str, Any]:
    left = {"run_no", "fence", *but}
    return {name: getattr(head, name) for name in Head.__slots__ if name not in left}


@pytest.mark.parametrize("here, there", KINDS)
def test_a_whole_store(make: Make, here: str, there: str) -> None:
    source, target = make(here), make(there)
    ids = a_bit_of_everything(source)
    before = {run_id: source.whole(run_id) for run_id in ids}
    done = moving.copy(source, target, by="ops")
    assert (done.runs, done.elsewhere, done.left, done.let_go) == (len(ids), 0, [], len(ids))
    assert [run_id for run_id, _, _ in target.ends()] == ids
    for run_id, was in before.items():
        now = target.whole(run_id)
        assert now.journal == was.journal and seen(now.head) == seen(was.head)
        assert now.gates == was.gates and now.notices == was.notices and now.format == was.format
        assert now.head.fence > was.head.fence
        left = list(source.journal(run_id))
        assert left[:-1] == was.journal and left[-1].kind == "RunMoved" and left[-1].by == "ops"
        head = source.head(run_id)
        assert (head.status, head.reason, head.wake_at) == ("cancelled", f"moved to {target.url}", None)
        assert all(row.outcome is not None for row, _ in source.gates(run_id))
    assert source.check() == [] and target.check() == []
    assert take(source, agents=("support", "billing"), limit=50) == [] and source.inbox(role=None, agent=None, tags={}, limit=9) == []
    assert {x.run_id for x in take(target, agents=("support", "billing"), limit=50)} == {"due", "event", "asks"}
    again = moving.copy(source, target)
    assert (again.runs, again.left) == (len(ids), [])
    assert target.check() == []


def test_what_goes_on_there_goes_on_from_where_it_was(make: Make) -> None:
    source, target = make("sqlite"), make("postgres")
    a_bit_of_everything(source)
    moving.copy(source, target)
    lease = target.claim_run("event", ME)
    driving = Driving(target, lease)
    driving.save(asks("go on"), r.RunEnded("done"), status="done", release=True)
    assert target.check() == []
    kinds = [row.kind for row in target.journal("event")]
    assert kinds[-2:] == ["MessageAdded", "RunEnded"] and target.head("event").status == "done"
    moving.copy(source, target)  # does no harm to what went on
    assert [row.kind for row in target.journal("event")] == kinds


@pytest.mark.parametrize("there", ["sqlite", "postgres"])
@pytest.mark.parametrize("at", range(8))
def test_cut_off_anywhere_and_started_again(make: Make, there: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make("sqlite"), make(there)
    ids = a_bit_of_everything(source)
    was = journals(source)
    calls_left, counting = [at], threading.Lock()

    class Cut(Exception):
        pass

    def cutting(store: CareStore, name: str, *, after: bool) -> None:
        real = getattr(store, name)

        def cut(*args: Any, **more: Any) -> Any:
            with counting:  # several runs are on their way at the same time
                if calls_left[0] == 0 and not after:
                    raise Cut
                calls_left[0] -= 1
            done = real(*args, **more)
            if calls_left[0] < 0 and after:
                raise Cut
            return done

        monkeypatch.setattr(store, name, cut)

    cutting(target, "put", after=at % 2 == 1)
    cutting(source, "outside", after=at % 4 == 2)
    with pytest.raises(Cut):
        moving.copy(source, target)
    monkeypatch.undo()
    assert take(target, agents=("support", "billing"), limit=50) == [], "nothing goes on before all is there"
    done = moving.copy(source, target)
    assert done.left == [] and journals(target) == was and target.check() == [] == source.check()
    assert {head.status for head in map(source.head, ids)} == {"cancelled"}
    assert not [head.driver for head in map(target.head, ids) if head.driver != "built-in"]


def test_a_run_that_goes_on_meanwhile_is_carried_as_it_is_then(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make("sqlite"), make("postgres")
    store_put = target.put
    begin(source, "busy").release("waiting_for_event")
    sent: list[Any] = []

    def put(whole: Any, **more: Any) -> bool:
        done = store_put(whole, **more)
        if not sent:
            sent.append(send(source, "busy", "one more", "m9"))
        return done

    monkeypatch.setattr(target, "put", put)
    assert moving.copy(source, target).left == []
    assert [row.entry_id for row in target.journal("busy")][-1] == "m9" and target.check() == []


def test_held_runs_stay_and_nothing_goes_on_there(make: Make) -> None:
    source, target = make("sqlite"), make("sqlite")
    ended(source, "done")
    begin(source, "held")
    done = moving.copy(source, target)
    assert [run_id for run_id, _ in done.left] == ["held"] and "driven until" in done.left[0][1] and done.let_go == 0
    assert source.head("held").status == "running" and target.head("done").driver == "moving:built-in"
    with pytest.raises(RunBusy):
        moving.export(source, "held", move=True)


def test_a_parent_goes_after_what_it_waits_for(make: Make) -> None:
    source, target = make("sqlite"), make("postgres")
    waits = r.GateOpened("run:c1", "run", "c1", "ask", "sha256:00", noun="run", rungs=[{}], args={"run_id": "parent:c1"})
    driving = begin(source, "parent")
    child = replace(new("parent:c1", agent="helper"), parent_run_id="parent", parent_call_id="c1")
    driving.put(replace(driving.batch(calls("c1"), waits, status="waiting_for_run", release=True), children=[child]))
    with pytest.raises(Refused, match="waits for parent:c1"):
        moving.export(source, "parent", move=True)
    with pytest.raises(Refused, match="answers a call of parent"):
        moving.export(source, "parent:c1", move=True)
    done = moving.copy(source, target)
    assert done.left == [] and target.head("parent:c1").parent_run_id == "parent" and target.check() == []
    assert [row.outcome for row, _ in target.gates("parent")] == [None]


def test_another_run_of_that_id(make: Make) -> None:
    source, target = make("sqlite"), make("sqlite")
    ended(source, "same", text="one")
    ended(target, "same", text="another")
    done = moving.copy(source, target)
    assert done.left == [("same", f"another run of that id is in {target.url}")]
    assert source.head("same").status == "done"


@pytest.mark.parametrize("here, there", [("sqlite", "postgres"), ("postgres", "sqlite")])
def test_one_run_as_a_document(make: Make, here: str, there: str) -> None:
    source, target = make(here), make(there)
    ids = a_bit_of_everything(source)
    for run_id in ids:
        was = source.whole(run_id)
        doc = moving.export(source, run_id, move=True, by="ops")
        text = moving.dumped(doc)
        assert json.loads(text) == doc and doc["format"] == 1
        assert moving.read_in(target, text).run_id == run_id
        now = target.whole(run_id)
        assert now.journal == was.journal and seen(now.head) == seen(was.head) and now.notices == was.notices and now.gates == was.gates
        assert source.head(run_id).reason == "moved to a document"
        assert moving.read_in(target, text).run_id == run_id, "the same again changes nothing"
        again = moving.export(source, run_id, move=True)
        assert again["journal"] == doc["journal"] and again["moved_at"] == doc["moved_at"]
        status, wake_at = again["run"]["status"], again["run"]["wake_at"]
        assert status == doc["run"]["status"] or (status == "running" and wake_at), (
            "what no entry says is found out again by whoever takes it"
        )
        with pytest.raises(UsageError, match="own id"):
            moving.read_in(target, text, run_id="other")
    assert source.check() == [] and target.check() == []


def test_moved_is_over_for_good(make: Make) -> None:
    source = make("sqlite")
    begin(source, "run-1").release("waiting_for_event")
    moving.export(source, "run-1", move=True)
    with pytest.raises(RunExists):
        moving.read_in(source, moving.dumped(moving.export(source, "run-1")))
    assert take(source) == []


def test_an_exported_run_comes_in_as_another_one_only(make: Make) -> None:
    source, target = make("sqlite"), make("postgres")
    a_bit_of_everything(source)
    for run_id in ("asks", "done", "due"):
        doc = moving.dumped(moving.export(source, run_id))
        with pytest.raises(UsageError, match="two of them would do everything twice"):
            moving.read_in(target, doc)
        assert moving.read_in(target, doc, run_id=f"{run_id}-twin").run_id == f"{run_id}-twin"
        ours, theirs = list(target.journal(f"{run_id}-twin")), list(source.journal(run_id))
        assert [row.body for row in ours] == [row.body for row in theirs] and ours[-1].digest != theirs[-1].digest
        with pytest.raises(RunExists):
            moving.read_in(target, moving.dumped(moving.export(source, "failed")), run_id=f"{run_id}-twin")
    assert target.check() == [] and source.head("asks").status == "waiting_for_approval"
    assert [row.outcome for row, _ in target.gates("asks-twin")] == [None]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d["journal"].pop(1), "entry 2 of the document"),
        (lambda d: d["journal"][1].update(body='{"role": "user", "content": "another"}'), "entry 2 of the document.*digest"),
        (lambda d: d["journal"][2].update(by="somebody"), "entry 3 of the document.*digest"),
        (lambda d: d["journal"][0].pop("kind"), "entry 1 of the document"),
        (lambda d: d["journal"][0].update(at=7), "entry 1 of the document"),
        (lambda d: d["journal"][0].update(body=None), "entry 1 of the document"),
        (lambda d: d["journal"].clear(), "no entries"),
        (lambda d: d["run"].update(entries=99), "does not fit together"),
        (lambda d: d["run"].update(status="failed"), "does not fit together"),
        (lambda d: d["run"].update(run_id="other"), "entry 1 of the document.*digest"),
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.update(type="x"), "no document of a run"),
        (lambda d: d.pop("run"), "not whole"),
    ],
)
def test_a_document_that_does_not_fit_is_refused(make: Make, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    source, target = make("sqlite"), make("sqlite")
    ended(source, "run-1")
    doc = moving.export(source, "run-1", move=True)
    change(doc)
    with pytest.raises(UsageError, match=said):
        moving.read_in(target, json.dumps(doc))
    assert list(target.ends()) == []


def test_entries_that_are_well_made_and_cannot_follow_each_other(make: Make) -> None:
    """Digests that fit do not make a history: it is folded, and the entry that cannot be is named."""
    source, target = make("sqlite"), make("sqlite")
    ended(source, "run-1")
    whole = source.whole("run-1")
    rows, digest = [], genesis("run-1")
    for was in whole.journal:
        row = replace(was, body='{"gate_id": 7}', kind="GateExpired") if was.entry_no == 4 else was
        digest = moving._chained(digest, row)
        rows.append(replace(row, digest=digest))
    doc = moving.document(replace(whole, journal=rows), moved=START)
    with pytest.raises(UsageError, match="entry 4 of the document is not valid"):
        moving.read_in(target, json.dumps(doc))


def test_there_and_back_again(make: Make) -> None:
    """Some hundred runs from SQLite to Postgres and back to SQLite (ten thousand in the long form): every journal as it was."""
    source, middle, last = make("sqlite"), make("postgres"), make("sqlite")
    count = 10_000 if LONG else 200
    for n in range(count // 8):
        a_bit_of_everything(source, f"-{n}")
    was = journals(source)
    heads = {run_id: seen(source.head(run_id)) for run_id in was}
    assert len(was) == count
    begun = time.perf_counter()
    assert moving.copy(source, middle).left == []
    there = time.perf_counter()
    assert moving.copy(middle, last).left == []
    print(f"{count:,} runs: {there - begun:.0f} s from SQLite to Postgres, {time.perf_counter() - there:.0f} s back")
    assert journals(last) == was
    assert {run_id: seen(last.head(run_id)) for run_id in was} == heads
    assert last.check() == []
    gone = journals(source)
    assert all(gone[run_id][:-1] == rows and gone[run_id][-1].kind == "RunMoved" for run_id, rows in was.items())
    assert last.head("timer-0").wake_at == START + timedelta(days=1)

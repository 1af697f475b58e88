"""What was erased is nowhere any more: not in the file, not in its WAL, not in a backup made after; and the chain still verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.core import run as r
from outlast.errors import Refused, RunNotFound
from outlast.stores.base import NewNotice, NewRun, RunFilter
from outlast.stores.care import CareStore
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import ME, Driving, answers, asks, begin, calls, new, send
from stores.keepers import CANARY, START, Clock, ended, postgres_store, sqlite
from support.postgres import Server

Open = Callable[[], CareStore]


def told_everything(store: CareStore, run_id: str, *, size: int = 1) -> None:
    """A finished run that says the canary in every place where a text can stand."""
    text = CANARY * size
    first = [r.RunStarted("support"), asks(f"my name is {text}")]
    store.start(NewRun(run_id, "support", first, tags={"name": CANARY}))
    driving = Driving(store, store.claim_run(run_id, ME))
    opened = r.GateOpened(
        "approval:c1", "approval", "c1", "refund", "sha256:00", noun=text[:200], rungs=[{"role": "lead"}], args={"to": text}
    )
    notice = NewNotice("n1", "approval:c1", "opened", "ntfy", f"a refund of {text}")
    child = replace(
        new(f"{run_id}:c1", agent="helper"), parent_run_id=run_id, parent_call_id="c1", entries=[r.RunStarted("helper"), asks(text)]
    )
    batch = driving.batch(replace(calls("c1"), meta={"malformed": text}), opened)
    driving.put(replace(batch, notices=[notice], children=[child]))
    driving.save(r.GateDecided("approval:c1", "approved", text, args={"to": text}, by="priya", entry_id="d1"))
    driving.save(
        r.CallFinished("c1", text, meta={"ms": 3}), answers(text), r.RunEnded("done", text), status="done", reason=text, release=True
    )
    taken = Driving(store, store.claim_run(f"{run_id}:c1", ME))
    taken.save(answers(text), r.RunEnded("done"), status="done", release=True)


def holds(path: Path) -> list[str]:
    """Files of this store, backups too, in which a piece of the canary stands. (Cut over two pages it may not be whole.)"""
    pieces = [CANARY[:9].encode(), CANARY[-9:].encode()]
    return [f.name for f in sorted(path.parent.glob("*")) if f.is_file() and any(p in f.read_bytes() for p in pieces)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outlast.db"


@pytest.fixture
def store(path: Path) -> Any:
    store = sqlite(path, Clock())
    yield store
    store.close()


@pytest.mark.parametrize("size", [1, 40, 2000])
def test_no_trace_in_the_file(store: SQLiteStore, path: Path, size: int) -> None:
    for n in range(5):
        ended(store, f"before-{n}", text="x" * 700 * n)
        told_everything(store, f"secret-{n}", size=size)
        ended(store, f"after-{n}", text="y" * 900)
    store.backup(path.with_name("before.db"))
    assert "before.db" in holds(path) and len(holds(path)) > 1
    path.with_name("before.db").unlink()
    for n in range(5):
        assert store.erase(f"secret-{n}") == [f"secret-{n}", f"secret-{n}:c1"]
    assert store.tidy(wiped=True) is None
    store.backup(path.with_name("after.db"))
    assert holds(path) == []
    assert store.check() == []
    copy = SQLiteStore(path.with_name("after.db"))
    assert copy.check() == []
    copy.close()


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store: CareStore
    if request.param == "sqlite":
        store = sqlite(tmp_path / "outlast.db", Clock())
    else:
        store = postgres_store(request.getfixturevalue("postgres"), Clock())
    yield store
    store.close()


def rows(store: CareStore, run_id: str) -> str:
    """All that the store gives out about a run."""
    head = store.head(run_id)
    return f"{head}{list(store.journal(run_id))}{store.gates(run_id)}{store.whole(run_id)}"


def test_what_is_left(either: CareStore) -> None:
    told_everything(either, "run-1")
    ended(either, "run-2", text=CANARY)
    before, others = either.whole("run-1"), either.whole("run-2")
    assert CANARY in rows(either, "run-1")
    assert either.erase("run-1") == ["run-1", "run-1:c1"]
    either.tidy(wiped=True)
    for run_id in ("run-1", "run-1:c1"):
        assert CANARY not in rows(either, run_id)
    now = either.whole("run-1")
    assert [(x.kind, x.at, x.by, x.digest, x.fence, x.status) for x in now.journal] == [
        (x.kind, x.at, x.by, x.digest, x.fence, x.status) for x in before.journal]  # fmt: skip
    assert (now.head.status, now.head.reason, now.head.tags) == ("done", "erased", {})
    assert now.head.entries == before.head.entries and now.head.input_digest == before.head.input_digest
    assert (now.gates[0][0].outcome, now.gates[0][0].decided_by, now.gates[0][0].args) == ("approved", "priya", "{}")
    assert either.whole("run-2") == others and either.check() == []
    assert [head.run_id for head in either.heads(RunFilter(status="done"))] == ["run-2", "run-1:c1", "run-1"]
    assert either.erase("run-1") == ["run-1", "run-1:c1"], "again is harmless"
    assert either.whole("run-1") == now and either.check() == []


def test_nothing_goes_on_from_it(either: CareStore) -> None:
    told_everything(either, "run-1")
    either.erase("run-1")
    with pytest.raises(Refused, match="run run-1 was erased"):
        either.load(either.head("run-1").run_no)
    with pytest.raises(Refused, match="was erased"):
        send(either, "run-1", "and now?")
    assert either.check() == []


def test_an_erased_entry_that_was_changed_is_found(store: SQLiteStore) -> None:
    told_everything(store, "run-1")
    store.erase("run-1")
    store._files.write(lambda db: db.execute("UPDATE entry SET body = replace(body, substr(body, 14, 1), 'e') WHERE entry_no = 2"))
    store._files.write(lambda db: db.execute("UPDATE entry SET body = body || ' ' WHERE entry_no = 3"))
    assert [where for where, _, _ in store.check()] != []


def test_only_what_is_over(either: CareStore) -> None:
    begin(either, "run-1").release("waiting_for_event")
    with pytest.raises(Refused, match="waiting_for_event: only a finished run is erased"):
        either.erase("run-1")
    told_everything(either, "run-2")
    begin(either, "run-2:c2", parent_run_id="run-2", parent_call_id="c2").release("waiting_for_event")
    with pytest.raises(Refused, match="run-2:c2"):
        either.erase("run-2")
    assert CANARY in rows(either, "run-2"), "all of them or none"
    with pytest.raises(RunNotFound):
        either.erase("nobody")


def test_the_start_stays_known(either: CareStore) -> None:
    """The same start again finds the run that was erased: the work is not done twice."""
    told_everything(either, "run-1")
    either.erase("run-1")
    _, lease, created = either.start(new("run-1"), owner=ME)
    assert lease is None and not created
    assert either.now() >= START


def test_postgres_says_what_is_left_to_do(postgres: Server) -> None:
    store = postgres_store(postgres, Clock())
    told_everything(store, "run-1")
    store.erase("run-1")
    left = store.tidy(wiped=True)
    assert left is not None and "VACUUM (FULL)" in left
    statement = left[left.index("VACUUM") : left.index(", and its WAL")]
    with postgres.connect() as db:
        db.execute(statement)  # type: ignore[call-overload]  # as a person would type it
        [(folder,)] = db.execute("SELECT current_setting('data_directory')").fetchall()
        db.execute("CHECKPOINT")
        names = db.execute("SELECT pg_relation_filepath(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
                           "WHERE n.nspname = %s AND c.relkind IN ('r', 't')", (store._connections.schema,)).fetchall()  # fmt: skip
    found = [name for (name,) in names if CANARY.encode() in Path(str(folder), str(name)).read_bytes()]
    assert names and found == [] and store.check() == []
    store.close()

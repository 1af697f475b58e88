"""Old runs go, and a busy store stays as large as what is kept in it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outlast.core import run as r
from outlast.stores.care import CareStore, Old
from outlast.testing.store_contract import ME, Driving, answers, asks, begin, calls, gate, new
from stores.keepers import Clock, a_bit_of_everything, ended, postgres_store, sqlite

DAY = timedelta(days=1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Any:
    store: CareStore
    if request.param == "sqlite":
        store = sqlite(tmp_path / "outlast.db", clock)
    else:
        store = postgres_store(request.getfixturevalue("postgres"), clock)
    yield store
    store.close()


def ids(store: CareStore) -> list[str]:
    return [run_id for run_id, _, _ in store.ends()]


def test_only_what_is_old_and_over(store: CareStore, clock: Clock) -> None:
    everything = a_bit_of_everything(store)
    clock.now += 100 * DAY
    ended(store, "new")
    before = clock.now - 90 * DAY
    assert store.old(before) == Old(2, 8) and store.old(before, keep=["failed"]) == Old(1, 4)
    assert store.prune(before, keep=["failed"]) == 1 and store.prune(before, keep=["failed"]) == 0
    assert ids(store) == sorted({*everything, "new"} - {"done"})
    assert store.prune(before) == 1 and store.old(before) == Old(0, 0)
    assert ids(store) == sorted({*everything, "new"} - {"done", "failed"})
    assert store.check() == [] and store.old(clock.now + DAY) == Old(1, 4)


def test_gates_and_notices_go_too_and_in_batches(store: CareStore, clock: Clock) -> None:
    for n in range(7):
        driving = begin(store, f"run-{n}")
        driving.save(calls("c1"), gate(), status="waiting_for_approval")
        driving.save(r.GateDecided("approval:c1", "approved", by="priya", entry_id="d1"), r.CallFinished("c1", "ok"), asks("ok"), answers(),
                     r.RunEnded("done"), status="done", release=True)  # fmt: skip
    clock.now += DAY
    assert [store.prune(clock.now, limit=3) for _ in range(4)] == [3, 3, 1, 0]
    assert ids(store) == [] and store.check() == [], "check finds rows without a run"


def test_a_child_stays_as_long_as_its_parent_goes_on(store: CareStore, clock: Clock) -> None:
    begin(store, "parent").release("waiting_for_event")
    ended(store, "parent:c1", parent_run_id="parent", parent_call_id="c1")
    clock.now += DAY
    assert store.prune(clock.now) == 0 and ids(store) == ["parent", "parent:c1"]
    Driving(store, store.claim_run("parent", ME)).save(answers(), r.RunEnded("done"), status="done", release=True)
    clock.now += DAY
    assert store.prune(clock.now) == 2


def test_an_id_that_was_removed_can_be_used_again(store: CareStore, clock: Clock) -> None:
    ended(store, "run-1")
    clock.now += DAY
    assert store.prune(clock.now) == 1
    assert store.start(new("run-1"))[2] and store.check() == []


def test_a_busy_store_stays_bounded(tmp_path: Path, clock: Clock) -> None:
    """Ten rounds of the same load, each pruned after a day: the file after the last is hardly larger than after the second."""
    path = tmp_path / "outlast.db"
    store = sqlite(path, clock)
    sizes = []
    for n in range(10):
        for k in range(40):
            ended(store, f"run-{n}-{k}", text="x" * 4000)
        clock.now += DAY
        while store.prune(clock.now - DAY / 2, limit=20):
            pass
        store.tidy()
        sizes.append(path.stat().st_size + path.with_name("outlast.db-wal").stat().st_size)
    assert sizes[-1] < 1.2 * sizes[1], sizes
    assert "free" in (store.tidy() or ""), "nearly all of it is free, and that is said"
    store.close()


def test_a_reader_that_stays_does_not_let_the_wal_grow_without_end(tmp_path: Path, clock: Clock) -> None:
    """Our own readers end with each answer: while pages are read all the time, the WAL is begun anew again and again."""
    path = tmp_path / "outlast.db"
    store, reader = sqlite(path, clock), sqlite(path, clock)
    largest = 0
    for n in range(300):
        ended(store, f"run-{n}", text="x" * 20_000)
        reader.head(f"run-{n}")
        reader.wait_for_change(None, 0)
        largest = max(largest, path.with_name("outlast.db-wal").stat().st_size)
    assert path.stat().st_size > 5_000_000 and largest < 4_000_000 + 20_000 * 10, largest
    store.close()
    reader.close()

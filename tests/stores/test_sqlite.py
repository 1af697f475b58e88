"""The SQLite store: the contract of all stores, and what only a file can do."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from outlast.errors import CommitUnknown, RunBusy
from outlast.stores.base import Store
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import ME, PassTime, Reopen, StoreContract, new


class Clocks:
    """A wall clock and a boot clock that move only when told."""

    def __init__(self) -> None:
        self.wall = datetime(2026, 11, 27, 15, 0, 0, 123000, tzinfo=UTC)
        self.boot = 1_000_000

    def move(self, by: timedelta) -> None:
        self.wall += by
        self.boot += by // timedelta(milliseconds=1)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


Open = Callable[..., SQLiteStore]


@pytest.fixture
def open_store(tmp_path: Path, clocks: Clocks) -> Iterator[Open]:
    """Stores over one file; nobody is dead."""
    opened: list[SQLiteStore] = []

    def open_(**more: Any) -> SQLiteStore:
        given = {
            "clock": lambda: clocks.wall,
            "boot_clock": lambda: clocks.boot,
            "boot": lambda: "boot-1",
            "dead": lambda owner: False,
            **more,
        }
        opened.append(SQLiteStore(given.pop("path", tmp_path / "outlast.db"), **given))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, open_store: Open) -> Store:
        return open_store()

    @pytest.fixture
    def reopen(self, open_store: Open) -> Reopen:
        return open_store

    @pytest.fixture
    def pass_time(self, clocks: Clocks) -> PassTime:
        return clocks.move


def test_a_lease_whose_commit_was_unknown_is_found_by_one_asker(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of the process that took it ask for it in the same moment: two holders of one lease would do everything twice."""
    lost = [0]

    def point(name: str) -> None:
        if name == "commit.after" and lost[0]:
            lost[0] -= 1
            raise CommitUnknown("the answer was lost")

    store = open_store(point=point)
    store.start(new("run-1"))
    lost[0] = 2  # and so was that of the look whether it stands
    with pytest.raises(CommitUnknown):
        store.claim_run("run-1", ME)
    both, write = threading.Barrier(2, timeout=30), store._files.write

    def together(work: Any) -> Any:
        both.wait()
        return write(work)

    monkeypatch.setattr(store._files, "write", together)

    def ask() -> Any:
        try:
            return store.claim_run("run-1", ME)
        except RunBusy as e:
            return e

    with ThreadPoolExecutor(2) as threads:
        found = [asked.result() for asked in [threads.submit(ask), threads.submit(ask)]]
    assert sorted(type(x).__name__ for x in found) == ["Lease", "RunBusy"]


def test_no_statement_is_prepared_anew_for_the_values_that_are_bound(open_store: Open) -> None:
    """SQLite does that where a plan may depend on them, as with partial indexes, unless it is told that plans are to stay what they are."""
    store = open_store()
    store.start(new("run-1"))
    reading = open_store(read_only=True)
    asked = [s._files.read(lambda db: db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, -1)) for s in (store, reading)]
    assert [*asked, store._files.write(lambda db: db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, -1))] == [True] * 3

"""The SQLite store: the contract of all stores, and what only a file can do."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outlast.stores.base import Store
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import PassTime, Reopen, StoreContract


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

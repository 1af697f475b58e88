"""The Postgres store: the contract of all stores, and what only a server can do."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outlast.settings import parse_store
from outlast.stores.base import Store
from outlast.stores.postgres import PostgresStore
from outlast.testing.store_contract import PassTime, Reopen, StoreContract
from support.postgres import Server


class Clock:
    """Moves only when told; of deadlines and of leases."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 27, 15, 0, 0, 123000, tzinfo=UTC)

    def move(self, by: timedelta) -> None:
        self.now += by


@pytest.fixture
def clock() -> Clock:
    return Clock()


Open = Callable[..., PostgresStore]


@pytest.fixture
def open_store(postgres: Server, clock: Clock) -> Iterator[Open]:
    """Stores over one fresh schema; nobody is dead."""
    opened: list[PostgresStore] = []
    parsed = parse_store(postgres.url(schema=postgres.fresh_schema()))

    def open_(**more: Any) -> PostgresStore:
        given = {"clock": lambda: clock.now, "lease_clock": lambda: clock.now, "dead": lambda owner: False, **more}
        store = PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown, **given)
        if not opened:
            store.migrate()
        opened.append(store)
        return store

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
    def pass_time(self, clock: Clock) -> PassTime:
        return clock.move

"""The keeper of leases: one that was lost and taken again in the same process is kept, whatever its old holder does."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

from outlast.core import run as r
from outlast.runtime.leases import Keeper
from outlast.stores import base
from outlast.stores.sqlite import SQLiteStore

NOW = datetime(2026, 3, 2, 9, tzinfo=UTC)


class Clock:
    seconds = 0

    def wall(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def boot(self) -> int:
        return 1_000_000 + self.seconds * 1000


def test_the_old_holder_of_a_run_does_not_take_the_new_one_off() -> None:
    clock = Clock()
    store = SQLiteStore(":memory:", clock=clock.wall, boot_clock=clock.boot, boot=lambda: "boot", dead=lambda owner: False)
    new = base.NewRun("run-1", "agent", [r.RunStarted("agent"), r.MessageAdded({"role": "user", "content": "go"})])
    _, lost, _ = store.start(new, owner="me")
    clock.seconds = 31
    [lease] = store.claim("me", agents=["agent"])
    assert lost is not None
    told: dict[str, list[bool]] = {"old": [], "new": []}
    heard = threading.Event()

    def hear(whom: str, renewed: base.Renewed) -> None:
        told[whom].append(renewed.held)
        if told["old"] and told["new"]:
            heard.set()

    keeper = Keeper(store, 0.3)
    try:
        keeper.add(lost, lambda renewed: hear("old", renewed))
        keeper.add(lease, lambda renewed: hear("new", renewed))
        assert heard.wait(10)
        keeper.remove(lost)
        assert keeper.held() == 1
        assert set(told["old"]) == {False}
        assert set(told["new"]) == {True}
    finally:
        keeper.close()
        store.close()

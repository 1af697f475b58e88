"""A worker that was stopped between its claim and its first look, for longer than its lease, does not go on from what another did meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outlast.core import run as r
from outlast.core.step import Policy
from outlast.errors import LeaseLost
from outlast.runtime.writer import Writer
from outlast.stores import base
from outlast.stores.sqlite import SQLiteStore


class Clock:
    def __init__(self) -> None:
        self.s = 0

    def wall(self) -> datetime:
        return datetime(2026, 3, 2, 9, tzinfo=UTC) + timedelta(seconds=self.s)

    def boot_ms(self) -> int:
        return 1_000_000 + self.s * 1000


@pytest.mark.parametrize("taken_over", [True, False])
def test_what_another_wrote_is_not_gone_on_from(taken_over: bool) -> None:
    clock = Clock()
    store = SQLiteStore(":memory:", clock=clock.wall, boot_clock=clock.boot_ms, dead=lambda owner: False)
    new = base.NewRun("run-1", "agent", [r.RunStarted("agent"), r.MessageAdded({"role": "user", "content": "go"})])
    _, lease, _ = store.start(new, owner="host/boot/ns/1/1", lease_s=30)
    assert lease is not None
    stopped = Writer(store, lease, Policy())
    clock.s += 31
    if taken_over:
        other = Writer(store, store.claim_run("run-1", "host/boot/ns/2/2"), Policy())
        other.load()
        with pytest.raises(LeaseLost, match="taken over"):
            stopped.load()
    else:
        stopped.load()  # late, and nobody missed it
        assert len(stopped.run.messages) == 1
    store.close()

"""A commit whose answer is lost: nothing is done before a write that takes the run's row has settled what stands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outlast.core import run as r
from outlast.core.step import Policy, ToolPolicy
from outlast.errors import CommitUnknown, LeaseLost
from outlast.runtime.writer import Writer
from outlast.stores import base
from outlast.stores.sqlite import SQLiteStore

NOW = datetime(2026, 3, 2, 9, tzinfo=UTC)
CALL = {"type": "tool_use", "id": "c", "name": "pay", "input": {}}
ASKED = r.MessageAdded({"role": "assistant", "content": [CALL]}, meta={"stop_reason": "tool_use"})


class OnItsWay(SQLiteStore):
    """The server has the commit and has not done it yet when the answer is lost: it is done before anybody else gets the run's row."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__(":memory:", clock=lambda: NOW, boot_clock=lambda: 1_000_000, dead=lambda owner: False)
        self.arrives = arrives
        self.lose_next = False
        self.coming: Callable[[], Any] | None = None
        self.log: list[str] = []

    def append(self, lease: base.Lease, place: base.Place, batch: base.Batch, *, now: datetime) -> base.Appended | base.Behind:
        self.log.append("append")
        if self.lose_next:
            self.lose_next = False
            self.coming = lambda: super(OnItsWay, self).append(lease, place, batch, now=now)
            raise CommitUnknown("the answer was lost")
        return super().append(lease, place, batch, now=now)

    def reclaim(self, lease: base.Lease, *, lease_s: float = 30) -> base.Lease:
        self.log.append("reclaim")
        coming, self.coming = self.coming, None
        if coming is not None and self.arrives:
            coming()
        return super().reclaim(lease, lease_s=lease_s)


def driven(store: OnItsWay) -> Writer:
    new = base.NewRun("run-1", "agent", [r.RunStarted("agent"), r.MessageAdded({"role": "user", "content": "go"})])
    _, lease, _ = store.start(new, owner="host/boot/ns/1/1")
    assert lease is not None
    writer = Writer(store, lease, Policy(tools={"pay": ToolPolicy("pay")}))
    writer.load()
    return writer


def kinds(store: OnItsWay) -> list[str]:
    return [row.kind for row in store.journal("run-1")]


@pytest.mark.parametrize("arrives", [True, False])
def test_an_answer_is_saved_once(arrives: bool) -> None:
    store = OnItsWay(arrives=arrives)
    writer = driven(store)
    store.lose_next = True
    writer.save([ASKED])
    assert kinds(store) == ["RunStarted", "MessageAdded", "MessageAdded"]
    assert store.log[:2] == ["append", "reclaim"]
    assert writer.lease.fence == store.head("run-1").fence == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_an_intent_counts_only_where_it_stands(arrives: bool) -> None:
    store = OnItsWay(arrives=arrives)
    writer = driven(store)
    writer.save([ASKED])
    store.lose_next = True
    intent = r.CallStarted("c", "run-1:c", "at_most_once", 1, NOW + timedelta(seconds=60))
    assert writer.propose(intent, timedelta(seconds=60)) is arrives
    assert kinds(store).count("CallStarted") == arrives
    assert "reclaim" in store.log


def test_whoever_lost_the_run_meanwhile_does_nothing() -> None:
    store = OnItsWay(arrives=False)
    writer = driven(store)
    store.lose_next = True
    store.outside("run-1", lambda tail: base.Outside([r.RunCancelled()], status="cancelled", fence=True, wake=False))
    with pytest.raises(LeaseLost):
        writer.save([ASKED])
    assert kinds(store) == ["RunStarted", "MessageAdded", "RunCancelled"]


class TakenBehindUs(OnItsWay):
    """Before we look, somebody else has claimed the run and written to it."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__(arrives=arrives)
        self.pass_s = 0
        self._boot_clock = lambda: 1_000_000 + 1000 * self.pass_s

    def reclaim(self, lease: base.Lease, *, lease_s: float = 30) -> base.Lease:
        coming, self.coming = self.coming, None
        if coming is not None and self.arrives:
            coming()
        else:
            self.pass_s = 31
        [theirs] = self.claim("host/boot/ns/2/2", agents=["agent"])
        place = self.load(theirs.run_no)[1]
        seen = r.stored(r.DecisionRefused("g", "theirs"))
        head = base.NewHead("running", None)
        super().append(theirs, place, base.Batch([seen], head, place.seq), now=NOW)
        return super().reclaim(lease, lease_s=lease_s)


@pytest.mark.parametrize("arrives", [True, False])
def test_what_gave_the_lease_back_is_known_although_somebody_took_it(arrives: bool) -> None:
    store = TakenBehindUs(arrives=arrives)
    writer = driven(store)
    store.lose_next = True
    if arrives:
        saved = writer.save([ASKED], draining=True)
        assert saved.released and writer.released
        assert [type(e).__name__ for e in saved.entries] == ["MessageAdded"]
        assert writer.place.entries == 3
    else:
        with pytest.raises(LeaseLost):
            writer.save([ASKED], draining=True)
    assert kinds(store)[-2 if arrives else -1 :] == (["MessageAdded"] if arrives else []) + ["DecisionRefused"]


class Flooded(OnItsWay):
    """Before each of the first appends somebody else's text comes in; the answer to the one under the lock is lost, and it stood."""

    def __init__(self) -> None:
        super().__init__(arrives=True)
        self.texts = ["one", "two"]

    def text(self) -> None:
        if self.texts:
            sent = r.TextSent(self.texts.pop(0))
            self.outside("run-1", lambda tail: base.Outside([sent]))

    def append(self, lease: base.Lease, place: base.Place, batch: base.Batch, *, now: datetime) -> base.Appended | base.Behind:
        self.text()
        return super().append(lease, place, batch, now=now)

    def append_locked(self, lease: base.Lease, place: base.Place, plan: Any, *, now: datetime) -> Any:
        self.text()
        super().append_locked(lease, place, plan, now=now)
        raise CommitUnknown("the answer was lost")


def test_an_answer_that_stands_behind_what_others_wrote_is_found() -> None:
    store = Flooded()
    writer = driven(store)
    writer.save([ASKED])
    assert kinds(store) == ["RunStarted", "MessageAdded", "TextSent", "TextSent", "MessageAdded"]
    assert [e.content for e in writer.heard if isinstance(e, r.TextSent)] == ["one", "two"]
    assert writer.run.entries == store.head("run-1").entries

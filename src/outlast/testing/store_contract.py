"""What every store must do: a class of pytest tests. A store passes all of them or is not a store.

class TestMine(StoreContract):
    @pytest.fixture
    def store(self) -> Store: ...           an empty one
    @pytest.fixture
    def reopen(self) -> Reopen: ...         another store over the same data: reopen(point=…, dead=…)
    @pytest.fixture
    def pass_time(self) -> PassTime: ...    moves the store's wall clock and its lease clock on
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, cast

import pytest

from outlast.core import run as r
from outlast.core.gate import projection
from outlast.core.run import Entry, Run, fold
from outlast.errors import CommitUnknown, LeaseLost, OutlastError, Refused, RunBusy, RunNotFound
from outlast.stores.base import (
    Appended,
    Batch,
    Behind,
    Head,
    Lease,
    NewHead,
    NewNotice,
    NewRun,
    Outside,
    ParentEntry,
    Place,
    RunFilter,
    Store,
    Tail,
    chain,
    genesis,
)

PassTime = Callable[[timedelta], None]
SECOND = timedelta(seconds=1)
ME, OTHER = "host/boot/ns/1/1", "host/boot/ns/2/2"


class Reopen(Protocol):
    def __call__(self, *, point: Callable[[str], None] = ..., dead: Callable[[str], bool] = ...) -> Store: ...


def asks(text: str = "hello") -> r.MessageAdded:
    return r.MessageAdded({"role": "user", "content": text})


def answers(text: str = "hi") -> r.MessageAdded:
    return r.MessageAdded({"role": "assistant", "content": text}, meta={"stop_reason": "end_turn"})


def calls(*ids: str) -> r.MessageAdded:
    content = [{"type": "tool_use", "id": i, "name": "refund", "input": {"amount": 1.0, "to": "Zoë"}} for i in ids]
    return r.MessageAdded({"role": "assistant", "content": content}, meta={"stop_reason": "tool_use"})


def new(run_id: str, agent: str = "support", **more: Any) -> NewRun:
    return NewRun(run_id, agent, [r.RunStarted(agent), asks()], **more)


class Driving:
    """A worker's side of one run: its lease, its fold, its place."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store, self.lease = store, lease
        entries, self.place = store.load(lease.run_no)
        self.run = fold(Run(lease.run_id), entries)

    def batch(self, *entries: Entry, status: str = "running", before: Run | None = None, **head: Any) -> Batch:
        now = self.store.now()
        stamped = [r.stored(replace(e, at=now)) for e in entries]
        after, gates = projection(before or self.run, stamped)
        counts: dict[str, Any] = {
            "model_calls": after.model_calls,
            "input_tokens": after.input_tokens,
            "output_tokens": after.output_tokens,
        }
        self.after = after
        return Batch(stamped, NewHead(status, head.pop("reason", None), **counts, **head), after.seq, gates, progress=True)

    def save(self, *entries: Entry, status: str = "running", **head: Any) -> Driving:
        self.put(self.batch(*entries, status=status, **head))
        return self

    def put(self, batch: Batch) -> None:
        saved = self.store.append(self.lease, self.place, batch, now=self.store.now())
        assert isinstance(saved, Appended), saved
        self.place, self.run = saved.place, self.after

    def release(self, status: str = "waiting_for_event", **head: Any) -> None:
        self.save(status=status, release=True, **head)


def begin(store: Store, run_id: str = "run-1", *, owner: str = ME, lease_s: float = 30, **more: Any) -> Driving:
    """A new run, leased."""
    _, lease, created = store.start(new(run_id, **more), owner=owner, lease_s=lease_s)
    assert created and lease is not None
    return Driving(store, lease)


def take(store: Store, owner: str = OTHER, *, limit: int = 1, agents: Sequence[str] = ("support",), **more: Any) -> list[Lease]:
    return store.claim(owner, agents=agents, limit=limit, **more)


def send(store: Store, run_id: str, text: str, entry_id: str | None = None, **more: Any) -> tuple[Head, Any, bool]:
    return store.outside(run_id, lambda tail: Outside([r.TextSent(text, entry_id=entry_id)], **more), entry_id=entry_id)


def at_commit(name: str, error: BaseException) -> tuple[Callable[[str], None], list[bool]]:
    """A point that raises once, when armed."""
    armed = [False]

    def point(passed: str) -> None:
        if armed[0] and passed == name:
            armed[0] = False
            raise error

    return point, armed


def gate(gate_id: str = "approval:c1", call_id: str = "c1", *, role: str | None = "lead", deadline: str | None = None) -> r.GateOpened:
    return r.GateOpened(gate_id, "approval", call_id, "refund", "sha256:00", noun="refund", rungs=[{"role": role, "deadline": deadline}])


def ask_busy(store: Store) -> str:
    """Who holds run-1, as somebody else hears it."""
    with pytest.raises(RunBusy) as caught:
        store.claim_run("run-1", OTHER)
    assert caught.value.hint == "outlast show run-1"
    return caught.value.owner


class StoreContract:
    """See the top of this file."""

    # ---- starting -------------------------------------------------------------------------------------------------------------

    def test_start_twice_is_one_run(self, store: Store) -> None:
        head, lease, created = store.start(new("run-1", input_digest="a", tags={"tenant": "northwind"}, started_by="priya"))
        assert created and lease is None
        assert (head.status, head.entries, head.seq, head.fence, head.held) == ("running", 2, 1, 0, False)
        assert (dict(head.tags), head.started_by, head.input_digest) == ({"tenant": "northwind"}, "priya", "a")
        assert head.wake_at == head.created_at
        again, lease, created = store.start(new("run-1", input_digest="b"), owner=ME)
        assert (again, lease, created) == (head, None, False)
        assert len(store.load(head.run_no)[0]) == 2

    def test_a_run_that_is_not_there(self, store: Store) -> None:
        for ask in (
            store.head,
            store.gates,
            lambda i: store.claim_run(i, ME),
            lambda i: send(store, i, "x"),
            lambda i: list(store.journal(i)),
        ):
            with pytest.raises(RunNotFound) as caught:
                ask("nobody")
            assert store.url in str(caught.value) and "nobody" in str(caught.value)

    def test_start_leased_cannot_be_snatched(self, store: Store) -> None:
        driving = begin(store)
        assert driving.lease.fence == 1 and driving.lease.attempts == 0 and not driving.lease.taken_over
        assert store.head("run-1").held
        assert take(store) == []
        with pytest.raises(RunBusy) as caught:
            store.claim_run("run-1", OTHER)
        assert (caught.value.owner, caught.value.until) == (ME, driving.lease.until)

    # ---- claiming -------------------------------------------------------------------------------------------------------------

    def test_claim_takes_the_oldest_due_of_all_its_agents(self, store: Store, pass_time: PassTime) -> None:
        for n, agent in enumerate(["support", "billing", "support", "other", "billing"]):
            store.start(new(f"run-{n}", agent))
            pass_time(SECOND)
        store.start(new("elsewhere", driver="temporal"))
        taken = take(store, agents=["billing", "support"], limit=3)
        assert [lease.run_id for lease in taken] == ["run-0", "run-1", "run-2"]
        assert [lease.run_id for lease in take(store, agents=["billing", "support"], limit=9)] == ["run-4"]
        assert [lease.run_id for lease in take(store, driver="temporal")] == ["elsewhere"]
        assert take(store, agents=[]) == []

    def test_claim_of_nothing_writes_nothing(self, store: Store) -> None:
        begin(store)
        seen = store.wait_for_change(None, 0)
        assert take(store) == [] and store.reap() == 0
        assert store.wait_for_change(seen, 0) == seen

    def test_a_run_is_due_when_its_instant_has_come(self, store: Store, pass_time: PassTime) -> None:
        begin(store).release("waiting_for_timer", wake_at=store.now() + 10 * SECOND)
        assert take(store) == []
        pass_time(10 * SECOND)
        [lease] = take(store)
        assert (lease.fence, lease.attempts, lease.taken_over) == (2, 0, False)

    def test_attempts_grow_only_where_nobody_released(self, store: Store, pass_time: PassTime) -> None:
        begin(store)
        pass_time(31 * SECOND)
        [lease] = take(store)
        assert (lease.attempts, lease.taken_over, lease.fence) == (1, True, 2)
        pass_time(31 * SECOND)
        [lease] = take(store)
        assert (lease.attempts, lease.taken_over, lease.fence) == (2, True, 3)
        driving = Driving(store, lease)
        driving.put(replace(driving.batch(r.CallSkipped("c1", "late")), progress=False))
        assert store.head("run-1").attempts == 2
        driving.release(wake_at=store.now())
        [lease] = take(store)
        assert lease.attempts == 0 and not lease.taken_over  # the release was a batch with progress

    def test_due_runs_come_before_those_whose_lease_is_over(self, store: Store, pass_time: PassTime) -> None:
        begin(store, "over")
        pass_time(31 * SECOND)
        store.start(new("due"))
        assert [lease.run_id for lease in take(store, limit=5)] == ["due", "over"]

    def test_a_claim_costs_no_run_twice(self, store: Store) -> None:
        for n in range(200):
            store.start(new(f"run-{n:03}"))
        taken: list[str] = []

        def work(owner: str) -> None:
            while leases := take(store, owner):
                taken.extend(lease.run_id for lease in leases)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, [ME, OTHER]))
        assert sorted(taken) == [f"run-{n:03}" for n in range(200)]

    def test_claim_run_takes_what_is_not_due(self, store: Store) -> None:
        begin(store).release()
        assert take(store) == []
        assert store.claim_run("run-1", ME).fence == 2
        store.start(new("run-2", driver="temporal"))
        with pytest.raises(Refused, match="temporal"):
            store.claim_run("run-2", ME)
        assert store.claim_run("run-2", ME, driver=None).fence == 1

    def test_a_dead_process_holds_nothing(self, store: Store, reopen: Reopen) -> None:
        begin(store, "run-1")
        begin(store, "run-2", owner=OTHER)
        seer = reopen(dead=lambda owner: owner == ME)
        assert not seer.head("run-1").held and seer.head("run-2").held
        lease = seer.claim_run("run-1", OTHER)
        assert (lease.attempts, lease.taken_over) == (1, True)
        with pytest.raises(RunBusy):
            seer.claim_run("run-2", ME)
        begin(store, "run-3")
        assert take(seer) == []
        assert (seer.reap(), seer.reap()) == (1, 0)
        assert [(lease.run_id, lease.attempts) for lease in take(seer, limit=5)] == [("run-3", 1)]

    def test_parked_runs_are_passed_over(self, store: Store) -> None:
        begin(store).release("waiting_for_code", needs="tool:refund")
        begin(store, "run-2", agent="billing").release("waiting_for_code", needs="tool:refund")
        assert store.parked(agents=["support"]) == [("support", "tool:refund")]
        assert take(store) == [] and take(store, needs=[("support", "tool:other")]) == []
        [lease] = take(store, agents=["support"], needs=[("support", "tool:refund"), ("billing", "tool:refund")], limit=5)
        assert lease.run_id == "run-1"
        assert store.parked(agents=["support"]) == []
        Driving(store, lease).release("waiting_for_code", needs="tool:refund")
        send(store, "run-1", "go on")
        assert store.head("run-1").needs is None
        assert [lease.run_id for lease in take(store)] == ["run-1"]

    def test_parked_runs_are_not_due_whatever_their_clock_says(self, store: Store) -> None:
        begin(store).release("waiting_for_code", needs="tool:refund", wake_at=store.now())
        assert take(store) == [] and store.due(agents=["support"], driver="built-in") == []
        assert store.pending(agents=["support"])[0] == 0
        assert store.due(agents=["support"], driver="built-in", needs=[("support", "tool:refund")]) == ["run-1"]

    def test_mark_parks_a_run_that_needs_newer_code(self, store: Store) -> None:
        held = begin(store)
        store.mark(held.lease, NewHead("waiting_for_code", "the journal is of format 2", release=True, needs="format:2"))
        head = store.head("run-1")
        assert (head.status, head.needs, head.wake_at, head.lease_owner, head.entries) == (
            "waiting_for_code",
            "format:2",
            None,
            None,
            held.place.entries,
        )
        assert take(store) == [] and store.parked(agents=["support"]) == [("support", "format:2")]
        assert [lease.run_id for lease in take(store, needs=[("support", "format:2")])] == ["run-1"]

    def test_unfinished_page_has_each_runs_tail_and_version(self, store: Store) -> None:
        begin(store, "asks").save(calls("c1")).release("waiting_for_approval")
        begin(store, "changed").save(r.VersionChanged("2", "sha256:2")).save(calls("c1")).save(r.VersionChanged("3", "sha256:3")).release()
        begin(store, "done").save(r.RunEnded("done"), status="done", release=True)
        store.start(new("fresh"))
        found, last = [], None
        while page := store.unfinished_page(after=last, limit=2):
            found += page
            last = page[-1].head
        assert [x.head.run_id for x in found] == ["asks", "changed", "fresh"]
        assert [x.ran_by.kind for x in found] == ["RunStarted", "VersionChanged", "RunStarted"]
        assert '"3"' in found[1].ran_by.body
        assert [[row.kind for row in x.rows] for x in found] == [["MessageAdded"], ["MessageAdded", "VersionChanged"], ["MessageAdded"]]
        assert {row.seq for row in found[0].rows} == {found[0].head.seq}

    def test_ends_are_the_last_digests(self, store: Store) -> None:
        assert list(store.ends()) == []
        for run_id in ("run-2", "run-1"):
            begin(store, run_id).save(calls("c1"))
        last = {run_id: list(store.journal(run_id))[-1] for run_id in ("run-1", "run-2")}
        assert list(store.ends()) == [(run_id, row.entry_no, row.digest.hex()) for run_id, row in last.items()]
        first = next(iter(store.journal("run-1")))
        assert store.digest_at("run-1", 1) == first.digest.hex()
        assert store.digest_at("run-1", 99) is None and store.digest_at("nothing", 1) is None

    def test_pending_is_what_until_idle_waits_for(self, store: Store, pass_time: PassTime) -> None:
        agents = ["support", "billing"]
        assert store.pending(agents=agents) == (0, None)
        store.start(new("due"))
        begin(store, "held", agent="billing")
        soon, later = store.now() + 40 * SECOND, store.now() + 61 * SECOND
        begin(store, "soon").release("waiting_for_timer", wake_at=soon)
        begin(store, "later").release("waiting_for_timer", wake_at=later)
        begin(store, "waits").release()
        store.start(new("other", "other"))
        count, first = store.pending(agents=agents)
        assert (count, first) == (3, store.head("due").wake_at)
        [lease] = take(store)
        Driving(store, lease).release("done")
        assert store.pending(agents=["support"]) == (1, soon)
        assert store.pending(agents=["support"], within=SECOND) == (0, None)
        pass_time(SECOND)
        assert store.pending(agents=["support"]) == (2, soon)

    # ---- leases ---------------------------------------------------------------------------------------------------------------

    def test_renewal(self, store: Store, pass_time: PassTime) -> None:
        first, second = begin(store, "run-1"), begin(store, "run-2")
        send(store, "run-1", "x")
        seen = [(n.run_id, n.held, n.fence, n.entries) for n in store.renew([first.lease, second.lease])]
        assert seen == [("run-1", True, 1, 3), ("run-2", True, 1, 2)]
        pass_time(31 * SECOND)
        [late] = store.renew([first.lease])  # over, and nobody took it
        assert late.held and store.head("run-1").held
        [lease] = take(store)
        assert lease.run_id == "run-2"
        assert [(n.held, n.fence) for n in store.renew([second.lease, first.lease])] == [(False, 2), (True, 1)]
        assert [(n.held, n.fence) for n in store.peek([second.lease, first.lease])] == [(False, 2), (True, 1)]
        assert store.renew([]) == []

    def test_whoever_lost_a_lease_moves_nothing_by_renewing_it(self, store: Store, pass_time: PassTime) -> None:
        lost = begin(store)
        pass_time(31 * SECOND)
        [lease] = take(store)
        assert [n.held for n in store.renew([lost.lease], lease_s=1000)] == [False]
        pass_time(31 * SECOND)
        assert not store.head("run-1").held, "the lease of who has it now ends when it would have"
        assert store.renew([lease])[0].held

    def test_a_renewal_during_the_holders_own_reclaim(self, store: Store) -> None:
        driving = begin(store)
        store.reclaim(driving.lease)  # in another thread; the renewal still has the fence from before
        for found in (store.peek([driving.lease]), store.renew([driving.lease])):
            assert [(n.held, n.fence) for n in found] == [(True, 2)]

    def test_a_renewal_never_shortens(self, store: Store, pass_time: PassTime) -> None:
        driving = begin(store, lease_s=300)
        store.renew([driving.lease], lease_s=1)
        pass_time(200 * SECOND)
        assert store.head("run-1").held

    def test_a_released_lease_is_not_renewed(self, store: Store) -> None:
        driving = begin(store)
        driving.release()
        assert [n.held for n in store.renew([driving.lease])] == [False]

    def test_give_back_unused(self, store: Store) -> None:
        store.start(new("run-1"))
        [lease] = take(store)
        store.release(lease)
        [again] = take(store)
        assert (again.fence, again.attempts, again.taken_over) == (2, 0, False)
        store.release(lease)  # another's by now: nothing happens
        assert store.head("run-1").held

    def test_an_effect_about_to_begin_extends_the_lease(self, store: Store, pass_time: PassTime) -> None:
        driving = begin(store)
        driving.put(replace(driving.batch(calls("c1")), extend_until=150 * SECOND))
        driving.put(replace(driving.batch(r.CallSkipped("c1", "late")), extend_until=10 * SECOND))  # never shorter
        pass_time(140 * SECOND)
        assert store.head("run-1").held and take(store) == []
        pass_time(11 * SECOND)
        assert not store.head("run-1").held and len(take(store)) == 1

    # ---- appending ------------------------------------------------------------------------------------------------------------

    def test_what_was_appended_is_what_is_read(self, store: Store) -> None:
        driving = begin(store)
        message = {
            "role": "assistant",
            "content": [{"type": "text", "text": "Zoë \u2028 \U0001f600"}, {"type": "x", "n": 10**20, "f": 1.0, "z": None}],
        }
        meta = {"stop_reason": "end_turn", "usage": {"input_tokens": 7, "output_tokens": 2}}
        driving.save(r.MessageAdded(message, meta=meta), r.RunEnded("done"), status="done", release=True, cost_usd="0.0001")
        entries, place = store.load(driving.lease.run_no)
        assert place == driving.place and place.entries == 4 and place.seq == 2
        assert isinstance(entries[2], r.MessageAdded) and entries[2].message == message and entries[2].meta == meta
        assert entries[2].at == store.now()
        head = store.head("run-1")
        assert (head.status, head.seq, head.model_calls, head.input_tokens, head.cost_usd) == ("done", 2, 1, 7, "0.0001")
        assert (head.lease_owner, head.lease_until, head.wake_at, head.held) == (None, None, None, False)
        assert [(row.entry_no, row.seq, row.status, row.fence) for row in store.journal("run-1")] == [
            (1, 0, "running", 0), (2, 1, "running", 0), (3, 2, "done", 1), (4, 2, "done", 1)]  # fmt: skip

    def test_load_after_a_place(self, store: Store) -> None:
        driving = begin(store)
        middle = driving.place
        driving.save(calls("c1")).save(r.CallSkipped("c1", "late"))
        entries, place = store.load(driving.lease.run_no, after=middle)
        assert [type(e).__name__ for e in entries] == ["MessageAdded", "CallSkipped"] and place == driving.place
        assert store.load(driving.lease.run_no, after=place) == ([], place)
        assert [type(e).__name__ for e in store.load(driving.lease.run_no, since_seq=2)[0]] == ["MessageAdded", "CallSkipped"]

    def test_the_journal_in_pieces_and_its_chain(self, store: Store) -> None:
        driving = begin(store)
        for n in range(600):
            driving.save(r.DecisionRefused("g", f"no {n}", by="priya", entry_id=f"e{n}"))
        whole = list(store.journal("run-1"))
        assert [row.entry_no for row in whole] == list(range(1, 603))
        assert list(store.journal("run-1", after=550, limit=20)) == whole[550:570]
        digest = genesis("run-1")
        for row in whole:
            digest = chain(
                digest, entry_no=row.entry_no, seq=row.seq, kind=row.kind, at_ms=r.ms(row.at), by=row.by, entry_id=row.entry_id, fence=row.fence,
                status=row.status, meta=row.meta, body=row.body)  # fmt: skip
            assert digest == row.digest
        assert digest == driving.place.digest
        assert store.check() == []

    def test_a_former_holder_writes_nothing(self, store: Store, pass_time: PassTime) -> None:
        driving = begin(store)
        pass_time(31 * SECOND)
        take(store)
        before = store.head("run-1")
        with pytest.raises(LeaseLost, match=r"fence 2, ours 1"):
            store.append(driving.lease, driving.place, driving.batch(answers()), now=store.now())
        with pytest.raises(LeaseLost):
            store.append_locked(driving.lease, driving.place, lambda others, place: driving.batch(answers()), now=store.now())
        assert store.head("run-1") == before

    def test_a_stranger_with_the_right_fence_writes_nothing(self, store: Store) -> None:
        driving = begin(store)
        with pytest.raises(LeaseLost):
            store.append(replace(driving.lease, nonce="guess"), driving.place, driving.batch(answers()), now=store.now())

    def test_after_a_release_nothing_more_is_written(self, store: Store) -> None:
        driving = begin(store)
        driving.release()
        with pytest.raises(LeaseLost):
            store.append(driving.lease, driving.place, driving.batch(answers()), now=store.now())

    def test_behind_gives_what_others_wrote(self, store: Store) -> None:
        driving = begin(store)
        send(store, "run-1", "one", "e1")
        send(store, "run-1", "two", "e2")
        refused = store.append(driving.lease, driving.place, driving.batch(answers()), now=store.now())
        assert isinstance(refused, Behind)
        assert [cast("r.TextSent", e).content for e in refused.entries] == ["one", "two"]
        assert store.head("run-1").seq == 1
        driving.run, driving.place = fold(driving.run, refused.entries), refused.place
        driving.save(answers())
        assert store.check() == []

    def test_the_second_try_is_worked_out_under_the_lock(self, store: Store) -> None:
        driving = begin(store)
        send(store, "run-1", "one", "e1")

        def plan(others: Sequence[Entry], place: Place) -> Batch:
            assert place.entries == 3
            return driving.batch(answers(), before=fold(driving.run, others))

        saved, others = store.append_locked(driving.lease, driving.place, plan, now=store.now())
        assert [type(e).__name__ for e in others] == ["TextSent"]
        assert saved.place.entries == 4 and store.load(driving.lease.run_no)[1] == saved.place

        def broken(others: Sequence[Entry], place: Place) -> Batch:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.append_locked(driving.lease, saved.place, broken, now=store.now())
        assert store.check() == []

    def test_many_threads_append_at_once(self, store: Store) -> None:
        runs = [begin(store, f"run-{n}") for n in range(16)]
        gate_ = threading.Barrier(16)

        def work(driving: Driving) -> None:
            gate_.wait(10)
            for n in range(10):
                driving.save(r.DecisionRefused("g", f"no {n}"))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, runs))
        assert [store.head(f"run-{n}").entries for n in range(16)] == [12] * 16
        assert store.check() == []

    def test_one_refused_append_harms_no_other(self, store: Store) -> None:
        runs = [begin(store, f"run-{n}") for n in range(8)]
        for n in (2, 5):
            runs[n].lease = replace(runs[n].lease, nonce="gone")
        send(store, "run-3", "came first")
        gate_ = threading.Barrier(8)

        def work(driving: Driving) -> str:
            batch = driving.batch(answers())
            gate_.wait(10)
            try:
                return type(store.append(driving.lease, driving.place, batch, now=store.now())).__name__
            except OutlastError as e:
                return type(e).__name__

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(work, runs))
        assert outcomes == ["Appended", "Appended", "LeaseLost", "Behind", "Appended", "LeaseLost", "Appended", "Appended"]
        assert [store.head(f"run-{n}").seq for n in range(8)] == [2, 2, 1, 1, 2, 1, 2, 2]

    # ---- commits whose answer is lost -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name, stands", [("commit.before", False), ("commit.after", True)])
    def test_a_lost_answer_is_settled_by_reclaim(self, store: Store, reopen: Reopen, name: str, stands: bool) -> None:
        driving = begin(store)
        point, armed = at_commit(name, CommitUnknown("the answer was lost"))
        driving.store = shaky = reopen(point=point)
        batch = driving.batch(answers())
        armed[0] = True
        with pytest.raises(CommitUnknown):
            shaky.append(driving.lease, driving.place, batch, now=store.now())
        lease = shaky.reclaim(driving.lease)
        assert lease.fence == 2 and shaky.head("run-1").held
        found, place = shaky.load(lease.run_no, after=driving.place)
        assert found == (list(batch.entries) if stands else [])
        with pytest.raises(LeaseLost):  # under the former fence nothing more can arrive
            shaky.append(driving.lease, driving.place, batch, now=store.now())
        driving.lease, driving.place, driving.run = lease, place, fold(driving.run, found)
        driving.save(r.DecisionRefused("g", "goes on"))
        assert store.check() == []

    def test_a_lost_answer_of_the_reclaim_itself(self, store: Store, reopen: Reopen) -> None:
        driving = begin(store)
        point, armed = at_commit("commit.after", CommitUnknown("the answer was lost"))
        shaky = reopen(point=point)
        armed[0] = True
        with pytest.raises(CommitUnknown):
            shaky.reclaim(driving.lease)
        lease = shaky.reclaim(driving.lease)
        assert shaky.head("run-1").fence == lease.fence
        driving.lease = lease
        driving.save(answers())

    @pytest.mark.parametrize("name", ["commit.before", "commit.after"])
    @pytest.mark.parametrize("led", [True, False])
    def test_a_start_whose_answer_is_lost_is_found_again(self, store: Store, reopen: Reopen, name: str, led: bool) -> None:
        store.heads(RunFilter())
        point, armed = at_commit(name, CommitUnknown("the answer was lost"))
        shaky = reopen(point=point)
        shaky.heads(RunFilter())
        armed[0] = True
        head, lease, created = shaky.start(new("run-1"), owner=ME if led else None)
        assert created and not armed[0]
        assert (lease is not None) == head.held == led
        assert head.attempts == 0
        if lease is not None:
            Driving(shaky, lease).save(answers())
        assert store.check() == []

    @pytest.mark.parametrize("name", ["commit.before", "commit.after"])
    @pytest.mark.parametrize("by_name", [True, False])
    def test_a_claim_whose_answer_is_lost_is_found_again(self, store: Store, reopen: Reopen, name: str, by_name: bool) -> None:
        """Nobody waits for a lease to run out that is this very process's own, and no death is counted."""
        store.start(new("run-1"))
        point, armed = at_commit(name, CommitUnknown("the answer was lost"))
        shaky = reopen(point=point)
        shaky.heads(RunFilter())
        armed[0] = True

        def ask() -> list[Lease]:
            return [shaky.claim_run("run-1", ME)] if by_name else take(shaky, ME)

        try:
            leases = ask()
        except CommitUnknown:
            leases = ask()
        assert [(lease.run_id, lease.attempts, lease.taken_over) for lease in leases] == [("run-1", 0, False)]
        Driving(shaky, leases[0]).save(answers())
        assert not armed[0]
        assert ask_busy(store) == ME

    def test_a_claim_that_is_found_again_late_is_held_anew(self, store: Store, reopen: Reopen, pass_time: PassTime) -> None:
        """Its lease is over by then: unless it is renewed in the same commit, somebody else takes the run at this very moment."""
        store.start(new("run-1"))
        losing = [False]

        def point(name: str) -> None:
            if losing[0] and name == "commit.after":
                raise CommitUnknown("the answer was lost")

        shaky = reopen(point=point)
        shaky.heads(RunFilter())
        losing[0] = True
        with pytest.raises(CommitUnknown):
            take(shaky, ME)
        losing[0] = False
        pass_time(31 * SECOND)
        [lease] = take(shaky, ME)
        assert lease.until == store.now() + 30 * SECOND
        assert take(store, "another") == []
        Driving(shaky, lease).save(answers())

    def test_whether_our_release_stood_says_the_fence(self, store: Store, reopen: Reopen) -> None:
        driving = begin(store)
        point, armed = at_commit("commit.after", CommitUnknown("the answer was lost"))
        shaky = reopen(point=point)
        batch = driving.batch(calls("c1"), release=True, wake_at=store.now())
        armed[0] = True
        with pytest.raises(CommitUnknown):
            shaky.append(driving.lease, driving.place, batch, now=store.now())
        [lease] = take(store)
        Driving(store, lease).save(r.DecisionRefused("g", "goes on"))
        with pytest.raises(LeaseLost):
            shaky.reclaim(driving.lease)
        rows = list(shaky.journal("run-1", after=driving.place.entries))
        assert [(row.kind, row.fence) for row in rows] == [("MessageAdded", driving.lease.fence), ("DecisionRefused", lease.fence)]

    def test_reclaim_after_our_release_or_anothers_claim(self, store: Store, pass_time: PassTime) -> None:
        driving = begin(store)
        driving.release()
        lease = store.reclaim(driving.lease)  # the release may have been what was lost: nobody else took the run
        assert store.head("run-1").held
        pass_time(31 * SECOND)
        take(store)
        with pytest.raises(LeaseLost):
            store.reclaim(lease)
        begin(store, "run-2")

    # ---- from outside ---------------------------------------------------------------------------------------------------------

    def test_an_entry_from_outside_wakes(self, store: Store) -> None:
        begin(store).release()
        head, value, written = store.outside(
            "run-1", lambda tail: Outside([r.TextSent("x", by="priya", entry_id="e1")], status="running", value=tail.head.status))  # fmt: skip
        assert (value, written, head.status, head.wake_at) == ("waiting_for_event", True, "running", store.now())
        [row] = store.journal("run-1", after=2)
        assert (row.kind, row.by, row.entry_id, row.fence, row.status, row.at) == ("TextSent", "priya", "e1", 0, "running", store.now())
        assert len(take(store)) == 1

    def test_the_same_entry_twice_is_one(self, store: Store) -> None:
        store.start(new("run-1"))
        assert send(store, "run-1", "one", "e1")[2]
        head, value, written = send(store, "run-1", "two", "e1")
        assert (value, written, head.entries) == (None, False, 3)
        store.start(new("run-2"))
        assert send(store, "run-2", "one", "e1")[2]  # unique in its run only

    def test_an_id_goes_to_the_first_entry_that_has_none(self, store: Store) -> None:
        store.start(new("run-1"))
        store.outside("run-1", lambda tail: Outside([r.TextSent("one")]), entry_id="e1")
        assert [row.entry_id for row in store.journal("run-1", after=2)] == ["e1"]

    def test_no_entries_write_nothing(self, store: Store) -> None:
        begin(store).release()
        before = store.head("run-1")
        assert store.outside("run-1", lambda tail: Outside(value=7)) == (before, 7, False)

    def test_what_a_plan_sees(self, store: Store) -> None:
        driving = begin(store, tags={"a": "b"})
        driving.save(answers()).save(asks("more")).save(calls("c1", "c2"), gate(), status="waiting_for_approval")
        send(store, "run-1", "hurry")
        _, tail, _ = store.outside("run-1", lambda tail: Outside(value=tail))
        assert (tail.run.entries, tail.run.seq, tail.head.seq) == (tail.head.entries, 4, 4)
        assert [c.id for c in tail.run.calls] == ["c1", "c2"] and [t.content for t in tail.run.queued] == ["hurry"]
        assert [g.gate_id for g in tail.gates] == ["approval:c1"] and tail.gates[0].seq == 4
        assert (tail.run.agent, tail.now) == ("support", store.now())

    def test_a_plan_sees_a_text_that_is_older_than_the_models_answer(self, store: Store) -> None:
        """It waits until it is placed; a cancel that did not see it would lose it."""
        driving = begin(store)
        send(store, "run-1", "early")
        entries, driving.place = store.load(driving.lease.run_no)
        driving.run = fold(Run("run-1"), entries)
        driving.save(calls("c1"))
        send(store, "run-1", "late")
        _, tail, _ = store.outside("run-1", lambda tail: Outside(value=tail))
        assert [t.content for t in tail.run.queued] == ["early", "late"]
        assert [c.id for c in tail.run.calls] == ["c1"]
        assert (tail.run.entries, tail.run.seq) == (tail.head.entries, tail.head.seq)

    def test_renewing_tells_two_leases_of_one_run_apart(self, store: Store, pass_time: PassTime) -> None:
        lost = begin(store).lease
        pass_time(31 * SECOND)
        [lease] = take(store)
        for asked in ([lost, lease], [lease, lost]):
            assert [x.held for x in store.renew(asked)] == [x.held for x in store.peek(asked)] == [x is lease for x in asked]

    def test_cancel_takes_the_fence(self, store: Store) -> None:
        driving = begin(store)

        def cancel(tail: Tail) -> Outside:
            return Outside([r.RunCancelled("enough", by="priya", entry_id="x")], status="cancelled", reason="enough", fence=True)

        head, _, _ = store.outside("run-1", cancel)
        assert (head.status, head.reason, head.fence, head.lease_owner, head.wake_at) == ("cancelled", "enough", 2, None, None)
        assert take(store) == []
        with pytest.raises(LeaseLost):
            store.append(driving.lease, driving.place, driving.batch(answers()), now=store.now())
        with pytest.raises(LeaseLost):
            store.reclaim(driving.lease)
        assert [n.held for n in store.renew([driving.lease])] == [False]

    def test_a_persons_word_starts_attempts_anew(self, store: Store, pass_time: PassTime) -> None:
        begin(store)
        pass_time(31 * SECOND)
        [lease] = take(store)
        send(store, "run-1", "x")
        assert store.head("run-1").attempts == lease.attempts == 1
        send(store, "run-1", "y", fresh=True)
        assert store.head("run-1").attempts == 0

    def test_a_plan_that_raises_changes_nothing(self, store: Store) -> None:
        store.start(new("run-1"))
        before = store.head("run-1")

        def broken(tail: Tail) -> Outside:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.outside("run-1", broken)
        assert store.head("run-1") == before

    def test_mark_a_run_whose_journal_cannot_be_read(self, store: Store) -> None:
        driving = begin(store).save(answers())
        store.mark(driving.lease, NewHead("failed", "entry 2 cannot be read", release=True))
        head = store.head("run-1")
        assert (head.status, head.reason, head.entries, head.lease_owner) == ("failed", "entry 2 cannot be read", 3, None)
        with pytest.raises(LeaseLost):
            store.mark(driving.lease, NewHead("failed", "again", release=True))

    # ---- gates, children, notices ---------------------------------------------------------------------------------------------

    def test_gates_are_the_journals_projection(self, store: Store) -> None:
        driving = begin(store).save(calls("c1", "c2"), gate(), gate("approval:c2", "c2"), status="waiting_for_approval", release=True)
        assert [(g.gate_id, g.outcome, told) for g, told in store.gates("run-1")] == [
            ("approval:c1", None, None),
            ("approval:c2", None, None),
        ]

        def decide(tail: Tail) -> Outside:
            entries = [r.stored(r.GateDecided("approval:c1", "rejected", "too much", by="priya", entry_id="d1", at=tail.now))]
            return Outside(entries, status="running", gates=projection(tail.run, entries)[1])

        store.outside("run-1", decide)
        (second, _), (first, _) = store.gates("run-1")  # open ones first
        assert (second.gate_id, second.outcome) == ("approval:c2", None)
        assert (first.outcome, first.decided_by, first.decided_at, first.note) == ("rejected", "priya", store.now(), "too much")
        assert first.args == '{"amount": 1.0, "to": "Zoë"}'
        driving = Driving(store, store.claim_run("run-1", ME))
        done = [r.CallFinished("c1", "no", is_error=True, how="refused"), r.CallFinished("c2", "no", is_error=True, how="cancelled")]
        blocks = [{"type": "tool_result", "tool_use_id": c.call_id, "content": c.content} for c in done]
        driving.save(*done, r.MessageAdded({"role": "user", "content": blocks}), r.RunEnded("done"), status="done", release=True)
        assert [g.outcome for g, _ in store.gates("run-1")] == ["rejected", "cancelled"]
        assert store.check() == []

    def test_the_inbox(self, store: Store, pass_time: PassTime) -> None:
        def open_(run_id: str, role: str | None, in_s: int | None, **more: Any) -> None:
            deadline = r.iso(store.now() + in_s * SECOND) if in_s is not None else None
            begin(store, run_id, **more).save(calls("c1"), gate(role=role, deadline=deadline), status="waiting_for_approval", release=True)
            pass_time(SECOND)

        open_("never-1", "lead", None, tags={"tenant": "northwind", "x": "1"})
        open_("late", "lead", 500)
        open_("never-2", None, None)
        open_("soon", "boss", 100, agent="billing", tags={"tenant": "northwind"})

        def ids(role: str | None = None, agent: str | None = None, tags: dict[str, str] | None = None, limit: int = 50) -> list[str]:
            return [head.run_id for head, _, _ in store.inbox(role=role, agent=agent, tags=tags or {}, limit=limit)]

        assert ids() == ["soon", "late", "never-1", "never-2"]
        assert ids(limit=2) == ["soon", "late"]
        assert ids(role="lead") == ["late", "never-1"] and ids(agent="billing") == ["soon"]
        assert ids(tags={"tenant": "northwind"}) == ["soon", "never-1"] and ids(tags={"tenant": "northwind", "x": "1"}) == ["never-1"]
        [(head, row, told)] = store.inbox(role="boss", agent=None, tags={}, limit=1)
        assert (head.run_id, row.gate_id, row.role, told) == ("soon", "approval:c1", "boss", None)

    def test_a_child_is_made_and_heard_in_one_transaction(self, store: Store) -> None:
        parent = begin(store, "run-1").save(calls("c1"))
        child = new("run-1:c1", "billing", parent_run_id="run-1", parent_call_id="c1")
        waits = r.GateOpened("run:c1", "run", "c1", "refund", "sha256:00", args={"run_id": "run-1:c1"})
        batch = replace(parent.batch(waits, status="waiting_for_run", release=True), children=[child])
        parent.put(batch)
        [lease] = take(store, agents=["billing"])
        assert (lease.run_id, store.head("run-1:c1").parent_run_id) == ("run-1:c1", "run-1")

        def told(tail: Tail) -> Outside:
            entries = [r.stored(r.ChildFinished("c1", "done", "42", entry_id="child:c1", at=tail.now))]
            return Outside(entries, status="running", gates=projection(tail.run, entries)[1])

        driving = Driving(store, lease)
        driving.put(replace(driving.batch(r.RunEnded("done"), status="done", release=True), parent=ParentEntry("run-1", told)))
        assert [row.kind for row in store.journal("run-1", after=4)] == ["ChildFinished"]
        assert store.gates("run-1")[0][0].outcome == "arrived"
        assert [lease.run_id for lease in take(store)] == ["run-1"]
        assert store.check() == []

    def test_a_child_that_is_there_is_left_as_it_is(self, store: Store) -> None:
        store.start(new("run-1:c1", "billing", input_digest="first"))
        parent = begin(store, "run-1").save(calls("c1"))
        parent.put(replace(parent.batch(r.DecisionRefused("g", "x")), children=[new("run-1:c1", "billing", input_digest="second")]))
        assert store.head("run-1:c1").input_digest == "first"

    def test_a_refused_append_makes_no_child_and_tells_no_parent(self, store: Store) -> None:
        store.start(new("parent"))
        driving = begin(store, "run-1")
        send(store, "run-1", "came first")
        told = ParentEntry("parent", lambda tail: Outside([r.TextSent("told")]))
        batch = replace(driving.batch(r.DecisionRefused("g", "x")), children=[new("run-1:c1")], parent=told)
        assert isinstance(store.append(driving.lease, driving.place, batch, now=store.now()), Behind)
        assert store.head("parent").entries == 2
        with pytest.raises(RunNotFound):
            store.head("run-1:c1")

    def test_an_entry_from_outside_reaches_other_runs(self, store: Store) -> None:
        store.start(new("run-1"))
        store.start(new("run-1:c1"))

        def cancelled(tail: Tail) -> Outside:
            return Outside([r.RunCancelled("x", entry_id=f"cancel:{tail.head.run_id}")], status="cancelled", fence=True)

        def cancel(tail: Tail) -> Outside:
            return replace(cancelled(tail), others=[ParentEntry("run-1:c1", cancelled), ParentEntry("gone", cancelled)])

        store.outside("run-1", cancel)
        assert [store.head(i).status for i in ("run-1", "run-1:c1")] == ["cancelled", "cancelled"]

    def test_a_notice_is_kept_once(self, store: Store) -> None:
        driving = begin(store).save(calls("c1"))
        notice = NewNotice("n1", "approval:c1", "opened", "https://example.org/hook", "please decide")
        driving.put(replace(driving.batch(gate()), notices=[notice]))
        driving.put(replace(driving.batch(r.DecisionRefused("g", "x")), notices=[notice]))
        assert store.check() == []

    # ---- reading --------------------------------------------------------------------------------------------------------------

    def test_lists_newest_first_in_pages(self, store: Store, pass_time: PassTime) -> None:
        for n in range(6):
            driving = begin(store, f"run-{n}", agent="billing" if n == 3 else "support", tags={"n": str(n), "all": "yes"})
            driving.release("done" if n % 2 else "waiting_for_event")
            if n != 2:  # 2 and 3 were made in the same millisecond: the run id decides
                pass_time(SECOND)

        def ids(**where: Any) -> list[str]:
            return [h.run_id for h in store.heads(RunFilter(**where))]

        assert ids() == ["run-5", "run-4", "run-3", "run-2", "run-1", "run-0"]
        assert ids(limit=2, before="run-4") == ["run-3", "run-2"] and ids(before="run-3", limit=1) == ["run-2"]
        assert ids(status="done") == ["run-5", "run-3", "run-1"] and ids(status="waiting_for_event") == ["run-4", "run-2", "run-0"]
        assert ids(unfinished=True) == ["run-4", "run-2", "run-0"] and ids(agent="billing") == ["run-3"]
        assert ids(tags={"n": "1", "all": "yes"}) == ["run-1"] and ids(tags={"n": "7"}) == []
        assert ids(since=store.head("run-4").created_at) == ["run-5", "run-4"]
        assert store.unfinished() == ["run-0", "run-2", "run-4"]
        with pytest.raises(RunNotFound):
            ids(before="nobody")

    def test_a_commit_elsewhere_is_noticed(self, store: Store, reopen: Reopen) -> None:
        other = reopen()
        other.unfinished()
        seen = store.wait_for_change(None, 0)
        assert store.wait_for_change(seen, 0.02) == seen
        woken: list[int] = []
        waiting = threading.Thread(target=lambda: woken.append(store.wait_for_change(seen, 20)))
        waiting.start()
        other.start(new("run-1"))
        waiting.join(10)
        assert woken and woken[0] != seen

    def test_readers_do_not_wait_for_the_writer(self, store: Store, reopen: Reopen) -> None:
        store.start(new("run-1"))
        other, found = reopen(), []

        def plan(tail: Tail) -> Outside:
            found.append(other.head("run-1").entries)  # inside the transaction, by another connection
            return Outside([r.TextSent("x")])

        store.outside("run-1", plan)
        assert found == [2] and other.head("run-1").entries == 3

    def test_closed_and_used_again(self, store: Store) -> None:
        store.start(new("run-1"))
        store.close()
        store.close()
        assert store.head("run-1").run_id == "run-1"

"""Postgres behind a network and a server that fail: every COMMIT cut or swallowed, servers killed, poolers, standbys.

What counts is the world outside: each effect there once, and each run at its end.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from outlast import Agent, Outlast, Run, ToolContext, approval, tool
from outlast.core import run as r
from outlast.errors import CommitUnknown, OutlastError, RunBusy, StoreError
from outlast.models import ScriptedModel
from outlast.settings import parse_store
from outlast.stores.postgres import PostgresStore
from outlast.testing.store_contract import ME, OTHER, Driving, answers, begin, calls, new, send, take
from support.pgbouncer import Bouncer
from support.pgproxy import MODES, Mode, Proxy
from support.postgres import Server, make, remove
from support.waiting import until
from support.world import Ledger, asks, assert_whole, tools, use

LEASE = timedelta(seconds=1)
SCRIPT = [
    asks(use("deliver", "c1", text="parcel"), use("act", "c2", text="refund")),
    asks(use("deliver", "c3", text="note")),
    "All is done.",
]
GATED = approval(to="support-lead", noun="parcel", within=timedelta(hours=4))
KEYS = ["c1", "c2", "c3"]


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(str(postgres.socket_dir), postgres.port) as proxy:
        yield proxy


@dataclass
class Play:
    """A support agent whose store is behind the proxy; `sure` is the same store, asked directly."""

    app: Outlast
    sure: Outlast
    ledger: Ledger

    def run(self, run_id: str) -> Run[Any]:
        """As a careful program does it: start, decide and resume are each called again until they are answered."""
        self.again(lambda: self.app.start("courier", "send it", run_id=run_id))
        for _ in range(60):
            run = self.again(lambda: self.app.resume_sync(run_id))
            if run.finished:
                return run
            for gate in [g for g in run.gates if g.outcome is None]:
                assert gate.call_id is not None
                if gate.kind == "approval":
                    self.again(lambda gate=gate: self.app.decide(run_id, gate.call_id, approved=True, decided_by="priya"))
                else:
                    self.verify(run_id, gate.call_id)
        raise AssertionError(f"{run_id} does not end")

    def verify(self, run_id: str, call_id: str) -> None:
        """A person looks whether it happened."""
        if self.ledger.has(f"{run_id}:{call_id}"):
            self.again(lambda: self.app.verify(run_id, call_id, outcome="happened", result={"done": "x"}, decided_by="priya"))
        else:
            self.again(lambda: self.app.verify(run_id, call_id, outcome="run_again", decided_by="priya"))

    def again(self, call: Callable[[], Any]) -> Any:
        return again(self.sure, call)

    def effects(self, run_id: str) -> list[str]:
        return sorted(line["key"].removeprefix(f"{run_id}:") for line in self.ledger.lines() if line["key"].startswith(f"{run_id}:"))


def again(app: Outlast, call: Callable[[], Any]) -> Any:
    """Each try is bounded by the store's own limit; where somebody holds the run, its lease is waited for."""
    for _ in range(100):
        try:
            return call()
        except RunBusy as busy:
            until(app, lambda over=busy.until: app._store.now() >= over)
        except StoreError:
            continue
    raise AssertionError("never answered")


@pytest.fixture
def play(postgres: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Play]:
    schema, ledger = postgres.fresh_schema(), Ledger(tmp_path / "ledger")
    sure = parse_store(postgres.url(schema=schema))
    PostgresStore(sure.url, schema=sure.schema, shown=sure.shown).migrate()
    courier = Agent("courier", model=ScriptedModel(SCRIPT), tools=[tools(GATED)["deliver"], tools()["act"]])
    with (
        Outlast(postgres.url(schema=schema, port=proxy.port), agents=[courier], deps=ledger, lease=LEASE) as app,
        Outlast(postgres.url(schema=schema), agents=[courier], deps=ledger, lease=LEASE) as direct,
    ):
        app._store._limit_s = 0.3  # so that a swallowed COMMIT costs a test no more than that
        yield Play(app, direct, ledger)


@pytest.mark.parametrize("mode", MODES)
def test_commit_ack_lost_at_every_commit_of_a_run(play: Play, proxy: Proxy, mode: Mode) -> None:
    """0 doubled, 0 lost, whichever COMMIT it is."""
    nth, cut = 1, 0
    while True:
        run_id = f"{mode}-{nth}"
        proxy.arm(mode, nth)
        run = play.run(run_id)
        seen, cuts = proxy.seen, proxy.cuts
        proxy.disarm()
        assert (run.status, run.output) == ("done", "All is done."), run_id
        assert play.effects(run_id) == KEYS, run_id
        assert_whole(play.sure, run_id)
        cut += cuts
        if not cuts:  # the run made fewer COMMITs than that
            assert seen < nth
            break
        nth += 1
    assert cut == nth - 1 >= 12


# ---- servers that die -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mortal() -> Iterator[Server]:
    """A server of this test's own."""
    server = make()
    yield server
    remove(server)


def store_of(server: Server, schema: str, **more: Any) -> PostgresStore:
    parsed = parse_store(server.url(schema=schema))
    store = PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown, **more)
    store.migrate()
    return store


KILLS, RUNS = (20, 200) if os.environ.get("OUTLAST_TESTS") == "long" else (5, 40)


def test_the_server_is_killed_again_and_again_during_runs(mortal: Server, tmp_path: Path) -> None:
    """Workers survive it by themselves; then 0 doubled, 0 lost. (200 runs and 20 kills in the long form.)"""
    store_of(mortal, "soak").close()
    ledger = Ledger(tmp_path / "ledger")
    courier = Agent("courier", model=ScriptedModel(SCRIPT), tools=[tools()["deliver"], tools()["act"]])
    with Outlast(mortal.url(schema="soak"), agents=[courier], deps=ledger, lease=LEASE) as app:
        for n in range(RUNS):
            app.start("courier", "send it", run_id=f"run-{n}")
        worker = threading.Thread(target=lambda: app.work_sync(concurrency=4, until_idle=True))
        worker.start()
        for kill in range(1, KILLS + 1):
            wanted = kill * RUNS * len(KEYS) // (KILLS + 2)
            patiently(lambda wanted=wanted: len(ledger.lines()) >= wanted)
            mortal.restart()
        worker.join(600)
        assert not worker.is_alive()
        for run_id in [head.run_id for head in app.runs(limit=RUNS) if head.status == "waiting_for_verification"]:
            for gate in [g for g in app.get(run_id).gates if g.outcome is None]:
                assert gate.call_id is not None
                happened = ledger.has(f"{run_id}:{gate.call_id}")
                until_allowed(app, run_id, gate.call_id, "happened" if happened else "run_again")
            app.resume_sync(run_id)
        for n in range(RUNS):
            assert app.head(f"run-{n}").status == "done"
            assert sorted(e["key"] for e in ledger.lines() if e["key"].startswith(f"run-{n}:")) == [f"run-{n}:{c}" for c in KEYS]
        assert app.store_check() == []
    asked = sum(1 for e in ledger.lines()) - RUNS * len(KEYS)
    print(f"{KILLS} kills during {RUNS} runs: {len(ledger.lines())} effects, {asked} of them doubled, 0 runs lost")


def until_allowed(app: Outlast, run_id: str, call_id: str, outcome: Any) -> None:
    """`run_again` is refused while the earlier attempt may still act: here nothing of it is left, and the person knows."""
    app.verify(run_id, call_id, outcome=outcome, result={"done": "x"} if outcome == "happened" else None, decided_by="priya")


def patiently(condition: Callable[[], bool]) -> None:
    """On a file that others write; 60 s at most."""
    end, never = time.monotonic() + 60, threading.Event()
    while not condition():
        assert time.monotonic() < end
        never.wait(0.01)


def test_a_killed_backend_is_replaced_in_silence(mortal: Server) -> None:
    store = store_of(mortal, "quiet")
    driving = begin(store)
    for _ in range(3):
        with mortal.connect() as admin:
            admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'outlast'")
        driving.save(answers())
    assert store.check() == []


def test_after_the_servers_start_no_lease_is_over_for_one_lease(mortal: Server) -> None:
    """Holders could not renew while it was away: they come first."""
    store = store_of(mortal, "takeover", dead=lambda owner: owner == "gone")
    begin(store, "run-1", lease_s=1)
    begin(store, "run-2", owner="gone")
    mortal.restart()
    patiently(lambda: store.now() > store.head("run-1").created_at + timedelta(seconds=1))
    assert store.head("run-1").held
    assert take(store, lease_s=30) == []
    with pytest.raises(RunBusy):
        store.claim_run("run-1", OTHER)
    assert store.reap() == 1
    assert [lease.run_id for lease in take(store, lease_s=30)] == ["run-2"]  # its process is provably dead
    patiently(lambda: bool(leases := take(store, lease_s=1)) and leases[0].run_id == "run-1")


def test_a_call_waits_for_a_server_that_comes_back(mortal: Server) -> None:
    store = store_of(mortal, "back")
    begin(store).release(wake_at=store.now())
    store._limit_s = 60
    mortal.kill()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, store, lease_s=180)
        mortal.start()
        assert len(taken.result()) == 1
    mortal.kill()
    store._limit_s = 0.3
    with pytest.raises(StoreError, match="connection failed") as caught:
        store.head("run-1")
    assert not isinstance(caught.value, CommitUnknown) and mortal.password not in str(caught.value)


def test_standby_and_failover(mortal: Server, tmp_path: Path) -> None:
    """A standby is refused by name; an address with both hosts finds the primary, and the other one once it is promoted."""
    store = store_of(mortal, "outlast")
    driving = begin(store).save(answers())
    standby = mortal.standby()
    try:
        parsed = parse_store(standby.url())
        with pytest.raises(StoreError, match="read-only standby"):
            PostgresStore(parsed.url, shown=parsed.shown).head("run-1")
        both = mortal.url().replace(f"127.0.0.1:{mortal.port}", f"127.0.0.1:{standby.port},127.0.0.1:{mortal.port}")
        either = PostgresStore(parse_store(both).url, shown=parse_store(both).shown)
        driving.store = either
        driving.save(calls("c1"))
        standby.caught_up(mortal)
        mortal.kill()
        promotion = threading.Thread(target=standby.promote)
        promotion.start()
        driving.save(r.CallSkipped("c1", "late"))
        promotion.join()
        assert either.check() == []
        assert [row.kind for row in either.journal("run-1")][-2:] == ["MessageAdded", "CallSkipped"]
    finally:
        remove(standby)


# ---- networks that fail ---------------------------------------------------------------------------------------------------------


def test_two_hosts_and_one_is_cut_off_in_the_middle_of_a_call(postgres: Server, tmp_path: Path) -> None:
    """One effect; the run ends on the other host; the returning worker is fenced."""
    schema, ledger = postgres.fresh_schema(), Ledger(tmp_path / "ledger")
    store_of(postgres, schema).close()
    begun, healed, raised = threading.Event(), threading.Event(), []

    @tool(effect="idempotent")
    def deliver(ctx: ToolContext[Ledger], text: str) -> str:
        ctx.deps.deliver("deliver", ctx.idempotency_key)
        if not begun.is_set():
            begun.set()
            assert healed.wait(60)
        return text

    courier = Agent("courier", model=ScriptedModel([asks(use("deliver", "c1", text="parcel")), "Done."]), tools=[deliver])
    socket_dir = str(postgres.socket_dir)
    with Proxy(socket_dir, postgres.port) as one, Proxy(socket_dir, postgres.port) as two:
        here = Outlast(postgres.url(schema=schema, port=one.port), agents=[courier], deps=ledger, lease=LEASE)
        there = Outlast(postgres.url(schema=schema, port=two.port), agents=[courier], deps=ledger, lease=LEASE)

        def drive() -> None:
            try:
                here.run_sync(courier, "send it", run_id="run-1")
            except OutlastError as e:
                raised.append(e)

        with here, there:
            first = threading.Thread(target=drive)
            first.start()
            assert begun.wait(30)
            one.part()
            run = again(there, lambda: there.resume_sync("run-1"))
            assert (run.status, run.output) == ("done", "Done.")
            one.join()
            healed.set()
            first.join(60)
            assert not first.is_alive() and raised == []  # it was told how the other one ended it
            assert [(row.kind, row.fence) for row in there.journal("run-1") if row.fence < 2 and row.entry_no > 3] in (
                [],
                [("LateResult", 0)],
            )
            assert [line["key"] for line in ledger.lines("deliver")] == ["run-1:c1"]
            assert_whole(there, "run-1")


def test_a_swallowed_commit_ends_within_the_limit(postgres: Server, proxy: Proxy) -> None:
    schema = postgres.fresh_schema()
    sure = store_of(postgres, schema)
    parsed = parse_store(postgres.url(schema=schema, port=proxy.port))
    shaky = PostgresStore(parsed.url, schema=schema, shown=parsed.shown, limit_s=0.5)
    driving = begin(shaky)
    batch, place = driving.batch(answers()), driving.place
    proxy.arm("swallow", 1)
    began = time.monotonic()
    with pytest.raises(CommitUnknown) as caught:
        shaky.append(driving.lease, place, batch, now=shaky.now())
    assert time.monotonic() - began < 5 and postgres.password not in str(caught.value)
    lease = shaky.reclaim(driving.lease)
    assert lease.fence == 2 and shaky.load(lease.run_no, after=place)[0] == list(batch.entries)  # it stood
    assert sure.check() == []


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_claim_whose_answer_was_lost_is_taken_up_again(postgres: Server, proxy: Proxy, mode: Mode) -> None:
    schema = postgres.fresh_schema()
    sure = store_of(postgres, schema)
    parsed = parse_store(postgres.url(schema=schema, port=proxy.port))
    shaky = PostgresStore(parsed.url, schema=schema, shown=parsed.shown)
    sure.start(new("run-1"))
    shaky.head("run-1")
    proxy.arm(mode, 1)
    with pytest.raises(CommitUnknown):
        take(shaky)
    assert sure.head("run-1").held == (mode == "after")
    [lease] = take(shaky)
    assert (lease.run_id, lease.fence) == ("run-1", 2 if mode == "after" else 1)
    Driving(shaky, lease).save(answers())


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("what", ["start", "start_leased", "claim_run", "outside", "outside_with_id"])
def test_what_settles_itself(postgres: Server, proxy: Proxy, what: str, mode: Mode) -> None:
    """The caller hears one answer, the true one, and the thing is done once."""
    schema = postgres.fresh_schema()
    sure = store_of(postgres, schema)
    parsed = parse_store(postgres.url(schema=schema, port=proxy.port))
    shaky = PostgresStore(parsed.url, schema=schema, shown=parsed.shown)
    sure.start(new("there"))
    shaky.head("there")
    proxy.arm(mode, 1)
    match what:
        case "start":
            assert shaky.start(new("run-1"))[2]
        case "start_leased":
            _, lease, created = shaky.start(new("run-1"), owner=ME)
            assert created and lease is not None
            Driving(shaky, lease).save(answers())
        case "claim_run":
            lease = shaky.claim_run("there", ME)
            Driving(shaky, lease).save(answers())
        case "outside":
            head, _, written = send(shaky, "there", "hurry")
            assert written and head.entries == 3
        case _:
            head, value, written = send(shaky, "there", "hurry", "e1", value=7)
            assert (value, written, head.entries) == (7, True, 3)
    assert proxy.cuts == 1
    assert sure.check() == []


def test_a_renewal_while_its_holder_reclaims(postgres: Server) -> None:
    """The keeper's thread knows the fence of a moment ago: the lease is not lost."""
    store = store_of(postgres, postgres.fresh_schema())
    driving = begin(store)
    store.reclaim(driving.lease)
    assert [n.held for n in store.renew([driving.lease])] == [True]
    assert [n.held for n in store.peek([driving.lease])] == [True]


def test_changes_are_heard_again_after_the_connection_broke(postgres: Server) -> None:
    store = store_of(postgres, postgres.fresh_schema())
    seen = store.wait_for_change(None, 0)
    with postgres.connect() as admin:
        admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    broken = store.wait_for_change(seen, 10)
    assert broken != seen  # something may have been missed
    again = store.wait_for_change(broken, 0.05)
    heard: list[int] = []
    waiting = threading.Thread(target=lambda: heard.append(store.wait_for_change(again, 20)))
    waiting.start()
    store.start(new("run-1"))
    waiting.join(10)
    assert heard and heard[0] != again


def test_behind_a_pooler_that_gives_each_transaction_another_backend(postgres: Server, tmp_path: Path) -> None:
    with Bouncer(postgres, tmp_path) as port:
        parsed = parse_store(postgres.url(schema=postgres.fresh_schema(), port=port))
        store = PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown)
        store.migrate()
        runs = [begin(store, f"run-{n}") for n in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda driving: [driving.save(r.DecisionRefused("g", f"no {n}")) for n in range(10)], runs))
        send(store, "run-1", "hurry")
        seen = store.wait_for_change(None, 0)
        assert store.wait_for_change(seen, 0.05) == seen  # nothing is heard through it; whoever waits looks again by itself
        assert store.check() == []
        direct = PostgresStore(f"{parsed.url}?listen_url={quote(parse_store(postgres.url()).url, safe='')}", schema=parsed.schema)
        assert postgres.password not in direct.url and quote(postgres.password, safe="") not in direct.url
        seen = direct.wait_for_change(None, 0)
        send(store, "run-2", "hurry")
        assert direct.wait_for_change(seen, 20) != seen
        store.close()
        direct.close()

"""A deadline: computed once, applied exactly once, whoever looks and whenever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import FRIDAY, HOUR, MONDAY_NOON, MS, Desk, kinds, results, use

from outlast import Agent, Hours, Outlast, approval
from outlast.core import codec
from outlast.errors import GateClosed, InvariantViolated, UsageError
from outlast.models import ScriptedModel

NAIVE = datetime.fromisoformat("2026-11-30T12:00:00")
NOBODY = "Nobody decided on this reply within 4 working hours, so it was not sent."


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    return Desk(tmp_path, url=new_store())


def test_four_working_hours_from_friday_afternoon_end_on_monday_at_noon(desk: Desk) -> None:
    app = desk.waiting()
    [gate] = app.inbox()
    assert (gate.deadline, gate.created_at) == (MONDAY_NOON, FRIDAY)
    [opened] = [codec.decode(row.body) for row in app.journal("run-1") if row.kind == "GateOpened"]
    assert opened["closes_at"] == "2026-11-30T11:00:00.000Z"
    rule = opened["rungs"][0]["rule"]
    assert rule["within_s"] == 4 * 3600
    assert rule["hours"]["opening"] == "Mo-Fr 09:00-17:00; PH off" and rule["hours"]["tz"] == "Europe/Berlin"
    assert app.head("run-1").wake_at == MONDAY_NOON
    assert app.head("run-1").lease_owner is None  # it costs nothing while it waits


def test_one_millisecond_before_the_deadline_a_decision_counts(desk: Desk) -> None:
    app = desk.waiting()
    desk.at(MONDAY_NOON - MS)
    assert app.sweep() == 0
    app.decide("run-1", approved=True, decided_by="priya")
    desk.at(MONDAY_NOON)
    assert app.sweep() == 0
    assert app.resume_sync("run-1").status == "done"
    assert desk.sent == ["run-1:toolu_01"]
    assert kinds(app)["GateExpired"] == 0
    assert_whole(app, "run-1")


@pytest.mark.parametrize("late", [timedelta(0), MS, timedelta(days=400)])
@pytest.mark.parametrize("swept", [False, True], ids=["not swept", "swept"])
def test_approve_after_expiry(desk: Desk, late: timedelta, swept: bool) -> None:
    """Refused by the decision itself, sweeper or not."""
    app = desk.waiting()
    desk.at(MONDAY_NOON + late)
    if swept:
        assert app.sweep() >= 1
    with pytest.raises(GateClosed, match="expired") as e:
        app.decide("run-1", approved=True, decided_by="priya")
    assert e.value.gate.outcome == "expired"
    assert app.resume_sync("run-1").status == "done"
    assert desk.sent == []
    assert [(x["content"], x["is_error"]) for x in results(app)] == [(NOBODY, True)]
    assert kinds(app)["GateExpired"] == 1 and kinds(app)["GateDecided"] == 0
    assert_whole(app, "run-1")


def test_a_persons_no_reads_differently(desk: Desk) -> None:
    app = desk.waiting()
    app.decide("run-1", approved=False, decided_by="priya", note="too short")
    app.resume_sync("run-1")
    assert [x["content"] for x in results(app)] == ["A support lead rejected this reply: too short"]


def test_a_deadline_that_passed_while_nothing_ran_comes_before_any_model_or_tool_call(desk: Desk) -> None:
    desk.turns = ([use("reply", text="Hello.")], lambda messages: f"I read: {messages[-1]['content'][0]['content']}")
    desk.waiting().close()
    assert len(desk.model_log) == 1
    desk.at(MONDAY_NOON + timedelta(days=3))
    with desk.app() as app:
        app.work_sync(until_idle=True)
        assert app.get("run-1").output == f"I read: {NOBODY}"
        order = [row.kind for row in app.journal("run-1")]
    assert desk.sent == []
    assert len(desk.model_log) == 2
    assert order[order.index("GateOpened") + 1] == "GateExpired"


def test_deadline_clock_restarts(desk: Desk) -> None:
    """Restarts never restart a clock: a worker that starts every two seconds sees the same end."""
    desk.gate = approval(to="support-lead", noun="reply", within=timedelta(seconds=6))
    desk.waiting().close()
    for _ in range(2):
        desk.clock.move(timedelta(seconds=2))
        with desk.app() as app:
            assert app.resume_sync("run-1").status == "waiting_for_approval"
            assert app.inbox()[0].deadline == FRIDAY + timedelta(seconds=6)
    desk.clock.move(timedelta(seconds=2))
    with desk.app() as app:
        assert app.resume_sync("run-1").status == "done"
        assert kinds(app)["GateExpired"] == 1
        assert app.sweep() == 0
        assert [n.kind for n in desk.notices] == ["opened", "expired"]
        assert [x["content"] for x in results(app)] == ["Nobody decided on this reply within 6 seconds, so it was not sent."]


def test_code_that_was_changed_meanwhile_does_not_move_a_deadline(desk: Desk) -> None:
    desk.waiting().close()
    desk.gate = approval(to="anybody", noun="reply", within=timedelta(days=9))
    with desk.app() as app:
        assert app.resume_sync("run-1").gates[0].deadline == MONDAY_NOON
        assert app.inbox()[0].role == "support-lead"


def test_a_wall_clock_that_is_set_moves_deadlines_and_undoes_nothing(desk: Desk) -> None:
    app = desk.waiting()
    desk.at(MONDAY_NOON)
    assert app.sweep() >= 1
    desk.at(FRIDAY - timedelta(days=30))
    assert app.sweep() == 0
    with pytest.raises(GateClosed, match="expired"):
        app.decide("run-1", approved=True, decided_by="priya")
    run = app.resume_sync("run-1")
    assert [g.outcome for g in run.gates] == ["expired"] and desk.sent == []
    desk.at(MONDAY_NOON + timedelta(days=1))
    assert app.sweep() == 0
    assert kinds(app)["GateExpired"] == 1


def test_many_sweeps_and_a_decision_at_once(desk: Desk, tmp_path: Path) -> None:
    """Twelve runs reach their deadline while four sweepers, a worker's load and two people are at it: one outcome each, and the loser is told."""
    first = desk.app()
    runs = [f"run-{n}" for n in range(12)]
    for run_id in runs:
        first.run_sync(first.agents["desk"], "A ticket came in.", run_id=run_id)
    apps = [first, *(desk.app(notify=()) for _ in range(5))]
    desk.at(MONDAY_NOON - MS)
    told: dict[str, list[str]] = {run_id: [] for run_id in runs}
    go = threading.Barrier(7)

    def decides(app: Outlast, person: str) -> None:
        go.wait()
        for n, run_id in enumerate(runs):
            if n == 6 and person == "priya":
                desk.at(MONDAY_NOON)
            try:
                app.decide(run_id, approved=True, decided_by=person)
            except GateClosed as e:
                told[run_id].append(str(e))

    def sweeps(app: Outlast) -> int:
        go.wait()
        return sum(app.sweep() for _ in range(10))

    with ThreadPoolExecutor(7) as pool:
        people = [pool.submit(decides, apps[0], "priya"), pool.submit(decides, apps[1], "tom")]
        sweepers = [pool.submit(sweeps, app) for app in apps[2:]]
        clock = pool.submit(go.wait)
        for task in (*people, *sweepers, clock):
            task.result(60)
    desk.at(MONDAY_NOON + MS)
    first.sweep()
    for run_id in runs:
        count = kinds(first, run_id)
        assert count["GateExpired"] + count["GateDecided"] == 1, (run_id, count)
        [(row, _)] = first._store.gates(run_id)
        assert row.outcome in ("approved", "expired")
        decided = {row.decided_by} if row.decided_by else set()
        assert len(told[run_id]) == 2 - len(decided)  # everybody whose word did not count was told so
        first.resume_sync(run_id)
        assert_whole(first, run_id)
    approved = [run_id for run_id in runs if first._store.gates(run_id)[0][0].outcome == "approved"]
    assert sorted(desk.sent) == sorted(f"{run_id}:toolu_01" for run_id in approved)
    for app in apps:
        app.close()


def test_a_sweep_leaves_a_run_that_somebody_holds_to_its_holder(desk: Desk) -> None:
    app = desk.waiting()
    lease = app._store.claim_run("run-1", "host/1/1/another-process/1", lease_s=30)
    desk.at(MONDAY_NOON)
    app.sweep()
    assert kinds(app)["GateExpired"] == 0
    app._store.release(lease)
    app.sweep()
    assert kinds(app)["GateExpired"] == 1


def test_sweeping_needs_no_agents_code(desk: Desk) -> None:
    desk.waiting().close()
    desk.at(MONDAY_NOON)
    with Outlast(desk.store, clock=desk.clock) as bare:
        assert bare.sweep() == 1
        assert bare.head("run-1").status == "running"
        assert [n.kind for n in desk.notices] == ["opened"]
    with desk.app() as app:  # the notice was written for those who were told when it opened
        assert app.sweep() == 1
        assert [n.kind for n in desk.notices] == ["opened", "expired"]


def test_a_run_that_cannot_be_read_does_not_stop_the_sweep_of_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    app = desk.waiting("run-1")
    app.run_sync(app.agents["desk"], "Another one.", run_id="run-2")
    desk.at(MONDAY_NOON)
    outside = type(app._store).outside

    def broken(self: Any, run_id: str, plan: Any, **more: Any) -> Any:
        if run_id == "run-1":
            raise InvariantViolated("entry 3 of run run-1 cannot be read", run_id=run_id)
        return outside(self, run_id, plan, **more)

    monkeypatch.setattr(type(app._store), "outside", broken)
    assert app.sweep() == 2  # the other one's expiry, and its notice
    assert (app.head("run-1").status, app.head("run-2").status) == ("waiting_for_approval", "running")


def test_a_worker_sweeps_by_itself(desk: Desk) -> None:
    """A worker that knows another agent only: it moves the clocks of every run, and says what is stuck."""
    desk.waiting().close()
    desk.at(MONDAY_NOON)

    async def works() -> None:
        other = Agent("other", model=ScriptedModel([]))
        with Outlast(desk.store, agents=[other], clock=desk.clock, notify=[desk.notices.append], lease=timedelta(seconds=1)) as app:
            worker = asyncio.ensure_future(app.work())
            seen = None
            async with asyncio.timeout(30):
                while app.head("run-1").status != "running":
                    seen = await asyncio.to_thread(app._store.wait_for_change, seen, 0.2)
                while [n.kind for n in desk.notices] != ["opened", "expired"]:
                    seen = await asyncio.to_thread(app._store.wait_for_change, seen, 0.2)
            worker.cancel()
            await asyncio.wait({worker})

    asyncio.run(works())
    with desk.app() as app:
        assert kinds(app)["GateExpired"] == 1 and app.head("run-1").lease_owner is None


def test_hours_that_are_over_for_good_leave_the_gate_closed_and_stuck(desk: Desk) -> None:
    desk.gate = approval(to="support-lead", noun="reply", within=4 * HOUR, hours=Hours("2026 Mo-Fr 09:00-17:00", tz="Europe/Berlin"))
    desk.at(datetime(2027, 2, 1, tzinfo=UTC))
    app = desk.waiting()
    assert app.inbox()[0].deadline is None
    assert [x.command for x in app.stuck()] == ["outlast approve run-1 toolu_01"]
    assert desk.sent == []


def test_a_naive_instant_names_its_parameter(desk: Desk) -> None:
    with pytest.raises(UsageError, match=r"since.* is naive"):
        desk.app().runs(since=NAIVE)

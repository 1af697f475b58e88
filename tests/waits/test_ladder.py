"""The ladder: reminders, the next rung, the end; each an entry and a notice, each once, through every crash between two commits."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.deaths import dying_at
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import FRIDAY, HOUR, LADDER, MONDAY_NOON, MS, OFFICE, Desk, kinds, results

from outlast import Outlast, approval
from outlast.core import codec
from outlast.errors import GateClosed

END = MONDAY_NOON + 2 * HOUR
CLIMB = ["opened", "reminder", "escalated", "expired"]


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    return Desk(tmp_path, gate=LADDER, url=new_store())


def test_every_rung_is_an_entry_and_a_notice(desk: Desk) -> None:
    app = desk.waiting()
    asked = []
    for at in (MONDAY_NOON - 2 * HOUR, MONDAY_NOON, END):
        desk.at(at - MS)
        assert app.sweep() == 0, at
        desk.at(at)
        assert app.sweep() == 2, at  # the entry, and its notice
        assert app.sweep() == 0, at
        asked.append(app.inbox()[0].role if app.inbox() else None)
    assert asked == ["support-lead", "duty-manager", None]
    assert [n.kind for n in desk.notices] == CLIMB
    assert len({n.id for n in desk.notices}) == 4
    moves = [codec.decode(row.body) for row in app.journal("run-1") if row.kind in ("GateMoved", "GateExpired")]
    assert [m.get("level") for m in moves] == [0, 1, None]
    run = app.resume_sync("run-1")
    assert run.status == "done" and desk.sent == []
    assert results(app)[0]["content"] == "Nobody decided on this reply within 6 working hours, so it was not sent."
    assert_whole(app, "run-1")


def test_the_head_and_the_inbox_say_who_is_asked_now(desk: Desk) -> None:
    app = desk.waiting()
    assert app.head("run-1").reason == "reply waits for support-lead until 2026-11-30T11:00:00.000Z"
    desk.at(MONDAY_NOON)
    app.sweep()
    assert app.head("run-1").reason == "reply waits for duty-manager until 2026-11-30T13:00:00.000Z"
    [gate] = app.inbox(role="duty-manager")
    assert (gate.level, gate.deadline) == (1, END)
    assert app.inbox(role="support-lead") == []


def test_a_worker_climbs_the_same_ladder_without_a_sweep(desk: Desk) -> None:
    desk.waiting().close()
    for at in (MONDAY_NOON - 2 * HOUR, MONDAY_NOON, END):
        desk.at(at)
        with desk.app() as app:
            app.work_sync(until_idle=True)
    with desk.app() as app:
        assert app.head("run-1").status == "done"
        assert kinds(app)["GateMoved"] == 2 and kinds(app)["GateExpired"] == 1
        assert_whole(app, "run-1")
    assert [n.kind for n in desk.notices] == CLIMB


def test_what_was_slept_through_is_not_made_up_for(desk: Desk) -> None:
    """Nothing ran over the whole ladder: one expiry, and nobody is reminded of what is over."""
    app = desk.waiting()
    desk.at(END + timedelta(days=2))
    app.sweep()
    assert kinds(app)["GateMoved"] == 0 and kinds(app)["GateExpired"] == 1
    assert [n.kind for n in desk.notices] == ["opened", "expired"]


def test_the_next_rung_begins_where_the_one_before_ended(desk: Desk) -> None:
    """Not when somebody looks: found an hour late, the duty manager has one hour left."""
    app = desk.waiting()
    desk.at(MONDAY_NOON + HOUR)
    app.sweep()
    assert app.inbox()[0].deadline == END


@pytest.mark.parametrize("person, role", [("sam", "duty-manager"), ("priya", "support-lead")])
def test_whoever_was_asked_may_still_answer(desk: Desk, person: str, role: str) -> None:
    desk.more = {"may_decide": {"support-lead": ["priya"], "duty-manager": ["sam"]}}
    app = desk.waiting()
    desk.at(MONDAY_NOON + HOUR)
    app.sweep()
    app.decide("run-1", approved=True, decided_by=person)
    assert app.resume_sync("run-1").status == "done"
    assert desk.sent == ["run-1:toolu_01"]


def test_a_late_answer_to_a_rung_is_in_time_before_the_end_and_refused_at_it(desk: Desk) -> None:
    app = desk.waiting()
    desk.at(END)
    with pytest.raises(GateClosed, match="expired"):
        app.decide("run-1", approved=True, decided_by="priya")
    assert app.resume_sync("run-1").status == "done" and desk.sent == []


def test_keep_waiting_never_closes_reminds_on_and_shows_as_stuck(desk: Desk) -> None:
    desk.gate = approval(to="support-lead", noun="reply", within=HOUR, then="keep_waiting", remind_every=HOUR)
    app = desk.waiting()
    for n in range(1, 4):
        desk.at(FRIDAY + n * HOUR)
        app.sweep()
        assert len(desk.notices) == 1 + n
    assert {n.kind for n in desk.notices[1:]} == {"reminder"}
    desk.at(FRIDAY + timedelta(days=40))
    assert app.resume_sync("run-1").status == "waiting_for_approval"
    assert app._store.gates("run-1")[0][0].closes_at is None
    app.decide("run-1", approved=True, decided_by="priya")
    assert app.resume_sync("run-1").status == "done"


def test_rungs_of_different_clocks(desk: Desk) -> None:
    """Working hours below, plain hours above; the words do not add what cannot be added."""
    desk.gate = approval(
        to="support-lead", noun="reply", within=4 * HOUR, hours=OFFICE, then=approval(to="boss", noun="reply", within=HOUR)
    )
    app = desk.waiting()
    desk.at(MONDAY_NOON + HOUR)
    app.sweep()
    app.resume_sync("run-1")
    assert results(app)[0]["content"] == "Nobody decided on this reply in time, so it was not sent."


POINTS = ["commit.before", "commit.after"]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("at", [MONDAY_NOON - 2 * HOUR, MONDAY_NOON, END], ids=["reminder", "escalation", "end"])
def test_a_crash_of_a_sweep_between_any_two_commits(desk: Desk, at: object, point: str, nth: int) -> None:
    """Three commits: the entry with its notice, the notice taken, the notice recorded. What was sent and not recorded is sent once more."""
    desk.waiting().close()
    desk.at(at)  # type: ignore[arg-type]  # an instant
    app = desk.app()
    with dying_at(point, nth):
        app.sweep()
    app.close()
    desk.clock.move(timedelta(seconds=61))  # a notice that was taken is due again
    with desk.app() as after:
        after.sweep()
        count = kinds(after)
        assert count["GateMoved"] + count["GateExpired"] == 1
        ids = [n.id for n in desk.notices]
        assert len(set(ids)) == 2 and len(ids) <= 3
        assert len(ids) == (3 if (point, nth) == ("commit.before", 3) else 2)
        assert_whole(after, "run-1")


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_of_the_worker_at_every_commit_of_a_climb(desk: Desk, point: str) -> None:
    """Die at the nth commit of each life, for n = 1, 2, … until a life gets through: the ladder is climbed once."""
    desk.waiting().close()
    desk.at(END)
    lives = 0
    while True:
        lives += 1
        app = desk.app()
        try:
            with dying_at(point, lives):
                app.work_sync(until_idle=True)
        except AssertionError:  # this life had fewer commits than that: it got through
            break
        finally:
            app.close()
        desk.clock.move(timedelta(seconds=61))
        with Outlast(desk.store, clock=desk.clock) as bare:
            bare._store.reap()
    assert lives > 3
    desk.clock.move(timedelta(seconds=61))
    with desk.app() as app:
        app.sweep()
        assert app.head("run-1").status == "done"
        assert kinds(app)["GateExpired"] == 1 and kinds(app)["GateDecided"] == 0
        assert desk.sent == []
        assert {n.kind for n in desk.notices} == {"opened", "expired"}
        assert len({n.id for n in desk.notices}) == 2
        assert_whole(app, "run-1")

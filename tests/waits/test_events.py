"""A call that waits for the world: answered by an event or by its time, once, whichever of event and wait came first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.deaths import dying_at
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import FRIDAY, HOUR, MONDAY_NOON, MS, OFFICE, Desk, kinds, results, use

from outlast import Outlast, ToolContext, Wait, tool
from outlast.core import codec
from outlast.errors import Refused, UsageError

LATE = "Not settled within 3 days."


def paying(
    desk: Desk, wait: Callable[[], Wait] = lambda: Wait("settled", within=timedelta(days=3), otherwise=LATE), *, effect: Any = "idempotent"
) -> None:
    @tool(effect=effect)
    def charge(ctx: ToolContext, amount: int) -> Wait:
        """Charge the customer."""
        desk.sent.append(ctx.idempotency_key)
        return wait()

    desk.tools = [charge]
    desk.turns = ([use("charge", amount=20)], lambda messages: f"I read: {messages[-1]['content'][0]['content']}")


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    desk = Desk(tmp_path, url=new_store())
    paying(desk)
    return desk


def test_an_event_answers_the_call_that_waits_for_it(desk: Desk) -> None:
    app = desk.waiting()
    assert app.head("run-1").status == "waiting_for_event"
    assert app.inbox() == []  # nobody is asked
    assert app.event("run-1", "settled", {"settled": True}, event_id="evt-1") is True
    assert app.head("run-1").status == "running"
    run = app.resume_sync("run-1")
    assert run.output == 'I read: {"settled": true}'
    assert [g.outcome for g in run.gates] == ["arrived"]
    assert desk.sent == ["run-1:toolu_01"]
    assert_whole(app, "run-1")


def test_an_event_that_came_first_is_kept(desk: Desk) -> None:
    app = desk.app()
    app.start(app.agents["desk"], "Charge them.", run_id="run-1")
    assert app.event("run-1", "settled", "early", event_id="evt-1") is True
    assert app.resume_sync("run-1").output == "I read: early"
    assert_whole(app, "run-1")


def test_an_event_that_comes_while_the_tool_still_runs_is_kept(desk: Desk) -> None:
    """The bank is quicker than we are: it calls back before the wait is saved."""
    app = desk.app()

    def quick() -> Wait:
        with Outlast(desk.store, clock=desk.clock) as webhook:
            assert webhook.event("run-1", "settled", "at once") is True
        return Wait("settled", within=HOUR, otherwise=LATE)

    paying(desk, quick)
    app = desk.app()
    assert app.run_sync(app.agents["desk"], "Charge them.", run_id="run-1").output == "I read: at once"
    assert_whole(app, "run-1")


def test_a_known_event_id_changes_nothing(desk: Desk) -> None:
    app = desk.waiting()
    assert [app.event("run-1", "settled", n, event_id="evt-1") for n in range(3)] == [True, False, False]
    assert kinds(app)["EventReceived"] == 1
    assert app.resume_sync("run-1").output == "I read: 0"


def test_an_event_of_another_name_is_kept_and_answers_nothing(desk: Desk) -> None:
    app = desk.waiting()
    assert app.event("run-1", "refunded", 1) is True
    assert app.resume_sync("run-1").status == "waiting_for_event"
    app.event("run-1", "settled", 2)
    assert app.resume_sync("run-1").output == "I read: 2"


@pytest.mark.parametrize("swept", [False, True], ids=["not swept", "swept"])
def test_its_time_answers_it_where_nothing_came(desk: Desk, swept: bool) -> None:
    app = desk.waiting()
    desk.at(FRIDAY + timedelta(days=3) - MS)
    assert app.resume_sync("run-1").status == "waiting_for_event"
    desk.at(FRIDAY + timedelta(days=3))
    assert app.sweep() == swept if swept else True
    assert app.resume_sync("run-1").output == f"I read: {LATE}"
    assert kinds(app)["GateExpired"] == 1
    assert desk.notices == []  # a timer is nobody's business
    assert desk.sent == ["run-1:toolu_01"]
    assert_whole(app, "run-1")


def test_by_default_the_event_is_called_as_the_call(desk: Desk) -> None:
    paying(desk, lambda: Wait(within=timedelta(days=3), otherwise=LATE))
    app = desk.waiting()
    assert app.head("run-1").status == "waiting_for_event"
    app.event("run-1", "toolu_01", "settled")
    assert app.resume_sync("run-1").output == "I read: settled"


def test_working_hours_count_here_too_and_their_rule_is_stored(desk: Desk) -> None:
    paying(desk, lambda: Wait("settled", within=4 * HOUR, hours=OFFICE, otherwise=LATE))
    app = desk.waiting()
    assert app.head("run-1").wake_at == MONDAY_NOON
    [opened] = [codec.decode(row.body) for row in app.journal("run-1") if row.kind == "GateOpened"]
    assert opened["rungs"][0]["rule"]["hours"]["tz"] == "Europe/Berlin"


def test_until_an_instant(desk: Desk) -> None:
    paying(desk, lambda: Wait(until=MONDAY_NOON, otherwise="it is time"))
    app = desk.waiting()
    assert app.head("run-1").status == "waiting_for_timer"
    desk.at(MONDAY_NOON)
    assert app.resume_sync("run-1").output == "I read: it is time"


def test_an_instant_that_is_over_is_no_wait(desk: Desk) -> None:
    paying(desk, lambda: Wait(until=FRIDAY - HOUR, otherwise="long ago"))
    app = desk.app()
    assert app.run_sync(app.agents["desk"], "Charge them.", run_id="run-1").output == "I read: long ago"


def test_a_finished_run_waits_for_no_event(desk: Desk) -> None:
    app = desk.waiting()
    app.cancel("run-1", by="tom")
    with pytest.raises(Refused, match="cancelled"):
        app.event("run-1", "settled", 1)
    assert results(app)[0]["is_error"] is True


@pytest.mark.parametrize("name", ["", "x" * 129, None, 3])
def test_names_that_are_none(desk: Desk, name: Any) -> None:
    with pytest.raises(UsageError, match="name"):
        desk.waiting().event("run-1", name)


@pytest.mark.parametrize("effect", ["read", "idempotent", "at_most_once"])
@pytest.mark.parametrize("point", ["commit.before", "commit.after"])
def test_a_crash_between_any_two_commits(tmp_path: Path, new_store: NewStore, point: str, effect: str) -> None:
    """The wait is saved or it is not: what was charged twice was charged under one key, and an at-most-once charge is asked about."""
    for nth in range(1, 10):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        desk = Desk(folder, url=new_store())
        paying(desk, effect=effect)
        app = desk.app()
        try:
            with dying_at(point, nth):
                app.run_sync(app.agents["desk"], "Charge them.", run_id="run-1")
        except AssertionError:
            assert nth > 2
            break
        finally:
            app.close()
        with desk.app() as after:
            after._store.reap()
            run = after.run_sync(after.agents["desk"], "Charge them.", run_id="run-1")
            if run.status == "waiting_for_verification":
                assert effect == "at_most_once" and len(desk.sent) <= 1
                continue
            assert run.status == "waiting_for_event"
            assert kinds(after)["GateOpened"] == 1
            assert set(desk.sent) == {"run-1:toolu_01"} and (effect != "at_most_once" or len(desk.sent) == 1)
            assert_whole(after, "run-1")
    else:
        raise AssertionError("it has more commits than this test knows")

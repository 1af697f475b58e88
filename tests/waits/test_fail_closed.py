"""Nothing gated runs without a decision of its own: not after a crash, not from an imported history, not on a second use of the same yes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.deaths import dying_at
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import Desk, kinds, results, use

from outlast.core import codec
from outlast.errors import GateClosed, OutlastError, UsageError


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    return Desk(tmp_path, url=new_store())


HISTORY = [
    {"role": "user", "content": "A ticket came in."},
    {"role": "assistant", "content": [{"type": "text", "text": "I reply."}, use("reply", text="Hello.")]},
]


def test_history_ends_in_unapproved_call_counts_as_approved(desk: Desk) -> None:
    """It does not: the gate is opened, once, whoever drives the run and however often."""
    app = desk.app()
    app.start(app.agents["desk"], HISTORY, run_id="run-1")
    app.work_sync(until_idle=True)
    app.resume_sync("run-1")
    assert app.head("run-1").status == "waiting_for_approval"
    assert desk.sent == [] and kinds(app)["GateOpened"] == 1 and len(app.inbox()) == 1
    app.decide("run-1", approved=True, decided_by="priya")
    assert app.resume_sync("run-1").status == "done" and desk.sent == ["run-1:toolu_01"]
    assert_whole(app, "run-1")


@pytest.mark.parametrize("point", ["model.after", "commit.before", "commit.after", "release.after"])
def test_a_crash_around_the_answer_that_asks(desk: Desk, point: str) -> None:
    """There is no moment at which the answer is saved and its gate is not."""
    for nth in range(1, 9):
        run_id = f"run-{nth}"
        app = desk.app()
        try:
            with dying_at(point, nth):
                app.run_sync(app.agents["desk"], "A ticket came in.", run_id=run_id)
        except AssertionError:
            break
        finally:
            app.close()
        with desk.app() as after:
            after._store.reap()
            asked = kinds(after, run_id)["GateOpened"] if run_id in [r.run_id for r in after.runs()] else 0
            assert asked == (after.head(run_id).seq >= 2 if asked else 0)
            run = after.run_sync(after.agents["desk"], "A ticket came in.", run_id=run_id)
            assert run.status == "waiting_for_approval"
            assert kinds(after, run_id)["GateOpened"] == 1
            assert_whole(after, run_id)
    assert desk.sent == []


def test_one_decision_lets_one_call_through(desk: Desk) -> None:
    """The same call in the same batch, in a later one and in another run: each asks for itself."""
    twice = [use("reply", "toolu_01", text="Hello."), use("reply", "toolu_02", text="Hello.")]
    desk.turns = (twice, [use("reply", "toolu_03", text="Hello.")], "Done.")
    app = desk.waiting()
    app.run_sync(app.agents["desk"], "A ticket came in.", run_id="run-2")
    app.decide("run-1", "toolu_01", approved=True, decided_by="priya")
    app.resume_sync("run-1")
    assert desk.sent == ["run-1:toolu_01"]
    app.decide("run-1", "toolu_02", approved=True, decided_by="priya")
    assert app.resume_sync("run-1").status == "waiting_for_approval"
    assert desk.sent == ["run-1:toolu_01", "run-1:toolu_02"]
    assert {g.call_id for g in app.inbox()} == {"toolu_03", "toolu_01", "toolu_02"}
    assert app.resume_sync("run-2").status == "waiting_for_approval"


def test_a_decision_is_immutable_and_has_who_and_when(desk: Desk) -> None:
    app = desk.waiting()
    first = app.decide("run-1", approved=True, decided_by="priya", note="fine")
    assert app.decide("run-1", approved=True, decided_by="priya") == first  # the same again is accepted
    with pytest.raises(GateClosed, match="was approved by priya"):
        app.decide("run-1", approved=False, decided_by="tom")
    [row] = [row for row in app.journal("run-1") if row.kind == "GateDecided"]
    assert (row.by, row.at, codec.decode(row.body)["note"]) == ("priya", desk.clock.now, "fine")
    assert [(g.decided_by, g.decided_at, g.note) for g in app.get("run-1").gates] == [("priya", desk.clock.now, "fine")]


def test_what_was_shown_is_what_runs(desk: Desk) -> None:
    app = desk.waiting()
    [gate] = app.inbox()
    with pytest.raises(GateClosed, match="no longer has the arguments"):
        app.decide("run-1", approved=True, decided_by="priya", digest="sha256:of-a-stale-page")
    app.decide("run-1", approved=True, decided_by="priya", digest=gate.digest, args={"text": "Hello, and sorry."})
    app.resume_sync("run-1")
    assert "A person (priya) changed the arguments" in results(app)[0]["content"]
    [row] = [codec.decode(row.body) for row in app.journal("run-1") if row.kind == "GateDecided"]
    assert row["digest"] == codec.digest({"text": "Hello, and sorry."}) != gate.digest


@pytest.mark.parametrize("word", [None, "false", "true", 1, 0])
def test_what_is_no_decision(desk: Desk, word: object) -> None:
    app = desk.waiting()
    with pytest.raises(UsageError, match="True or False"):
        app.decide("run-1", approved=word, decided_by="priya")  # type: ignore[arg-type]  # what a careless handler passes on
    assert app.head("run-1").status == "waiting_for_approval"


def test_a_cancelled_run_that_is_taken_up_again_asks_again(desk: Desk) -> None:
    desk.turns = ([use("reply", "toolu_01", text="Hello.")], [use("reply", "toolu_02", text="Hello.")], "Done.")
    app = desk.waiting()
    app.cancel("run-1", by="tom")
    with pytest.raises(OutlastError):
        app.decide("run-1", "toolu_01", approved=True, decided_by="priya")
    app.retry("run-1", by="tom")
    assert app.resume_sync("run-1").status == "waiting_for_approval"
    assert [g.call_id for g in app.inbox()] == ["toolu_02"] and desk.sent == []

"""Who may decide: asked before anything is decided, recorded where it says no, and never bypassed by another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import Desk, kinds

from outlast import Gate, Outlast
from outlast.core import codec
from outlast.errors import NotAllowed

May = Callable[[str, Gate], bool] | Mapping[str, Sequence[str]]


def not_the_starter(person: str, gate: Gate) -> bool:
    return person != gate.started_by


def broken(person: str, gate: Gate) -> bool:
    raise ConnectionError("the directory is down")


@pytest.mark.parametrize(
    "may, person",
    [
        ({"support-lead": ["priya"]}, "tom"),
        ({"duty-manager": ["tom"]}, "tom"),
        ({}, "priya"),
        (not_the_starter, "helpdesk"),
        (broken, "priya"),
        (lambda person, gate: None, "priya"),
        (lambda person, gate: "yes", "priya"),
        (lambda person, gate: 1, "priya"),
    ],
)
def test_no_and_whatever_is_not_true_is_refused_and_recorded(tmp_path: Path, new_store: NewStore, may: Any, person: str) -> None:
    desk = Desk(tmp_path, url=new_store(), more={"may_decide": may})
    app = desk.waiting()
    with pytest.raises(NotAllowed) as e:
        app.decide("run-1", approved=True, decided_by=person)
    assert e.value.exit_code == 5
    assert "directory" not in str(e.value)
    [refused] = [row for row in app.journal("run-1") if row.kind == "DecisionRefused"]
    assert refused.by == person and codec.decode(refused.body)["gate_id"] == "approval:toolu_01"
    assert app.head("run-1").status == "waiting_for_approval" and len(app.inbox()) == 1
    assert app.resume_sync("run-1").status == "waiting_for_approval" and desk.sent == []
    assert_whole(app, "run-1")


@pytest.mark.parametrize("may", [{"support-lead": ["priya"]}, not_the_starter])
def test_who_may_does(tmp_path: Path, new_store: NewStore, may: May) -> None:
    desk = Desk(tmp_path, url=new_store(), more={"may_decide": may})
    app = desk.waiting()
    gate = app.decide("run-1", approved=True, decided_by="priya")
    assert (gate.decided_by, gate.outcome) == ("priya", "approved")
    assert app.resume_sync("run-1").status == "done"
    assert desk.sent == ["run-1:toolu_01"] and kinds(app)["DecisionRefused"] == 0


def test_a_process_that_does_not_ask_cannot_decide(tmp_path: Path, new_store: NewStore) -> None:
    """A plain command on the same file does not know who may: it is refused, whoever it says it is."""
    desk = Desk(tmp_path, url=new_store(), more={"may_decide": {"support-lead": ["priya"]}})
    desk.waiting().close()
    with Outlast(desk.store, clock=desk.clock) as bare, pytest.raises(NotAllowed, match="--app"):
        bare.decide("run-1", approved=True, decided_by="priya")
    with desk.app() as app:
        assert app.resume_sync("run-1").status == "waiting_for_approval"


def test_the_refused_can_be_told_apart_from_the_decided(tmp_path: Path, new_store: NewStore) -> None:
    desk = Desk(tmp_path, url=new_store(), more={"may_decide": {"support-lead": ["priya"]}})
    app = desk.waiting()
    for person in ("tom", "ann"):
        with pytest.raises(NotAllowed, match="asked"):
            app.decide("run-1", approved=False, decided_by=person, note="no")
    app.decide("run-1", approved=True, decided_by="priya")
    people = [(row.kind, row.by) for row in app.journal("run-1") if row.kind in ("DecisionRefused", "GateDecided")]
    assert people == [("DecisionRefused", "tom"), ("DecisionRefused", "ann"), ("GateDecided", "priya")]

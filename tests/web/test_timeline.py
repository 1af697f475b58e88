"""A journal told as a life: who drove when, what was begun and not saved, and that the key made it harmless."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from outlast.core.run import KINDS
from outlast.web import text
from outlast.web.timeline import Story, _snake

START = datetime(2026, 11, 30, 10, 14, 22, tzinfo=UTC)
OWNER = "worker-2/0123abcd/4026531836/5204/99"


def entry(
    no: int, kind: str, body: dict[str, Any], *, fence: int = 1, seq: int = 1, after_s: float = 0, meta: Any = None, by: str | None = None
) -> dict[str, Any]:
    at = text.utc(START + timedelta(seconds=after_s))
    return {
        "type": "entry",
        "run_id": "run-1",
        "entry_no": no,
        "seq": seq,
        "kind": kind,
        "at": at,
        "by": by,
        "status": "running",
        "fence": fence,
        "meta": meta,
        "body": body,
    }


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_01", "name": "reply_to_customer", "input": {}}]}
STARTED = {
    "call_id": "toolu_01",
    "key": "run-1:toolu_01",
    "effect": "idempotent",
    "attempt": 1,
    "may_act_until": text.utc(START),
    "owner": OWNER,
}


def story(entries: list[dict[str, Any]]) -> Story:
    return Story("support", entries, [], text.Clock(START + timedelta(minutes=1), UTC))


def test_a_process_that_died_and_the_one_that_took_over() -> None:
    told = story([
        entry(1, "RunStarted", {"agent": "support"}, fence=0, seq=0, by="helpdesk"),
        entry(2, "MessageAdded", {"role": "user", "content": "hello"}, fence=0),
        entry(3, "MessageAdded", CALL, seq=2, after_s=1.25, meta={"latency_ms": 1250, "attempt": 1}),
        entry(4, "CallStarted", STARTED, seq=2, after_s=1.3),
        entry(5, "CallStarted", STARTED | {"attempt": 2}, fence=2, seq=2, after_s=9, meta={"taken_over": True}),
        entry(6, "CallFinished", {"call_id": "toolu_01", "content": "sent"}, fence=2, seq=2, after_s=9.4, meta={"ms": 410, "attempt": 2}),
        entry(7, "RunEnded", {"status": "done"}, fence=2, seq=2, after_s=9.5),
    ])  # fmt: skip
    assert [g.title for g in told.groups] == ["The start", "Process 1", "Process 2"]
    first, second = told.groups[1], told.groups[2]
    assert first.killed and first.lines[-1].row == "killed" and "reply_to_customer" in first.lines[-1].what.striptags()
    assert "worker-2, pid 5204" in first.sub
    assert second.lines[0].what.striptags() == "Begins reply_to_customer again with key run-1:toolu_01"
    assert second.lines[1].row == "kept" and second.lines[1].took == timedelta(milliseconds=410)
    assert [p.kind for p in told.life()] == ["killed", "process"]
    [effect] = told.effects()
    assert (effect.key, effect.state, effect.attempts) == ("run-1:toolu_01", "done", 2)
    model = first.lines[0]
    assert model.bar == "model" and model.width > told.groups[2].lines[1].width > 0  # one scale for all processes


def test_a_process_that_died_before_it_wrote_anything() -> None:
    """The one that waited gave its run back; it is not the one that died."""
    told = story([
        entry(1, "RunStarted", {"agent": "support"}, fence=0, seq=0, by="helpdesk"),
        entry(2, "MessageAdded", {"role": "user", "content": "hello"}, fence=0),
        entry(3, "MessageAdded", CALL, seq=2, after_s=1, meta={"latency_ms": 1000, "attempt": 1}),
        entry(4, "CallFinished", {"call_id": "toolu_01", "content": "sent"}, fence=3, seq=2, after_s=9, meta={"ms": 410, "attempt": 1, "taken_over": True}),
        entry(5, "RunEnded", {"status": "done"}, fence=3, seq=2, after_s=9),
    ])  # fmt: skip
    assert [(g.title, g.killed) for g in told.groups] == [
        ("The start", False),
        ("Process 1", False),
        ("Process 2", True),
        ("Process 3", False),
    ]
    [killed] = told.groups[2].lines
    assert killed.row == "killed" and "nothing of it was saved" in killed.what.striptags() and told.groups[2].sub == ["fence 2"]


def test_the_version_and_the_cost_of_each_answer() -> None:
    answer = {"role": "assistant", "content": "Done."}
    entries = [
        entry(1, "RunStarted", {"agent": "support", "agent_version": "1"}, fence=0, seq=0),
        entry(2, "MessageAdded", CALL, seq=1, meta={"usage": {"input_tokens": 820, "output_tokens": 58}, "cost_usd": "0.0033"}),
        entry(3, "VersionChanged", {"agent_version": "2"}, fence=2, seq=1),
        entry(4, "MessageAdded", answer, fence=2, seq=2),
    ]
    assert [said.about for said in story(entries).conversation()] == ["820 in, 58 out, $0.0033, version 1", "version 2"]
    assert [said.about for said in story(entries[:2]).conversation()] == [
        "820 in, 58 out, $0.0033"
    ]  # of one version the head of the page speaks
    assert story(entries).answer() == "Done."


def test_every_kind_of_entry_is_told() -> None:
    missing = [kind for kind in KINDS if not hasattr(Story, f"_tell_{_snake(kind)}")]
    assert not missing, missing


def test_a_kind_that_is_not_known_is_shown_by_its_name() -> None:
    told = story([entry(1, "SomethingNew", {"<b>": 1})])
    [line] = told.groups[0].lines
    assert str(line.what) == "SomethingNew" and line.note == '{"<b>": 1}'


def test_the_bars_stay_inside_their_track() -> None:
    entries = [entry(n, "MessageAdded", CALL, seq=n, after_s=n, meta={"latency_ms": 10**9}) for n in range(1, 20)]
    for group in story(entries).groups:
        for line in group.lines:
            assert 0 <= line.x <= 100 and 0 <= line.x + line.width <= 101

"""`approve`, `reject`, `verify`, `inbox`, `show`, and what a person does to a run from outside."""

from __future__ import annotations

import pytest

from cli.shell import SUPPORT, Shell
from cli.test_run import HEAD_KEYS, RUN_KEYS, without_instants

GATE_KEYS = {
    "type", "run_id", "gate_id", "kind", "call_id", "tool", "args", "digest", "text", "role", "level", "deadline", "created_at",
    "notified_at", "outcome", "decided_at", "decided_by", "note", "edited_args", "agent", "tags", "started_by",
}  # fmt: skip
ENTRY_KEYS = {"type", "run_id", "entry_no", "seq", "kind", "at", "by", "status", "fence", "meta", "body"}


def test_inbox(shell: Shell) -> None:
    shell.story()
    done = shell.outlast("inbox")
    assert done.code == 0
    assert (
        without_instants(done.out)
        == """\
run-1  approval:toolu_02  approval is asked of support-lead, until DEADLINE
  support wants to send this reply
  reply_to_customer
    ticket_id: "KITE-142"
    message: "Hello, the SSO change locked you out."
  outlast approve run-1 --by you
  outlast reject run-1 --by you --note "why"
"""
    )
    [gate] = shell.outlast("inbox", "--json", "--role", "support-lead").documents
    assert set(gate) == GATE_KEYS and gate["args"]["message"] == "Hello, the SSO change locked you out."
    assert shell.outlast("inbox", "--role", "cook", "--json").documents == []
    assert shell.outlast("inbox", "--role", "cook").out.startswith("nothing waits for a person\n")


def test_approve_is_one_line_and_the_same_again_is_accepted(shell: Shell) -> None:
    shell.story()
    done = shell.outlast("approve", "run-1", "--by", "priya", "--note", "fine")
    assert (done.code, done.err) == (0, "")
    assert without_instants(done.out) == "run-1: reply_to_customer (approval:toolu_02) was approved by priya at DEADLINE: fine\n"
    again = shell.outlast("approve", "run-1", "approval:toolu_02", "--by", "priya", "--json")
    assert again.code == 0 and [set(d) for d in again.documents] == [GATE_KEYS]
    other = shell.outlast("reject", "run-1", "--by", "anna", "--note", "no")
    assert other.code == 5 and "priya" in other.err


def test_reject_needs_a_note_which_the_model_reads(shell: Shell) -> None:
    shell.story()
    assert shell.outlast("reject", "run-1").code == 2
    assert shell.outlast("reject", "run-1", "--note", " ").code == 2
    assert shell.outlast("reject", "run-1", "--note", "Loop in their IT admin first.").code == 0
    done = shell.outlast("resume", "run-1", "--app", "support")
    assert done.code == 0 and "A support lead rejected this reply: L" in done.out
    assert shell.effects() == []


def test_edited_arguments_need_the_app_and_its_schema(shell: Shell) -> None:
    shell.story()
    args = '{"ticket_id": "KITE-142", "message": "Better."}'
    without = shell.outlast("approve", "run-1", "--args", args)
    assert without.code == 2 and "--app" in without.err
    wrong = shell.outlast("approve", "run-1", "--args", '{"ticket_id": 3}', "--app", "support")
    assert wrong.code == 2
    assert shell.outlast("approve", "run-1", "--args", args, "--app", "support").code == 0
    assert shell.outlast("resume", "run-1", "--app", "support").code == 0
    assert shell.effects() == ["run-1:toolu_02 KITE-142 'Better.'"]


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "run-1"),
        ("verify", "run-1", "--happened", "--give-up"),
        ("verify", "run-1", "--run-again", "--result", '"x"'),
        ("verify", "run-1", "--happened", "--result", "nonsense"),
        ("approve", "run-1", "--args", "yes", "--app", "support"),
        ("approve", "run-1", "--args", "1", "--app", "support"),
        ("approve", "run-1", "--args", "null", "--app", "support"),
        ("approve", "run-1", "nonsense"),
        ("approve", "run-1", "--approved", "false"),
        ("approve",),
    ],
)
def test_missing_decision_executes_nothing(shell: Shell, args: tuple[str, ...]) -> None:
    shell.story()
    assert shell.outlast(*args).code == 2
    assert [g["outcome"] for g in shell.outlast("inbox", "--json").documents] == [None]
    assert shell.outlast("resume", "run-1", "--app", "support").code == 3
    assert shell.effects() == []


def test_digest_refuses_what_was_not_shown(shell: Shell) -> None:
    shell.story()
    [gate] = shell.outlast("inbox", "--json").documents
    assert shell.outlast("approve", "run-1", "--digest", "sha256:" + "0" * 64).code == 5
    assert shell.outlast("approve", "run-1", "--digest", gate["digest"]).code == 0


def test_decisions_by_position_hit_the_wrong_call(shell: Shell) -> None:
    """Two open calls of one tool: each is named, none is guessed."""
    stopped = shell.story(plan="two")
    assert "outlast approve run-1 toolu_01 --by you" in stopped.out and "outlast approve run-1 toolu_02 --by you" in stopped.out
    guessed = shell.outlast("approve", "run-1")
    assert guessed.code == 2 and "toolu_01" in guessed.err and "toolu_02" in guessed.err
    assert shell.outlast("inbox").out.count("outlast approve") == 2
    assert shell.outlast("approve", "run-1", "toolu_02").code == 0
    assert shell.outlast("reject", "run-1", "approval:toolu_01", "--note", "not this one").code == 0
    assert shell.outlast("resume", "run-1", "--app", "support", PLAN="two").code == 0
    assert shell.effects() == ["run-1:toolu_02 KITE-142 'second'"]


def test_approval_text_truncated(shell: Shell) -> None:
    """What is too long to be listed says how much is missing and how to see it; the end is always shown."""
    stopped = shell.story(plan="long")
    listed = shell.outlast("inbox")
    for out in (stopped.out, listed.out):
        assert "3,002 more characters here: outlast show run-1 --json" in out and "DELETE ALL" in out
    assert "x" * 4990 + "DELETE ALL" in shell.outlast("show", "run-1").out
    [gate] = shell.outlast("inbox", "--json").documents
    assert gate["args"]["message"] == "x" * 4990 + "DELETE ALL"


@pytest.mark.parametrize(
    "answer, code, effects, says",
    [
        (("--happened", "--result", '"paid by hand"'), 0, 1, "happened, says priya"),
        (("--give-up",), 0, 1, "was given up by priya"),
    ],
)
def test_verify(shell: Shell, answer: tuple[str, ...], code: int, effects: int, says: str) -> None:
    stopped = shell.story(plan="refund")
    for flag in ("--happened", "--run-again", "--give-up"):
        assert f"outlast verify run-1 --by you {flag}" in stopped.out
    assert shell.effects() == ["refund 20 attempt 1"]
    done = shell.outlast("verify", "run-1", *answer)
    assert done.code == 0 and says in done.out, done
    assert shell.outlast("resume", "run-1", "--app", "support", PLAN="refund").code == code
    assert len(shell.effects()) == effects


def test_run_again_not_while_the_first_attempt_may_still_act(shell: Shell) -> None:
    shell.story(plan="refund")
    done = shell.outlast("verify", "run-1", "--run-again", "--json")
    if done.code == 0:  # the attempt is known to be over
        assert shell.outlast("resume", "run-1", "--app", "support", PLAN="refund").code == 0
        assert shell.effects() == ["refund 20 attempt 1", "refund 20 attempt 2"]
    else:
        assert done.code == 5 and done.error["type"] == "run_busy" and len(shell.effects()) == 1


def test_show(shell: Shell) -> None:
    shell.story()
    text = shell.outlast("show", "run-1", "--messages", "--journal")
    assert text.code == 0
    assert "status      waiting_for_approval" in text.out and "outlast approve run-1 --by you" in text.out
    assert "\nmessages\n1 user\n  What is KITE-142 about?\n" in text.out and "GateOpened" in text.out
    [run] = shell.outlast("show", "run-1", "--json").documents
    assert set(run) == RUN_KEYS
    [whole] = shell.outlast("show", "run-1", "--json", "--messages", "--journal").documents
    assert set(whole) == RUN_KEYS | {"steps", "messages", "journal"}
    assert len(whole["messages"]) == 4 and {frozenset(e) for e in whole["journal"]} == {frozenset(ENTRY_KEYS)}
    assert [e["entry_no"] for e in whole["journal"]] == list(range(1, len(whole["journal"]) + 1))


def test_runs(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    for n, plan in enumerate(("short", "story", "fails"), 1):
        shell.outlast("run", "support", "Hi", "--id", f"run-{n}", "--tag", f"n={n}", PLAN=plan)
    everything = shell.outlast("runs", "--json").documents
    assert [d["run_id"] for d in everything] == ["run-3", "run-2", "run-1"] and all(set(d) == HEAD_KEYS for d in everything)

    def found(*args: str) -> list[str]:
        return [d["run_id"] for d in shell.outlast("runs", "--json", *args).documents]

    assert found("--status", "done") == ["run-1"]
    assert found("--unfinished") == ["run-2"]
    assert found("--tag", "n=3") == ["run-3"]
    assert found("--agent", "sales") == []
    assert found("--since", "1h") == ["run-3", "run-2", "run-1"] and found("--since", "2100-01-01") == []
    assert found("--limit", "1") == ["run-3"] and found("--limit", "1", "--before", "run-3") == ["run-2"]
    lines = shell.outlast("runs").lines
    assert lines[0].split() == ["RUN", "AGENT", "STATUS", "CHECKPOINT", "UPDATED", "REASON"]
    assert [line.split()[0] for line in lines[1:]] == ["run-3", "run-2", "run-1"]
    assert len({line.index(line.split()[1]) for line in lines[1:]}) == 1, "aligned"
    assert "outlast runs" in shell.outlast("runs", "--agent", "sales").out
    assert shell.outlast("runs", "--status", "sleeping").code == 2
    assert shell.outlast("runs", "--limit", "0").code == 2


def test_send_cancel_retry(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    assert shell.outlast("run", "support", "Hi", "--id", "run-1", "--detach").code == 0
    cancelled = shell.outlast("cancel", "run-1", "--note", "not needed", "--json")
    assert cancelled.code == 0 and [set(d) for d in cancelled.documents] == [HEAD_KEYS] and cancelled.documents[0]["status"] == "cancelled"
    assert shell.outlast("resume", "run-1", "--app", "support").code == 4
    sent = shell.outlast("send", "run-1", "-", stdin="Do it after all")
    assert sent.code == 0 and "run-1 is running" in sent.out and "outlast resume run-1" in sent.out
    assert shell.outlast("resume", "run-1", "--app", "support", PLAN="short").code == 0
    refused = shell.outlast("retry", "run-1", "--json")
    assert refused.code == 5 and refused.error["type"] == "refused"
    assert shell.outlast("run", "support", "Hi", "--id", "run-2", PLAN="fails").code == 4
    assert shell.outlast("retry", "run-2").code == 0
    assert shell.outlast("resume", "run-2", "--app", "support", PLAN="short").code == 0

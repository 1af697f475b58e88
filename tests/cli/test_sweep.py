"""`sweep`, `event`, `runs --stuck`, as a person and as cron see them."""

from __future__ import annotations

from cli.shell import Shell

APP = '''
from datetime import timedelta

from outlast import Agent, Outlast, Wait, approval, tool
from outlast.models import ScriptedModel


def tell(notice):
    with open("told.log", "a") as log:
        log.write(f"{notice.kind} {notice.gate.gate_id}\\n")


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def quick(text: str) -> str:
    """Reply."""
    return "sent"


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=None))
def endless(text: str) -> str:
    """Reply."""
    return "sent"


@tool(effect="idempotent")
def charge(amount: int) -> Wait:
    """Charge."""
    return Wait("settled", within=timedelta(days=3), otherwise="late")


def asks(name, **args):
    return [{"type": "tool_use", "id": "toolu_01", "name": name, "input": args}]


def agent(name, first):
    return Agent(name, model=ScriptedModel([first, lambda messages: f"I read: {messages[-1]['content'][0]['content']}"]), tools=[quick, endless, charge])


app = Outlast(agents=[agent("quick", asks("quick", text="hi")), agent("endless", asks("endless", text="hi")), agent("charge", asks("charge", amount=3))],
              notify=[tell])
'''

FIVE_HOURS_AGO = """
from datetime import timedelta

from outlast import Outlast
from outlast.runtime.clock import ManualClock, wall
from support import app, tell

app = Outlast(agents=list(app.agents.values()), notify=[tell], clock=ManualClock(wall() - timedelta(hours=5)))
"""


def test_sweep_applies_deadlines_sends_notices_and_says_what_is_stuck(shell: Shell) -> None:
    shell.write("support.py", APP)
    shell.write("before.py", FIVE_HOURS_AGO)
    assert shell.outlast("run", "before", "hi", "--agent", "quick", "--id", "run-q").code == 3
    assert shell.outlast("run", "support", "hi", "--agent", "endless", "--id", "run-e").code == 3
    done = shell.outlast("sweep", "--app", "support")
    assert done.code == 0
    assert done.lines[0] == "2 deadlines applied and notices sent"
    assert done.lines[2] == "1 do not go on by themselves"
    assert (
        "  quick wants" not in done.out and "  endless wants to send this reply: it waits for support-lead without a deadline" in done.lines
    )
    assert done.lines[-1] == "  outlast approve run-e toolu_01 --app support"
    assert (shell.folder / "told.log").read_text().splitlines() == [
        "opened approval:toolu_01",
        "opened approval:toolu_01",
        "expired approval:toolu_01",
    ]
    assert shell.outlast("sweep").lines[0] == "no deadline has passed and no notice is due"
    assert shell.outlast("resume", "run-q", "--app", "support").lines[-1] == (
        "I read: Nobody decided on this reply within 4 hours, so it was not sent."
    )


def test_documents_of_a_sweep_and_of_stuck_runs(shell: Shell) -> None:
    shell.write("support.py", APP)
    shell.outlast("run", "support", "hi", "--agent", "endless", "--id", "run-e")
    sweep, stuck = shell.outlast("sweep", "--json").documents
    assert sweep == {"type": "sweep", "done": 0, "stuck": 1}
    assert {**stuck, "since": ""} == {
        "type": "stuck", "run_id": "run-e", "status": "waiting_for_approval", "since": "",
        "reason": "endless wants to send this reply: it waits for support-lead without a deadline", "command": "outlast approve run-e toolu_01",
    }  # fmt: skip
    [run] = shell.outlast("runs", "--stuck", "--json").documents
    assert run["run_id"] == "run-e" and run["stuck"] == [stuck]
    listed = shell.outlast("runs", "--stuck")
    assert listed.code == 0 and "  outlast approve run-e toolu_01" in listed.lines
    shell.outlast("approve", "run-e")
    assert shell.outlast("runs", "--stuck").out.startswith("every run goes on by itself")
    assert shell.outlast("runs", "--stuck", "--json").out == ""


def test_event_answers_the_call_once(shell: Shell) -> None:
    shell.write("support.py", APP)
    waits = shell.outlast("run", "support", "hi", "--agent", "charge", "--id", "run-c")
    assert waits.code == 3 and "  outlast event run-c settled --data JSON --app support" in waits.lines
    first = shell.outlast("event", "run-c", "settled", "--data", '{"ok": true}', "--event-id", "evt-1")
    assert first.code == 0 and first.lines[0] == "run-c is running"
    again = shell.outlast("event", "run-c", "settled", "--data", '{"ok": true}', "--event-id", "evt-1", "--json")
    assert again.documents == [{"type": "event", "run_id": "run-c", "name": "settled", "first": False}]
    assert shell.outlast("resume", "run-c", "--app", "support").code == 0
    assert '{"ok": true}' in shell.outlast("show", "run-c").out


def test_event_says_what_is_wrong(shell: Shell) -> None:
    shell.write("support.py", APP)
    shell.outlast("run", "support", "hi", "--agent", "charge", "--id", "run-c")
    assert shell.outlast("event", "run-c", "settled", "--data", "{ok}").code == 2
    assert shell.outlast("event", "run-c").code == 2
    assert shell.outlast("event", "run-x", "settled").code == 1
    shell.outlast("cancel", "run-c")
    late = shell.outlast("event", "run-c", "settled", "--json")
    assert late.code == 5 and late.error["type"] == "refused"


def test_an_event_that_nothing_waits_for_is_said_to_be_kept(shell: Shell) -> None:
    shell.write("support.py", APP)
    where = ("--app", "support", "--store", "sqlite:///kept.db")
    assert "kept.db" in shell.outlast("runs", *where).lines[0], "no runs yet, and where that is"
    assert shell.outlast("run", "hi", "--agent", "charge", "--id", "run-k", *where).code == 3
    early = shell.outlast("event", "run-k", "early", *where)
    assert early.code == 0 and early.lines[-1].startswith("the event early is kept")

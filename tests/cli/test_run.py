"""`run` and `resume`: what they print, where they stop, and their exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from typing import Any

import pytest

from cli.shell import SUPPORT, Shell

STORY = """\
checkpoint 1  running               user: What is KITE-142 about?
checkpoint 2  running               model asks for get_ticket(ticket_id="KITE-142")
checkpoint 3  running               tool result: {"id": "KITE-142", "title": "Customer locked...
checkpoint 4  waiting_for_approval  model asks for reply_to_customer(ticket_id="KITE-142", me...

paused: reply_to_customer waits for support-lead until DEADLINE

run-1  approval:toolu_02  approval is asked of support-lead, until DEADLINE
  support wants to send this reply
  reply_to_customer
    ticket_id: "KITE-142"
    message: "Hello, the SSO change locked you out."

go on with
  outlast approve run-1 --by you --app support
  outlast reject run-1 --by you --note "why" --app support
  outlast resume run-1 --app support
"""
REST = """\
loaded checkpoint 4 (waiting_for_approval)
checkpoint 5  running               tool result: {"reply_id": 1, "status": "sent"}
checkpoint 6  done                  model: Replied to Northwind Studio on KITE-142 with the S...

Replied to Northwind Studio on KITE-142 with the SSO steps, and closed the ticket.
"""
HEAD_KEYS = {
    "type", "run_id", "agent", "agent_version", "status", "reason", "seq", "model_calls", "input_tokens", "output_tokens",
    "cache_read_tokens", "cache_write_tokens", "cost_usd", "attempts", "tags", "started_by", "parent_run_id", "parent_call_id", "lease_owner", "lease_until",
    "wake_at", "created_at", "updated_at",
}  # fmt: skip
RUN_KEYS = HEAD_KEYS | {"output", "gates"}
CHECKPOINT_KEYS = {"type", "run_id", "seq", "status", "created_at", "message"}


def without_instants(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{3})?Z", "DEADLINE", text)


def test_a_run_stops_where_it_waits_and_goes_on_when_decided(shell: Shell) -> None:
    stopped = shell.story()
    assert without_instants(stopped.out) == STORY
    assert shell.outlast("approve", "run-1", "--by", "priya").code == 0
    went_on = shell.outlast("resume", "run-1", "--app", "support")
    assert (went_on.code, went_on.out) == (0, REST)
    assert shell.effects() == ["run-1:toolu_02 KITE-142 'Hello, the SSO change locked you out.'"]


def test_the_same_start_again_is_the_same_run(shell: Shell) -> None:
    first = shell.story()
    assert shell.tell().out == first.out
    assert len((shell.folder / "model.log").read_text().splitlines()) == 2
    other = shell.outlast("run", "support", "Something else", "--id", "run-1")
    assert other.code == 5 and "run-1" in other.err


def test_documents_of_a_run(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    done = shell.outlast("--json", "run", "support", "Hi", "--id", "run-1", "--tag", "tenant=northwind")
    assert done.code == 3
    *events, run = done.documents
    checkpoints = [d for d in events if d["type"] == "checkpoint"]
    assert [d["seq"] for d in checkpoints] == [1, 2, 3, 4]
    assert all(set(d) == CHECKPOINT_KEYS for d in checkpoints)
    assert {d["type"] for d in events} <= {"checkpoint", "run"} and all(set(d) == HEAD_KEYS for d in events if d["type"] == "run")
    assert set(run) == RUN_KEYS
    assert (run["status"], run["tags"], run["started_by"], run["output"]) == (
        "waiting_for_approval",
        {"tenant": "northwind"},
        "priya",
        None,
    )
    assert [g["gate_id"] for g in run["gates"]] == ["approval:toolu_02"]


def test_done_and_failed(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    done = shell.outlast("run", "support", "Hi", PLAN="short")
    assert done.code == 0
    assert done.lines == ["checkpoint 1  running               user: Hi", "checkpoint 2  done                  model: All is well."]
    failed = shell.outlast("run", "support", "Hi", "--id", "run-2", PLAN="fails")
    assert failed.code == 4
    assert "failed: " in failed.out and "outlast retry run-2 --app support" in failed.out


@pytest.mark.parametrize(
    "args, says",
    [
        ([], "TEXT is missing"),
        (["hi"], "no app is named"),
        (["a", "b", "c"], "too many arguments"),
        (["a", "b", "--input", "x.json"], "too many arguments"),
        (["support", ""], "TEXT is empty"),
        (["support", "hi", "--app", "support"], "named twice"),
        (["support", "hi", "--detach", "--follow"], "exclude each other"),
        (["support", "hi", "--agent", "sales"], "no agent 'sales'"),
        (["support", "hi", "--tag", "x"], "KEY=VALUE"),
        (["support", "hi", "--id", "a:b"], "a:b"),
        (["support", "--input", "absent.json"], "absent.json cannot be read"),
        (["support", "hi", "--store", "mysql://u:s3cr3t@h/x"], "--store"),
    ],
)
def test_usage(shell: Shell, args: list[str], says: str) -> None:
    shell.write("support.py", SUPPORT)
    done = shell.outlast("run", *args)
    assert done.code == 2 and says in done.err and done.out == "" and "s3cr3t" not in done.err
    assert len(done.err.splitlines()) <= 2
    assert not (shell.folder / "model.log").exists()


def test_stdin_and_input_file(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    piped = shell.outlast("run", "support", "-", stdin="Ticket über\nKITE-142\n", PLAN="short")
    assert piped.code == 0 and piped.lines[0].endswith("user: Ticket über KITE-142")
    shell.write("input.json", json.dumps([{"type": "text", "text": "from a file"}]))
    filed = shell.outlast("run", "support", "--input", "input.json", PLAN="short")
    assert filed.code == 0 and filed.lines[0].endswith("user: from a file")
    by_default = shell.outlast("run", "--input", "-", stdin='"a text"', PLAN="short", OUTLAST_APP="support")
    assert by_default.code == 0 and by_default.lines[0].endswith("user: a text")
    for wrong in ("{}", "3", "nonsense", b"\xff"):
        assert shell.outlast("run", "support", "--input", "-", stdin=wrong).code == 2
    assert shell.outlast("run", "support", "-", stdin=b"\xff\xfe").code == 2


def test_detach_only_starts(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    started = shell.outlast("run", "support", "Hi", "--id", "run-1", "--detach", "--json", PLAN="short")
    assert started.code == 0
    [head] = started.documents
    assert set(head) == HEAD_KEYS and (head["run_id"], head["status"], head["seq"]) == ("run-1", "running", 1)
    assert not (shell.folder / "model.log").exists()
    by_name = shell.outlast("run", "Hi", "--id", "run-2", "--detach", "--agent", "support")
    assert by_name.code == 0 and "run-2 is running" in by_name.out, "without the agent's code"
    assert shell.outlast("worker", "support", "--until-idle", PLAN="short").code == 0
    assert {d["status"] for d in shell.outlast("runs", "--json").documents} == {"done"}


def follow(shell: Shell, *args: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a run that is followed, and read up to its first wait."""
    shell.write("support.py", SUPPORT)
    process: Any = shell.start(
        "run", "support", "Hi", "--id", "run-1", "--follow", *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    while not lines or "outlast resume" not in lines[-1]:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        lines.append(line)
    return process, lines


def test_follow_stays_through_the_wait(shell: Shell) -> None:
    process, _ = follow(shell)
    assert shell.outlast("approve", "run-1").code == 0
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert [line for line in out.splitlines() if line.startswith("checkpoint")] == REST.splitlines()[1:3]


def test_ctrl_c_keeps_the_run_and_says_what_goes_on(shell: Shell) -> None:
    process, _ = follow(shell)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run-1 is kept" in err and "outlast resume run-1 --app support" in err
    assert shell.outlast("show", "run-1", "--json").documents[0]["status"] == "waiting_for_approval"


def test_resume_of_what_cannot_go_on(shell: Shell) -> None:
    shell.story()
    still = shell.outlast("resume", "run-1", "--app", "support")
    assert still.code == 3 and still.lines[0] == "loaded checkpoint 4 (waiting_for_approval)" and "outlast approve run-1" in still.out
    absent = shell.outlast("resume", "nope", "--app", "support")
    assert absent.code == 1 and "nope" in absent.err and "outlast.db" in absent.err, "not found names the store"


def test_a_plain_agent_is_an_app(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    done = shell.outlast("run", "support:agent", "Hi", "--store", "sqlite:///own.db", PLAN="short")
    assert done.code == 0 and (shell.folder / "own.db").exists() and not (shell.folder / "outlast.db").exists()


def test_several_agents_need_a_name(shell: Shell) -> None:
    shell.write("support.py", SUPPORT.replace("agents=[agent]", 'agents=[agent, Agent("sales", model=ScriptedModel(["Sold."]))]'))
    refused = shell.outlast("run", "support", "Hi")
    assert refused.code == 2 and "sales" in refused.err and "--agent" in refused.err
    assert shell.outlast("run", "support", "Hi", "--agent", "sales").lines[-1].endswith("model: Sold.")


@pytest.mark.parametrize(
    "source, app, says",
    [
        ("", "nowhere", "there is no module 'nowhere'"),
        ("import nowhere", "support", "ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1\ny = z\n", "support", "line 2: NameError"),
        ("def (:\n", "support", "line 1"),
        ("raise SystemExit(3)\n", "support", "line 1: SystemExit"),
        ("app = 3\n", "support", "support:app is int"),
        ("from outlast import Outlast\nother = Outlast()\n", "support", "there is support:other"),
        ("", "support.py:app", "support:app"),
        ("from outlast import Agent\na = Agent('no good name', model='anthropic:x')\n", "support:a", "line 2"),
    ],
)
def test_an_app_that_cannot_be_imported(shell: Shell, source: str, app: str, says: str) -> None:
    shell.write("support.py", source)
    done = shell.outlast("run", app, "Hi")
    assert done.code == 2 and says in done.err and len(done.err.splitlines()) <= 2, done.err
    assert done.err.startswith("outlast: --app")

"""`crashtest`, `record`, `init`: by the command line, on the example that everybody sees, and on a project as it is made."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from tests.support.waiting import LIMIT_S

from cli.shell import Shell
from outlast.models import ScriptedModel
from outlast.runtime.crashpoints import POINTS

KITEBASE = Path(__file__).parents[2] / "examples" / "kitebase"
WORLD = ("--deps", "crash_world:desk", "--observe", "crash_world:seen")


@pytest.fixture
def kitebase(shell: Shell) -> Shell:
    """The example in a folder of its own, and a script that was recorded from a real run of it."""
    for file in ("agent.py", "helpdesk.py", "crash_world.py"):
        shutil.copy(KITEBASE / file, shell.folder)
    shell.env = {k: v for k, v in shell.env.items() if k != "ANTHROPIC_API_KEY"}
    assert (
        shell.outlast(
            "run", "agent", "Ticket KITE-142 just came in.", "--id", "run-1", "--store", "sqlite:///agent.db", KITEBASE_DIR="."
        ).code
        == 3
    )
    waiting = shell.outlast("record", "run-1", "--store", "sqlite:///agent.db")
    assert waiting.code == 0 and "run-1 is not over (waiting_for_approval): its script ends with the answers so far" in waiting.err
    assert shell.outlast("approve", "run-1", "--by", "priya", "--store", "sqlite:///agent.db").code == 0
    assert shell.outlast("resume", "run-1", "--app", "agent", "--store", "sqlite:///agent.db", KITEBASE_DIR=".").code == 0
    recorded = shell.outlast("record", "run-1", "--store", "sqlite:///agent.db")
    assert recorded.err == ""
    assert recorded.code == 0, recorded
    shell.write("script.json", recorded.out)
    return shell


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_kitebase_is_green_and_without_its_key_red(kitebase: Shell) -> None:
    done = kitebase.outlast("crashtest", "agent", "--agent", "kitebase-support", "--script", "script.json", *WORLD, "--json")
    assert done.code == 0, done
    *cases, report = documents(done.out)
    assert report["type"] == "crash_report"
    assert report["ok"] is True
    assert report["cases"] == len(cases) >= 39
    assert {name for case in cases for name in case["killed_at"]} >= {
        "tool.after:reply_to_customer",
        "tool.before:get_ticket",
        "claim.after",
    }
    assert not (kitebase.folder / ".demo").exists(), "each case has its own working directory"

    done = kitebase.outlast("crashtest", "agent", "--script", "script.json", *WORLD, "--junit", "junit.xml", KITEBASE_NO_KEY="1")
    assert done.code == 1, done
    [finding] = [line for line in done.out.splitlines() if "killed at tool.after:reply_to_customer:" in line]
    assert "reply_to_customer (toolu_03): killed at tool.after:reply_to_customer: sent 2 times; " in finding
    assert "send that key (crash-test:toolu_03)" in finding
    assert 'declare effect="at_most_once" and a check=' in finding
    assert "RED 1" in next(line for line in done.out.splitlines() if line.startswith("tool.after:reply_to_customer "))
    suite = ET.parse(kitebase.folder / "junit.xml").getroot()[0]  # noqa: S314 - we have just written it
    assert int(suite.get("failures", "0")) >= 1
    assert any("tool.after:reply_to_customer" in case.get("name", "") and case.find("failure") is not None for case in suite)


def test_record_gives_the_turns_of_a_script(kitebase: Shell) -> None:
    turns = json.loads((kitebase.folder / "script.json").read_text())
    ScriptedModel(turns)
    assert [turn[0].get("name") for turn in turns] == ["get_ticket", "search_help", "reply_to_customer", None]
    assert kitebase.outlast("record", "run-1", "--store", "sqlite:///agent.db", "--json").out.count("\n") == 1
    missing = kitebase.outlast("record", "run-9", "--store", "sqlite:///agent.db")
    assert missing.code == 1
    assert "run-9" in missing.err


def test_record_keeps_a_stop_reason_that_does_not_follow(shell: Shell) -> None:
    shell.write(
        "cut.py",
        """
from outlast import Agent
from outlast.models import ScriptedModel

app = Agent("cut", model=ScriptedModel([{"content": "I will not.", "stop_reason": "refusal"}]), tools=[])
""",
    )
    assert shell.outlast("run", "cut", "go", "--id", "run-1", "--store", "sqlite:///cut.db").code == 4
    turns = json.loads(shell.outlast("record", "run-1", "--store", "sqlite:///cut.db").out)
    assert turns == [{"content": [{"type": "text", "text": "I will not."}], "stop_reason": "refusal"}]


def test_list_names_every_point_and_what_is_at_risk(shell: Shell) -> None:
    out = shell.outlast("crashtest", "--list").out
    assert all(name in out and risk in out for name, risk in POINTS.items())
    found = documents(shell.outlast("crashtest", "--list", "--json").out)
    assert [(one["type"], one["name"], one["at_risk"]) for one in found] == [("crash_point", *item) for item in POINTS.items()]


@pytest.mark.parametrize(
    "args, said",
    [
        (["crashtest", "support"], "--script FILE is missing"),
        (["crashtest", "support", "--script", "nothing.json"], "--script nothing.json cannot be read"),
        (["crashtest", "support", "--script", "bad.json"], "--script bad.json is no JSON"),
        (["crashtest", "support", "--script", "empty.json"], "--script empty.json must be a JSON list of turns"),
        (["crashtest", "--script", "good.json"], "no app is named"),
        (["crashtest", "support", "--script", "good.json", "--deps", "support"], "--deps is 'support': write it as MODULE:ATTR"),
        (["crashtest", "support", "--script", "good.json", "--deps", "nowhere:x"], "--deps: there is no module 'nowhere'"),
        (
            ["crashtest", "support", "--script", "good.json", "--observe", "support:nothing"],
            "--observe: support has no 'nothing'",
        ),
        (["crashtest", "support", "--script", "good.json", "--junit", "no/such/x.xml"], "--junit no/such/x.xml cannot be written"),
        (["init", "../outside"], "NAME is '../outside'"),
    ],
)
def test_what_is_refused(shell: Shell, args: list[str], said: str) -> None:
    shell.tell()
    shell.write("bad.json", "[")
    shell.write("empty.json", "[]")
    shell.write("good.json", '["Done."]')
    done = shell.outlast(*args)
    assert done.code == 2, done
    assert said in done.err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_crash_test_that_is_ended_leaves_nothing(shell: Shell, signum: signal.Signals) -> None:
    """No process, no folder; after Ctrl-C it says how far it was."""
    shell.write(
        "slow.py",
        """
import threading
from outlast import Agent, tool
from outlast.models import ScriptedModel

@tool(effect="read")
def wait() -> str:
    open("../../begun", "a").write("x")
    threading.Event().wait(60)
    return "never"

app = Agent("slow", model=ScriptedModel([]), tools=[wait])
""",
    )
    shell.write("script.json", '[[{"type": "tool_use", "id": "t", "name": "wait", "input": {}}], "Done."]')
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    hears = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"  # under nohup too
    testing = subprocess.Popen([sys.executable, "-c", hears, *shell.command("crashtest", "slow", "--script", "script.json")], cwd=shell.folder,
                               env={**shell.env, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        end = monotonic() + LIMIT_S
        while not list(temporary.glob("outlast-crashtest-*/begun")):
            assert monotonic() < end and testing.poll() is None
            threading.Event().wait(0.05)
        testing.send_signal(signum)
        _, err = testing.communicate(timeout=LIMIT_S)
    finally:
        testing.kill()
    assert testing.returncode == 128 + signum
    assert list(temporary.iterdir()) == []
    assert ("interrupted after no case; nothing is reported" in err) == (signum is signal.SIGINT)


def test_under_nohup_the_end_of_a_terminal_is_nothing_to_the_cases_either(shell: Shell) -> None:
    shell.write(
        "hung_up.py",
        """
import os, signal
from outlast import Agent, tool
from outlast.models import ScriptedModel

@tool(effect="read")
def look() -> str:
    os.killpg(0, signal.SIGHUP)  # a terminal tells everybody
    return "seen"

app = Agent("hung-up", model=ScriptedModel([]), tools=[look])
""",
    )
    shell.write("script.json", '[[{"type": "tool_use", "id": "t", "name": "look", "input": {}}], "Done."]')
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", nohup, *shell.command("crashtest", "hung_up", "--script", "script.json")], cwd=shell.folder,
                          env=shell.env, start_new_session=True, capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_init_makes_a_project_whose_tests_pass(shell: Shell) -> None:
    done = shell.outlast("init", "refund-desk")
    assert done.code == 0, done
    folder = shell.folder / "refund-desk"
    assert 'Agent(\n    "refund-desk"' in (folder / "agent.py").read_text()
    assert not [file for file in folder.iterdir() if "{" in file.name or ".txt" in file.name]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "4 passed" in tests.stdout
    by_hand = subprocess.run(
        shell.command("crashtest", "--script", "script.json", "--deps", "world:shop", "--observe", "world:refunds", "--json"),
        cwd=folder, env=shell.env, capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr

    again = shell.outlast("init", "refund-desk")
    assert again.code == 2
    assert "there already" in again.err

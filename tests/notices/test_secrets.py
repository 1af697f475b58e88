"""Secrets are never in what is stored, logged or printed: canaries in the environment, in URLs and in the store's address, and a grep."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cli.shell import Shell
from outlast.testing import FakeMessagesAPI
from outlast.testing.fake_api import Fault

KEY = "sk-ant-canary-0123456789abcdef"
SIGNING = "Y2FuYXJ5LW9mLXRoZS1zaWduaW5nLWtleS0hIQ=="
PATH = "canary-in-the-path-of-a-hook"
PASSWORD = "canary-of-the-database"
TOKEN = "CanaryTokenA"
CANARIES = [KEY, SIGNING, PATH, PASSWORD, TOKEN]

APP = '''
import os
from datetime import timedelta

from outlast import Agent, Outlast, approval, tool
from outlast.models import Anthropic, ScriptedModel


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply(text: str) -> str:
    """Reply."""
    return "sent"


use = {"type": "tool_use", "id": "toolu_01", "name": "reply", "input": {"text": "Hello."}}
refused = Agent("refused", model=Anthropic("claude-sonnet-5-5", base_url=os.environ["API"]), tools=[reply])
waits = Agent("waits", model=ScriptedModel([[use], "Done."]), tools=[reply])
app = Outlast(agents=[refused, waits], notify=[
    "http://127.0.0.1:9/canary-in-the-path-of-a-hook",
    "https://user-of-nobody.invalid/canary-in-the-path-of-a-hook?token=canary-in-the-path-of-a-hook",
    "json://127.0.0.1:9/CanaryTokenA",
])
'''


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_secrets_in_checkpoints_and_logs(shell: Shell) -> None:
    shell.write("support.py", APP)
    printed: list[str] = []
    with FakeMessagesAPI([Fault(401)] * 3) as api:
        shell.env |= {"API": api.url, "ANTHROPIC_API_KEY": KEY, "OUTLAST_WEBHOOK_SECRET": f"whsec_{SIGNING}", "OUTLAST_LOG_LEVEL": "debug"}
        commands = [
            (4, ["run", "support", "hi", "--agent", "refused", "--id", "run-401"]),
            (3, ["run", "support", "hi", "--agent", "waits", "--id", "run-waits"]),
            (0, ["sweep", "--app", "support"]),
            (0, ["inbox"]),
            (0, ["inbox", "--json"]),
            (0, ["show", "run-401", "--messages", "--journal", "--json"]),
            (0, ["show", "run-waits", "--journal"]),
            (0, ["runs", "--stuck", "--json"]),
            (4, ["resume", "run-401", "--app", "support", "--debug"]),
            (None, ["runs", "--store", f"postgresql://outlast:{PASSWORD}@127.0.0.1:9/kitebase", "--debug"]),
            (None, ["sweep", "--store", f"postgresql://outlast:{PASSWORD}@127.0.0.1:9/kitebase", "--json"]),
            (None, ["run", "support", "hi", "--agent", "waits", "--store", f"postgresql://outlast:{PASSWORD}@127.0.0.1:9/kitebase"]),
        ]
        for code, args in commands:
            done = shell.outlast(*args)
            assert done.code == code if code is not None else done.code in (1, 2), (args, done)
            printed += [done.out, done.err]
    everything = "\n".join(printed)
    for said in ("authentication_error", "did not reach webhook:", "did not reach apprise:", "postgresql:"):
        assert said in everything, said  # the errors are there; what they do not hold is a secret
    database = [p.read_bytes() for p in shell.folder.glob("outlast.db*")]
    for canary in CANARIES:
        assert canary not in everything, canary
        assert not [1 for content in database if canary.encode() in content], canary
    assert stat.S_IMODE((shell.folder / "outlast.db").stat().st_mode) == 0o600

"""A folder to run `outlast` in, as a person would: as a process of its own, with an agent whose model is a script.

`SUPPORT` is the application of most tests, `support:app`: a ticket is read, a reply is asked for and needs a support lead, and the last
answer says what was done. Its tools write what they did to `effects.log`. Environment: PLAN chooses the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = r'''
import os
from datetime import timedelta
from typing import Any

from outlast import Agent, Outlast, ToolContext, approval, tool
from outlast.models import ScriptedModel


def note(line: str) -> None:
    with open("effects.log", "a") as log:
        log.write(line + "\n")


@tool(effect="read")
def get_ticket(ticket_id: str) -> dict[str, Any]:
    """Look up a ticket."""
    return {"id": ticket_id, "title": "Customer locked out after SSO change"}


@tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
def reply_to_customer(ctx: ToolContext, ticket_id: str, message: str) -> dict[str, Any]:
    """Send a reply."""
    note(f"{ctx.idempotency_key} {ticket_id} {message!r}")
    return {"reply_id": 1, "status": "sent"}


@tool
def refund(ctx: ToolContext, amount: int) -> str:
    """Pay money back."""
    note(f"refund {amount} attempt {ctx.attempt}")
    if ctx.attempt == 1:
        raise ConnectionError("the bank did not answer")
    return "paid"


def call(call_id: str, name: str, **args: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


NASTY = "a\r\x1b[2K\x1b]52;c;ZXZpbA==\x07\x9b31m\u202eevil\u200b\U000e0041 [bold]x[/bold] é"
PLANS = {
    "story": [
        [call("toolu_01", "get_ticket", ticket_id="KITE-142")],
        [call("toolu_02", "reply_to_customer", ticket_id="KITE-142", message="Hello, the SSO change locked you out.")],
        "Replied to Northwind Studio on KITE-142 with the SSO steps, and closed the ticket.",
    ],
    "short": ["All is well."],
    "two": [
        [call("toolu_01", "reply_to_customer", ticket_id="KITE-142", message="first"),
         call("toolu_02", "reply_to_customer", ticket_id="KITE-142", message="second")],
        "Done with both.",
    ],
    "long": [[call("toolu_01", "reply_to_customer", ticket_id="KITE-142", message="x" * 4990 + "DELETE ALL")], "Done."],
    "nasty": [[call("toolu_01", "reply_to_customer", ticket_id=NASTY, message=NASTY)], NASTY + "\ncheckpoint 99  done"],
    "refund": [[call("toolu_01", "refund", amount=20)], "Refunded."],
    "fails": [],
}

agent = Agent("support", model=ScriptedModel(PLANS[os.environ.get("PLAN", "story")], log="model.log"),
              tools=[get_ticket, reply_to_customer, refund])
app = Outlast(agents=[agent])
'''


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def documents(self) -> list[dict[str, Any]]:
        """stdout as documents; any other line is an error of the test."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, Any]:
        """The error document: the last line of stderr."""
        document = json.loads(self.err.splitlines()[-1])
        assert document["type"] == "error" and set(document) == {"type", "error"}
        assert set(document["error"]) == {"type", "message", "hint", "run_id", "gate"}
        error: dict[str, Any] = document["error"]
        return error


class Shell:
    """Commands in one folder. `plan` and `env` reach the processes as their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "ANTHROPIC_", "PLAN"))} | {"OUTLAST_BY": "priya"}

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return file

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "outlast", *args]

    def outlast(self, *args: str, stdin: str | bytes = b"", cwd: Path | None = None, **env: str | None) -> Done:
        environment = {k: v for k, v in (self.env | env).items() if v is not None}
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            self.command(*args), cwd=cwd or self.folder, env=environment, input=given, capture_output=True, timeout=60, check=False
        )
        err = done.stderr.decode("utf-8", "surrogateescape")
        if "--debug" not in args:
            assert "Traceback" not in err, err
        return Done(done.returncode, done.stdout.decode("utf-8", "surrogateescape"), err)

    def start(self, *args: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        """A command that is talked to while it runs. The caller ends it."""
        return subprocess.Popen(self.command(*args), cwd=self.folder, env=self.env, **kwargs)

    def effects(self) -> list[str]:
        log = self.folder / "effects.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def story(self, run_id: str = "run-1", *, plan: str = "story", code: int = 3) -> Done:
        """A run that has come as far as it can by itself."""
        self.write("support.py", SUPPORT)
        done = self.outlast("run", "support", "What is KITE-142 about?", "--id", run_id, PLAN=plan)
        assert done.code == code, done
        return done

"""A folder to run `outlast` in, as a person would: as a process of its own, with an agent whose model is a script.

`SUPPORT` is the application of most tests, `support:app`: a ticket is read, a reply is asked for and needs a support lead, and the last
answer says what was done. Its tools write what they did to `effects.log`. Environment: PLAN chooses the script.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outlast.cli import main

for _module in ("outlast.app", "outlast.models", "outlast.stores.sqlite.store", "typer._adapters"):
    importlib.import_module(_module)  # now, once, and not in every fork

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


EXAMPLES = str(Path(__file__).parents[2] / "examples") + os.sep


def _is_of_tests(name: str, module: object) -> bool:
    """What the tests of this session have imported under a name that a file of the folder may bear: their own helpers, the examples' modules."""
    return name.partition(".")[0] == "support" or (getattr(module, "__file__", None) or "").startswith(EXAMPLES)


def _be_command(args: tuple[str, ...], folder: Path, env: dict[str, str], fds: list[int]) -> NoReturn:
    """In a forked child: become `outlast ARGS` in this folder, with these files as stdin, stdout and stderr."""
    code = 70
    try:
        signal.alarm(60)  # no test waits longer for one command
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
        sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", closefd=False) for fd, mode in enumerate("rww"))  # noqa: SIM115 - descriptors
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:] = [p for p in sys.path if p]
        for name in [n for n, module in sys.modules.items() if _is_of_tests(n, module)]:
            del sys.modules[name]
        code = main(list(args))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


_stories: dict[str, tuple[Path, Done]] = {}  # plan -> the folder and the output of a first run, told once and copied for each test


class Shell:
    """Commands in one folder. `env` reaches the processes as their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "ANTHROPIC_", "PLAN"))} | {"OUTLAST_BY": "priya"}

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return file

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "outlast", *args]

    def outlast(self, *args: str, stdin: str | bytes = b"", **env: str | None) -> Done:
        """Run a command to its end. It is forked off this process, which has the imports; PYTHON... in `env` makes it a new interpreter."""
        environment = {k: v for k, v in (self.env | env).items() if v is not None}
        given = stdin.encode() if isinstance(stdin, str) else stdin
        whole = any(name.startswith("PYTHON") for name in environment.keys() - os.environ.keys())
        code, out, err = (self._new if whole else self._forked)(args, environment, given)
        if "--debug" not in args:
            assert b"Traceback" not in err, err.decode()
        return Done(code, out.decode("utf-8", "surrogateescape"), err.decode("utf-8", "surrogateescape"))

    def _new(self, args: tuple[str, ...], env: dict[str, str], stdin: bytes) -> tuple[int, bytes, bytes]:
        done = subprocess.run(self.command(*args), cwd=self.folder, env=env, input=stdin, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    def _forked(self, args: tuple[str, ...], env: dict[str, str], stdin: bytes) -> tuple[int, bytes, bytes]:
        with tempfile.TemporaryFile() as in_, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            in_.write(stdin)
            in_.seek(0)
            pid = os.fork()
            if pid == 0:
                _be_command(args, self.folder, env, [in_.fileno(), out.fileno(), err.fileno()])
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
            return code, texts[0], texts[1]

    def start(self, *args: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        """A command that is talked to while it runs. The caller ends it."""
        return subprocess.Popen(self.command(*args), cwd=self.folder, env=self.env, **kwargs)

    def effects(self) -> list[str]:
        log = self.folder / "effects.log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def story(self, *, plan: str = "story", code: int = 3) -> Done:
        """A run, run-1, that has come as far as it can by itself."""
        if plan in _stories:
            folder, done = _stories[plan]
            shutil.copytree(folder, self.folder, dirs_exist_ok=True)
        else:
            folder = Path(tempfile.mkdtemp(prefix="story-", dir=self.folder.parent))
            done = Shell(folder).tell(plan, PYTHONUNBUFFERED="1")  # by an interpreter of its own
            _stories[plan] = folder, done
            return self.story(plan=plan, code=code)
        assert done.code == code, done
        return done

    def tell(self, plan: str = "story", **env: str | None) -> Done:
        self.write("support.py", SUPPORT)
        return self.outlast("run", "support", "What is KITE-142 about?", "--id", "run-1", PLAN=plan, **env)

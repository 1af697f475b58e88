"""`worker`: drives what is there, drains when asked to end, and answers whoever watches it."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.shell import SUPPORT, Shell
from outlast.cli.worker import file_system, warn_where_volatile

# A model that says it was asked, and then waits for a word on a pipe: a step that is under way for as long as the test wants.
SLOW = """
import asyncio
from outlast import Agent, Outlast

async def model(request):
    with open("asked", "w") as pipe:
        pipe.write("asked")
    def wait():
        with open("answer") as pipe:
            return pipe.read()
    return await asyncio.to_thread(wait)

app = Outlast(agents=[Agent("slow", model=model)])
"""


MOUNTS = """\
22 1 0:21 / / rw,relatime - overlay overlay rw
23 22 0:22 / /proc rw - proc proc rw
24 22 8:1 / /data rw,relatime shared:1 - ext4 /dev/sda1 rw
25 24 0:30 / /data/my\\040cache rw - tmpfs tmpfs rw
26 22 8:2 / /srv rw - ext4 /dev/sda2 rw
27 26 0:31 / /srv rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    "file, kind",
    [
        ("/agent.db", "overlay"),
        ("/data/agent.db", "ext4"),
        ("/database/agent.db", "overlay"),
        ("/data/my cache/a.db", "tmpfs"),
        ("/srv/a.db", "tmpfs"),
    ],
)
def test_which_file_system(file: str, kind: str) -> None:
    assert file_system(Path(file), MOUNTS) == kind


@pytest.mark.parametrize("file, warned", [("/agent.db", True), ("/data/agent.db", False)])
def test_a_file_that_goes_with_its_container_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, warned: bool
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    warn_where_volatile(Path(file), tmp_path / "mountinfo")
    assert ("mount a volume" in caplog.text) == warned
    warn_where_volatile(None, tmp_path / "mountinfo")
    warn_where_volatile(Path(file), tmp_path / "absent")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_until_idle_drives_what_can_go_on_and_leaves_what_waits(shell: Shell) -> None:
    shell.write("support.py", SUPPORT)
    for n in (1, 2):
        assert shell.outlast("run", "Hi", "--id", f"run-{n}", "--detach", "--agent", "support").code == 0
    done = shell.outlast("worker", "support", "--until-idle")
    assert done.code == 0 and done.out == ""
    assert [d["status"] for d in shell.outlast("runs", "--json").documents] == ["waiting_for_approval"] * 2
    assert "idle: every unfinished run waits" in [line["message"] for line in lines(done.err)]
    shell.outlast("approve", "run-2")
    assert shell.outlast("--app", "support", "worker", "--until-idle").code == 0
    assert [d["status"] for d in shell.outlast("runs", "--json").documents] == ["done", "waiting_for_approval"]


@pytest.mark.parametrize(
    "args, env",
    [
        (("support", "--concurrency", "0"), {}),
        (("support", "--grace", "25"), {}),
        (("support", "--agent", "sales"), {}),
        (("support", "--health-port", "70000"), {}),
        (("support",), {"OUTLAST_CONCURRENCY": "many"}),
        ((), {}),
    ],
)
def test_usage(shell: Shell, args: tuple[str, ...], env: dict[str, str]) -> None:
    shell.write("support.py", SUPPORT)
    done = shell.outlast("worker", *args, "--until-idle", **env)
    assert done.code == 2 and len(done.err.splitlines()) <= 2


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test began; none of them outlives it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def a_slow_worker(shell: Shell, started: list[subprocess.Popen[str]], *args: str) -> subprocess.Popen[str]:
    """A worker in the middle of a model call."""
    shell.write("slow.py", SLOW)
    for pipe in ("asked", "answer"):
        subprocess.run(["mkfifo", str(shell.folder / pipe)], check=True)
    assert shell.outlast("run", "Hi", "--id", "run-1", "--detach", "--agent", "slow").code == 0
    process: Any = shell.start("worker", "slow", *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(process)
    assert (shell.folder / "asked").read_text() == "asked"
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_step_end(shell: Shell, started: list[subprocess.Popen[str]], signum: signal.Signals) -> None:
    process = a_slow_worker(shell, started, "--grace", "60s")
    process.send_signal(signum)
    while "running steps have 60s to end" not in (line := process.stderr.readline() if process.stderr else ""):
        assert line, "it ended without saying so"
    (shell.folder / "answer").write_text("All is well.")
    process.communicate(timeout=60)
    assert process.returncode == 0
    [head] = shell.outlast("runs", "--json").documents
    assert (head["status"], head["lease_owner"]) == ("done", None)


def test_the_second_signal_stops_now(shell: Shell, started: list[subprocess.Popen[str]]) -> None:
    process = a_slow_worker(shell, started, "--grace", "60s")
    process.send_signal(signal.SIGTERM)
    while "running steps have 60s to end" not in (line := process.stderr.readline() if process.stderr else ""):
        assert line, "it ended without saying so"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    [head] = shell.outlast("runs", "--json").documents
    assert (head["status"], head["seq"]) == ("running", 1)


def test_health_pages(shell: Shell, started: list[subprocess.Popen[str]]) -> None:
    process = a_slow_worker(shell, started, "--health-port", "0")
    while "health pages on port" not in (line := process.stderr.readline() if process.stderr else ""):
        assert line, "it ended without saying so"
    port = int(json.loads(line)["message"].rsplit(" ", 1)[1])

    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as e:
            return e.code

    assert [status(path) for path in ("/livez", "/readyz", "/livez?x=1", "/else")] == [200, 200, 200, 404]

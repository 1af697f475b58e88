"""The README's Python runs as it stands, and the first agent is the one whose types are checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FIRST_AGENT, ACTING_TOOL, OWN_LOOP = BLOCKS


def play(source: str, folder: Path) -> str:
    """Run it as a script in a folder of its own, as a reader would; its stdout."""
    (folder / "support.py").write_text(source, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "ANTHROPIC_"))}
    done = subprocess.run([sys.executable, "support.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_agent_is_the_typed_program() -> None:
    program = (ROOT / "tests" / "typing" / "programs" / "p01_first_agent.py").read_text(encoding="utf-8")
    assert program.split('"""\n\n', 1)[1] == FIRST_AGENT
    assert len([line for line in FIRST_AGENT.splitlines() if line.strip()]) <= 30


def test_first_agent_runs_and_running_it_again_asks_nothing(tmp_path: Path) -> None:
    first = play(FIRST_AGENT, tmp_path)
    lines = first.splitlines()
    assert lines[0] == "done Northwind Studio is locked out since its SSO change."
    assert [line.split()[:2] for line in lines[1:]] == [["1", "running"], ["2", "running"], ["3", "running"], ["4", "done"]]
    assert play(FIRST_AGENT, tmp_path) == first


def test_acting_tool_is_a_tool(tmp_path: Path) -> None:
    assert play(ACTING_TOOL + "\nprint(reply_to_customer.name, reply_to_customer.effect)\n", tmp_path) == "reply_to_customer idempotent\n"


def test_own_loop_runs_in_eight_lines(tmp_path: Path) -> None:
    assert play(OWN_LOOP, tmp_path) == "done\n"
    assert play(OWN_LOOP, tmp_path) == "done\n", "finished: nothing left to do"
    loop = OWN_LOOP[OWN_LOOP.index("with app.open") :]
    assert len(loop.splitlines()) == 8


@pytest.mark.parametrize("script", ["demo", "test", "setup", "check"])
def test_scripts_are_there(script: str) -> None:
    assert os.access(ROOT / "script" / script, os.X_OK)


@pytest.mark.parametrize("file", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/reference/README.md"])
def test_links_lead_somewhere(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t and not t.startswith("#")]
    assert not [t for t in targets if not (ROOT / file).parent.joinpath(t).exists()]

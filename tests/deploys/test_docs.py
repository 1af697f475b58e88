"""The guide to deploys: its program runs, and every command in it is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "deploys.md").read_text(encoding="utf-8")


def test_program_of_the_guide() -> None:
    [source] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(source, "deploys.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    made = names["answer_ticket"]
    assert made.aliases == ("reply_to_customer",)
    assert made.problem(made.upgraded("reply_to_customer", {"ticket": "KITE-1", "text": "hello"})) is None


def test_commands_of_the_guide_are_commands() -> None:
    for line in re.findall(r"^    outlast ([^>#\n]+)", GUIDE, re.MULTILINE):
        words = [word for word in line.split() if not word.startswith("-")]
        command = words[:2] if words[0] == "store" else words[:1]
        done = subprocess.run(
            [sys.executable, "-m", "outlast", *command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, line
        for flag in re.findall(r"--[a-z-]+", line):
            assert flag in done.stdout, (line, flag)

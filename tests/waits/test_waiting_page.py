"""The page on waiting says what is so: its code runs, and its commands are commands."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outlast.cli import build
from outlast.runtime import notices

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "waiting.md").read_text(encoding="utf-8")


def test_its_code_runs_from_top_to_bottom() -> None:
    space: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "waiting.md", "exec"), space)  # noqa: S102 - our own page
    assert space["office"].add(datetime(2026, 11, 27, 15, tzinfo=UTC), timedelta(hours=4)) == datetime(2026, 11, 30, 11, tzinfo=UTC)
    assert [t.name for t in space["app"]._told][1].startswith("webhook:https://hooks.example.com#")
    assert space["boss"].tools[0].name == "researcher"
    gate = type("Gate", (), {"role": "support-lead", "started_by": "priya"})
    assert space["may_decide"]("tom", gate) and not space["may_decide"]("priya", gate)


def test_its_commands_exist() -> None:
    known = {command.name for command in build().registered_commands}
    named = set(
        re.findall(
            r"outlast (?:--app \S+ )?([a-z]+)\b(?= (?:run-|--|\"|$)|$)",
            "\n".join(re.findall(r"^    .*$", PAGE, re.MULTILINE)),
            re.MULTILINE,
        )
    )
    assert {"sweep", "event", "run"} <= named <= known


def test_its_numbers_are_the_programs() -> None:
    assert [notices.pause(n).total_seconds() for n in (1, 2, 3)] == [5, 20, 80] and "after 5 s, 20 s, 80 s" in PAGE
    assert notices.pause(99) == timedelta(hours=1) and timedelta(days=3) == notices.GIVE_UP_AFTER

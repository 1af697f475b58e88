"""What the runs of the crash tests do: a script for every effect, turns one after another, and a batch of calls."""

from __future__ import annotations

from typing import Any

from tests.support.world import EFFECTS, asks, use

RUN = "run-crash"
BATCH = ("look", "deliver", "act", "act_checked")
SCRIPTS: dict[str, list[Any]] = {
    **{name: [asks(use(name, text="hello")), "Done."] for name in EFFECTS},
    "two turns": [asks(use("look", text="a")), asks(use("act_checked", "toolu_02", text="b")), "Done."],
    "a batch": [asks(*[use(name, f"toolu_{n:02}", text=name) for n, name in enumerate(BATCH, 1)]), "Done."],
}

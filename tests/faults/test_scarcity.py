"""A process that has no file descriptors left, or no memory: what it told as saved stands, nothing happens twice, and what comes out says why.

A few amounts here; `OUTLAST_TESTS=long` takes each of many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.scene import EXPECTED

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("OUTLAST_TESTS") == "long"
PLENTY = {"files": 200, "memory": 2000}  # then it goes through
LEFT = {
    "files": [*range(30)] if LONG else [0, 2, 6, 9],
    "memory": [*range(1, 40), 48, 64, 96, 128] if LONG else [2, 8, 20],
}  # descriptors, MB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a process as Linux has them")


@pytest.mark.parametrize("of", ["files", "memory"])
def test_want_costs_nothing_that_was_told_and_nothing_happens_twice(of: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.scarce", of, *map(str, [PLENTY[of], *LEFT[of]])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    calm, *cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == len(LEFT[of]), done.stderr[-2000:]
    assert (calm["code"], calm["again"], calm["ended"], calm["status"], calm["effects"]) == (0, 0, ["done"], "done", EXPECTED)
    assert [x for x in cases if "error" in x], "nothing was in want of anything"
    for case in cases:
        assert (case["again"], case["check"]) == (0, []), case
        assert case["before"] >= case["acked"], case
        if case["status"] == "done":
            assert (case["messages"], case["effects"]) == (calm["messages"], EXPECTED), case
        else:  # the model's or a tool's own code found none: that is its answer, and what it did stands once
            assert case["status"] == "failed" and case["reason"], case
            assert all(case["effects"][name] <= n for name, n in EXPECTED.items()), case
        name, text, hint = case.get("error", ["", "", "python"])
        assert hint == "python" or ("outlast.db" in text and hint), (name, case)

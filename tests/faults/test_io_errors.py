"""I/O errors, a full disk, torn writes and deaths at the write-class calls of a run: nothing acknowledged is lost, nothing happens twice, no trace.

A slice here; `OUTLAST_TESTS=long` (script/proof) takes every call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.faults.scene import EXPECTED

ROOT = Path(__file__).parents[2]
EVERY = os.environ.get("OUTLAST_TESTS") == "long"
STRIDE = 1 if EVERY else 61

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the failing disk is preloaded with LD_PRELOAD")


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to make the failing disk")
    library = tmp_path_factory.mktemp("fi") / "fi.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(Path(__file__).parent / "fi.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def cases(failing_disk: Path) -> list[dict[str, Any]]:
    day = datetime.now(UTC).toordinal()
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.sweep", str(STRIDE), str(day)], cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(failing_disk)},
        capture_output=True, text=True, check=False, timeout=3600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = Counter(f"{c['kind']}{', stays' if c['stays'] else ''}" for c in found)
    how = Counter("died" if c["code"] < 0 else c["error"][0] if "error" in c else "went through" for c in found[1:])
    print(f"{len(found) - 1} cases of {found[0]['calls'][0]} calls: {dict(kinds)}; {dict(how)}")
    return found


def test_the_disk_can_fail(cases: list[dict[str, Any]]) -> None:
    calm, *disturbed = cases
    assert calm["status"] == "done" and calm["calls"][0] > 40
    assert calm["effects"] == EXPECTED
    assert len(disturbed) >= 10
    fired = sum(c["code"] < 0 or c["calls"][1] > 0 for c in disturbed)
    assert fired >= 0.85 * len(disturbed)  # how often it writes differs a little from run to run


def test_nothing_acknowledged_is_lost(cases: list[dict[str, Any]]) -> None:
    wrong = [c for c in cases if c["again"] != 0 or c["before"] < c["acked"] or c["check"]]
    assert wrong == []


def test_the_run_ends_as_undisturbed_and_nothing_happens_twice(cases: list[dict[str, Any]]) -> None:
    calm, *disturbed = cases
    wrong = [c for c in disturbed if (c["status"], c["messages"], c["effects"]) != ("done", calm["messages"], EXPECTED)]
    assert wrong == []


def test_errors_are_typed_name_the_file_and_say_what_to_do(cases: list[dict[str, Any]]) -> None:
    _, *disturbed = cases
    living = [c for c in disturbed if c["kind"] not in ("killed", "torn and killed")]
    assert [c for c in living if c["code"] != 0] == []
    told = [c["error"] for c in living if "error" in c]
    assert [e for e in told if "outlast.db" not in e[1] or not e[2]] == []
    assert {c["code"] for c in disturbed if c["kind"] in ("killed", "torn and killed")} <= {-9, 0}

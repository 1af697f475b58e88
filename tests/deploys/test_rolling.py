"""A rolling deploy: workers of version 1 and 2 side by side on one store, killed again and again. All runs finish, one effect each."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.deploys import fleet
from tests.support.world import Ledger

from outlast import Outlast
from outlast.errors import GateClosed

RUNS = 200
LIMIT_S = 300
SEED = 20261130


def worker(version: str, folder: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, str(Path(fleet.__file__)), version, str(folder)], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": str(root)}, cwd=folder)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def decide(app: Outlast) -> int:
    gates = app.inbox(limit=1000)
    for gate in gates:
        with suppress(GateClosed):
            app.decide(gate.run_id, gate.gate_id, approved=True, decided_by="priya", digest=gate.digest)
    return len(gates)


def test_rolling_deploy(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    workers: dict[str, subprocess.Popen[str]] = {}
    with fleet.app("1", tmp_path) as app:
        for n in range(RUNS):
            app.start("support", "go", run_id=f"run-{n}")
        try:
            workers = {name: worker(name[0], tmp_path) for name in ("1a", "1b", "2a")}
            end, seen, kills = time.monotonic() + LIMIT_S, None, 0
            while app.unfinished_runs():
                assert time.monotonic() < end, [(h.run_id, h.status, h.reason) for h in app.runs(unfinished=True)]
                seen = app._store.wait_for_change(seen, 1.0)
                decided = decide(app)
                if decided and kills < 8:  # right after decisions: effects are under way
                    kills += 1
                    name = rng.choice(sorted(workers))
                    workers[name].kill()
                    workers.pop(name).wait()
                    version = "2" if kills >= 2 else "1"  # from now on what is started anew is the new version
                    workers[f"{version}{kills}"] = worker(version, tmp_path)
            assert kills
        finally:
            for process in workers.values():
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
        assert {head.status for head in app.runs(limit=1000)} == {"done"}
        keys = sorted(line["key"] for line in Ledger(tmp_path / "ledger").lines("reply"))
        assert keys == sorted(f"run-{n}:toolu_01" for n in range(RUNS))
        versions = {head.agent_version for head in app.runs(limit=1000)}
        assert "2" in versions
        assert app.store_check() == []

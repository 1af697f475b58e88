"""An edited, dropped or reordered entry is found; a deleted -wal is noticed; heads that were kept elsewhere prove what was there."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.world import GATE, Ledger, tools, use

from outlast import Agent, Outlast
from outlast.errors import StoreError, UsageError
from outlast.models import ScriptedModel

SEED = 20261130
WRITES = """
import os, sys
from outlast import Agent, Outlast
from outlast.models import ScriptedModel
app = Outlast(sys.argv[1], agents=[Agent("a", model=ScriptedModel(["Done."]))])
for n in range(20):
    app.start("a", "go", run_id=f"run-{n}")
print("acknowledged", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with runs that hold entries of many kinds, closed cleanly."""
    folder = tmp_path_factory.mktemp("whole")
    made = tools(GATE)
    turns: list[Any] = [[use("act", text="grüße €1 \U0001f600"), use("look", "toolu_02", text="x")], "Done."]
    agent = Agent("a", model=ScriptedModel(turns), tools=list(made.values()), version="1")
    with Outlast(folder / "outlast.db", agents=[agent], deps=Ledger(folder / "ledger")) as app:
        for n in range(3):
            app.run_sync(agent, "go", run_id=f"run-{n}", tags={"t": "x"}, by="priya")
        for gate in app.inbox():
            app.decide(gate.run_id, gate.gate_id, approved=gate.run_id != "run-1", decided_by="priya", note="well")
        app.resume_sync("run-0")
        app.send("run-2", "and this", by="priya")
        assert app.store_check() == []
    return folder / "outlast.db"


def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(whole, tmp_path / "outlast.db"))


def findings(path: Path, heads: Any = ()) -> list[tuple[str, str, str]]:
    with Outlast(path) as app:
        return app.store_check(heads)


COLUMNS = ("entry_no", "seq", "kind", "at", "fence", '"by"', "entry_id", "status", "digest", "meta", "body")


@pytest.mark.parametrize("number", range(60))
def test_any_flipped_byte_of_any_entry_is_found(number: int, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED + number)
    path = copy(whole, tmp_path)
    db = apsw.Connection(str(path))
    rows = db.execute(f"SELECT rowid, {', '.join(COLUMNS)} FROM entry").fetchall()
    while True:
        rowid, *values = rng.choice(rows)
        at = rng.choice([n for n, value in enumerate(values) if value is not None and value != ""])
        column, value = COLUMNS[at], values[at]
        if isinstance(value, int):
            changed: Any = value ^ (1 << rng.randrange(max(value.bit_length(), 1)))
            what = "?"
        else:
            raw = bytearray(value if isinstance(value, bytes) else value.encode())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            changed, what = bytes(raw), "?" if isinstance(value, bytes) else "CAST(? AS TEXT)"  # whatever bytes those are
        try:
            db.execute(f"UPDATE entry SET {column} = {what} WHERE rowid = ?", (changed, rowid))
            break
        except apsw.ConstraintError:  # two entries of one number: the database itself says no
            continue
    db.close()
    assert findings(path), f"{column} of row {rowid}"


@pytest.mark.parametrize("number", range(30))
def test_flipped_bytes_of_the_file_inside_entries_are_found(number: int, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED + number)
    path = copy(whole, tmp_path)
    db = apsw.Connection(str(path))
    bodies = [body for (body,) in db.execute("SELECT CAST(body AS BLOB) FROM entry WHERE length(body) > 20")]
    db.close()
    before, body = path.read_bytes(), rng.choice(bodies)
    byte, bit = rng.randrange(len(body)), rng.randrange(8)
    start = before.find(body)
    while start > 0:  # the free space of a page may hold copies that no row uses any more
        raw = bytearray(before)
        raw[start + byte] ^= 1 << bit
        path.write_bytes(raw)
        db = apsw.Connection(str(path))
        used = bodies != [now for (now,) in db.execute("SELECT CAST(body AS BLOB) FROM entry WHERE length(body) > 20")]
        db.close()
        if used:
            assert findings(path)
            return
        start = before.find(body, start + 1)
    raise AssertionError("no row was changed")


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM entry WHERE rowid = (SELECT max(rowid) FROM entry WHERE run_no = 1)",
        "DELETE FROM entry WHERE rowid = (SELECT min(rowid) + 2 FROM entry)",
        "UPDATE entry SET body = (SELECT body FROM entry e WHERE e.run_no = 2 AND e.entry_no = 2) WHERE run_no = 1 AND entry_no = 3",
        "UPDATE entry SET meta = NULL WHERE meta IS NOT NULL",
    ],
)
def test_dropped_exchanged_or_emptied_entry_is_found(change: str, whole: Path, tmp_path: Path) -> None:
    path = copy(whole, tmp_path)
    db = apsw.Connection(str(path))
    db.execute(change)
    assert db.changes()
    db.close()
    assert findings(path)


def test_heads_that_were_kept_find_what_a_forger_hides(whole: Path, tmp_path: Path) -> None:
    """A file that is whole in itself, and is not the one that was there: an older copy, or a run that is gone with all its rows."""
    with Outlast(whole) as app:
        heads = list(app.store_heads())
        assert [(run_id, entries) for run_id, entries, _ in heads] == sorted(
            (h.run_id, app._store.head(h.run_id).entries) for h in app.runs()
        )
    assert findings(whole, heads) == []
    path = copy(whole, tmp_path)
    db = apsw.Connection(str(path))
    for table in ("entry", "gate", "run"):
        db.execute(f"DELETE FROM {table} WHERE run_no = 1")
    db.close()
    assert findings(path) == []
    [(where, what, _)] = findings(path, heads)
    assert where == "run run-0" and "no longer there" in what
    [(where, what, _)] = findings(whole, [heads[1], (heads[0][0], heads[0][1], "00" * 32)])
    assert "rewritten" in what
    grown = [(run_id, entries - 1, "") for run_id, entries, _ in heads]  # a journal that grew since is no finding by its length
    assert {what for _, what, _ in findings(whole, grown)} != {f"it had {n} entries" for _, n, _ in grown}


def test_store_heads_and_check_by_the_command_line(whole: Path, tmp_path: Path) -> None:
    def outlast(*args: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "outlast", *args, "--store", f"sqlite:///{whole}"], capture_output=True, text=True, check=False,
                              timeout=60, cwd=tmp_path, env={k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")})  # fmt: skip
        assert done.returncode == code, done
        return done.stdout

    for flag in ([], ["--json"]):
        kept = tmp_path / f"heads{len(flag)}"
        kept.write_text(outlast("store", "heads", *flag))
        outlast("store", "check", "--heads", str(kept))
        kept.write_text(kept.read_text().replace("run-1", "run-9"))
        assert "run-9" in outlast("store", "check", "--heads", str(kept), code=1)
    kept.write_text("nonsense")
    outlast("store", "check", "--heads", str(kept), code=UsageError.exit_code)


def test_wal_deleted_after_a_crash_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "outlast.db"
    done = subprocess.run([sys.executable, "-c", WRITES, str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-9, "acknowledged\n"), done.stderr
    Path(f"{path}-wal").unlink()
    before = path.read_bytes()
    for _ in range(2):
        with Outlast(path) as app, pytest.raises(StoreError, match="-wal was deleted after a crash"):
            app.start("a", "go")
    assert path.read_bytes() == before and not Path(f"{path}-wal").exists()
    Path(f"{path}-shm").unlink()  # as the hint says: go on with what is left
    with Outlast(path) as app:
        app.start("a", "go", run_id="next")
        assert "next" in app.unfinished_runs()


def test_crash_alone_and_clean_ends_are_no_deleted_wal(tmp_path: Path) -> None:
    path = tmp_path / "outlast.db"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WRITES, str(path)], capture_output=True, check=False, timeout=60)
        with Outlast(path) as app:
            assert len(app.unfinished_runs()) == 20
    Path(f"{path}-wal").unlink(missing_ok=True)
    with Outlast(path) as app:
        assert len(app.unfinished_runs()) == 20

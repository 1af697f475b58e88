"""How many runs a second can workers take, one by one and in batches, and does it matter how many are held already?

Worker processes on one file claim until nothing is left; every run is taken once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import apsw

import measure
from ours import AGENT
from outlast.stores.sqlite.store import SQLiteStore

RUNS = 4000
HELD = 10_000
BATCH = 50
ROUNDS = 5


def main() -> None:
    measure.header("claim: runs taken by workers")
    targets = measure.Targets()
    rows: list[tuple[Any, ...]] = []
    for place, base in (("disk", None), ("tmpfs", measure.memory_folder())):
        single, batched = table_of(place, base, rows)
        if place == "disk":
            targets.at_least("single claims a second, one worker", single[1, 0], 2000)
            targets.at_least("batched claims a second, one worker", batched[1, 0], 10_000)
        else:
            targets.at_most("a single claim with 10,000 held against none (tmpfs)", single[1, 0] / single[1, HELD], 1.25, "×")
        targets.at_least(f"fewest claims of 4 workers against the most ({place}, single)", single[4, -1], 0.5)
    for place, base in (("disk", None), ("tmpfs", measure.memory_folder())):
        with measure.folder(base) as folder:
            claims, updates = in_turns(folder, 500)
        print(
            f"\n{place}, in turns: {500 / sum(claims):,.0f} single claims and {500 / sum(updates):,.0f} bare autocommitted UPDATEs a second; "
            f"a claim takes {sum(claims) / sum(updates):.2f} of them (of medians: {measure.median(claims) / measure.median(updates):.2f})"
        )
    print()
    measure.table(["files on", "workers", "at a time", "held before", "claims a second", "µs a call, median", "per worker"], rows)
    targets.show()


def table_of(
    place: str, base: str | None, rows: list[tuple[Any, ...]]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    cases = [(workers, held, batch) for workers, held in ((1, 0), (1, HELD), (4, 0)) for batch in (1, BATCH)]
    found: dict[tuple[int, int, int], list[list[dict[str, Any]]]] = {case: [] for case in cases}
    for _ in range(ROUNDS):  # in turns: what the neighbours do meets all cases
        for workers, held, batch in cases:
            runs = RUNS if batch > 1 else RUNS // 4
            with measure.folder(base) as folder:
                filled(folder, runs, held)
                answers = race(folder, workers, batch)
            assert sum(a["claims"] for a in answers) == runs, "a run was taken twice, or not at all"
            found[workers, held, batch].append(answers)
    single: dict[tuple[int, int], float] = {}
    batched: dict[tuple[int, int], float] = {}
    for (workers, held, batch), rounds in found.items():
        rate = measure.median([sum(a["claims"] for a in answers) / max(a["took"] for a in answers) for answers in rounds])
        call = measure.median([a["median"] for answers in rounds for a in answers])
        counts = [[a["claims"] for a in answers] for answers in rounds]
        rates = single if batch == 1 else batched
        rates[workers, held] = rate
        rates[workers, -1] = measure.median([min(c) / max(c) for c in counts])
        rows.append((place, workers, batch, f"{held:,}", f"{rate:,.0f}", measure.us(call), f"{min(counts[-1])} … {max(counts[-1])}"))
    return single, batched


def in_turns(folder: Path, times: int) -> tuple[list[float], list[float]]:
    """Seconds of single claims, and of the least that a claim could be on this disk: one UPDATE of one row, one fsync."""
    filled(folder, times + 1, 0)
    store = SQLiteStore(folder / "outlast.db")
    bare = apsw.Connection(str(folder / "bare.db"))
    bare.execute(
        "PRAGMA journal_mode = wal; PRAGMA synchronous = full; CREATE TABLE run (run_no INTEGER PRIMARY KEY, fence, owner)"
    ).fetchall()
    bare.executemany("INSERT INTO run VALUES (?, 0, ?)", ((n, "x" * 50) for n in range(times)))
    store.claim("worker", agents=[AGENT], limit=1)
    claims, updates = [], []
    for n in range(times):
        a = measure.now()
        bare.execute("UPDATE run SET fence = fence + 1 WHERE run_no = ?", (n,))
        b = measure.now()
        assert store.claim("worker", agents=[AGENT], limit=1)
        claims.append(measure.now() - b)
        updates.append(b - a)
    bare.close()
    store.close()
    return claims, updates


def filled(folder: Path, due: int, held: int) -> None:
    """Runs that are due, and runs that somebody holds, put there directly."""
    store = SQLiteStore(folder / "outlast.db")
    store.unfinished()  # makes the file
    store.close()
    db = apsw.Connection(str(folder / "outlast.db"))
    db.execute("PRAGMA synchronous = off; BEGIN")
    sql = (
        "INSERT INTO run (run_id, agent, status, entries, seq, wake_at, driver, format, created_at, updated_at, lease_owner, lease_until, "
        "lease_boot, lease_until_at, fence, nonce) VALUES (?, ?, 'running', 2, 1, ?, 'built-in', 1, ?, ?, ?, ?, ?, ?, 1, 'n')"
    )
    far = 2**50
    db.executemany(sql, ((f"held-{n}", AGENT, n, n, n, "somebody", far, "boot", far) for n in range(held)))
    db.executemany(sql, ((f"due-{n}", AGENT, n, n, n, None, None, None, None) for n in range(due)))
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def race(folder: Path, workers: int, batch: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "child", str(folder), str(batch)]
    return measure.race(command, workers, within_s=120)


def child(folder: Path, batch: int, number: int) -> None:
    store = SQLiteStore(folder / "outlast.db")
    store.unfinished()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = measure.now()
    claims, calls = 0, []
    while True:
        a = measure.now()
        taken = store.claim(f"worker-{number}", agents=[AGENT], limit=batch)
        if not taken:
            break
        calls.append(measure.now() - a)
        claims += len(taken)
    took = measure.now() - begun
    print(json.dumps({"claims": claims, "took": took, "median": measure.median(calls or [0])}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

"""Loss of power: images of the disk at every moment of a recorded run, with what was not synced lost, torn at sectors, or reordered.

With synchronous=FULL nothing that was told as saved may be missing from any of them; with NORMAL the same suite must find something missing,
or it would see nothing at all. A slice here; `OUTLAST_TESTS=long` (script/proof) looks at many.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest

from outlast.stores.sqlite import SQLiteStore

ROOT = Path(__file__).parents[2]
IMAGES = 20_000 if os.environ.get("OUTLAST_TESTS") == "long" else 700
CHECKED = 40  # images on which the whole store check runs too
SECTOR = 512
SEED = 20261129


@dataclass
class Found:
    images: int = 0
    lost: int = 0
    corrupt: int = 0
    torn: int = 0  # part of a transaction
    wrong: list[str] = field(default_factory=list)


def recorded(folder: Path, level: str) -> list[list[Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.record", str(folder), level], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def apply(image: bytearray, step: list[Any]) -> None:
    if step[0] == "write":
        offset, data = step[2], step[3]
        if len(image) < offset:
            image.extend(bytes(offset - len(image)))
        image[offset : offset + len(data)] = data
    else:
        del image[step[2] :]


def survived(durable: dict[str, bytearray], pending: dict[str, list[list[Any]]], rng: random.Random) -> dict[str, bytearray]:
    """What is on the disk: all that was synced, and of the rest any sectors."""
    keeps = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    found = {}
    for name in durable.keys() | pending.keys():
        image = bytearray(durable.get(name, b""))
        for step in pending.get(name, []):
            if step[0] == "cut":
                if rng.random() < keeps:
                    apply(image, step)
                continue
            offset, data, at = step[2], step[3], 0
            while at < len(data):
                end = min(len(data), at + SECTOR - (offset + at) % SECTOR)
                if rng.random() < keeps:
                    apply(image, ["write", name, offset + at, data[at:end]])
                at = end
        found[name] = image
    return found


def judged(folder: Path, told: int, found: Found, *, whole: bool) -> None:
    file = folder / "outlast.db"
    try:
        db = apsw.Connection(str(file))
        try:
            [(said,)] = db.execute("PRAGMA quick_check").fetchall()
            tables = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'entry'").fetchall() == [(1,)]
            entries = db.execute("SELECT count(*) FROM entry").fetchall()[0][0] if tables else 0
            heads = db.execute("SELECT coalesce(sum(entries), 0) FROM run").fetchall()[0][0] if tables else 0
        finally:
            db.close()
    except apsw.Error as e:
        found.corrupt += 1
        found.wrong.append(f"{type(e).__name__}: {e}")
        return
    found.corrupt += said != "ok"
    found.lost += entries < told
    found.torn += entries != heads
    if whole and tables:
        file.chmod(0o600)
        store = SQLiteStore(file)
        found.wrong += [str(problem) for problem in store.check()]
        store.close()


def images(folder: Path, trace: list[list[Any]], wanted: int) -> Found:
    found, rng = Found(), random.Random(SEED)
    durable: dict[str, bytearray] = {}
    pending: dict[str, list[list[Any]]] = {}
    told = 0
    each = -(-wanted // len(trace))
    for step in trace:
        match step[0]:
            case "told":
                told = step[1]
            case "sync":
                image = durable.setdefault(step[1], bytearray())
                for earlier in pending.pop(step[1], []):
                    apply(image, earlier)
            case "delete":
                durable.pop(step[1], None)
                pending.pop(step[1], None)
            case _:
                pending.setdefault(step[1], []).append([*step[:3], base64.b64decode(step[3])] if step[0] == "write" else step)
        for _ in range(each):
            for old in folder.iterdir():
                old.unlink()
            for name, image in survived(durable, pending, rng).items():
                (folder / name).write_bytes(image)
            found.images += 1
            judged(folder, told, found, whole=found.images % max(wanted // CHECKED, 1) == 0)
    return found


@pytest.fixture
def disk() -> Iterator[Path]:
    """In memory where there is such a place: thousands of small files."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="outlast-images-", dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder)


def test_nothing_acknowledged_is_lost_with_the_power(tmp_path: Path, disk: Path) -> None:
    trace = recorded(tmp_path, "full")
    assert sum(step[0] == "told" for step in trace) > 15
    assert sum(step[0] == "sync" and step[1] == "outlast.db" for step in trace) >= 2  # checkpoints are among them
    found = images(disk, trace, IMAGES)
    print(found)
    assert found.images >= IMAGES * 0.5
    assert (found.lost, found.corrupt, found.torn, found.wrong) == (0, 0, 0, [])


def test_the_same_suite_fails_without_full(tmp_path: Path, disk: Path) -> None:
    found = images(disk, recorded(tmp_path, "normal"), IMAGES if IMAGES > 700 else 300)
    print(found)
    assert found.lost > found.images / 20
    assert found.corrupt == 0

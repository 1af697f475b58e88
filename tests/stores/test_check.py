"""What `store check` says about where a SQLite file lies, each finding with its remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from outlast.stores.sqlite import SQLiteStore
from outlast.stores.sqlite.check import LEAST_FREE
from stores.keepers import ended


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outlast.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    store = SQLiteStore(path)
    ended(store, "run-1")
    assert store.check() == []
    yield store
    store.close()


def only(store: SQLiteStore) -> tuple[str, str, str]:
    [finding] = store.check()
    assert all(finding), "where, what and a remedy"
    return finding


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_who_else_may_read_it(store: SQLiteStore, path: Path, end: str) -> None:
    file = path.with_name(path.name + end)
    file.chmod(0o640)
    where, what, remedy = only(store)
    assert (where, remedy) == (str(file), f"chmod 600 {path}*") and "0640" in what


def test_who_else_may_replace_it(store: SQLiteStore, path: Path) -> None:
    path.parent.chmod(0o777)
    assert only(store)[0::2] == (str(path.parent), f"chmod o-w {path.parent}")
    path.parent.chmod(0o1777)  # as /tmp: each may remove only what is theirs
    assert store.check() == []
    path.parent.chmod(0o700)


def test_room_on_the_disk(store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - LEAST_FREE, LEAST_FREE))
    assert store.check() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - 5 * 2**20, 5 * 2**20))
    where, what, remedy = only(store)
    assert where == str(path) and what.startswith("5 MiB are free") and "prune" in remedy


def test_a_rollback_journal_that_is_left_over(store: SQLiteStore, path: Path) -> None:
    left = path.with_name("outlast.db-journal")
    left.write_bytes(b"")
    assert store.check() == [], "an empty one holds nothing"
    left.write_bytes(os.urandom(512))
    where, what, _ = only(store)
    assert where == str(left) and "left over" in what
    left.unlink()


def test_a_network_file_system(store: SQLiteStore, path: Path, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {path.parent} nfs4 rw 0 0\n")
    [(where, what, remedy)] = store.check(mounts=mounts)
    assert where == str(path) and "nfs4" in what and "local disk" in remedy

"""A backup made while others write: it opens, it is whole, and it is a prefix of what went on; and what happens when an old one is put back."""

from __future__ import annotations

import shutil
import stat
import threading
from pathlib import Path

import pytest

from outlast.errors import LeaseLost, StoreError, UsageError
from outlast.stores.base import NewHead
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import ME, OTHER, Driving, answers, begin, calls, new, take
from stores.keepers import Clock, a_bit_of_everything, ended, journals, postgres_store, sqlite
from support.postgres import Server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outlast.db"


def test_it_opens_and_is_whole(path: Path) -> None:
    store = sqlite(path, Clock())
    a_bit_of_everything(store)
    file = path.with_name("copy.db")
    store.backup(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(["copy.db", *(p.name for p in path.parent.glob("outlast.db*"))])
    copy = SQLiteStore(file)
    assert journals(copy) == journals(store) and copy.check() == [] and copy.gates("asks") == store.gates("asks")
    with pytest.raises(UsageError, match="there already"):
        store.backup(file)
    with pytest.raises(UsageError, match="does not exist"):
        store.backup(path.parent / "nowhere" / "copy.db")
    assert journals(copy) == journals(store)
    for each in (store, copy):
        each.close()


def test_while_others_write_it_is_a_prefix(path: Path) -> None:
    store = SQLiteStore(path)
    stop = threading.Event()

    def work(worker: int) -> None:
        mine = SQLiteStore(path)
        n = 0
        while not stop.is_set():
            driving = begin(mine, f"run-{worker}-{n}")
            for _ in range(5):
                driving.save(calls("c1"))
            driving.save(answers("x" * 3000), status="waiting_for_event", release=True)
            n += 1
        mine.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    files = [path.with_name(f"copy-{n}.db") for n in range(6)]
    try:
        while not list(store.ends()):
            store.wait_for_change(None, 0.01)
        for file in files:
            store.backup(file)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    live = journals(store)
    entries = []
    for file in files:
        copy = SQLiteStore(file)
        assert copy.check() == []
        for run_id, rows in journals(copy).items():
            assert live[run_id][: len(rows)] == rows
        entries.append(sum(map(len, journals(copy).values())))
        copy.close()
    assert entries == sorted(entries) and 0 < entries[0] < entries[-1]
    store.close()


def test_an_old_one_put_back_fences_who_went_on_with_the_file(path: Path) -> None:
    store = sqlite(path, Clock())
    driving = begin(store, "run-1")
    driving.save(calls("c1"))
    backup = path.with_name("backup.db")
    store.backup(backup)
    for _ in range(5):
        store.release(driving.lease)
        driving = Driving(store, store.claim_run("run-1", OTHER))
    late = driving.lease
    store.close()
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    shutil.copy(backup, path)
    again = sqlite(path, Clock())
    assert again.head("run-1").fence > late.fence and not again.head("run-1").held
    with pytest.raises(LeaseLost):
        again.append(late, driving.place, driving.batch(answers()), now=again.now())
    assert [n.held for n in again.renew([late])] == [False]
    [lease] = take(again, ME)
    assert lease.fence > late.fence and lease.taken_over, "nobody had released it"
    assert again.check() == []
    again.close()


def test_a_copy_of_the_file_alone_is_none(path: Path) -> None:
    """Why the command is there: what was committed last stands in the -wal."""
    store = sqlite(path, Clock())
    ended(store, "run-1")
    naive = path.with_name("naive.db")
    shutil.copy(path, naive)
    store.backup(path.with_name("copy.db"))
    good = SQLiteStore(path.with_name("copy.db"))
    assert [run_id for run_id, _, _ in good.ends()] == ["run-1"]
    lost = SQLiteStore(naive)
    assert list(lost.ends()) == []
    for each in (store, good, lost):
        each.close()


def test_disk_full_leaves_no_half_backup(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sqlite(path, Clock())
    ended(store, "run-1")

    def full(part: Path) -> None:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_copy_to", full)
    with pytest.raises(StoreError, match="No space left"):
        store.backup(path.with_name("copy.db"))
    assert not list(path.parent.glob("copy*"))
    store.close()


def test_postgres_has_its_own(postgres: Server, tmp_path: Path) -> None:
    store = postgres_store(postgres, Clock())
    store.start(new("run-1"))
    with pytest.raises(UsageError) as e:
        store.backup(tmp_path / "copy.db")
    assert e.value.hint.startswith("pg_dump ") and postgres.password not in e.value.hint and store._connections.schema in e.value.hint
    store.close()


def test_what_was_stopped_and_marked_is_stuck_in_the_copy_too(path: Path) -> None:
    store = sqlite(path, Clock())
    store.mark(begin(store, "broken").lease, NewHead("failed", "its journal cannot be read", release=True))
    file = path.with_name("copy.db")
    store.backup(file)
    copy = SQLiteStore(file)
    assert [x.command for x in store.stuck()] == [x.command for x in copy.stuck()] == ["outlast store check"]
    copy.close()
    store.close()

"""The SQLite store as a file: opening it, refusing it, forking beside it, committing in groups, and telling what is broken."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from outlast.core import run as r
from outlast.errors import CommitUnknown, InvariantViolated, OutlastError, SchemaTooNew, StoreError, UsageError
from outlast.stores.base import Appended, NewHead, Outside, RunFilter
from outlast.stores.sqlite import SQLiteStore, opening
from outlast.testing.store_contract import Driving, answers, asks, begin, calls, gate, new, send


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outlast.db"


@pytest.fixture
def store(path: Path) -> Iterator[SQLiteStore]:
    store = SQLiteStore(path, dead=lambda owner: False)
    yield store
    store.close()


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}


def change(path: Path, *statements: str) -> None:
    """By another connection of the same library."""
    db = apsw.Connection(str(path))
    for statement in statements:
        db.execute(statement)
    db.close()


def forked(act: Callable[[], None]) -> Callable[[], int]:
    """Run it in a child; calling what comes back waits for its exit code."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def python(source: str, *args: object) -> str:
    done = subprocess.run([sys.executable, "-c", source, *map(str, args)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(path: Path, query: str) -> list[list[Any]]:
    """What another SQLite library, read-only, in a process of its own, sees."""
    source = """
import json, sqlite3, sys
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
print(json.dumps([list(row) for row in db.execute(sys.argv[2])]))
"""
    rows: list[list[Any]] = json.loads(python(source, path, query))
    return rows


# ---- opening ---------------------------------------------------------------------------------------------------------------------


def test_nothing_is_opened_before_it_is_used(path: Path) -> None:
    store = SQLiteStore(path)
    assert store.now().microsecond % 1000 == 0
    store.close()
    assert not path.exists()


def test_all_three_files_are_private(store: SQLiteStore, path: Path) -> None:
    old = os.umask(0)
    try:
        store.start(new("run-1"))
    finally:
        os.umask(old)
    assert {f.name: stat.S_IMODE(f.stat().st_mode) for f in path.parent.iterdir()} == {
        "outlast.db": 0o600, "outlast.db-wal": 0o600, "outlast.db-shm": 0o600}  # fmt: skip


def test_settings_are_what_they_should_be(store: SQLiteStore) -> None:
    store.start(new("run-1"))

    def ask(pragma: str) -> Any:
        return store._files.write(lambda db: db.execute(f"PRAGMA {pragma}").fetchall()[0][0])

    assert (ask("journal_mode"), ask("synchronous"), ask("page_size"), ask("mmap_size")) == ("wal", 2, 4096, 0)
    assert 250 <= ask("wal_autocheckpoint") <= 1000
    assert ask("application_id") == opening.APPLICATION_ID and ask("user_version") == opening.SCHEMA


def a_text(path: Path) -> None:
    path.write_text("dear diary, this is no database at all\n" * 50)


def a_zeroed_first_page(path: Path) -> None:
    with_runs(path)
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    Path(f"{path}-wal").write_bytes(b"\x37\x7f\x06\x82 something")


def an_empty_file_with_a_wal(path: Path) -> None:
    path.touch()
    Path(f"{path}-wal").write_bytes(b"\x37\x7f\x06\x82 something")


def only_a_wal(path: Path) -> None:
    Path(f"{path}-wal").write_bytes(b"\x37\x7f\x06\x82 something")


def the_articles_own_table(path: Path) -> None:
    change(
        path,
        "CREATE TABLE checkpoints (run_id TEXT, seq INTEGER, status TEXT, messages TEXT)",
        "INSERT INTO checkpoints VALUES ('a', 1, 'x', '[]')",
    )


def the_articles_own_table_in_wal(path: Path) -> None:
    change(path, "PRAGMA journal_mode = wal")
    the_articles_own_table(path)


def a_view_of_somebody(path: Path) -> None:
    change(path, "CREATE VIEW inbox AS SELECT 1")


def one_of_ours_with_a_foreign_table(path: Path) -> None:
    with_runs(path)
    change(path, "CREATE TABLE tickets (id)")


def a_newer_schema(path: Path) -> None:
    with_runs(path)
    change(path, f"PRAGMA user_version = {opening.SCHEMA + 3}")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def with_runs(path: Path) -> None:
    store = SQLiteStore(path)
    begin(store).save(answers()).release()
    store.close()


REFUSED: list[tuple[Callable[[Path], None], type[OutlastError], str]] = [
    (a_text, StoreError, "is not an SQLite database; it was left as it is"),
    (a_zeroed_first_page, StoreError, "is not an SQLite database any more: its first page is damaged"),
    (an_empty_file_with_a_wal, StoreError, "the file is empty, and its -wal is not"),
    (only_a_wal, StoreError, "the file is gone, and its -wal is still there"),
    (the_articles_own_table, UsageError, "holds tables of another program (checkpoints)"),
    (the_articles_own_table_in_wal, UsageError, "holds tables of another program (checkpoints)"),
    (a_view_of_somebody, UsageError, "holds tables of another program (inbox)"),
    (one_of_ours_with_a_foreign_table, UsageError, "holds tables of another program (tickets)"),
    (a_newer_schema, SchemaTooNew, f"its schema is version {opening.SCHEMA + 3}, this program knows up to {opening.SCHEMA}"),
    (a_directory, StoreError, "is a directory, not a file"),
    (a_fifo, StoreError, "is not a regular file"),
]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("make, kind, words", REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_corrupted_database_file_is_refused_and_left_as_it_is(
    path: Path, make: Callable[[Path], None], kind: type[OutlastError], words: str, read_only: bool
) -> None:
    """(Of a Postgres server's own files that server takes care; what we judge there is the schema: another program's, too old, too new.)"""
    if read_only and make is one_of_ours_with_a_foreign_table:
        return  # a reader harms nothing there
    make(path)
    before = files(path.parent)
    store = SQLiteStore(path, read_only=read_only)
    with pytest.raises(kind) as caught:
        store.unfinished()
    store.close()
    assert str(path) in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value) and caught.value.hint
    assert files(path.parent) == before


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist") as caught:
        SQLiteStore(tmp_path / "no" / "such" / "outlast.db").unfinished()
    assert caught.value.hint == f"mkdir -p {tmp_path}/no/such"


def as_nobody(act: Callable[[Path], None], prepare: Callable[[Path], None]) -> int:
    """In a child without root's rights, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outlast.db"
        prepare(path)

        def child() -> None:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            act(path)

        Path(folder).chmod(0o555)
        try:
            return forked(child)()
        finally:
            Path(folder).chmod(0o755)


def test_a_directory_that_cannot_be_written() -> None:
    def act(path: Path) -> None:
        with pytest.raises(StoreError, match="cannot be made: Permission denied") as caught:
            SQLiteStore(path).unfinished()
        assert str(path) in str(caught.value)

    assert as_nobody(act, lambda path: None) == 0


def readable_runs(path: Path) -> None:
    with_runs(path)
    path.chmod(0o444)


def test_a_file_that_cannot_be_written() -> None:
    def act(path: Path) -> None:
        with pytest.raises(StoreError, match="cannot be written") as caught:
            SQLiteStore(path).start(new("run-2"))
        assert str(path) in str(caught.value)

    assert as_nobody(act, readable_runs) == 0


def test_reading_where_nothing_can_be_written() -> None:
    def act(path: Path) -> None:
        store = SQLiteStore(path, read_only=True)
        assert store.head("run-1").seq == 2 and [h.run_id for h in store.heads(RunFilter())] == ["run-1"]
        assert [f.name for f in path.parent.iterdir()] == [path.name]

    assert as_nobody(act, readable_runs) == 0


def test_reading_where_the_last_commits_stand_in_a_wal_says_why() -> None:
    def prepare(path: Path) -> None:
        store = SQLiteStore(path)
        store.start(new("run-1"))
        copies = {f: f.read_bytes() for f in (path, Path(f"{path}-wal"))}  # as after a kill
        store.close()
        for file, content in copies.items():
            file.write_bytes(content)
            file.chmod(0o444)

    def act(path: Path) -> None:
        with pytest.raises(StoreError, match="its last commits stand in") as caught:
            SQLiteStore(path, read_only=True).unfinished()
        assert "copy the file and its -wal" in caught.value.hint

    assert as_nobody(act, prepare) == 0


def test_a_reader_changes_nothing(path: Path) -> None:
    reader = SQLiteStore(path, read_only=True)
    with pytest.raises(StoreError, match="there is no store here"):
        reader.unfinished()
    assert files(path.parent) == {}
    with_runs(path)
    before = path.read_bytes()
    assert reader.head("run-1").seq == 2 and reader.check() == []
    with pytest.raises(StoreError, match="for reading only"):
        reader.start(new("run-2"))
    reader.close()
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    with_runs(path)
    assert SQLiteStore(path, read_only=True).head("run-1").seq == 2


def test_twenty_first_opens_at_once(tmp_path: Path) -> None:
    for round_ in range(3):
        path = tmp_path / f"round-{round_}.db"
        ready, go = os.pipe()

        def act(path: Path = path, ready: int = ready, go: int = go) -> None:
            os.close(go)
            os.read(ready, 1)  # ends when the parent lets go
            SQLiteStore(path).start(new(f"run-{os.getpid()}"))

        children = [forked(act) for _ in range(20)]
        os.close(ready)
        os.close(go)
        assert [wait() for wait in children] == [0] * 20
        store = SQLiteStore(path)
        assert len(store.unfinished()) == 20 and store.check() == []
        store.close()


def test_locked_by_another_process(path: Path) -> None:
    with_runs(path)
    locked, is_locked = os.pipe()
    hold, let_go = os.pipe()

    def act() -> None:
        os.close(let_go)
        db = apsw.Connection(str(path))
        db.execute("BEGIN IMMEDIATE")
        os.write(is_locked, b"x")
        os.read(hold, 1)

    wait = forked(act)
    os.read(locked, 1)
    store = SQLiteStore(path, busy_s=0.2)
    with pytest.raises(StoreError, match="locked by another process") as caught:
        store.start(new("run-2"))
    assert not isinstance(caught.value, CommitUnknown) and str(path) in str(caught.value)
    assert store.unfinished() == ["run-1"]  # readers do not wait
    os.close(let_go)
    assert wait() == 0
    assert store.start(new("run-2"))[2]
    store.close()
    for fd in (locked, is_locked, hold):
        os.close(fd)


def test_in_memory(tmp_path: Path) -> None:
    store = SQLiteStore(":memory:")
    begin(store).save(calls("c1"), gate(), status="waiting_for_approval", release=True)
    assert store.check() == [] and len(store.gates("run-1")) == 1
    seen = store.wait_for_change(None, 0)
    send(store, "run-1", "x")
    assert store.wait_for_change(seen, 0) != seen
    with ThreadPoolExecutor(8) as pool:
        heads = list(pool.map(lambda n: (send(store, "run-1", str(n)), store.head("run-1"))[1], range(40)))
    assert max(h.entries for h in heads) == store.head("run-1").entries == 45
    assert files(tmp_path) == {}


# ---- forks -----------------------------------------------------------------------------------------------------------------------

FORK = """
import ctypes, os, sys, threading
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import new

path, how = sys.argv[1:]
store = SQLiteStore(path)
store.start(new("before"))
store.unfinished()
store.wait_for_change(None, 0)
stop = threading.Event()

def busy():
    n = 0
    while not stop.is_set():
        store.start(new(f"busy-{n}"))
        n += 1

thread = threading.Thread(target=busy)
if how == "threads":
    thread.start()
pid = ctypes.CDLL(None).fork() if how == "past Python's hooks" else os.fork()
who = "parent" if pid else "child"
for n in range(100):
    store.start(new(f"{who}-{n}"))
    store.unfinished()
stop.set()
if how != "past Python's hooks" and os.path.exists("/proc/locks"):
    held = [line for line in open("/proc/locks") if f" {os.getpid()} " in line]
    assert held, "this process believes in locks that it does not hold"
if pid:
    if how == "threads":
        thread.join()
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize("how", ["plain", "threads", "past Python's hooks"])
def test_connection_carried_across_fork(path: Path, how: str) -> None:
    python(FORK, path, how)
    store = SQLiteStore(path)
    ids = store.unfinished()
    assert {i for i in ids if not i.startswith("busy")} == {"before", *(f"{who}-{n}" for who in ("parent", "child") for n in range(100))}
    assert store.check() == []
    store.close()


# ---- group commit ----------------------------------------------------------------------------------------------------------------


class Queued:
    """Writes that stand in line behind one that holds the lock: they are committed as one group."""

    def __init__(self, store: SQLiteStore, *writes: Callable[[], Any], just_before: Callable[[], None] = lambda: None) -> None:
        store.start(new("holder"))
        inside, go = threading.Event(), threading.Event()

        def hold(tail: Any) -> Outside:
            inside.set()
            go.wait(20)
            return Outside([r.TextSent("x")])

        writer = store._files._writer
        assert writer is not None
        with ThreadPoolExecutor(len(writes) + 1) as pool:
            holder = pool.submit(store.outside, "holder", hold)
            assert inside.wait(10)
            before = writer.commits
            waiting = []
            for write in writes:  # one by one, so that their order is known
                length = len(writer._queue)
                waiting.append(pool.submit(write))
                while len(writer._queue) == length and not waiting[-1].done():
                    threading.Event().wait(0.0005)
            just_before()
            go.set()
            holder.result(10)
            self.outcomes = [w.exception(20) or w.result() for w in waiting]
        self.commits = writer.commits - before - 1


def appending(driving: Driving, text: str = "hi") -> Callable[[], Any]:
    batch = driving.batch(answers(text))
    return lambda: driving.store.append(driving.lease, driving.place, batch, now=driving.store.now())


def test_a_group_is_one_commit_and_a_failing_member_harms_no_other(store: SQLiteStore) -> None:
    runs = [begin(store, f"run-{n}") for n in range(5)]
    runs[2].lease = replace(runs[2].lease, nonce="gone")

    def broken() -> Any:
        def work(db: apsw.Connection) -> None:
            db.execute("UPDATE run SET reason = 'half done'")
            db.execute("INSERT INTO entry (run_no, seq, entry_no) VALUES (1, 1, 1)")

        return store._files.write(work)

    queued = Queued(store, *(appending(run) for run in runs), broken)
    assert [type(o).__name__ for o in queued.outcomes] == ["Appended", "Appended", "LeaseLost", "Appended", "Appended", "InvariantViolated"]
    assert queued.commits == 1
    assert [store.head(f"run-{n}").seq for n in range(5)] == [2, 2, 1, 2, 2] and store.check() == []
    assert [h.reason for h in store.heads(RunFilter())] == [None] * 6


def test_a_group_that_was_thrown_away_is_run_again_one_by_one(store: SQLiteStore, path: Path) -> None:
    runs = [begin(store, f"run-{n}") for n in range(4)]

    def limit(pages: int) -> None:
        writer = store._files._writer
        assert writer is not None
        [(now,)] = writer.db.execute("PRAGMA page_count").fetchall()
        writer.db.execute(f"PRAGMA max_page_count = {now + pages}").fetchall()

    limit(20)
    queued = Queued(store, appending(runs[0]), appending(runs[1], "x" * 500_000), appending(runs[2]), appending(runs[3]))
    assert [type(o).__name__ for o in queued.outcomes] == ["Appended", "StoreError", "Appended", "Appended"]
    assert str(queued.outcomes[1]) == f"{path}: disk full"
    assert queued.commits == 3
    limit(100_000)
    assert isinstance(appending(runs[1], "x" * 500_000)(), Appended)  # free again: goes on
    assert store.check() == []


@pytest.mark.parametrize("name, stands", [("commit.before", False), ("commit.after", True)])
def test_a_commit_that_failed_is_unknown_to_all_its_members(path: Path, name: str, stands: bool) -> None:
    passes_left = [0]

    def point(passed: str) -> None:
        if passed == name and passes_left[0]:
            passes_left[0] -= 1
            if not passes_left[0]:
                raise apsw.IOError("fsync failed")

    store = SQLiteStore(path, point=point, dead=lambda owner: False)
    runs = [begin(store, f"run-{n}") for n in range(3)]
    queued = Queued(store, *map(appending, runs), just_before=lambda: passes_left.__setitem__(0, 2))  # the holder's commit is the first
    assert all(isinstance(o, CommitUnknown) and str(path) in str(o) for o in queued.outcomes), queued.outcomes
    for driving in runs:  # each settles it for itself
        lease = store.reclaim(driving.lease)
        assert (len(store.load(lease.run_no, after=driving.place)[0]) == 1) == stands
    assert store.check() == []
    store.close()


def test_a_death_in_the_middle_of_a_group(store: SQLiteStore) -> None:
    """Ctrl-C in the leader: the others are told, nobody waits for ever, and the next write works."""
    runs = [begin(store, f"run-{n}") for n in range(2)]

    def interrupted() -> Any:
        def work(db: apsw.Connection) -> None:
            raise KeyboardInterrupt

        return store._files.write(work)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    queued = Queued(store, interrupted, *map(appending, runs))
    assert [type(o).__name__ for o in queued.outcomes] == ["KeyboardInterrupt", "StoreError", "StoreError"]
    assert isinstance(appending(runs[0])(), Appended) and store.check() == []


# ---- what is broken --------------------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_stops_its_own_run_only(store: SQLiteStore, path: Path) -> None:
    bad, good = begin(store, "bad"), begin(store, "good")
    change(path, "UPDATE entry SET body = '{\"role\": ' WHERE run_no = 1 AND entry_no = 2")
    with pytest.raises(InvariantViolated, match="entry 2 of run number 1 cannot be read"):
        store.load(bad.lease.run_no)
    with pytest.raises(InvariantViolated, match="entry 2 of run bad cannot be read"):
        send(store, "bad", "x")
    store.mark(bad.lease, NewHead("failed", "its journal cannot be read", release=True))
    good.save(answers())
    assert [h.status for h in store.heads(RunFilter())] == ["running", "failed"]
    assert [(where, what) for where, what, _ in store.check()] == [
        ("run bad", "entry 2 (MessageAdded) was changed after it was written: its digest does not fit")]  # fmt: skip


BROKEN: list[tuple[str, str, str]] = [
    ("UPDATE entry SET body = replace(body, 'hi', 'ho') WHERE entry_no = 3", "run run-1", "entry 3 (MessageAdded) was changed"),
    ("UPDATE entry SET status = 'done' WHERE entry_no = 2", "run run-1", "entry 2 (MessageAdded) was changed"),
    ("DELETE FROM entry WHERE entry_no = 2", "run run-1", "entry 2 (checkpoint 1) is missing: found entry 3"),
    ("DELETE FROM entry WHERE entry_no = 5", "run run-1", "its head says 5 entries and checkpoint 3, its journal holds 4 and 3"),
    ("UPDATE run SET seq = 2", "run run-1", "its head says 5 entries and checkpoint 2"),
    ("UPDATE run SET status = 'done'", "run run-1", "its head says done, its journal that it goes on"),
    ("UPDATE run SET input_tokens = 9", "run run-1", "its head counts"),
    ("UPDATE gate SET role = 'me'", "run run-1", "gate approval:c1 differs from its journal: role is 'me', not 'lead'"),
    ("DELETE FROM gate", "run run-1", "gate approval:c1 is missing"),
    ("UPDATE gate SET gate_id = 'approval:c2'", "run run-1", "gate approval:c2 is not in its journal"),
    ("DELETE FROM run", "run number 1", "rows in entry without a run"),
]


@pytest.mark.parametrize("statement, where, what", BROKEN, ids=[b[0] for b in BROKEN])
def test_check_finds_what_was_broken(store: SQLiteStore, path: Path, statement: str, where: str, what: str) -> None:
    begin(store).save(answers()).save(calls("c1"), gate(), status="waiting_for_approval", release=True)
    assert store.check() == []
    change(path, statement)
    assert any(found[0] == where and found[1].startswith(what) and found[2] for found in store.check()), store.check()


def test_wal_on_network_or_shared_mount(store: SQLiteStore, path: Path, tmp_path: Path) -> None:
    """(On Postgres the same question is put to the server: fsync, full_page_writes and synchronous_commit, in what `check` finds there.)"""
    begin(store)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {path.parent.parent} nfs4 rw 0 0\n")
    [(where, what, _)] = store.check(mounts=mounts)
    assert where == str(path) and "network file system (nfs4)" in what
    path.chmod(0o644)
    [(where, what, _)] = store.check()
    assert "others may read it (mode 0644)" in what
    path.chmod(0o600)
    Path(f"{path}-wal").unlink()
    [(where, what, _)] = store.check()
    assert where == f"{path}-wal" and "was deleted while this process had it open" in what


def test_garbage_in_the_middle(path: Path) -> None:
    store = SQLiteStore(path)
    driving = begin(store)
    for n in range(400):
        driving.save(asks("x" * 300) if n % 2 else answers("y" * 300))
    store.close()
    data = bytearray(path.read_bytes())
    middle = len(data) * 3 // 4 // 4096 * 4096  # behind the pages of the schema
    data[middle : middle + 8 * 4096] = os.urandom(8 * 4096)
    path.write_bytes(data)
    store = SQLiteStore(path)
    with pytest.raises(StoreError, match="the file is damaged") as caught:
        store.load(1)
    assert str(path) in str(caught.value) and "restore a backup" in caught.value.hint
    assert {what.split(":")[0] for _, what, _ in store.check()} == {"cannot be read any further"}
    store.close()
    assert path.read_bytes() == data


# ---- leases of another boot ---------------------------------------------------------------------------------------------------------


def test_a_machine_that_was_started_anew(path: Path) -> None:
    before = SQLiteStore(path, boot=lambda: "boot-1", boot_clock=lambda: 10**9, dead=lambda owner: False)
    begin(before, "run-1")
    begin(before, "run-2")
    before.close()
    after = SQLiteStore(path, boot=lambda: "boot-2", boot_clock=lambda: 1000, dead=lambda owner: False)
    assert not after.head("run-1").held
    assert after.claim_run("run-1", "me").attempts == 1
    assert after.claim("me", agents=["support"]) == []
    assert (after.reap(), after.reap()) == (1, 0)
    assert [lease.run_id for lease in after.claim("me", agents=["support"], limit=5)] == ["run-2"]
    after.close()


# ---- what the sqlite3 shell shows ----------------------------------------------------------------------------------------------------

ARTICLE = """SELECT run_id FROM checkpoints c WHERE seq = (SELECT MAX(seq) FROM checkpoints WHERE run_id = c.run_id) AND status != 'done' ORDER BY 1"""


def test_checkpoints_look_as_if_the_list_were_stored_each_time(store: SQLiteStore, path: Path) -> None:
    driving = begin(store).save(answers('Zoë \u2028 "x"')).save(calls("c1"), gate(), status="waiting_for_approval", release=True)
    messages = list(driving.run.messages)
    rows = shell(path, "SELECT run_id, seq, status, messages, created_at FROM checkpoints ORDER BY seq")
    assert [row[:3] for row in rows] == [["run-1", 1, "running"], ["run-1", 2, "running"], ["run-1", 3, "waiting_for_approval"]]
    assert [row[3] for row in rows] == [json.dumps(messages[:n], ensure_ascii=False) for n in (1, 2, 3)]
    entry = list(store.journal("run-1"))[1]
    assert rows[0][4] == r.iso(entry.at)


def test_the_last_checkpoint_shows_how_a_run_ended(store: SQLiteStore, path: Path) -> None:
    begin(store, "failed").save(answers()).save(r.RunEnded("failed", "x"), status="failed", release=True)
    begin(store, "cancelled").release()
    store.outside("cancelled", lambda tail: Outside([r.RunCancelled("x")], status="cancelled", fence=True))
    begin(store, "done").save(answers(), r.RunEnded("done"), status="done", release=True)
    begin(store, "again").save(answers(), r.RunEnded("done"), status="done", release=True)
    send(store, "again", "one more thing", status="running")
    begin(store, "waits").save(calls("c1"), gate(), status="waiting_for_approval", release=True)
    send(store, "waits", "x", status="running")
    rows = shell(path, "SELECT run_id, seq, status FROM checkpoints ORDER BY run_id, seq")
    assert rows == [
        ["again", 1, "running"], ["again", 2, "running"], ["cancelled", 1, "cancelled"], ["done", 1, "running"], ["done", 2, "done"],
        ["failed", 1, "running"], ["failed", 2, "failed"], ["waits", 1, "running"], ["waits", 2, "waiting_for_approval"]]  # fmt: skip
    assert shell(path, ARTICLE) == [["again"], ["cancelled"], ["failed"], ["waits"]]


def test_instants_are_whole_milliseconds(path: Path) -> None:
    at = [
        r.EPOCH + r.timedelta(milliseconds=n)
        for n in (0, 1, 999, 1_795_791_600_001, 1_795_791_612_345, 1_795_791_659_999, 4_102_444_799_999)
    ]
    times = iter(at)
    store = SQLiteStore(path, clock=lambda: next(times))
    for n in range(len(at)):
        store.start(new(f"run-{n}"))
    assert [row[0] for row in shell(path, "SELECT created_at FROM runs ORDER BY run_id")] == [r.iso(a) for a in at]
    store.close()


def states(path: Path, view: str = "tool_calls") -> dict[str, str]:
    return dict(shell(path, f"SELECT call_id, state FROM {view} ORDER BY call_id"))


def started(call_id: str, attempt: int = 1) -> r.CallStarted:
    until = r.EPOCH + r.timedelta(days=1)
    return r.CallStarted(call_id, f"run-1:{call_id}", "at_most_once", attempt, until)


def test_how_a_tool_call_stands(store: SQLiteStore, path: Path) -> None:
    driving = begin(store).save(
        calls("gated", "begun", "skipped", "failed", "doubted", "done", "refused", "new"), gate("approval:gated", "gated")
    )
    driving.save(
        started("begun"), started("skipped"), r.CallSkipped("skipped", "late"), started("failed"), started("doubted"), started("done")
    )
    retry = r.CallFailed("failed", "timeout", store.now())
    driving.save(
        retry, r.CallDoubted("doubted", "lost"), r.CallFinished("done", "42"), r.CallFinished("refused", "no", is_error=True, how="refused")
    )
    expected = {
        "gated": "waiting", "begun": "begun", "skipped": "pending", "failed": "pending", "doubted": "begun", "done": "done", "refused": "refused",
        "new": "pending"}  # fmt: skip
    assert states(path) == expected
    assert states(path, "in_doubt") == {}  # somebody holds the run: it may be in the middle of it
    driving.release()
    assert states(path, "in_doubt") == {"begun": "begun", "doubted": "begun"}
    [row] = shell(
        path, "SELECT seq, tool, args, effect, attempts, idempotency_key, started_at, finished_at FROM tool_calls WHERE call_id = 'done'"
    )
    assert row[:6] == [2, "refund", '{"amount":1.0,"to":"Zoë"}', "at_most_once", 1, "run-1:done"] and row[6] and row[7]
    assert shell(path, "SELECT effect, attempts, idempotency_key, started_at FROM tool_calls WHERE call_id = 'new'") == [
        [None, 0, "run-1:new", None]
    ]


def test_run_again_is_used_up_by_the_next_start(store: SQLiteStore, path: Path) -> None:
    verify = r.GateOpened("verification:c1", "verification", "c1", "refund", "sha256:00", rungs=[{"role": None, "deadline": None}])
    driving = begin(store).save(calls("c1"), started("c1")).save(verify, status="waiting_for_verification", release=True)
    assert states(path) == {"c1": "begun"} == states(path, "in_doubt")
    driving = Driving(store, store.claim_run("run-1", "me")).save(r.GateDecided("verification:c1", "run_again", by="priya"))
    assert states(path) == {"c1": "pending"}
    driving.save(started("c1", 2))
    assert states(path) == {"c1": "begun"}


def test_a_wait_for_an_event_is_no_doubt(store: SQLiteStore, path: Path) -> None:
    waits = r.GateOpened("event:c1", "event", "c1", "refund", "sha256:00", args={"event": "paid"})
    begin(store).save(calls("c1"), started("c1"), waits, status="waiting_for_event", release=True)
    assert states(path) == {"c1": "waiting"} and states(path, "in_doubt") == {}


def test_doubt_outlives_a_cancel_until_somebody_knows(store: SQLiteStore, path: Path) -> None:
    begin(store).save(calls("c1", "c2"), started("c1"))

    def cancel(tail: Any) -> Outside:
        unknown = r.CallFinished("c1", "outcome unknown, not repeated", is_error=True, how="unknown")
        refused = r.CallFinished("c2", "cancelled", is_error=True, how="cancelled")
        return Outside([r.RunCancelled("x"), unknown, refused, asks("results")], status="cancelled", fence=True)

    store.outside("run-1", cancel)
    assert states(path) == {"c1": "unknown", "c2": "refused"} and states(path, "in_doubt") == {"c1": "unknown"}
    store.outside("run-1", lambda tail: Outside([r.LateResult("c1", "done")], wake=False))
    assert states(path, "in_doubt") == {}


def test_a_history_given_as_input_is_answered(store: SQLiteStore, path: Path) -> None:
    history = [asks(), calls("c1"), asks("results"), calls("c2")]
    store.start(replace(new("run-1"), entries=[r.RunStarted("support"), *history]))
    assert states(path) == {"c1": "done", "c2": "pending"}


def test_every_view_is_readable_while_a_worker_writes(store: SQLiteStore, path: Path) -> None:
    begin(store, tags={"tenant": "northwind"}).save(calls("c1"), gate(), status="waiting_for_approval")
    views = [name for (name,) in shell(path, "SELECT name FROM sqlite_master WHERE type = 'view'")]
    assert {*views} >= {
        "checkpoints",
        "runs",
        "gates",
        "journal",
        "messages",
        "tool_calls",
        "inbox",
        "decisions",
        "in_doubt",
        "stuck",
        "notices",
    }
    counts = {view: len(shell(path, f"SELECT * FROM {view}")) for view in views if view != "stuck"}
    assert counts == {
        "checkpoints": 2, "runs": 1, "gates": 1, "journal": 4, "messages": 2, "tool_calls": 1, "inbox": 1, "decisions": 0, "in_doubt": 0,
        "notices": 0, "versions": 1, "costs": 1}  # fmt: skip
    [row] = shell(path, "SELECT run_id, gate_id, args, role, agent, tags, created_at FROM inbox")
    created = r.iso(store.gates("run-1")[0][0].created_at)
    assert row == ["run-1", "approval:c1", '{"amount": 1.0, "to": "Zoë"}', "lead", "support", '{"tenant": "northwind"}', created]


def test_a_long_run_costs_its_last_row_only(store: SQLiteStore, path: Path) -> None:
    """Without assembling the others: ten times the messages may cost ten times, never a hundred times."""

    def steps(n: int) -> int:
        history = [asks("x" * 50) if i % 2 == 0 else answers("y" * 50) for i in range(n)]
        store.start(replace(new(f"run-{n}"), entries=[r.RunStarted("support"), *history]))
        count = [0]
        db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        db.set_progress_handler(lambda: count.__setitem__(0, count[0] + 1) or False, 100)
        query = "SELECT length(messages) FROM checkpoints WHERE run_id = ? AND seq = (SELECT MAX(seq) FROM checkpoints WHERE run_id = ?)"
        assert len(db.execute(query, (f"run-{n}", f"run-{n}")).fetchall()) == 1
        db.close()
        return count[0]

    assert steps(2000) < 15 * steps(200)

"""Looking after the file: `stores.care` on SQLite."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import apsw

from outlast.core.run import ms
from outlast.errors import Refused, StoreError, UsageError
from outlast.stores import care
from outlast.stores.base import ENDED, Head, blank
from outlast.stores.sqlite import opening, rows
from outlast.stores.sqlite.connections import Connections
from outlast.stores.sqlite.failures import speaking
from outlast.stores.sqlite.pages import Pages
from outlast.stores.sqlite.rows import Q, ask

FENCES = 1_000_000  # a backup's fences are so far ahead: no lease of the time after it counts where it is put in place
_MUCH_FREE = 0.5  # of the file: more than that unused is worth a word


class Care(Pages):
    """Mixed into the store."""

    path: str
    url: str
    _files: Connections
    _busy_s: float
    _head: Callable[[apsw.Connection, str], Head]

    # ---- the schema, and backups ----------------------------------------------------------------------------------------------

    def migrate(self) -> tuple[int, int]:
        before = 0
        if self.path != opening.MEMORY and Path(self.path).exists():
            with speaking(self.path), contextlib.closing(apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY)) as db:
                [(before,)] = ask(db, "PRAGMA user_version")
        self._files.write(lambda db: None)  # whoever opens it for writing migrates it
        return before, opening.SCHEMA

    def migration_sql(self) -> str:
        return "\n".join(
            f"-- {number:04}.sql\n{text}\nPRAGMA user_version = {number};\nPRAGMA application_id = {opening.APPLICATION_ID};\n"
            for number, text in enumerate(opening.MIGRATIONS, 1))  # fmt: skip

    def backup(self, file: Path) -> None:
        if file.exists():
            raise UsageError(f"{file} is there already; it was left as it is", hint="name a new file")
        if not file.parent.is_dir():
            raise UsageError(f"the directory {file.parent} does not exist", hint=f"mkdir -p {file.parent}")
        part = file.with_name(f"{file.name}.part-{os.getpid()}")
        try:
            self._copy_to(part)
            try:
                os.link(part, file)  # under its name only once it is whole, and never over another
            except FileExistsError:
                raise UsageError(f"{file} was made by somebody else meanwhile; it was left as it is", hint="name a new file") from None
            _to_disk(file.parent)
        except OSError as e:
            raise StoreError(f"{file}: {e.strerror}", hint="look at free space and at the rights of the directory") from e
        finally:
            for left in (part, *(part.with_name(part.name + end) for end in ("-wal", "-shm", "-journal"))):
                left.unlink(missing_ok=True)

    def _copy_to(self, part: Path) -> None:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._files.read(lambda db: db.in_transaction)  # the file is there, ours and of our schema
        if self._files.memory:
            raise UsageError("a store in memory has no backups", hint="give it a file: --store sqlite:///FILE")
        with speaking(self.path), contextlib.closing(opening.connect(self.path, self._busy_s)) as db:
            ask(db, "VACUUM INTO ?", (str(part),))  # one moment of it, however many write
        with speaking(str(part)), contextlib.closing(opening.connect(str(part), self._busy_s)) as db:
            ask(db, "PRAGMA journal_mode = wal")
            opening.configure(db, str(part))
            db.execute("BEGIN IMMEDIATE")
            ask(db, Q["backup_fences"], {"fences": FENCES})
            self._files.point("commit.before")
            db.execute("COMMIT")
            self._files.point("commit.after")
            ask(db, "PRAGMA wal_checkpoint(TRUNCATE)")
        _to_disk(part)

    # ---- a run with all its rows ----------------------------------------------------------------------------------------------

    def whole(self, run_id: str) -> care.Whole:
        def work(db: apsw.Connection) -> care.Whole:
            head = self._head(db, run_id)
            key = {"run_no": head.run_no}
            [(format,)] = ask(db, Q["format"], key)
            journal = rows.readable(lambda: ask(db, Q["journal"], {**key, "since": 0, "after": 0, "limit": -1}), run_id)
            return care.Whole(
                head, format, [rows.journal(row) for row in journal], [rows.gate(row) for row in ask(db, Q["gates_as_written"], key)],
                [rows.notice(row) for row in ask(db, Q["notices"], key)])  # fmt: skip

        return self._files.read(work)

    def put(self, whole: care.Whole, *, carried: bool = False) -> bool:
        values = rows.head_values(whole, carried=carried)
        entries, gates, notices = rows.journal_values(whole), rows.all_gate_values(whole), rows.notice_values(whole)

        def work(db: apsw.Connection) -> bool:
            there = ask(db, Q["carried_run"], {"run_id": whole.head.run_id, "carried": care.CARRIED})
            self._remove(db, [run_no for (run_no,) in there])
            made = ask(db, Q["put_run"], values)
            if not made:
                return False
            run_no = int(made[0][0])
            db.executemany(Q["add_entry"], [(run_no, *row) for row in entries])
            db.executemany(Q["put_gate"], [(run_no, *row) for row, _ in gates])
            db.executemany(Q["put_told"], [{"run_no": run_no, "gate_id": row[0], "at": told} for row, told in gates if told is not None])
            db.executemany(Q["put_notice"], [(run_no, *row) for row in notices])
            return True

        return self._files.write(work)

    def let_go(self) -> int:
        return self._files.write(lambda db: len(ask(db, Q["let_go"], {"carried": care.CARRIED})))

    # ---- old runs -------------------------------------------------------------------------------------------------------------

    def old(self, before: datetime, *, keep: Sequence[str] = ()) -> care.Old:
        values = {"before": ms(before), "keep": json.dumps(list(keep))}
        return care.Old(*self._files.read(lambda db: ask(db, Q["old_count"], values))[0])

    def prune(self, before: datetime, *, keep: Sequence[str] = (), limit: int = 200) -> int:
        values = {"before": ms(before), "keep": json.dumps(list(keep)), "limit": limit}

        def work(db: apsw.Connection) -> int:
            numbers = [run_no for (run_no,) in ask(db, Q["old"], values)]
            self._remove(db, numbers)
            return len(numbers)

        return self._files.write(work) if self._files.read(lambda db: ask(db, Q["old"], {**values, "limit": 1})) else 0

    @staticmethod
    def _remove(db: apsw.Connection, numbers: Sequence[int]) -> None:
        for run_no in numbers:
            for table in ("entry", "gate", "notice", "run"):
                db.execute(Q[f"remove_{table}"], {"run_no": run_no})

    # ---- erasing --------------------------------------------------------------------------------------------------------------

    def erase(self, run_id: str) -> list[str]:
        def work(db: apsw.Connection) -> list[str]:
            heads = [self._head(db, name) for name in self._family(db, run_id)]
            for head in heads:
                finished(head)
            for head in heads:
                self._wipe(db, head.run_no)
            return [head.run_id for head in heads]

        return self._files.write(work)

    def _family(self, db: apsw.Connection, run_id: str) -> list[str]:
        """The run and the ones that it started, and theirs."""
        found = [self._head(db, run_id).run_id]
        for name in found:
            found += [child for (child,) in ask(db, Q["children_of"], {"run_id": name, "from": f"{name}:", "to": f"{name};"})]
        return found

    @staticmethod
    def _wipe(db: apsw.Connection, run_no: int) -> None:
        key = {"run_no": run_no}
        found = ask(db, Q["payloads"], key)
        db.executemany(
            Q["wipe_entry"],
            [
                {**key, "seq": seq, "entry_no": n, "body": blank(body), "meta": None if meta is None else blank(meta)}
                for seq, n, body, meta in found
            ],
        )
        for query in ("wipe_gates", "wipe_notices", "wipe_run"):
            db.execute(Q[query], key)

    def tidy(self, *, wiped: bool = False) -> str | None:
        if self._files.memory:
            return None
        with contextlib.closing(opening.connect(self.path, self._busy_s)) as db:
            opening.configure(db, self.path)
            if wiped:  # what rows once held stands in unused parts of pages too: only a file written anew is surely without it
                opening.patiently(lambda: ask(db, "VACUUM"), self.path, self._busy_s)
                opening.patiently(lambda: _into_file(db), self.path, self._busy_s)
                return None
            with speaking(self.path):
                ask(db, "PRAGMA wal_checkpoint(PASSIVE)")
                [(free,)], [(pages,)], [(size,)] = (ask(db, f"PRAGMA {what}") for what in ("freelist_count", "page_count", "page_size"))
        if free < pages * _MUCH_FREE:
            return None
        return f"{free * size // 2**20} MiB of the file are free and used again; to give them back, while nobody works: sqlite3 {self.path} VACUUM"


def finished(head: Head) -> None:
    """Raises Refused where the run is not over, or where somebody holds it."""
    if head.status not in ENDED or head.held:
        what = f"is {head.status}" if head.status not in ENDED else "is held by a worker"
        raise Refused(f"run {head.run_id} {what}: only a finished run is erased", run_id=head.run_id, hint=f"outlast cancel {head.run_id}")


def _into_file(db: apsw.Connection) -> None:
    """The whole -wal into the file, and the -wal emptied: not while somebody reads what stands before it."""
    [(busy, _, _)] = ask(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    if busy:
        raise apsw.BusyError("a reader holds the -wal")


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


__all__ = ["Care", "finished"]

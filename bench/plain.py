"""The floor and the starting point: a bare write, a bare INSERT, and the article's design with the whole list in every row."""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from pathlib import Path

from messages import Message, history, message, piece


class Write:
    """1 KB appended to a file, fdatasync: what the disk can do."""

    name = "bare write + fdatasync"

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "file", os.O_CREAT | os.O_RDWR)
        self._bytes, self._at = b"x" * 1024, 0

    def steps(self, n: int, k: int) -> list[float]:
        times = []
        for _ in range(k):
            a = time.perf_counter()
            os.pwrite(self._file, self._bytes, self._at)
            os.fdatasync(self._file)
            times.append(time.perf_counter() - a)
            self._at += 1024
        return times

    def close(self) -> None:
        os.close(self._file)


class Insert:
    """One INSERT of 1 KB, WAL, synchronous=FULL."""

    name = "bare INSERT, WAL, FULL"

    def __init__(self, folder: Path) -> None:
        self.db = sqlite3.connect(folder / "insert.db", isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, body TEXT)")
        self._body = piece(1, 1000)

    def steps(self, n: int, k: int) -> list[float]:
        times = []
        for _ in range(k):
            a = time.perf_counter()
            self.db.execute("INSERT INTO t (body) VALUES (?)", (self._body,))
            times.append(time.perf_counter() - a)
        return times

    def close(self) -> None:
        self.db.close()


class Article:
    """The article's design: the whole list in every row, the sqlite3 module's defaults."""

    name = "the article's design"
    pragmas: tuple[str, ...] = ()
    UNFINISHED = (
        "SELECT run_id FROM checkpoints c WHERE seq = (SELECT MAX(seq) FROM checkpoints WHERE run_id = c.run_id) AND status != 'done'"
    )

    def __init__(self, folder: Path) -> None:
        self.db = sqlite3.connect(folder / "article.db", check_same_thread=False)
        for pragma in self.pragmas:
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS checkpoints (run_id TEXT, seq INTEGER, status TEXT, messages TEXT, created_at REAL, "
            "PRIMARY KEY (run_id, seq))"
        )
        self.db.commit()
        self._lists: dict[int, tuple[str, list[Message]]] = {}

    def save(self, run_id: str, messages: list[Message], status: str = "running") -> None:
        with self.db:
            last = self.db.execute("SELECT MAX(seq) FROM checkpoints WHERE run_id = ?", (run_id,)).fetchone()[0] or 0
            row = (run_id, last + 1, status, json.dumps(messages), time.time())
            self.db.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", row)

    def load(self, run_id: str) -> list[Message]:
        found = self.db.execute("SELECT messages FROM checkpoints WHERE run_id = ? ORDER BY seq DESC LIMIT 1", (run_id,)).fetchone()
        loaded: list[Message] = json.loads(found[0])
        return loaded

    def steps(self, n: int, k: int) -> list[float]:
        if n not in self._lists:
            self._lists[n] = (str(uuid.uuid4()), history(n))
            self.save(*self._lists[n])
        (run_id, messages), times = self._lists[n], []
        for _ in range(k):
            messages.append(message(len(messages) - 1))
            a = time.perf_counter()
            self.save(run_id, messages)
            times.append(time.perf_counter() - a)
        return times

    def anew(self, n: int) -> None:
        self._lists.pop(n, None)

    def settle(self) -> None:
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        self.db.close()


class ArticleWal(Article):
    name = "the article's design, WAL, FULL"
    pragmas = ("journal_mode=WAL", "synchronous=FULL")

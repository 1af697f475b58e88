"""How long does it take to find 100 unfinished runs among N? Arguments: N ... (default 1,000,000).

Ours by its partial index; the article's query over its table, three rows a run (with empty message lists, which flatters it).
"""

from __future__ import annotations

import uuid
from pathlib import Path

import apsw

import measure
from ours import AGENT
from outlast.stores.sqlite.store import SQLiteStore
from plain import Article

OPEN = 100


def main() -> None:
    measure.header("unfinished: 100 runs among many")
    targets, rows = measure.Targets(), []
    for n in measure.numbers((1_000_000,)):
        with measure.folder() as folder:
            ids = [str(uuid.UUID(int=i * 0x9E3779B97F4A7C15 % 2**128)) for i in range(n)]
            still = {ids[i * (n // OPEN)] for i in range(OPEN)}
            ours, peer = store_of(folder, ids, still), article_of(folder, ids, still)
            quick, slow = [], []
            for _ in range(3):
                for _ in range(20):
                    a = measure.now()
                    found = ours.unfinished()
                    quick.append(measure.now() - a)
                    assert len(found) == OPEN
                a = measure.now()
                assert len(peer.db.execute(Article.UNFINISHED).fetchall()) == OPEN
                slow.append(measure.now() - a)
            mine, theirs = measure.median(quick), measure.median(slow)
            rows.append((f"{n:,}", "Outlast", f"{mine * 1e3:,.3f}", "1"))
            rows.append((f"{n:,}", Article.name, f"{theirs * 1e3:,.1f}", f"{theirs / mine:,.0f}"))
            if n == 1_000_000:
                targets.at_most("100 unfinished among 1,000,000", mine * 1e3, 1, " ms")
                targets.at_least("against the article's query", theirs / mine, 1000, "×")
            ours.close()
            peer.close()
    measure.table(["runs", "", "median ms", "× Outlast"], rows)
    targets.show()


def store_of(folder: Path, ids: list[str], still: set[str]) -> SQLiteStore:
    store = SQLiteStore(folder / "outlast.db")
    store.unfinished()
    store.close()
    db = apsw.Connection(store.path)
    db.execute("PRAGMA synchronous = off; BEGIN")
    sql = (
        "INSERT INTO run (run_id, agent, status, entries, seq, wake_at, driver, format, created_at, updated_at) "
        "VALUES (?, ?, ?, 4, 3, ?, 'built-in', 1, ?, ?)"
    )
    db.executemany(sql, ((i, AGENT, "running" if i in still else "done", n if i in still else None, n, n) for n, i in enumerate(ids)))
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return store


def article_of(folder: Path, ids: list[str], still: set[str]) -> Article:
    article = Article(folder)
    article.db.execute("PRAGMA synchronous = OFF")
    with article.db:
        rows = ((i, seq, "done" if seq == 3 and i not in still else "running", "[]", 0.0) for i in ids for seq in (1, 2, 3))
        article.db.executemany("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", rows)
    return article


if __name__ == "__main__":
    main()

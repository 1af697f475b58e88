"""The demo with its runs on a real Postgres server: the same lines, twice, in a schema of its own. Needs the repository's test tools."""

from __future__ import annotations

from pathlib import Path

from support.postgres import Server, postgres
from test_kitebase import EXPECTED, finished, play

__all__ = ["postgres"]


def test_demo_on_postgres_gives_the_same_lines_twice(postgres: Server, tmp_path: Path) -> None:
    """The schema that the URL names, and what is in it, are not the demo's: it has its own, which it empties first."""
    schema = postgres.fresh_schema()
    with postgres.connect() as db:
        db.execute(f"CREATE SCHEMA {schema} CREATE TABLE theirs (n integer)".encode())
    url = postgres.url(schema=schema)
    for _ in range(2):
        assert finished(play("main.py", tmp_path / "files", OUTLAST_STORE=url)) == EXPECTED
    with postgres.connect() as db:
        assert db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall() == [("theirs",)]
        assert db.execute("SELECT run_id, status, seq FROM kitebase_demo.runs").fetchall() == [("run-kite-142", "done", 8)]
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["helpdesk.db", "model.log"]

"""Older files, newer files, and many processes at once: migrated once and whole, or refused and left as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
from tests.support.world import GATE, Ledger, tools, use

from outlast import Agent, Outlast
from outlast.errors import SchemaTooNew, StoreError
from outlast.models import ScriptedModel
from outlast.stores import sql
from outlast.stores.postgres import PostgresStore, connections
from outlast.stores.sqlite import opening
from support.postgres import Server

OPENS = "import sys\nfrom outlast import Outlast\nwith Outlast(sys.argv[1]) as app: app.start('a', 'go', run_id=sys.argv[2])\n"


NEWEST = opening.SCHEMA


def agent() -> Agent[str]:
    return Agent("a", model=ScriptedModel([[use("act", text="x")], "Done."]), tools=[tools(GATE)["act"]])


def at_schema(version: int, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as it was when there were so many migrations, with a run that waits in it."""
    path = tmp_path / "outlast.db"
    with monkeypatch.context() as older:
        older.setattr(opening, "MIGRATIONS", opening.MIGRATIONS[:version])
        older.setattr(opening, "SCHEMA", version)
        with Outlast(path, agents=[agent()], deps=ledger) as app:
            app.run_sync(app.agents["a"], "go", run_id="r")
    assert schema(path) == version
    return path


def schema(path: Path) -> int:
    db = apsw.Connection(str(path))
    [(version,)] = db.execute("PRAGMA user_version").fetchall()
    db.close()
    return int(version)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.mark.parametrize("version", range(1, opening.SCHEMA))
def test_old_schema_new_code_and_reverse(version: int, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several new processes open it at once: migrated once, nobody fails, and the run that waits goes on."""
    path = at_schema(version, tmp_path, ledger, monkeypatch)
    starters = [subprocess.Popen([sys.executable, "-c", OPENS, str(path), f"new-{n}"], stderr=subprocess.PIPE, text=True) for n in range(4)]
    for process in starters:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert schema(path) == opening.SCHEMA
    with Outlast(path, agents=[agent()], deps=ledger) as app:
        app.decide("r", approved=True, decided_by="priya")
        assert app.resume_sync("r").status == "done"
        assert {"new-0", "new-1", "new-2", "new-3"} <= set(app.unfinished_runs())
        assert app.store_check() == []
    with monkeypatch.context() as older:  # and an older process that comes later
        older.setattr(opening, "MIGRATIONS", opening.MIGRATIONS[:version])
        older.setattr(opening, "SCHEMA", version)
        before = path.read_bytes()
        with Outlast(path) as app, pytest.raises(SchemaTooNew, match=f"its schema is version {NEWEST}, this program knows up to {version}"):
            app.unfinished_runs()
        assert path.read_bytes() == before


@pytest.mark.parametrize("where", ["commit.before", "commit.after"])
def test_kill_in_a_migration_leaves_old_or_new(where: str, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    path = at_schema(1, tmp_path, ledger, monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", OPENS, str(path), "new"], env=os.environ | {"OUTLAST_CRASH_AT": where}, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert schema(path) in (1, opening.SCHEMA)
    with Outlast(path, agents=[agent()], deps=ledger) as app:
        app.decide("r", approved=True, decided_by="priya")
        assert app.resume_sync("r").status == "done"
        assert app.store_check() == []


def test_schema_of_older_worker_that_is_alive_meets_a_newer_one(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration only adds: a process that opened the file before it goes on writing what it knows, and nothing is lost."""
    path = tmp_path / "outlast.db"
    with monkeypatch.context() as older:
        older.setattr(opening, "MIGRATIONS", opening.MIGRATIONS[:1])
        older.setattr(opening, "SCHEMA", 1)
        living = Outlast(path, agents=[agent()], deps=ledger)
        living.run_sync(living.agents["a"], "go", run_id="r")
        subprocess.run([sys.executable, "-c", OPENS, str(path), "new"], timeout=60, check=True)
        assert schema(path) == NEWEST
        living.decide("r", approved=True, decided_by="priya")
        assert living.resume_sync("r").status == "done"
        living.close()
    with Outlast(path) as app:
        assert app.store_check() == []
        assert app.unfinished_runs() == ["new"]


# ---- on Postgres, where migrating is a command -----------------------------------------------------------------------------------

MIGRATES = "import sys\nfrom outlast import Outlast\nwith Outlast(sys.argv[1]) as app: print(*app._store.migrate())\n"


def as_of(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process knows no more than the first migrations."""
    real = sql.migrations
    monkeypatch.setattr(sql, "migrations", lambda package: real(package)[:version])
    monkeypatch.setattr(connections, "SCHEMA", version)


def postgres_store(app: Outlast) -> PostgresStore:
    store = app._store
    assert isinstance(store, PostgresStore)
    return store


@pytest.mark.parametrize("version", range(1, connections.SCHEMA))
def test_old_schema_new_code_and_reverse_on_postgres(
    version: int, postgres: Server, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused until it is migrated; several migrate at once and one does it; the run that waits goes on; older code is refused then."""
    url = postgres.url(schema=postgres.fresh_schema())
    with monkeypatch.context() as older:
        as_of(version, older)
        with Outlast(url, agents=[agent()], deps=ledger) as app:
            assert postgres_store(app).migrate() == (0, version)
            app.run_sync(app.agents["a"], "go", run_id="r")
    newest = connections.SCHEMA
    with Outlast(url) as app, pytest.raises(StoreError, match=f"version {version}, this program needs {newest}") as caught:
        app.unfinished_runs()
    assert caught.value.hint == "outlast store migrate"
    starters = [
        subprocess.Popen([sys.executable, "-c", MIGRATES, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=60) for process in starters]
    assert sorted(out for out, _ in said) == sorted([f"{version} {newest}\n", *[f"{newest} {newest}\n"] * 2]), said
    with Outlast(url, agents=[agent()], deps=ledger) as app:
        app.decide("r", approved=True, decided_by="priya")
        assert app.resume_sync("r").status == "done"
        assert app.store_check() == []
    as_of(version, monkeypatch)
    with Outlast(url) as app, pytest.raises(SchemaTooNew, match=f"its schema is version {newest}, this program knows up to {version}"):
        app.unfinished_runs()

"""`store ...` as a person types it: what it says, what it asks for, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.shell import SUPPORT, Shell
from outlast.settings import parse_store
from outlast.stores.postgres import PostgresStore
from outlast.stores.sqlite.opening import SCHEMA
from support.postgres import Server, postgres

__all__ = ["postgres"]


def played(shell: Shell, *, run_id: str = "kite-1", plan: str = "short") -> None:
    shell.write("support.py", SUPPORT)
    assert shell.outlast("run", "support", "Hello", "--id", run_id, "--by", "maya", PLAN=plan).code in (0, 3)


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.url(schema=postgres.fresh_schema())


def test_migrate(shell: Shell) -> None:
    assert shell.outlast("store", "migrate").lines == [f"the schema is version {SCHEMA}, it was 0"]
    assert shell.outlast("store", "migrate").lines == [f"the schema is version {SCHEMA}: there was nothing to do"]
    said = shell.outlast("store", "migrate", "--sql")
    assert said.code == 0 and "CREATE TABLE run" in said.out and "PRAGMA user_version = 1" in said.out


def test_migrate_on_postgres_is_explicit(shell: Shell, url: str) -> None:
    refused = shell.outlast("runs", "--store", url)
    assert refused.code == 1 and "outlast store migrate --store" in refused.err and "s3cret" not in refused.err
    assert "it was 0" in shell.outlast("store", "migrate", "--store", url).out
    assert shell.outlast("runs", "--store", url).code == 0
    sql = shell.outlast("store", "migrate", "--sql", "--store", url).out
    assert sql.startswith("CREATE SCHEMA IF NOT EXISTS") and "s3cret" not in sql
    document = shell.outlast("store", "migrate", "--json", "--store", url).documents[0]
    assert document["before"] == document["now"] > 0


def test_backup(shell: Shell, tmp_path: Path, url: str) -> None:
    played(shell)
    assert shell.outlast("store", "backup", "copy.db").lines == ["backed up to copy.db"]
    assert shell.outlast("store", "check", "--store", "sqlite:///copy.db").lines == ["all is well"]
    assert "kite-1" in shell.outlast("runs", "--store", "sqlite:///copy.db").out
    assert shell.outlast("store", "backup", "copy.db").code == 2
    shell.outlast("store", "migrate", "--store", url)
    refused = shell.outlast("store", "backup", "copy2.db", "--store", url)
    assert refused.code == 2 and "pg_dump --format=custom" in refused.err and "s3cret" not in refused.err
    assert not (tmp_path / "copy2.db").exists()


def test_a_run_moves_as_a_document(shell: Shell, tmp_path: Path, url: str) -> None:
    played(shell, plan="story")
    shell.outlast("store", "migrate", "--store", url)
    document = shell.outlast("store", "export", "kite-1").out
    (tmp_path / "run.json").write_text(document)
    refused = shell.outlast("store", "import", "run.json", "--store", url)
    assert refused.code == 2 and "--id NEW" in refused.err
    assert "waiting_for_approval" in shell.outlast("store", "import", "run.json", "--id", "twin", "--store", url).out
    moved = shell.outlast("store", "export", "kite-1", "--move")
    (tmp_path / "run.json").write_text(moved.out)
    assert "kite-1  waiting_for_approval" in shell.outlast("store", "import", "run.json", "--store", url).out
    assert "moved to a document" in shell.outlast("show", "kite-1").out
    for verb in (("send", "kite-1", "x"), ("retry", "kite-1")):
        assert shell.outlast(*verb, "--by", "ops").code == 5
    assert shell.outlast("approve", "kite-1", "--by", "priya", "--store", url).code == 0
    done = shell.outlast("resume", "kite-1", "--app", "support", "--store", url)
    assert done.code == 0 and (tmp_path / "effects.log").read_text().count("kite-1:toolu_02") == 1
    bad = json.loads(document)
    bad["journal"][1]["body"] = "{}"
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    said = shell.outlast("store", "import", "bad.json", "--id", "x", "--store", url)
    assert said.code == 2 and "entry 2 of the document" in said.err
    assert shell.outlast("store", "import", "nowhere.json").code == 2
    assert shell.outlast("store", "export", "nobody").code == 1


def test_a_whole_store_is_copied(shell: Shell, url: str) -> None:
    played(shell, plan="story")
    played(shell, run_id="kite-2", plan="short")
    early = shell.outlast("store", "copy", url, "--json")
    assert early.code == 1 and "outlast store migrate" in early.err and "s3cret" not in early.err + early.out
    shell.outlast("store", "migrate", "--store", url)
    said = shell.outlast("store", "copy", url)
    assert said.code == 0 and said.out.startswith("2 runs carried to postgresql://") and "s3cret" not in said.out
    assert "moved to postgresql://" in shell.outlast("show", "kite-2").out and "s3cret" not in shell.outlast("show", "kite-2").out
    assert shell.outlast("approve", "kite-1", "--by", "priya", "--store", url).code == 0
    assert shell.outlast("resume", "kite-1", "--app", "support", "--store", url).code == 0
    assert shell.outlast("store", "check", "--store", url).lines == ["all is well"]
    assert shell.outlast("store", "check").lines == ["all is well"]
    assert shell.outlast("store", "copy", url, "--json").documents == [
        {"type": "copied", "runs": 2, "elsewhere": 0, "left": []}]  # fmt: skip
    parsed = parse_store(url)
    store = PostgresStore(parsed.url, schema=parsed.schema)
    assert store.head("kite-1").status == "done"
    store.close()


def test_prune_says_first_what_it_would_do(shell: Shell) -> None:
    played(shell)
    assert shell.outlast("store", "prune", "--older-than", "90d").lines == ["0 runs with 0 entries would be removed"]
    dry = shell.outlast("store", "prune", "--older-than", "0.0001s")
    assert dry.code == 0 and dry.out.startswith("1 run with ") and "--yes" in dry.out
    assert "kite-1" in shell.outlast("runs").out
    assert shell.outlast("store", "prune", "--older-than", "0.0001s", "--keep", "done", "--yes").lines == ["0 runs removed"]
    assert shell.outlast("store", "prune", "--older-than", "0.0001s", "--yes").out.startswith("1 run removed")
    assert "kite-1" not in shell.outlast("runs").out
    for wrong in (["--older-than", "soon"], ["--older-than", "90d", "--keep", "running"], [], ["--older-than", "0d"]):
        assert shell.outlast("store", "prune", *wrong).code == 2


def test_erase_says_first_what_it_would_do(shell: Shell, tmp_path: Path) -> None:
    played(shell)
    dry = shell.outlast("store", "erase", "kite-1")
    assert dry.code == 0 and "would be wiped for good; do it: --yes" in dry.out
    assert "All is well." in shell.outlast("show", "kite-1").out
    assert shell.outlast("store", "erase", "kite-1", "--yes").lines == ["wiped: kite-1"]
    assert not [f.name for f in tmp_path.glob("outlast.db*") if b"All is well." in f.read_bytes()]
    assert "kite-1" in shell.outlast("runs").out and shell.outlast("store", "check").lines == ["all is well"]
    shown = shell.outlast("show", "kite-1")
    assert "erased" in shown.out + shown.err and "Traceback" not in shown.err
    assert shell.outlast("send", "kite-1", "x", "--by", "me").code == 5
    played(shell, run_id="kite-2", plan="story")
    refused = shell.outlast("store", "erase", "kite-2", "--yes")
    assert refused.code == 5 and "only a finished run is erased" in refused.err
    assert shell.outlast("store", "erase", "nobody", "--yes").code == 1

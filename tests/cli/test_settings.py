"""Settings: which origin wins, what is refused, and that no password is ever shown."""

from __future__ import annotations

import getpass
from datetime import timedelta
from pathlib import Path

import pytest

from outlast import settings
from outlast.errors import UsageError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def file(folder: Path, **values: str) -> None:
    lines = "".join(f'{name} = "{value}"\n' for name, value in values.items())
    (folder / "pyproject.toml").write_text(f"[tool.outlast]\n{lines}", encoding="utf-8")


def test_argument_before_environment_before_file_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.store().path == tmp_path / "outlast.db"
    file(tmp_path, store="sqlite:///file.db")
    assert settings.store().path == tmp_path / "file.db"
    monkeypatch.setenv("OUTLAST_STORE", "sqlite:///environment.db")
    assert settings.store().path == tmp_path / "environment.db"
    assert settings.store("argument.db").path == tmp_path / "argument.db"
    monkeypatch.setenv("OUTLAST_STORE", "")
    assert settings.store().path == tmp_path / "file.db", "empty is absent"


def test_the_nearest_file_counts_and_its_paths_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, store="sqlite:///agent.db", app="support:app")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert settings.store().path == tmp_path / "agent.db"
    assert settings.app() == settings.Found("support:app", f"[tool.outlast] app in {tmp_path / 'pyproject.toml'}", tmp_path)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert settings.app() is None, "the nearest file, even if it says nothing"


@pytest.mark.parametrize(
    "text, says",
    [
        ('[tool.outlast]\nstroe = "x"\n', "no setting 'stroe'"),
        ('[tool.outlast]\npassword = "x"\n', "no setting 'password'"),
        ("[tool.outlast]\nstore = 3\n", "must be a string, not int"),
        ("[tool.outlast\n", "cannot be read"),
        ("[tool]\noutlast = 3\n", "must be a table"),
    ],
)
def test_a_wrong_file_is_named_and_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says) as e:
        settings.store()
    assert str(tmp_path / "pyproject.toml") in str(e.value)


@pytest.mark.parametrize(
    "value, path",
    [
        ("sqlite:///a.db", "a.db"),
        ("sqlite:////srv/a.db", "/srv/a.db"),
        ("a.db", "a.db"),
        (Path("b:c.db"), "b:c.db"),
        ("sqlite:///a b.db", "a b.db"),
    ],
)
def test_sqlite_addresses(tmp_path: Path, value: str | Path, path: str) -> None:
    found = settings.parse_store(value)
    assert found.kind == "sqlite" and found.path == tmp_path / path
    assert settings.parse_store(found.url) == found


def test_in_memory() -> None:
    assert settings.parse_store("sqlite:///:memory:").path is None


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_postgres_addresses(scheme: str) -> None:
    found = settings.parse_store(f"{scheme}://anna:s3cr3t@db.example:5432/agents?schema=crew&sslmode=require")
    assert (found.kind, found.schema) == ("postgres", "crew")
    assert found.url == "postgresql://anna:s3cr3t@db.example:5432/agents?sslmode=require"
    assert found.shown == "postgresql://anna:***@db.example:5432/agents?sslmode=require&schema=crew"
    assert settings.parse_store(f"{scheme}:///agents").schema == "outlast"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://anna:s3cr3t@h/db",
        "postgresql://anna:p/a:s3cr3t@h/db",
        "postgresql://h/db?password=s3cr3t",
        "postgresql://anna:s3cr3t@h/db?schema=no-name",
        "mysql://anna:s3cr3t@h/db",
        "host=h password=s3cr3t",
        "host=h password='s3cr3t too'",
    ],
)
def test_passwords_are_never_shown(url: str) -> None:
    try:
        found = settings.parse_store(url)
        said = repr(found) + found.shown
        assert "s3cr3t" in found.url
    except UsageError as e:
        said = f"{e} {e.hint}"
    assert said and "s3cr3t" not in said


@pytest.mark.parametrize(
    "value", ["", "sqlite://a.db", "sqlite:///", "sqlite:///a.db?mode=ro", "mysql://h/x", "postgres:x", "postgresql://", "a\0b"]
)
def test_what_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--store"):
        settings.parse_store(value, origin="--store")


def test_who(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.who("anna") == "anna"
    monkeypatch.setattr(getpass, "getuser", lambda: "login")
    assert settings.who() == "login"
    monkeypatch.setenv("OUTLAST_BY", "priya")
    assert settings.who() == "priya"
    monkeypatch.delenv("OUTLAST_BY")

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    with pytest.raises(UsageError) as e:
        settings.who()
    assert "--by" in e.value.hint


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (settings.concurrency(), settings.grace(), settings.health_port()) == (10, timedelta(seconds=25), None)
    monkeypatch.setenv("OUTLAST_CONCURRENCY", "3")
    monkeypatch.setenv("OUTLAST_GRACE_S", "1.5")
    monkeypatch.setenv("OUTLAST_HEALTH_PORT", "0")
    assert (settings.concurrency(), settings.grace(), settings.health_port()) == (3, timedelta(seconds=1.5), 0)
    assert settings.concurrency(4) == 4
    for name, value, read in (
        ("OUTLAST_CONCURRENCY", "0", settings.concurrency),
        ("OUTLAST_GRACE_S", "-1", settings.grace),
        ("OUTLAST_HEALTH_PORT", "65536", settings.health_port),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=name):
            read()
    monkeypatch.setenv("OUTLAST_CONCURRENCY", "many")
    with pytest.raises(UsageError, match="OUTLAST_CONCURRENCY is 'many'"):
        settings.concurrency()
    for not_a_number in ("nan", "inf"):
        monkeypatch.setenv("OUTLAST_GRACE_S", not_a_number)
        with pytest.raises(UsageError, match="OUTLAST_GRACE_S"):
            settings.grace()


def test_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (settings.log_level(), settings.log_format()) == ("info", None)
    file(tmp_path, log_level="WARNING", log_format="json")
    assert (settings.log_level(), settings.log_format()) == ("warning", "json")
    monkeypatch.setenv("OUTLAST_LOG_FORMAT", "xml")
    with pytest.raises(UsageError, match="OUTLAST_LOG_FORMAT is 'xml'"):
        settings.log_format()


def test_an_empty_by_signs_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--by "$WHO"` with WHO unset is a mistake, not a decision of the login's."""
    monkeypatch.setenv("OUTLAST_BY", "priya")
    with pytest.raises(UsageError, match="--by is empty"):
        settings.who("")

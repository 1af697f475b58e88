"""What every case has: a store of its own, a world outside of it, applications that are closed at the end, and no way to hang for ever.

A module that says `STORES = BOTH` has its tests run on SQLite and on Postgres; one of them that is about a file says so with `sqlite_alone`.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import apsw
import psycopg
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from tests.support.world import Ledger

from outlast import Agent, Outlast
from outlast.models import Anthropic
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.settings import parse_store
from outlast.stores.postgres import PostgresStore
from outlast.stores.sqlite import SQLiteStore
from outlast.stores.sqlite.store import boot_ms
from outlast.testing import FakeMessagesAPI
from support.postgres import Server, postgres

BOTH = ("sqlite", "postgres")
HANG_S = 100  # a case that takes longer hangs: its threads are shown and the session ends


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # pytest's copy from before it captures
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    crashpoints.arm(None)


_Test = TypeVar("_Test", bound=Callable[..., Any])


def sqlite_alone(test: _Test) -> _Test:
    """Decorator: the test is about SQLite's file. Its docstring says what corresponds to it on Postgres."""
    test.stores = ("sqlite",)  # type: ignore[attr-defined]  # read by pytest_generate_tests
    return test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store_kind" in metafunc.fixturenames:
        kinds = getattr(metafunc.function, "stores", getattr(metafunc.module, "STORES", ("sqlite",)))
        metafunc.parametrize("store_kind", kinds, indirect=True, ids=kinds if kinds == BOTH else [pytest.HIDDEN_PARAM])


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store_url(store_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A store that is there already: the first commit that a case sees is its own."""
    if store_kind == "postgres":
        server: Server = request.getfixturevalue("postgres")
        url = server.url(schema=server.fresh_schema())
        parsed = parse_store(url)
        store = PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown)
        store.migrate()
        store.close()
        return url
    url = f"sqlite:///{tmp_path / 'outlast.db'}"
    with Outlast(url) as app:
        assert app.unfinished_runs() == []
    return url


def lease_clock_ahead(app: Outlast, by: timedelta) -> None:
    """For this process leases are so much older: by the machine's boot clock on SQLite, by the server's clock on Postgres."""
    store = app._store
    if isinstance(store, SQLiteStore):
        ms = by // timedelta(milliseconds=1)
        store._boot_clock = lambda: boot_ms() + ms
    else:
        assert isinstance(store, PostgresStore)
        store._lease_clock = lambda: datetime.now(UTC) + by  # the server is on this machine


Edit = Callable[..., bool]


@pytest.fixture
def edit(store_url: str) -> Edit:
    """`edit(statement, *values)` by hand, past our code; False: the tables themselves refuse it."""

    def on_sqlite(statement: str, *values: Any) -> bool:
        db = apsw.Connection(store_url.removeprefix("sqlite:///"))
        try:
            db.execute(statement, values)
        except apsw.ConstraintError:
            return False
        finally:
            db.close()
        return True

    def on_postgres(statement: str, *values: Any) -> bool:
        parsed = parse_store(store_url)
        with psycopg.connect(parsed.url, options=f"-c search_path={parsed.schema}") as db:
            try:
                db.execute(statement.replace("?", "%s").encode(), values)
            except (psycopg.IntegrityError, psycopg.DataError, psycopg.errors.StatementTooComplex):
                db.rollback()
                return False
        return True

    return on_postgres if store_url.startswith("postgres") else on_sqlite


def size_on_disk(store_url: str) -> int:
    """Bytes of the tables and indexes, or of the files."""
    if store_url.startswith("sqlite"):
        path = Path(store_url.removeprefix("sqlite:///"))
        return sum(p.stat().st_size for p in path.parent.iterdir() if p.name.startswith(path.name))
    parsed = parse_store(store_url)
    with psycopg.connect(parsed.url) as db:
        [(size,)] = db.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s"
            " AND c.relkind = 'r'",
            (parsed.schema,),
        ).fetchall()
    return int(size)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class MakeApp(Protocol):
    def __call__(self, *agents: Agent[Any], **options: Any) -> Outlast: ...


@pytest.fixture
def make_app(store_url: str, ledger: Ledger) -> Iterator[MakeApp]:
    """Another process's view of the same store: `make_app(agent, clock=…)`; its tools' world is the ledger."""
    made: list[Outlast] = []

    def make(*agents: Agent[Any], **options: Any) -> Outlast:
        if "lifespan" not in options:
            options.setdefault("deps", ledger)
        made.append(Outlast(options.pop("store", store_url), agents=list(agents), **options))
        return made[-1]

    yield make
    for app in made:
        app.close()


class Provider(Protocol):
    def __call__(self, *turns: Any) -> tuple[FakeMessagesAPI, Anthropic]: ...


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """The strict stand-in with these turns, and the real SDK in front of it."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "mock")
    running: list[FakeMessagesAPI] = []

    def start(*turns: Any) -> tuple[FakeMessagesAPI, Anthropic]:
        api = FakeMessagesAPI(list(turns))
        api.__enter__()
        running.append(api)
        return api, Anthropic("any-name", base_url=api.url)

    yield start
    for api in running:
        assert api.refused == [], "the provider refused a request"
        api.__exit__(None, None, None)


__all__ = ["BOTH", "Edit", "MakeApp", "Provider", "lease_clock_ahead", "postgres", "size_on_disk", "sqlite_alone"]

"""The Postgres store: the contract of all stores, and what only a server can do."""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from outlast.core import run as r
from outlast.errors import OutlastError, RunNotFound, SchemaTooNew, StoreError, UsageError
from outlast.settings import parse_store
from outlast.stores.base import Outside, ParentEntry, Store, Tail
from outlast.stores.postgres import PostgresStore
from outlast.stores.postgres.clock import ServerClock
from outlast.stores.postgres.connections import MOST, SCHEMA, Tx, Wire
from outlast.stores.sql import queries
from outlast.stores.sqlite import SQLiteStore
from outlast.stores.sqlite.pages import Pages
from outlast.testing.store_contract import Driving, PassTime, Reopen, StoreContract, answers, begin, calls, gate, new, take
from support.postgres import Server


class Clock:
    """Moves only when told; of deadlines and of leases."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 27, 15, 0, 0, 123000, tzinfo=UTC)

    def move(self, by: timedelta) -> None:
        self.now += by


@pytest.fixture
def clock() -> Clock:
    return Clock()


Open = Callable[..., PostgresStore]


@pytest.fixture
def open_store(postgres: Server, clock: Clock) -> Iterator[Open]:
    """Stores over one fresh schema; nobody is dead."""
    opened: list[PostgresStore] = []
    parsed = parse_store(postgres.url(schema=postgres.fresh_schema()))

    def open_(**more: Any) -> PostgresStore:
        given = {"clock": lambda: clock.now, "lease_clock": lambda: clock.now, "dead": lambda owner: False, **more}
        store = PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown, **given)
        if not opened:
            store.migrate()
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, open_store: Open) -> Store:
        return open_store()

    @pytest.fixture
    def reopen(self, open_store: Open) -> Reopen:
        return open_store

    @pytest.fixture
    def pass_time(self, clock: Clock) -> PassTime:
        return clock.move


# ---- opening --------------------------------------------------------------------------------------------------------------------


def plain(url: str, **more: Any) -> PostgresStore:
    parsed = parse_store(url)
    return PostgresStore(parsed.url, schema=parsed.schema, shown=parsed.shown, **more)


def test_nothing_is_opened_before_the_first_call() -> None:
    plain("postgresql://nobody@127.0.0.1:1/nothing").close()


def test_what_is_lent_while_the_store_closes_is_closed_when_it_comes_back(open_store: Open) -> None:
    store = open_store()
    begin(store, "run-1")
    pool = store._connections
    with pool.lend(time.monotonic() + 30) as kept:
        store.close()
        assert not kept.closed
    assert kept.closed and pool._count == 0
    assert store.head("run-1").run_id == "run-1"
    with pool.lend(time.monotonic() + 30) as new_one:
        pass
    assert not new_one.closed


def test_a_missing_schema_is_named_with_the_command_that_makes_it(postgres: Server) -> None:
    store = plain(postgres.url(schema=postgres.fresh_schema()))
    with pytest.raises(StoreError, match="no schema") as caught:
        store.head("run-1")
    assert caught.value.hint.startswith("outlast store migrate") and postgres.password not in caught.value.hint
    assert store.migrate() == (0, SCHEMA)
    assert store.migrate() == (SCHEMA, SCHEMA)
    with pytest.raises(RunNotFound):
        store.head("run-1")


def test_a_newer_schema_is_refused_with_both_versions_and_left_alone(postgres: Server) -> None:
    url = postgres.url(schema=postgres.fresh_schema())
    plain(url).migrate()
    with postgres.connect() as admin:
        admin.execute(f"INSERT INTO {parse_store(url).schema}.schema_version (version) VALUES (7)")
    for call in (lambda: plain(url).head("run-1"), plain(url).migrate, lambda: plain(url).wait_for_change(None, 0)):
        with pytest.raises(SchemaTooNew, match=rf"version 7, this program knows up to {SCHEMA}"):
            call()


def test_tables_of_another_program_are_left_alone(postgres: Server) -> None:
    url = postgres.url(schema=postgres.fresh_schema())
    with postgres.connect() as admin:
        admin.execute(f"CREATE SCHEMA {parse_store(url).schema} CREATE TABLE theirs (a int)")
    with pytest.raises(UsageError, match=r"another program \(theirs\)"):
        plain(url).migrate()


def test_many_migrate_at_once_and_one_does_it(postgres: Server) -> None:
    url = postgres.url(schema=postgres.fresh_schema())
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: plain(url).migrate(), range(8)))
    assert sorted(done) == [(0, SCHEMA)] + [(SCHEMA, SCHEMA)] * 7


def test_a_migration_that_dies_at_any_statement_leaves_nothing(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = postgres.fresh_schema()
    url, at, execute = postgres.url(schema=schema), 0, Wire.execute

    def dies(self: Wire, *args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            self.cut()
        return execute(self, *args, **more)

    while True:
        at += 1
        left = at
        with monkeypatch.context() as patched, postgres.connect() as admin:
            patched.setattr(Wire, "execute", dies)
            try:
                plain(url).migrate()
                break
            except StoreError:
                assert admin.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchall() == []
    assert at > 8 and plain(url).check() == []


def test_the_sql_of_a_migration_can_be_run_by_hand(postgres: Server) -> None:
    url = postgres.url(schema=postgres.fresh_schema())
    store = plain(url)
    with postgres.connect() as admin:
        admin.execute(store.migration_sql().encode())
    begin(store)
    assert store.migrate() == (SCHEMA, SCHEMA) and store.check() == []


def test_another_schema_holds_other_runs(postgres: Server) -> None:
    one, two = (plain(postgres.url(schema=postgres.fresh_schema())) for _ in range(2))
    for store in (one, two):
        store.migrate()
        begin(store)
    one.start(new("run-2"))
    assert (one.unfinished(), two.unfinished()) == (["run-1", "run-2"], ["run-1"])


def test_no_password_in_any_error(postgres: Server, caplog: pytest.LogCaptureFixture) -> None:
    good = postgres.url()
    wrong = "wr0ng/secret"
    urls = {
        "password authentication failed": good.replace(quote(postgres.password, safe=""), quote(wrong, safe="")),
        "Connection refused": good.replace(f":{postgres.port}/", ":1/"),
        "does not exist": postgres.url(dbname="nowhere"),
        "no address": good.replace("?", "?nonsense=1&"),
        "no schema": postgres.url(schema="never_made"),
    }
    for says, url in urls.items():
        for call in (lambda store: store.head("run-1"), PostgresStore.migrate if says != "no schema" else PostgresStore.now):
            with pytest.raises(OutlastError, match=says) as caught:
                call(plain(url))
            shown = "".join(traceback.format_exception(caught.value)) + caught.value.hint + caplog.text
            for secret in (postgres.password, wrong):
                assert secret not in shown and quote(secret, safe="") not in shown, says


def test_a_server_that_was_never_reached_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match="refused"):
        plain("postgresql://nobody@127.0.0.1:1/nothing").head("run-1")
    assert time.monotonic() - began < 5


def test_settings_of_the_server_that_lose_commits(postgres: Server) -> None:
    schema = postgres.fresh_schema()
    plain(postgres.url(schema=schema)).migrate()
    asynchronous = postgres.url(schema=schema, options="-c synchronous_commit=off")
    with pytest.raises(StoreError, match="synchronous_commit is off") as caught:
        plain(asynchronous).head("run-1")
    assert "allow_async=1" in caught.value.hint
    store = plain(asynchronous.replace("?", "?allow_async=1&"))
    begin(store)
    with store._connections.lend(time.monotonic() + 10) as wire:
        tx = Tx(store._connections, wire, limit_s=5, reads=False)
        tx.ask()
        assert wire.execute("SHOW synchronous_commit").fetchall() == [("on",)]
        assert wire.execute("SHOW statement_timeout").fetchall() == [("5s",)]
        assert wire.execute("SHOW idle_in_transaction_session_timeout").fetchall() == [("2500ms",)]
        tx.end()
        assert wire.execute("SHOW synchronous_commit").fetchall() == [("off",)]
    assert [finding[0] for finding in store.check()] == ["setting synchronous_commit"]


def test_a_database_that_is_not_utf8_is_refused(postgres: Server) -> None:
    with postgres.connect() as admin:
        admin.execute("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with pytest.raises(UsageError, match="LATIN1, and must be UTF8"):
        plain(postgres.url(dbname="latin")).migrate()


# ---- clocks and leases ----------------------------------------------------------------------------------------------------------


def test_our_clock_is_never_ahead_of_the_servers(postgres: Server) -> None:
    store = plain(postgres.url(schema=postgres.fresh_schema()))
    store.migrate()
    with postgres.connect() as server:
        for _ in range(200):
            ours = store.now()
            [(theirs,)] = server.execute("SELECT clock_timestamp()").fetchall()
            assert isinstance(theirs, datetime) and ours <= theirs
            assert theirs - ours < timedelta(seconds=2)


def test_the_servers_clock_may_be_set() -> None:
    clock = ServerClock()
    clock.heard(1000.0, 10.0)
    clock.heard(1000.4, 10.5)  # took longer to come: the first is the better bound
    assert clock._offset == 990.0
    clock.heard(900.0, 11.0)  # set back
    assert clock._offset == 889.0
    clock.heard(1500.0, 12.0)  # set forward
    assert clock._offset == 1488.0
    clock.heard(1509.9, 22.0)  # an old answer counts no longer
    assert clock._offset == 1487.9


def test_a_child_process_opens_its_own_connections(postgres: Server) -> None:
    store = plain(postgres.url(schema=postgres.fresh_schema()))
    store.migrate()
    driving = begin(store)
    store.wait_for_change(None, 0)
    pid = os.fork()
    if pid == 0:
        try:
            for n in range(20):
                store.start(new(f"child-{n}"))
            store.close()
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    for _ in range(20):
        driving.save(answers())
    assert os.waitpid(pid, 0)[1] == 0
    assert len(store.unfinished()) == 21 and store.check() == []
    driving.save(answers())  # the child's end closed nothing of ours


def test_more_threads_than_connections(postgres: Server) -> None:
    store = plain(postgres.url(schema=postgres.fresh_schema()))
    store.migrate()
    with ThreadPoolExecutor(3 * MOST) as pool:
        list(pool.map(lambda n: store.start(new(f"run-{n}")), range(6 * MOST)))
    assert len(store.unfinished()) == 6 * MOST and store._connections._count <= MOST


def test_two_that_lock_parent_and_child_do_not_stand_in_each_others_way(postgres: Server) -> None:
    """A child's end tells its parent while the parent's cancel goes down to the child."""
    store = plain(postgres.url(schema=postgres.fresh_schema()))
    store.migrate()
    together = threading.Barrier(2)

    def down(run_id: str) -> None:
        def child(tail: Tail) -> Outside:
            return Outside([r.TextSent("from above")])

        together.wait(10)
        store.outside(run_id, lambda tail: Outside([r.TextSent("x")], others=[ParentEntry(f"{run_id}:c1", child)]))

    def up(driving: Driving) -> None:
        batch = replace(
            driving.batch(r.DecisionRefused("g", "x")),
            parent=ParentEntry(driving.lease.run_id[:-3], lambda tail: Outside([r.TextSent("up")])),
        )
        together.wait(10)
        store.append(driving.lease, driving.place, batch, now=store.now())

    with ThreadPoolExecutor(2) as pool:
        for n in range(25):
            store.start(new(f"run-{n}"))
            driving = begin(store, f"run-{n}:c1", parent_run_id=f"run-{n}", parent_call_id="c1")
            for done in (pool.submit(down, f"run-{n}"), pool.submit(up, driving)):
                done.result(30)
    assert store.check() == []
    with postgres.connect() as admin:
        assert admin.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'").fetchall() == [(0,)]


# ---- what is written --------------------------------------------------------------------------------------------------------------


def test_the_views_say_what_the_documents_say(postgres: Server) -> None:
    schema = postgres.fresh_schema()
    store = plain(postgres.url(schema=schema))
    store.migrate()
    begin(store).save(calls("c1"), gate(deadline="2031-01-01T00:00:00.001Z"), status="waiting_for_approval", release=True)
    with postgres.connect() as admin:
        admin.execute(f"SET search_path = {schema}")
        [(run_id, created)] = admin.execute("SELECT run_id, created_at FROM runs").fetchall()
        assert (run_id, created) == ("run-1", r.iso(store.head("run-1").created_at))
        rows = admin.execute("SELECT seq, status, messages::text FROM checkpoints ORDER BY seq").fetchall()
        assert [(seq, status, len(json.loads(str(messages)))) for seq, status, messages in rows] == [
            (1, "running", 1),
            (2, "waiting_for_approval", 2),
        ]
        assert '"amount": 1.0' in str(rows[1][2])
        assert admin.execute("SELECT deadline, args::text FROM inbox").fetchall() == [
            ("2031-01-01T00:00:00.001Z", '{"amount": 1.0, "to": "Zoë"}')
        ]
        assert admin.execute("SELECT call_id, tool, state, args::text FROM tool_calls").fetchall() == [
            ("c1", "refund", "waiting", '{"amount": 1.0, "to": "Zoë"}')]  # fmt: skip
        assert admin.execute("SELECT digest FROM journal ORDER BY entry_no DESC LIMIT 1").fetchall() == [(store.load(1)[1].digest.hex(),)]
        for view in ("messages", "decisions", "in_doubt", "stuck", "notices", "gates"):
            admin.execute(f"SELECT * FROM {view}").fetchall()


def test_every_millisecond_is_shown_as_it_is(postgres: Server) -> None:
    schema = postgres.fresh_schema()
    plain(postgres.url(schema=schema)).migrate()
    numbers = [1_700_000_000_000 + n for n in range(1000)] + [0, 1, 253_402_300_799_999]
    with postgres.connect() as admin:
        rows = admin.execute(f"SELECT n, {schema}.iso(n) FROM unnest(%s::bigint[]) n", (numbers,)).fetchall()
    assert [(n, r.iso(r.instant(int(str(n))))) for n, _ in rows] == rows


def test_an_ordinary_append_touches_no_index_of_the_heads(postgres: Server) -> None:
    """A HOT update: else each append would write to every index of `run`."""
    schema = postgres.fresh_schema()
    store = plain(postgres.url(schema=schema))
    store.migrate()
    driving = begin(store)

    def updates() -> tuple[object, ...]:
        with postgres.connect() as admin:
            admin.execute("SELECT pg_stat_clear_snapshot()")
            return admin.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = 'run'", (schema,)
            ).fetchall()[0]

    for _ in range(50):
        driving.save(answers())
    store.close()  # a session tells its figures at its end
    end = time.monotonic() + 20
    while (found := updates()) < (51, 0):
        assert time.monotonic() < end, found
    assert int(str(found[1])) >= 48  # but for the first, and one where the page was full


def test_claims_find_their_runs_by_the_partial_indexes(postgres: Server) -> None:
    schema = postgres.fresh_schema()
    store = plain(postgres.url(schema=schema))
    store.migrate()
    with postgres.connect() as admin:
        admin.execute(f"SET search_path = {schema}")
        admin.execute("""INSERT INTO run (run_id, agent, status, entries, seq, driver, format, created_at, updated_at, wake_at)
                         SELECT 'done-' || n, 'support', 'done', 1, 1, 'built-in', 1, n, n, NULL FROM generate_series(1, 20000) n""")
        admin.execute("ANALYZE run")
        store.start(new("due"))

        def scanned() -> tuple[object, ...]:
            return admin.execute(
                f"SELECT pg_stat_get_numscans('{schema}.run'::regclass), pg_stat_get_tuples_returned('{schema}.run'::regclass)"
            ).fetchall()[0]

        store.close()
        admin.execute("SELECT pg_stat_clear_snapshot()")
        before = scanned()
        for _ in range(20):
            take(store, agents=["support", "billing"], needs=[("support", "tool:x")])
            store.pending(agents=["support"])
            store.parked(agents=["support"])
        store.close()
        assert scanned() == before  # no scan of the whole table


VALUES: list[Any] = [
    "plain", "", "o'c", "'", "''", "back\\slash", "ends\\", "\\'", "mix\\'é🦉\n\t%s %(x)s $1 -- /* ;", '{"a": "\\"x\\\\n"}', 0, 7, -7, 2**40, -(2**50), True,
    False, None, 1.5, -1.5, ["a'", "b\\"], [], [1, 2], b"\x00\xff"]  # fmt: skip


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_values_arrive_as_the_driver_would_send_them(postgres: Server, conforming: str) -> None:
    """Whatever the server takes a backslash for."""
    wire = Wire.connect(postgres.conninfo, autocommit=True, prepare_threshold=None)
    wire.execute("SET client_encoding = 'utf8'")
    wire.execute(f"SET standard_conforming_strings = {conforming}".encode())
    query = "SELECT %(v)s, 10 %% 3, %(v)s"
    for value in VALUES:
        [found] = wire.rows(wire.answers(wire.written(query, {"v": value}).encode())[0])
        assert found == psycopg.ClientCursor(wire).execute(query, {"v": value}).fetchone()
        assert not isinstance(value, str) or found[0] == value
    with pytest.raises(psycopg.DataError, match="NUL"):
        wire.written(query, {"v": "a\0b"})
    wire.close()


def test_queries_have_the_names_of_the_sqlite_store() -> None:
    """What both do is called the same. What is left: what this one does by other means, and its transactions and its schema."""
    here, there = set(queries("outlast.stores.postgres")), set(queries("outlast.stores.sqlite"))
    only_here = {
        "begin", "begin_read", "limits", "server", "version", "wake", "times", "take_started", "started", "claim", "claimed", "append",
        "due", "lock", "lock_family", "clock", "stands", "since_message", "pending", "check_head", "check_orphans", "check_settings", "migrate_lock",
        "in_schema", "has_version", "make_version", "migrated", "page_filter", "page_near",
        "remove", "family", "commits"}  # fmt: skip
    assert here - there <= only_here


def test_it_does_all_that_the_sqlite_store_does() -> None:
    public = {name for name in vars(SQLiteStore) | vars(Pages) if not name.startswith("_")}
    assert {name for name in public if not hasattr(PostgresStore, name)} == set()

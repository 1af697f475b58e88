"""What does a durable step cost on Postgres, what does it leave on the server's disk, and how quickly are runs taken?

One server of its own, with its own defaults, and all peers on it in turns. The first table counts and is free of noise.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psycopg

import measure
from measure import now
from messages import Message, history, json_bytes, message, mixed
from ours import AGENT
from outlast.stores.postgres import PostgresStore
from pg_peers import ALL, DATABASES, PgAbsurd, PgDbos, PgInsert, PgLangGraph, PgOurs
from server import Counter, Server, running

ROUNDS = {10: (20, 10), 100: (12, 12), 1000: (6, 12)}  # history -> rounds, steps a round
COUNTED = 40
RUNS, HELD, BATCH = 6000, 10_000, 100


def main() -> None:
    measure.header("postgres: a durable step, its bytes, and claims")
    targets = measure.Targets()
    with running() as server:
        print(server.ask("SELECT version()")[0], "\n")
        for name in DATABASES:
            server.database(name)
        counts(server, targets)
        appends(server, targets)
        claims(server, targets)
    with running(measure.memory_folder()) as server:
        insert, ours = PgInsert(server), PgOurs(server)
        step_by_step(insert, ours, None)
        insert.close()
        ours.close()
        bytes_kept(server, targets)
    targets.show()


# ---- counted --------------------------------------------------------------------------------------------------------------------


def counts(server: Server, targets: measure.Targets) -> None:
    """Differences between a short life and a longer one, each with its opening and its end: a backend tells its counts when it ends."""
    rows = []
    for n in (10, 1000):
        for kind in ALL:
            if n == 1000 and kind in (PgInsert, PgDbos, PgAbsurd):
                continue  # as at 10
            _life(server, kind, n, 1)
            short, longer = _life(server, kind, n, COUNTED), _life(server, kind, n, 3 * COUNTED)
            trips, sent, commits, wal, syncs = (round((b - a) / (2 * COUNTED), 2) for a, b in zip(short, longer, strict=True))
            rows.append((kind.name, n, trips, measure.kib(sent), commits, measure.kib(wal), syncs))
            if kind is PgOurs:
                targets.at_most(f"round trips of an append, {n:,} messages", trips, 1.05)
                targets.at_most(f"commits of an append, {n:,} messages", commits, 1.05)
    print("counted: one step of")
    measure.table(["", "messages", "round trips", "KB sent", "commits", "KB of WAL", "syncs of the WAL"], rows)


def _life(server: Server, kind: Any, n: int, steps: int) -> list[float]:
    """(round trips, bytes sent, commits, bytes of WAL, its syncs) of a subject that begins, does so many steps, and ends."""
    server.settle()
    before = _seen(server)
    counter = Counter(server)
    subject = kind(server, port=counter.port)
    subject.steps(n, steps)
    subject.close()
    counter.close()
    return [counter.trips, counter.sent, *(b - a for a, b in zip(before, _seen(server), strict=True))]


def _seen(server: Server) -> tuple[float, float, float]:
    """(commits, bytes of WAL, its syncs) so far, once all clients are gone and nothing changes any more."""
    found: tuple[float, ...] = ()
    with psycopg.connect(server.url(), autocommit=True) as db:
        for _ in range(100):
            db.execute("SELECT pg_sleep(0.1)")
            row = db.execute(
                "SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), "
                "(SELECT sum(xact_commit) FROM pg_stat_database), "
                "pg_current_wal_insert_lsn() - '0/0'::pg_lsn, (SELECT wal_sync FROM pg_stat_wal)"
            ).fetchone()
            assert row is not None
            before, found = found, tuple(float(x) for x in row[1:])
            if row[0] == 1 and found[1:] == before[1:]:
                break
    return found[0], found[1], found[2]


# ---- timed ----------------------------------------------------------------------------------------------------------------------


def appends(server: Server, targets: measure.Targets) -> None:
    subjects = [kind(server) for kind in ALL]
    found: dict[int, dict[str, float]] = {}
    for n in measure.numbers((10, 100, 1000)):
        rounds, k = ROUNDS.get(n, (6, 12))
        times: dict[str, list[float]] = {s.name: [] for s in subjects}
        for s in subjects:
            s.steps(n, 6)
        for _ in range(rounds):
            for s in subjects:
                if hasattr(s, "anew"):
                    s.anew(n)
                quick = isinstance(s, PgInsert | PgOurs)
                times[s.name] += s.steps(n, k * (3 if quick else 1))
        found[n] = {name: measure.median(v) for name, v in times.items()}
        print(f"\n{n:,} messages")
        measure.table(
            ["a step of", "median µs", "p95 µs", "least µs", "× bare INSERT", "× Outlast"],
            [(name, measure.us(found[n][name]), measure.us(measure.p95(v)), measure.us(min(v)), f"{found[n][name] / found[n][PgInsert.name]:.2f}",
              f"{found[n][name] / found[n][PgOurs.name]:.2f}") for name, v in times.items()])  # fmt: skip
    step_by_step(subjects[0], subjects[1], targets)
    for s in subjects:
        s.close()
    for n, wanted in ((10, 7), (1000, 80)):
        if n in found:
            targets.at_least(f"LangGraph PostgresSaver, {n:,} messages", found[n][PgLangGraph.name] / found[n][PgOurs.name], wanted, "×")
    for kind, wanted in ((PgDbos, 6), (PgAbsurd, 2)):
        ratio = measure.median([at[kind.name] / at[PgOurs.name] for at in found.values()])
        targets.at_least(f"{kind.name}, a step", ratio, wanted, "×")


def step_by_step(insert: PgInsert, ours: PgOurs, targets: measure.Targets | None) -> None:
    """Against the floor, one step each in turn: a disk that is busy for a moment is busy for all of them. Without targets: on a tmpfs."""
    turns: dict[str, tuple[Any, int]] = {
        insert.name: (insert, 1), "Outlast, 10 messages": (ours, 10), "Outlast, 1,000 messages": (ours, 1000)}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(500):
        for name, (subject, n) in turns.items():
            times[name] += subject.steps(n, 1)
    found = {name: measure.median(v) for name, v in times.items()}
    print("\nstep by step in turns" + ("" if targets else ", without a disk (tmpfs)"))
    measure.table(["a step of", "median µs", "p95 µs", "least µs", "× bare INSERT"], [
        (name, measure.us(found[name]), measure.us(measure.p95(v)), measure.us(min(v)), f"{found[name] / found[insert.name]:.2f}")
        for name, v in times.items()])  # fmt: skip
    if targets is None:
        return
    targets.at_most("against a bare autocommitted INSERT", found["Outlast, 10 messages"] / found[insert.name], 1.6, "×")
    targets.at_most("1,000 messages against 10", found["Outlast, 1,000 messages"] / found["Outlast, 10 messages"], 1.2, "×")


# ---- kept -----------------------------------------------------------------------------------------------------------------------


def bytes_kept(server: Server, targets: measure.Targets) -> None:
    """Of some megabytes of runs, on a tmpfs where there is one: the bytes are the same, and it is quicker."""
    rows: list[list[str]] = []
    small = [message(i, 300) for i in range(100)]
    cases: list[tuple[str, list[Message], int]] = [
        ("10 × 1 KB", history(10), 200), ("100 × 1 KB", history(100), 30), ("100, mixed sizes", mixed(100), 20), ("100 × 300 bytes", small, 60)]  # fmt: skip
    ours = ["Outlast"]
    for number, (what, messages, repeat) in enumerate(cases):
        taken = _ours_keeps(server, f"kept_{number}", messages, repeat) / (json_bytes(messages) * repeat)
        ours.append(f"{taken:.2f}")
        targets.at_most(f"bytes on disk for each byte of JSON, {what}", taken, 1.5)
    rows.append(ours)
    for kind, dbname in ((PgLangGraph, "langgraph_kept"), (PgDbos, "dbos_kept"), (PgAbsurd, "absurd_kept")):
        server.database(dbname)
        subject = kind(server, dbname=dbname)
        subject.steps(1, 1)
        row = [kind.name]
        for n, repeat in ((10, 20), (100, 1 if kind is PgLangGraph else 10)):
            before = _size(server, dbname)
            for turn in range(repeat):
                if isinstance(subject, PgLangGraph):
                    subject.go(f"thread-{n}-{turn}", 0, n - 2)
                else:
                    subject.steps(n, n)
            row.append(f"{(_size(server, dbname) - before) / json_bytes(history(n)) / repeat:.2f}")
        rows.append([*row, "", ""])
        subject.close()
    print()
    measure.table(["bytes on disk for each byte of JSON", *(what for what, _, _ in cases)], rows)


def _ours_keeps(server: Server, schema: str, messages: list[Message], repeat: int) -> float:
    subject = PgOurs(server, schema=schema)
    before = _size(server, schema=schema)
    for _ in range(repeat):
        session = subject.session(messages[:1])
        for m in messages[1:]:
            session.save(session.fact(m))
    subject.close()
    return _size(server, schema=schema) - before


def _size(server: Server, dbname: str = "postgres", schema: str | None = None) -> float:
    """Of all tables with their indexes and TOAST."""
    where = f"n.nspname = '{schema}'" if schema else "n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')"
    statement = f"SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND {where}"
    return float(server.ask(statement, dbname=dbname)[0])


# ---- taken ----------------------------------------------------------------------------------------------------------------------


def claims(server: Server, targets: measure.Targets) -> None:
    rows: list[tuple[Any, ...]] = []
    cases = [(workers, held, batch) for workers, held in ((1, 0), (1, HELD), (4, 0)) for batch in (1, BATCH)]
    rates: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    shares: dict[tuple[int, int, int], list[list[int]]] = {case: [] for case in cases}
    for turn in range(3):
        for workers, held, batch in cases:
            schema, runs = f"claims_{turn}_{workers}_{held}_{batch}", RUNS if batch > 1 else RUNS // 4
            _filled(server, schema, runs, held)
            answers = _race(server, schema, workers, batch)
            assert sum(a["claims"] for a in answers) == runs, "a run was taken twice, or not at all"
            rates[workers, held, batch].append(runs / max(a["took"] for a in answers))
            shares[workers, held, batch].append(sorted(a["claims"] for a in answers))
    for workers, held, batch in cases:
        rate, share = measure.median(rates[workers, held, batch]), shares[workers, held, batch][-1]
        rows.append((workers, batch, f"{held:,}", f"{rate:,.0f}", f"{max(rates[workers, held, batch]):,.0f}", f"{share[0]} … {share[-1]}"))
    floor = PgInsert(server)
    bare = 1 / measure.median(floor.steps(1, 300))
    floor.close()
    print(f"\nbare autocommitted INSERTs a second, one client: {bare:,.0f}\n")
    measure.table(["workers", "at a time", "held before", "claims a second, median", "most", "per worker"], rows)
    single = measure.median(rates[4, 0, 1])
    targets.at_least("single claims a second, four workers", single, 1500)
    targets.at_least("batched claims a second, one worker", measure.median(rates[1, 0, BATCH]), 15_000)
    targets.at_least("single claims of one worker against bare INSERTs", measure.median(rates[1, 0, 1]) / bare, 0.6, "×")
    targets.at_least("fewest claims of 4 workers against the most, single", measure.median([s[0] / s[-1] for s in shares[4, 0, 1]]), 0.5)


def _filled(server: Server, schema: str, due: int, held: int) -> None:
    store = PostgresStore(server.url(), schema=schema)
    store.migrate()
    store.close()
    insert = (
        f"INSERT INTO {schema}.run (run_id, agent, status, entries, seq, wake_at, driver, format, created_at, updated_at, lease_owner, lease_until, "
        f"fence, nonce) SELECT %s || n, '{AGENT}', 'running', 2, 1, n, 'built-in', 1, n, n, %s, %s, 1, 'n' FROM generate_series(1, %s) n"
    )
    with psycopg.connect(server.url(), autocommit=True) as db:
        db.execute(insert.encode(), ("held-", "somebody", 2**50, held))
        db.execute(insert.encode(), ("due-", None, None, due))
        db.execute(f"VACUUM ANALYZE {schema}.run".encode())


def _race(server: Server, schema: str, workers: int, batch: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "child", server.url(), schema, str(batch)]
    return measure.race(command, workers, within_s=300)


def child(url: str, schema: str, batch: int, number: int) -> None:
    store = PostgresStore(url, schema=schema)
    store.unfinished()
    print("ready", flush=True)
    sys.stdin.readline()
    begun, claimed = now(), 0
    while taken := store.claim(f"worker-{number}", agents=[AGENT], limit=batch):
        claimed += len(taken)
    print(json.dumps({"claims": claimed, "took": now() - begun}))
    store.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()

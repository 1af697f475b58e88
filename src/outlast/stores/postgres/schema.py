"""Making the schema and bringing it up to date: explicit, one at a time, each time the whole way or not at all.

All runs in one transaction under an advisory lock of that transaction: of many starters at once one works and the others find it done, and a
kill at any statement leaves what was there before.
"""

from __future__ import annotations

import time

from psycopg import sql

from outlast.errors import UsageError
from outlast.stores import sql as files
from outlast.stores.postgres.connections import Connections, Wire, in_schema

LIMIT_S = 120.0  # for all of it: building an index on a large store takes its time


def statements(schema: str) -> str:
    """What brings an empty database to the present version, to be read or to be run by hand."""
    begin = f'CREATE SCHEMA IF NOT EXISTS "{schema}";\n'
    made = files.queries("outlast.stores.postgres")["make_version"] + ";\n"
    numbered = [
        f"-- {number:04}.sql\n{text}\nINSERT INTO outlast.schema_version (version) VALUES ({number});\n"
        for number, text in enumerate(files.migrations("outlast.stores.postgres"), 1)
    ]
    return begin + in_schema(schema, "\n".join([made, *numbered]))


def migrate(connections: Connections) -> tuple[int, int]:
    """(version before, version now); the same number twice: there was nothing to do. Raises SchemaTooNew, UsageError, psycopg's errors."""
    wire = connections.connect(time.monotonic() + LIMIT_S, migrating=True)
    try:
        with wire.transaction():
            versions = _migrate(connections, wire)
            connections.point("commit.before")
        connections.point("commit.after")
        return versions
    finally:
        wire.cut()


def _migrate(connections: Connections, wire: Wire) -> tuple[int, int]:
    queries, schema = connections.queries, connections.schema
    for name, value in (("synchronous_commit", "on"), ("statement_timeout", "0"), ("lock_timeout", "0")):
        wire.execute("SELECT set_config(%s, %s, true)", (name, value))
    wire.execute(queries["migrate_lock"], {"schema": schema})
    there = [name for (name,) in wire.execute(queries["in_schema"], {"schema": schema}).fetchall()]
    [(ours,)] = wire.execute(queries["has_version"], {"table": f'"{schema}".schema_version'}).fetchall()
    if there and not ours:
        raise UsageError(
            f"{connections.speaker.url}: the schema {schema!r} holds tables of another program ({', '.join(there[:5])}); it was left as it is",
            hint="give the store a schema of its own: postgresql://…?schema=outlast")  # fmt: skip
    if not there:
        wire.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
    wire.execute(queries["make_version"])
    before = int(wire.execute(queries["version"]).fetchall()[0][0] or 0)
    connections.not_newer(before)
    migrations = files.migrations("outlast.stores.postgres")
    for number, text in enumerate(migrations[before:], before + 1):
        wire.execute(in_schema(schema, text).encode())
        wire.execute(queries["migrated"], {"version": number})
    return before, len(migrations)

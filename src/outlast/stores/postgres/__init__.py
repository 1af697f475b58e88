"""Runs in Postgres: for workers on several machines. Needs the extra `postgres`."""

from outlast.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]

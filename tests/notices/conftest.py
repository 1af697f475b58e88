"""Notices are told from every store: a file in the test's folder, and a schema of its own on a real Postgres server."""

from tests.waits.conftest import new_store, postgres

__all__ = ["new_store", "postgres"]

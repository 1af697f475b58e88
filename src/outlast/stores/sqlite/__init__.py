"""The SQLite store: one file of its own, any number of processes of one machine."""

from outlast.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]

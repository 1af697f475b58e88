"""Fixtures of the crash tests: a real Postgres server for those that ask for it."""

from support.postgres import postgres

__all__ = ["postgres"]

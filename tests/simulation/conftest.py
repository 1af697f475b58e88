"""A real Postgres server for those that ask for it: that one can be made here is what they need to know."""

from support.postgres import postgres

__all__ = ["postgres"]

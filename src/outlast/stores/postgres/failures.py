"""What Postgres says, as our errors: which server, the cause, and what to do; never a password.

No psycopg exception leaves the store. What the server refused inside a transaction wrote nothing (`StoreError`); where the connection was lost
after COMMIT was sent, the outcome is unknown.
"""

from __future__ import annotations

import psycopg
from psycopg import errors

from outlast.errors import CommitUnknown, InvariantViolated, OutlastError, StoreError, UsageError


class Late(Exception):
    """The time of a store call is over; its connection was cut."""


class Full(Exception):
    """Every connection that this process may have was busy until the call's time was over."""


class Standby(Exception):
    """The server that answered is a read-only standby."""


Trouble = psycopg.Error | Late | Full | Standby

# The server will be another one, or the same again, in a moment; nothing was written.
_PASSING = (
    Standby,
    errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow, errors.TooManyConnections, errors.ReadOnlySqlTransaction,
    errors.SerializationFailure, errors.DeadlockDetected, errors.IdleInTransactionSessionTimeout)  # fmt: skip


def lost(error: Trouble) -> bool:
    """Was the connection lost, so that the server's word on what was sent is missing?"""
    if isinstance(error, Late):
        return True
    if isinstance(error, Full | Standby):
        return False
    state = error.sqlstate
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and (state is None or state.startswith(("08", "57P0")))


def passing(error: Trouble) -> bool:
    """May the same succeed a moment later?"""
    return isinstance(error, _PASSING) or (lost(error) and not isinstance(error, Late))


class Speaker:
    """Knows what must not be said: `url` is without the password, `secrets` are taken out of what the server or the driver says."""

    def __init__(self, url: str, secrets: tuple[str, ...]) -> None:
        self.url, self._secrets = url, tuple(s for s in secrets if s)

    def line(self, error: BaseException) -> str:
        diag = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        text = " ".join((diag or str(error)).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text or type(error).__name__

    def error(self, error: Trouble, *, committing: bool = False) -> OutlastError:
        """`committing`: COMMIT was sent, and no answer to it came."""
        what, hint = self._cause(error)
        if committing:
            return CommitUnknown(f"{self.url}: {what}; the commit may stand or not", hint=hint)
        if isinstance(error, errors.IntegrityConstraintViolation):
            return InvariantViolated(f"{self.url}: {what}")
        if isinstance(error, errors.UntranslatableCharacter | errors.CharacterNotInRepertoire):
            return UsageError(f"not a text that can be stored: {what}")
        return StoreError(f"{self.url}: {what}", hint=hint)

    def _cause(self, error: Trouble) -> tuple[str, str]:
        said = self.line(error)
        match error:
            case Late():
                return f"no answer in time ({said})", "look at the server and the network, then try again"
            case Full():
                return said, "give each worker fewer runs at once (--concurrency)"
            case Standby():
                return "the server is a read-only standby", "name the primary, or several hosts: postgresql://USER@HOST1,HOST2/DB"
            case errors.LockNotAvailable() | errors.QueryCanceled():
                return f"waited too long for another transaction ({said})", "pg_locks and pg_stat_activity show who holds what"
            case errors.UndefinedTable() | errors.UndefinedFunction() | errors.UndefinedColumn() | errors.InvalidSchemaName():
                return f"the schema is not whole: {said}", "outlast store migrate"
            case errors.InsufficientPrivilege():
                return said, "let this user read and write the tables of the schema"
            case errors.DiskFull():
                return said, "free some space on the server, then try again"
            case errors.TooManyConnections():
                return said, "fewer workers, a larger max_connections, or pgbouncer in transaction mode"
            case _ if lost(error):
                return f"the connection failed: {said}", "look at the server and the network, then try again"
            case _:
                return f"{type(error).__name__}: {said}", ""

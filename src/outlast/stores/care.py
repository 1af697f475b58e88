"""What looking after a store asks, beside `base.Store`: a run with all its rows, taken out and put in; old runs removed; a run erased; a backup.

Rules
1. A run is carried whole: its journal byte by byte with its digests, its gates, its notices. Its lease stays behind.
2. A run that was put in and is not let go yet has a driver that nobody is (`carried`): no worker takes it.
3. Only finished runs that nobody holds are removed or erased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from outlast.core.gate import GateRow
from outlast.stores.base import Head, JournalRow, Store

CARRIED = "moving:"  # before the name of a run's driver: it was put in, and not let go yet


@dataclass(frozen=True, slots=True)
class KeptNotice:
    """One row of the notices."""

    notice_id: str
    target: str
    gate_id: str
    kind: str
    text: str
    tries: int
    next_try_at: datetime | None
    sent_at: datetime | None
    error: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Whole:
    """A run with all its rows, of one moment. `format`: of its journal, when it was started."""

    head: Head
    format: int
    journal: Sequence[JournalRow]
    gates: Sequence[tuple[GateRow, datetime | None]]
    notices: Sequence[KeptNotice]


class Old(NamedTuple):
    """What `prune` would remove."""

    runs: int
    entries: int


class CareStore(Store, Protocol):
    def migrate(self) -> tuple[int, int]:
        """Bring the schema up to date: (version before, version now)."""
        ...

    def migration_sql(self) -> str:
        """What `migrate` runs in an empty database."""
        ...

    def backup(self, file: Path) -> None:
        """A copy of one moment, made while others work. Raises UsageError where the file is there, or where another program makes backups."""
        ...

    def whole(self, run_id: str) -> Whole: ...

    def put(self, whole: Whole, *, carried: bool = False) -> bool:
        """Put a run in, in one commit; False: a run of that id is there (one that is only carried so far is replaced). What it holds is not judged."""
        ...

    def let_go(self) -> int:
        """Give the carried runs to their drivers; how many."""
        ...

    def old(self, before: datetime, *, keep: Sequence[str] = ()) -> Old:
        """Runs that ended before that instant, in none of the statuses `keep`, and that answer no call of a run that goes on."""
        ...

    def prune(self, before: datetime, *, keep: Sequence[str] = (), limit: int = 200) -> int:
        """Remove up to `limit` of them in one commit, with all their rows; how many."""
        ...

    def erase(self, run_id: str) -> list[str]:
        """Wipe what a finished run and the runs that it started say: bodies, arguments, texts, tags; their SHA-256 stay, and that they existed.

        Gives the ids. Doing it again is harmless. Raises Refused where one of them is not finished, or held.
        """
        ...

    def tidy(self, *, wiped: bool = False) -> str | None:
        """Give back what is no longer used; `wiped`: so that no trace of it is left in the file. What is left to do by hand, or None."""
        ...

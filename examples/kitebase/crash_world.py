"""The world of one case of a crash test: a help desk of its own, and what is to be seen of it afterwards.

outlast crashtest agent --script FILE --deps crash_world:desk --observe crash_world:seen
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from helpdesk import HelpDesk

FILE = "helpdesk.db"


def desk(folder: Path) -> HelpDesk:
    """What the tools get as ctx.deps in this folder."""
    return HelpDesk(folder / FILE)


def seen(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that customers and colleagues got, oldest first, without the time of day."""
    with closing(sqlite3.connect(folder / FILE)) as db:
        return {
            "replies": db.execute("SELECT ticket_id, message FROM replies ORDER BY id").fetchall(),
            "comments": db.execute("SELECT ticket_id, text FROM comments ORDER BY id").fetchall(),
        }

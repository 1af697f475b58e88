"""The help desk: the other system. It knows nothing of agents, runs or checkpoints.

It stands for the SaaS that a support team already pays for, so it has a database of its own (`helpdesk.db`) and an API of
its own: tickets, help articles, replies, internal comments. What it does about a repeated request is the whole point:

- a request with an idempotency key that it has seen is answered with the first reply, marked `"duplicate": true`, and
  nothing is sent;
- a request without a key is a new reply, every time;
- `reference` is a free text field stored with the reply. It can be searched for, and the desk never looks at it.

`HelpDesk(path)` does no I/O; the file is made, with its tickets and articles, on first use. Every call opens its own
connection, so one object serves any number of threads and processes.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUSY_S = 30.0  # two processes may answer at once; each write takes milliseconds

SCHEMA = """
CREATE TABLE tickets (id TEXT PRIMARY KEY, title TEXT NOT NULL, customer TEXT NOT NULL, status TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE articles (slug TEXT NOT NULL, section INTEGER NOT NULL, text TEXT NOT NULL, PRIMARY KEY (slug, section));
CREATE TABLE replies (
    id INTEGER PRIMARY KEY,
    ticket_id TEXT NOT NULL REFERENCES tickets (id),
    message TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,  -- NULL: the caller sent no key, and NULLs are never equal
    reference TEXT,
    sent_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);
CREATE TABLE comments (
    id INTEGER PRIMARY KEY,
    ticket_id TEXT NOT NULL REFERENCES tickets (id),
    text TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    written_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
);
"""

TICKETS = [
    (
        "KITE-142",
        "Customer locked out after SSO change",
        "Northwind Studio",
        "open",
        (
            "We moved from Okta to Entra ID this morning and now nobody on our team can sign in. "
            "The page says 'account not linked'. We have a deadline at five."
        ),
    ),
    (
        "KITE-157",
        "CSV export misses columns",
        "Halden Clinic",
        "open",
        "Since last week the CSV export of our appointments has lost the custom columns. The screen still shows them.",
    ),
    (
        "KITE-163",
        "Charged twice in October",
        "Brisk Couriers",
        "open",
        "Our card statement has two payments for the October invoice, same amount, one day apart.",
    ),
    (
        "KITE-098",
        "How do I invite a guest?",
        "Tarn & Vale Architects",
        "closed",
        "We want to show one board to a client without giving them a seat.",
    ),
]

ARTICLES = {
    "account-recovery": [
        "Forgot your password? Choose 'Reset password' on the sign-in page. The link is good for one hour.",
        (
            "Locked out of your account after an SSO change? Your old identity is still linked. An admin opens "
            "/recover, confirms by email, and chooses 'Relink identity provider'. Everyone can then sign in."
        ),
        "Lost your second factor? Use one of your backup codes, or ask an admin to reset it.",
    ],
    "sso-setup": [
        "Kitebase supports SAML and OpenID Connect. Only workspace owners can set up single sign-on.",
        "Before you change your SSO provider, keep one admin with a password: that account still gets in.",
    ],
    "exports": [
        "Boards export to CSV, PDF and JSON. Large exports arrive by email.",
        (
            "A CSV export has the columns of the view it was started from. Custom columns that are hidden in that view are "
            "left out: choose 'All columns' in the export dialog."
        ),
    ],
    "billing": [
        "Invoices are made on the first of the month and charged to the card on file.",
        "A second charge is usually a card authorisation that drops off within five days. If it stays, we refund it.",
    ],
    "guests": ["Guests see the boards that they are invited to, and need no seat. Invite them from 'Share'."],
}

COMMON = frozenset(
    "a an and are as at by do for from has have how i in is it its my of on one or our s "
    "since that the then they to up was we with your you".split()
)


class UnknownTicket(LookupError):
    """There is no such ticket; nothing was written."""


class HelpDesk:
    """The help desk's API, over one SQLite file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def get_ticket(self, ticket_id: str) -> dict[str, Any]:
        """One ticket. Raises UnknownTicket."""
        with self._transaction() as db:
            return _ticket(db, ticket_id)

    def search_help(self, query: str, *, limit: int = 2) -> str:
        """The passages of the help articles that fit best, best first, one a line as `[article#section] text`.

        A word counts the more the fewer passages have it (inverse document frequency); very common words do not count.
        """
        with self._transaction() as db:
            passages = db.execute("SELECT slug, section, text FROM articles ORDER BY slug, section").fetchall()
        words = [_words(f"{slug} {text}") for slug, _, text in passages]
        weight = {word: math.log(1 + len(words) / sum(word in has for has in words)) for has in words for word in has}
        asked = _words(query)
        scored = [(sum(weight[word] for word in asked & has), n) for n, has in enumerate(words)]
        best = sorted((s for s in scored if s[0] > 0), key=lambda s: (-s[0], s[1]))[:limit]
        return "\n".join("[{}#{}] {}".format(*passages[n]) for _, n in best) or "No help article fits."

    def send_reply(self, ticket_id: str, message: str, key: str | None = None, *, reference: str | None = None) -> dict[str, Any]:
        """Send the customer a reply, unless `key` was seen before: then that first reply comes back, with `"duplicate": true`.

        Raises UnknownTicket; nothing is sent then.
        """
        with self._transaction() as db:
            customer = _ticket(db, ticket_id)["customer"]
            seen = db.execute("SELECT id FROM replies WHERE idempotency_key = ?", (key,)).fetchone()
            if seen is None:
                insert = "INSERT INTO replies (ticket_id, message, idempotency_key, reference) VALUES (?, ?, ?, ?)"
                reply_id = db.execute(insert, (ticket_id, message, key, reference)).lastrowid
        if seen is not None:
            _say(f"key {key} seen before, returned reply #{seen[0]}, sent nothing")
            return {"reply_id": seen[0], "status": "sent", "duplicate": True}
        told = f"key {key}" if key else f"reference {reference}" if reference else "no key"
        _say(f"sent reply #{reply_id} to {customer} ({told})")
        return {"reply_id": reply_id, "status": "sent"}

    def find_reply(self, ticket_id: str, reference: str) -> dict[str, Any] | None:
        """The first reply on this ticket that carries this reference, or None."""
        with self._transaction() as db:
            row = db.execute("SELECT id FROM replies WHERE ticket_id = ? AND reference = ? ORDER BY id", (ticket_id, reference)).fetchone()
        return {"reply_id": row[0], "status": "sent"} if row else None

    def last_reply(self, ticket_id: str) -> dict[str, Any] | None:
        """The newest reply on this ticket, or None."""
        with self._transaction() as db:
            row = db.execute("SELECT id FROM replies WHERE ticket_id = ? ORDER BY id DESC", (ticket_id,)).fetchone()
        return {"reply_id": row[0], "status": "sent"} if row else None

    def add_comment(self, ticket_id: str, text: str, key: str | None = None) -> dict[str, Any]:
        """Write a comment that only colleagues see; a repeated key gives the first one. Raises UnknownTicket."""
        with self._transaction() as db:
            _ticket(db, ticket_id)
            seen = db.execute("SELECT id FROM comments WHERE idempotency_key = ?", (key,)).fetchone()
            if seen is not None:
                return {"comment_id": seen[0], "duplicate": True}
            insert = "INSERT INTO comments (ticket_id, text, idempotency_key) VALUES (?, ?, ?)"
            return {"comment_id": db.execute(insert, (ticket_id, text, key)).lastrowid}

    def close_ticket(self, ticket_id: str, comment: str, key: str | None = None) -> dict[str, Any]:
        """Close a ticket with a comment that only colleagues see; a repeated key closes and comments once. Raises UnknownTicket."""
        written = self.add_comment(ticket_id, comment, key)
        with self._transaction() as db:
            db.execute("UPDATE tickets SET status = 'closed' WHERE id = ?", (ticket_id,))
        return {"ticket_id": ticket_id, "status": "closed", "comment_id": written["comment_id"]}

    def comments_on(self, ticket_id: str) -> list[str]:
        """What colleagues read on this ticket, oldest first."""
        with self._transaction() as db:
            rows = db.execute("SELECT text FROM comments WHERE ticket_id = ? ORDER BY id", (ticket_id,)).fetchall()
        return [text for (text,) in rows]

    def replies_to(self, ticket_id: str) -> int:
        """How many replies the customer got on this ticket."""
        with self._transaction() as db:
            count: int = db.execute("SELECT count(*) FROM replies WHERE ticket_id = ?", (ticket_id,)).fetchone()[0]
        return count

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            db.execute("BEGIN IMMEDIATE")  # reads too: looking for a key and sending must be one step
            if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'tickets'").fetchone():
                _fill(db)
            yield db
            db.execute("COMMIT")
        finally:
            db.close()  # an open transaction is rolled back


def _fill(db: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";\n"):
        db.execute(statement)
    db.executemany("INSERT INTO tickets (id, title, customer, status, body) VALUES (?, ?, ?, ?, ?)", TICKETS)
    rows = [(slug, n, text) for slug, sections in ARTICLES.items() for n, text in enumerate(sections, start=1)]
    db.executemany("INSERT INTO articles (slug, section, text) VALUES (?, ?, ?)", rows)


def _ticket(db: sqlite3.Connection, ticket_id: str) -> dict[str, Any]:
    row = db.execute("SELECT id, title, customer, status, body FROM tickets WHERE id = ?", (ticket_id,)).fetchone()
    if row is None:
        raise UnknownTicket(f"the help desk has no ticket {ticket_id}")
    return dict(zip(("id", "title", "customer", "status", "body"), row, strict=True))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower())) - COMMON


def _say(what: str) -> None:
    print(f"  help desk: {what}", flush=True)  # flushed: the caller may be killed at any moment

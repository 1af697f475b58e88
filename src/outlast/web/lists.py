"""The list of runs as its address says it: filters, the page after a run, and the command for the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outlast.web import text
from outlast.web.site import STATUS_WORDS, since_of

PAGE = 50  # runs
STATUSES = ("running", "waiting", "waiting_for_verification", "done", "failed", "cancelled")  # one filter each
KEYS = ("q", "status", "agent", "tag", "since", "stuck", "before")


@dataclass(frozen=True)
class Listing:
    """`given`: what the address says, "" where it says nothing. `problem`: what of it makes no sense, and was left out.

    `where`: what `Reader.page` takes. `counted`: what `Reader.counts` takes, None where no index counts them.
    """

    given: Mapping[str, str]
    problem: str
    where: Mapping[str, Any]
    counted: Mapping[str, Any] | None

    @property
    def kept(self) -> dict[str, str]:
        """The filters, without the page."""
        return {k: v for k, v in self.given.items() if k != "before"}

    def command(self) -> str:
        out = "outlast runs"
        for key, flag in (("status", "--status"), ("agent", "--agent"), ("tag", "--tag"), ("since", "--since"), ("before", "--before")):
            if self.given[key] and not (key == "status" and self.given[key] == "waiting"):
                out += f" {flag} {shlex.quote(self.given[key])}"
        if self.given["status"] == "waiting":
            out += " --unfinished"
        return out + (" --stuck" if self.given["stuck"] else "")


def listing(params: Mapping[str, str], now: datetime) -> Listing:
    given = {k: params.get(k, "") for k in KEYS}
    since = since_of(given["since"], now)
    tags = text.tags_of([given["tag"]]) if given["tag"] else {}
    problem = "Since: write 30m, 4h, 7d, a date or an instant with its zone." if given["since"] and since is None else ""
    problem = "Tag: write it as KEY=VALUE." if tags is None else problem
    if given["status"] and given["status"] not in (*STATUSES, *STATUS_WORDS):
        problem, given["status"] = "There is no such status.", ""
    agent, words = given["agent"] or None, given["q"].strip()[:200] or None
    where = {
        "agent": agent, "tags": tags or {}, "since": since, "text": words, "stuck": bool(given["stuck"]), "before": given["before"] or None,
        "limit": PAGE} | ({"waiting": True} if given["status"] == "waiting" else {"status": given["status"] or None})  # fmt: skip
    return Listing(given, problem, where, None if tags or words or given["stuck"] else {"agent": agent, "since": since})

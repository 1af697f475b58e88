"""`watch`, `tail`: what happens, as it happens. Both read the store, from any process; nothing is changed.

`watch` follows one run until it is over: drawn anew on a terminal, a line a checkpoint elsewhere. `tail` prints a document for every
checkpoint and every change of status of any run, until it is stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import render, words
from outlast.cli.options import Options, command
from outlast.cli.target import opened

if TYPE_CHECKING:
    from outlast import Outlast, RunHead

WAIT_S = 1.0  # the longest wait between two looks: the safety net under every wake-up
NEWEST = 200  # runs that are looked at even where they are over already: begun and ended between two looks
MOST = 1000  # unfinished runs that `tail` follows, the newest


def register(cli: typer.Typer) -> None:
    command(cli, "watch")(watch)
    command(cli, "tail")(tail)


# ---- one run ------------------------------------------------------------------------------------------------------------------


def watch(options: Options, *, run_id: Annotated[str, typer.Argument(metavar="RUN")]) -> int:
    """Follow a run until it is over. It is only watched: a worker, or `outlast resume`, drives it."""
    with opened(options, only_reads=True, run_id=run_id) as app:
        if options.json or not render.on_terminal():
            watch_lines(app, run_id, options)
        else:
            watch_live(app, run_id, options)
    return 0


def changes(app: Outlast, run_id: str) -> Iterator[tuple[RunHead, bool]]:
    """The run's head, and whether it changed: at once, then when something was committed or a second has passed, until it is over."""
    seen: int | None = None
    last: tuple[Any, ...] | None = None
    while True:
        head = app.head(run_id)
        now = (head.status, head.reason, head.seq, head.updated_at, head.lease_owner)
        yield head, now != last
        if head.finished:
            return
        last = now
        seen = app.reader.wait_for_change(seen, WAIT_S)


def watch_lines(app: Outlast, run_id: str, options: Options) -> None:
    printed, told = 0, None
    for head, changed in changes(app, run_id):
        if render.unread():
            return
        if not changed:
            continue
        if head.seq > printed:
            for checkpoint in app.checkpoints(run_id, after=printed):
                printed = checkpoint.seq
                if options.json:
                    render.document(checkpoint.to_dict())
                else:
                    render.say(render.checkpoint_line(checkpoint.seq, checkpoint.status, checkpoint.message))
        if (head.status, head.reason) != told:
            told = (head.status, head.reason)
            if options.json:
                render.document(head.to_dict())
            else:
                render.say(words.head_line(head))


def watch_live(app: Outlast, run_id: str, options: Options) -> None:
    lines: list[str] = []
    printed = 0
    with render.live() as draw:
        for head, _ in changes(app, run_id):
            if head.seq > printed:
                for checkpoint in app.checkpoints(run_id, after=printed):
                    printed = checkpoint.seq
                    lines.append(render.checkpoint_line(checkpoint.seq, checkpoint.status, checkpoint.message))
            draw([summary(head), ""], lines, footer(app, head, options))


def summary(head: RunHead) -> str:
    """Who, where, for how long, and what it used so far."""
    end = head.updated_at if head.finished else datetime.now(UTC)
    took = str(end - head.created_at).partition(".")[0]
    cost = f", {head.cost_usd:f} USD" if head.cost_usd is not None else ""
    return f"{head.run_id}  {head.agent}  {head.status}  {took}  {head.input_tokens} tokens in, {head.output_tokens} out{cost}"


def footer(app: Outlast, head: RunHead, options: Options) -> list[str]:
    if not head.waiting:
        driven = f"driven by {head.lease_owner}" if head.lease_owner else ""
        return ["", head.reason or driven] if head.reason or driven else []
    run = app.get(head.run_id)
    return ["", head.reason or "", *words.go_on(words.commands(run, run.gates, options))]


# ---- all runs -----------------------------------------------------------------------------------------------------------------


def tail(options: Options) -> int:
    """Print a JSON document for each checkpoint and each change of status of any run, from now on, until Ctrl-C."""
    with opened(options, only_reads=True) as app:
        follow = Tail(app)
        seen = app.reader.wait_for_change(None, 0.0)
        follow.look()
        render.say("following all runs; Ctrl-C ends", err=True)
        while not render.unread():  # `tail | head -1` ends
            seen = app.reader.wait_for_change(seen, WAIT_S)
            for document in follow.look():
                render.document(document)
    return 0


class Tail:
    """What changed since the last look, oldest first within each run. The first look is where it begins: it tells of nothing."""

    def __init__(self, app: Outlast) -> None:
        self.app = app
        self.known: dict[str, RunHead] | None = None

    def look(self) -> list[dict[str, Any]]:
        heads = {head.run_id: head for head in (*self.app.runs(limit=NEWEST), *self.app.runs(unfinished=True, limit=MOST))}
        if self.known is None:
            self.known = heads
            return []
        for run_id in self.known.keys() - heads.keys():  # over since, or no longer among the newest
            if not self.known[run_id].finished:
                heads[run_id] = self.app.head(run_id)
        out: list[dict[str, Any]] = []
        for head in sorted(heads.values(), key=lambda head: head.updated_at):
            before = self.known.get(head.run_id)
            seq = before.seq if before is not None else 0
            if head.seq > seq:
                out += [checkpoint.to_dict() for checkpoint in self.app.checkpoints(head.run_id, after=seq)]
            if before is None or (before.status, before.reason) != (head.status, head.reason):
                out.append(head.to_dict())
        self.known = heads
        return out

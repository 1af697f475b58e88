"""Stores of both kinds for the tests of looking after them, and some runs of every kind in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outlast.core import run as r
from outlast.settings import parse_store
from outlast.stores.base import NewNotice
from outlast.stores.care import CareStore
from outlast.stores.postgres import PostgresStore
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import answers, begin, calls, gate, new, send
from support.postgres import Server

START = datetime(2026, 11, 27, 15, 0, 0, 123000, tzinfo=UTC)
CANARY = "canary-7f3a9c-Zoë"


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def sqlite(path: Path, clock: Callable[[], datetime]) -> SQLiteStore:
    return SQLiteStore(path, clock=clock)


def postgres_store(server: Server, clock: Callable[[], datetime]) -> PostgresStore:
    parsed = parse_store(server.url(schema=server.fresh_schema()))
    store = PostgresStore(parsed.url, schema=parsed.schema, clock=clock, lease_clock=clock)
    store.migrate()
    return store


def journals(store: CareStore) -> dict[str, list[Any]]:
    """Every byte of every journal."""
    return {run_id: list(store.journal(run_id)) for run_id, _, _ in store.ends()}


def ended(store: CareStore, run_id: str, *, status: str = "done", text: str = "hi", **more: Any) -> None:
    begin(store, run_id, **more).save(answers(text), r.RunEnded(status, None if status == "done" else text), status=status, release=True)  # type: ignore[arg-type]  # a status of the end


def a_bit_of_everything(store: CareStore, suffix: str = "") -> list[str]:
    """Runs that wait in each way, that are over in each way, and that are due."""
    ended(store, f"done{suffix}", text='Zoë \u2028 "quoted" \\ \U0001f600')
    ended(store, f"failed{suffix}", status="failed", tags={"tenant": "northwind"})
    begin(store, f"asks{suffix}").save(calls("c1"), gate(), status="waiting_for_approval", release=True, reason="a refund waits")
    notice = NewNotice("n1", "approval:c1", "opened", "ntfy", f"a refund of {CANARY}")
    driving = begin(store, f"asks-2{suffix}", tags={"n": "2"})
    driving.put(replace(driving.batch(calls("c1"), gate(role=None, deadline=r.iso(START + timedelta(days=3))), status="waiting_for_approval",
                                      release=True), notices=[notice]))  # fmt: skip
    begin(store, f"event{suffix}").release("waiting_for_event", reason="waits for shipped")
    begin(store, f"timer{suffix}").release("waiting_for_timer", wake_at=START + timedelta(days=1))
    begin(store, f"parked{suffix}").release("waiting_for_code", needs="tool:refund")
    store.start(new(f"due{suffix}", agent="billing"))
    send(store, f"event{suffix}", "a text that came meanwhile", "m1")
    store.release(store.claim_run(f"asks{suffix}", "host/boot/ns/1/1"))
    return [run_id for run_id, _, _ in store.ends()]

"""What pages read, on every store: the same story told to SQLite and to Postgres gives the same pages."""

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outlast.core import run as r
from outlast.core.gate import projection
from outlast.errors import RunNotFound
from outlast.settings import parse_store
from outlast.stores.base import Outside, Tail
from outlast.stores.pages import PageFilter, PageStore
from outlast.stores.postgres import PostgresStore
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import ME, Driving, answers, asks, begin, calls, gate, new
from support.postgres import Server

HOUR = timedelta(hours=1)
START = datetime(2026, 11, 27, 15, 0, 0, 123000, tzinfo=UTC)


class Story:
    """Some runs of each kind, an hour apart."""

    def __init__(self, open_: Callable[[Callable[[], datetime]], Any]) -> None:
        self.now = START
        self.store: PageStore = open_(lambda: self.now)
        self.first = self.now
        for n in range(5):
            driving = begin(self.store, f"done-{n}", agent="billing" if n % 2 else "support", tags={"n": str(n)})
            meta = {"usage": {"input_tokens": 10 * n, "output_tokens": n}, "latency_ms": 7 + n}
            driving.save(replace(answers(), meta=meta), r.RunEnded("done"), status="done", release=True, cost_usd=f"0.{n}" if n else None)
            self.now += HOUR
        for n in range(3):
            driving = begin(self.store, f"asks-{n}")
            deadline = r.iso(self.now + timedelta(days=2 + n)) if n else None
            driving.save(calls("c1"), gate(deadline=deadline), status="waiting_for_approval", release=True)
            self.now += HOUR
        self.store.start(replace(new("texts"), entries=[r.RunStarted("support"), asks("Where is my PARCEL? " + "x" * 500)]))
        self.store.start(
            replace(
                new("blocks"),
                entries=[r.RunStarted("support"), r.MessageAdded({"role": "user", "content": [{"type": "text", "text": "a parcel"}]})],
            )
        )
        self.store.outside("asks-1", self.decide)
        driving = Driving(self.store, self.store.claim_run("asks-1", ME))
        driving.save(r.CallFinished("c1", "no", is_error=True, how="refused", meta={"ms": 12}))

    @staticmethod
    def decide(tail: Tail) -> Outside:
        entries = [r.stored(r.GateDecided("approval:c1", "rejected", "no", by="priya", entry_id="d1", at=tail.now))]
        return Outside(entries, status="running", gates=projection(tail.run, entries)[1])


@pytest.fixture(scope="module")
def both(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Story, Story]:
    def on_postgres(clock: Callable[[], datetime]) -> PostgresStore:
        parsed = parse_store(postgres.url(schema=postgres.fresh_schema()))
        store = PostgresStore(parsed.url, schema=parsed.schema, clock=clock, lease_clock=clock)
        store.migrate()
        return store

    return Story(lambda clock: SQLiteStore(tmp_path_factory.mktemp("pages") / "outlast.db", clock=clock)), Story(on_postgres)


FILTERS = [
    PageFilter(), PageFilter(limit=3), PageFilter(limit=3, before="asks-1"), PageFilter(status="done"), PageFilter(agent="billing", limit=1),
    PageFilter(waiting=True), PageFilter(unfinished=True), PageFilter(stuck=True), PageFilter(tags={"n": "3"}), PageFilter(text="parcel"),
    PageFilter(text="asks"), PageFilter(text="asks", waiting=True), PageFilter(text="done-", limit=2), PageFilter(text="o", limit=2, before="asks-2"),
    PageFilter(since=START + 2 * HOUR), PageFilter(status="done", agent="support"), PageFilter(text="%"), PageFilter(text="_"),
    PageFilter(waiting=True, agent="support"), PageFilter(unfinished=True, agent="support", limit=1), PageFilter(text="parcel", agent="support"),
    PageFilter(text="one", tags={"n": "1"}), PageFilter(tags={"n": "1"}, status="done"), PageFilter(tags={"n": "3"}, limit=3),
    PageFilter(stuck=True, agent="support"), PageFilter(agent="support", limit=3, before="asks-2")]  # fmt: skip


@pytest.mark.parametrize(
    "where", FILTERS, ids=lambda where: " ".join(f"{k}={v}" for k, v in asdict(where).items() if v and v != 50) or "all"
)
def test_pages(both: tuple[Story, Story], where: PageFilter) -> None:
    shown = [
        {
            "runs": [(x.head.run_id, x.head.status, x.head.agent, x.head.held, x.first, x.gate) for x in page.runs],
            "next": page.next,
            "scanned": page.scanned,
        }
        for page in (story.store.page(where, scan=4 if where.limit == 2 else 5000) for story in both)
    ]
    assert shown[0] == shown[1]
    assert shown[0]["runs"] or where.text in ("%", "_")


def test_figures(both: tuple[Story, Story]) -> None:
    sqlite, postgres = (story.store for story in both)
    assert sqlite.agents() == postgres.agents() == ["billing", "support"] and postgres.agents(limit=1) == ["billing"]
    for where in (
        PageFilter(),
        PageFilter(agent="billing"),
        PageFilter(agent="billing", since=START + HOUR),
        PageFilter(since=START + HOUR),
    ):
        assert sqlite.counts(where) == postgres.counts(where)
    assert postgres.counts(PageFilter(), most=2)["done"] == 3 and postgres.counts(PageFilter())["done"] == 5
    for more in ({}, {"agent": "support"}, {"offset": timedelta(hours=9)}, {"scan": 3}):
        one, two = (store.statistics(since=START - HOUR, **more) for store in (sqlite, postgres))  # type: ignore[arg-type]  # a table of arguments
        assert sorted(one.ended) == sorted(two.ended) and sorted(one.steps, key=str) == sorted(two.steps, key=str)
        assert [row[:5] + row[6:] for row in one.spent] == [row[:5] + row[6:] for row in two.spent]
        assert [row[5] for row in one.spent] == pytest.approx([row[5] for row in two.spent])
    assert [store.statistics(since=START - HOUR, scan=3).summed for store in (sqlite, postgres)] == [3, 3]
    assert [store.statistics(since=START - HOUR, agent="billing", scan=3).summed for store in (sqlite, postgres)] == [None, None]
    one, two = (store.statistics(since=START - HOUR) for store in (sqlite, postgres))
    assert two.ended and two.spent and ("refund", 12) in two.steps


def test_pages_in_turn_show_every_run_once(both: tuple[Story, Story]) -> None:
    for where in (
        PageFilter(limit=2),
        PageFilter(agent="support", limit=2),
        PageFilter(text="s-", limit=2),
        PageFilter(text="asks", limit=1),
        PageFilter(unfinished=True, limit=1),
    ):
        for story in both:
            seen, before = [], None
            while True:
                page = story.store.page(replace(where, before=before), scan=3)
                seen += [x.head.run_id for x in page.runs]
                if (before := page.next) is None:
                    break
            known = [x.head.run_id for x in story.store.page(replace(where, limit=50)).runs]
            assert set(seen) == set(known) and (where.text or len(seen) == len(known)), where


def test_what_tells_whether_a_page_is_still_true(both: tuple[Story, Story]) -> None:
    glances = [story.store.glance(["asks-0", "done-1", "nobody"]) for story in both]
    assert glances[0] == glances[1] and set(glances[0]) == {"asks-0", "done-1"}
    cards = [[row[1:] for row in story.store.glance_inbox()] for story in both]
    assert cards[0] == cards[1] and len(cards[0]) == 2
    for story in both:
        before = story.store.commits()
        assert story.store.commits() == before
        story.store.start(replace(new("later"), entries=[r.RunStarted("support"), asks("x")]))
        assert story.store.commits() != before


def test_gates_as_pages_show_them(both: tuple[Story, Story]) -> None:
    decided = [story.store.decided(since=START) for story in both]
    assert [[(head.run_id, row.outcome, row.decided_by, told) for head, row, told in found] for found in decided] == [
        [("asks-1", "rejected", "priya", None)]] * 2  # fmt: skip
    assert [story.store.decided(since=START, agent="billing") for story in both] == [[], []]
    entries = [[row.kind for row in story.store.gate_entries("asks-1", 2)] for story in both]
    assert entries == [["GateOpened", "GateDecided"]] * 2
    for story in both:
        with pytest.raises(RunNotFound):
            story.store.gate_entries("nobody", 1)

"""One story for every driver: whoever takes the steps, the journal says the same, entry by entry, and each effect happens once.

Scenarios have the same names for all of them; what is compared with is the journal that our own worker leaves. Times, fences and owners are
left out of the comparison. Everything else is real: worker processes, their deaths, the engines' servers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.drivers import KINDS, Driver, driver
from outlast.core import codec
from support.postgres import Server
from support.waiting import until

LONG = os.environ.get("OUTLAST_TESTS") == "long"
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")
ASIDE = {"owner", "ms", "latency_ms", "attempt", "taken_over", "driver", "library"}

Scenario = Callable[[Driver, str], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(f: Scenario) -> Scenario:
    SCENARIOS[f.__name__] = f
    return f


# ---- the scenarios ----------------------------------------------------------------------------------------------------------------


@scenario
def kill_after_the_effect(d: Driver, run_id: str) -> None:
    """The Kitebase story in three processes: one asks and waits, a person decides, one dies after sending, one finds that out."""
    d.worker()
    d.start("story", run_id)
    d.reaches(run_id, "waiting_for_approval")
    worker = d.worker()
    d.world.kill_at("tool.after:reply_to_customer")
    d.app.decide(run_id, approved=True, decided_by="priya")
    d.died(worker)
    d.worker()
    d.reaches(run_id, "done")
    effects(d, run_id, reply=1, models=3)


@scenario
def kill_after_our_record(d: Driver, run_id: str) -> None:
    """The result is saved, and the engine has not heard of it."""
    worker = d.worker()
    d.world.kill_at("tool.after:get_ticket", "commit.after")
    d.start("story", run_id)
    d.died(worker)
    d.worker()
    approved(d, run_id)
    effects(d, run_id, reply=1, models=3, get_ticket=1)


@scenario
def kill_while_waiting(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("story", run_id)
    d.reaches(run_id, "waiting_for_approval")
    d.kill()
    d.app.decide(run_id, approved=False, decided_by="priya", note="too curt")
    d.worker()
    d.reaches(run_id, "done")
    effects(d, run_id, reply=0, models=3)


@scenario
def deadline_passes(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("soon", run_id)
    d.reaches(run_id, "done")
    effects(d, run_id, reply=0, models=2)
    assert d.app.get(run_id).gates[0].outcome == "expired"


@scenario
def decide_before_the_wait_is_reached(d: Driver, run_id: str) -> None:
    """The gate is decided while the step that asked for it still runs: a call beside it is slow."""
    d.worker()
    d.start("batch", run_id)
    until(d.app, lambda: d.world.inside(run_id) and any(row.kind == "CallFinished" for row in d.app.journal(run_id)), what=d.logs())
    d.app.decide(run_id, approved=True, decided_by="priya")
    until(d.app, lambda: count(d, "reply", run_id) == 1, what=d.logs())
    d.world.let_go(run_id)
    d.reaches(run_id, "done")
    effects(d, run_id, reply=1, held=1, get_ticket=1, models=2)


@scenario
def batch_with_one_gated_call(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("batch", run_id)
    until(d.app, lambda: any(row.kind == "CallFinished" for row in d.app.journal(run_id)), what=d.logs())  # calls run side by side
    d.world.let_go(run_id)
    approved(d, run_id)
    effects(d, run_id, reply=1, held=1, get_ticket=1, models=2)


@scenario
def duplicate_start(d: Driver, run_id: str) -> None:
    d.worker()
    threads = [threading.Thread(target=d.start, args=("story", run_id)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    d.reaches(run_id, "waiting_for_approval")
    d.start("story", run_id)
    approved(d, run_id)
    effects(d, run_id, reply=1, models=3)


@scenario
def cancel_while_waiting(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("story", run_id)
    d.reaches(run_id, "waiting_for_approval")
    d.app.cancel(run_id, by="priya")
    d.reaches(run_id, "cancelled")
    effects(d, run_id, reply=0, models=2)


@scenario
def cancel_while_a_tool_runs(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("hold", run_id)
    until(d.app, lambda: d.world.inside(run_id), what=d.logs())
    d.app.cancel(run_id, by="priya")
    d.reaches(run_id, "cancelled")
    d.world.let_go(run_id)
    until(d.app, lambda: any(row.kind == "LateResult" for row in d.app.journal(run_id)), what=d.logs())
    effects(d, run_id, models=1)


@scenario
def retry_after_429(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("busy", run_id)
    d.reaches(run_id, "done")
    effects(d, run_id, models=2, get_ticket=1)
    assert [row.kind for row in d.app.journal(run_id)].count("ModelFailed") == 1


@scenario
def code_changed_while_a_run_waits(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("story", run_id)
    d.reaches(run_id, "waiting_for_approval")
    d.kill()
    d.version = "2"
    d.worker()
    approved(d, run_id)
    effects(d, run_id, reply=1, models=3)
    d.kill()
    d.version = "1"


@scenario
def server_and_worker_killed_together(d: Driver, run_id: str) -> None:
    d.worker()
    d.start("story", run_id)
    d.reaches(run_id, "waiting_for_approval")
    d.kill()
    d.kill_server()
    d.up()
    d.worker()
    approved(d, run_id)
    effects(d, run_id, reply=1, models=3)


@scenario
def stopped_past_its_time_then_continued(d: Driver, run_id: str) -> None:
    """A worker hangs in a tool for longer than its lease; where another one goes on, what the first does afterwards changes nothing."""
    first = d.worker()
    d.start("hold", run_id)
    until(d.app, lambda: d.world.inside(run_id), what=d.logs())
    first.send_signal(signal.SIGSTOP)
    head = d.app.head(run_id)
    try:
        if d.takes_over_a_stopped_worker:
            d.world.let_go(run_id)
            d.another()
            d.reaches(run_id, "done")
        else:
            until(d.app, lambda: not d.app.head(run_id).to_dict()["lease_owner"] or over(d, run_id), what="the lease is over")
    finally:
        first.send_signal(signal.SIGCONT)
    d.world.let_go(run_id)
    d.reaches(run_id, "done")
    assert head.lease_owner is not None
    effects(d, run_id, held=1, models=2)
    d.kill()


def over(d: Driver, run_id: str) -> bool:
    return run_id in d.app._store.due(agents=["kitebase-support"], driver=d.app._store.head(run_id).driver)


def approved(d: Driver, run_id: str) -> None:
    d.reaches(run_id, "waiting_for_approval")
    d.app.decide(run_id, approved=True, decided_by="priya")
    d.reaches(run_id, "done")


def count(d: Driver, what: str, run_id: str) -> int:
    return sum(line["key"].startswith(f"{run_id}:") for line in d.world.ledger.lines(what))


def effects(d: Driver, run_id: str, *, models: int, **expected: int) -> None:
    """What happened outside, and how often the model was asked: never twice for one turn."""
    asked = [line["key"] for line in d.world.ledger.lines("model") if line["key"].startswith(f"{run_id}:")]
    assert sorted(asked) == [f"{run_id}:{n}" for n in range(models)], asked
    for what, times in expected.items():
        assert count(d, what, run_id) == times, (what, d.world.ledger.lines(what))


# ---- comparing --------------------------------------------------------------------------------------------------------------------


def told(d: Driver, run_id: str) -> list[tuple[str, int, str | None, Any]]:
    """The journal without times, fences and owners."""
    rows = [(row.kind, row.seq, row.by, plain(codec.decode(row.body))) for row in d.app.journal(run_id)]
    for row in rows:
        if row[0] == "LateResult":  # whether the call or the holder was late is a matter of moments
            del row[3]["why"]
    return rows


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ASIDE}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return INSTANT.sub("<instant>", value) if isinstance(value, str) else value


# Which side of its record a death falls on differs: an engine's step gives its lease back with it, our own worker goes on. Whether the journal
# notes a death, and whether a begun call is begun again, follows from that.
DEATHS = {
    "kill_after_our_record": {"ModelCallLost"},
    "server_and_worker_killed_together": set[str](),
    "stopped_past_its_time_then_continued": {"CallStarted", "CallFinished", "WorkerDied", "ModelCallLost", "LateResult"},
}


def compared(rows: list[Any], name: str) -> list[Any]:
    return [row for row in rows if row[0] not in DEATHS.get(name, set())]


# ---- running ----------------------------------------------------------------------------------------------------------------------

FULL = list(SCENARIOS)
KILLS = ["kill_after_the_effect", "kill_after_our_record", "kill_while_waiting", "stopped_past_its_time_then_continued"]
QUICK = {
    "dbos": FULL,
    "dbos-postgres": ["kill_after_the_effect", "deadline_passes", "cancel_while_a_tool_runs", "batch_with_one_gated_call"],
    "restate": FULL,
    "inngest": FULL,
    "temporal": ["deadline_passes", "decide_before_the_wait_is_reached", "cancel_while_waiting", "cancel_while_a_tool_runs", "retry_after_429",
                 "duplicate_start", "batch_with_one_gated_call"],
    "temporal-server": FULL,
}  # fmt: skip
# Temporal's test server keeps nothing on disk, and goes on waiting for a worker that was killed: deaths are for the real one.
NOT = {("temporal", name) for name in (*KILLS, "code_changed_while_a_run_waits", "server_and_worker_killed_together")}
ENGINES = [name for name in KINDS if name != "built-in" and (name != "temporal-server" or "OUTLAST_TEMPORAL_SERVER" in os.environ)]
PAIRS = [(engine, name) for engine in ENGINES for name in FULL if (engine, name) not in NOT and (LONG or name in QUICK[engine])]


@pytest.fixture(scope="module")
def drivers(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Driver]]:
    """Each driver is made once, when its first scenario comes, and its worker lives until one kills it."""
    import contextlib

    with contextlib.ExitStack() as stack:
        made: dict[str, Driver] = {}

        def get(name: str) -> Driver:
            if name not in made:
                options = {}
                if name == "dbos-postgres":
                    server: Server = request.getfixturevalue("postgres")
                    options["store"] = server.url(schema=server.fresh_schema())
                for other in [n for n in made if n not in ("built-in", name)]:  # one server at a time
                    made.pop(other).close()
                made[name] = stack.enter_context(driver(name, **options))
            return made[name]

        yield get


@pytest.fixture(scope="module")
def ours(drivers: Callable[[str], Driver]) -> Callable[[str], list[Any]]:
    """What our own worker leaves of a scenario."""
    found: dict[str, list[Any]] = {}

    def get(name: str) -> list[Any]:
        if name not in found:
            d = drivers("built-in")
            SCENARIOS[name](d, run_of(name))
            found[name] = told(d, run_of(name))
        return found[name]

    return get


def run_of(name: str) -> str:
    return name.replace("_", "-")


@pytest.mark.parametrize("engine, name", PAIRS)
def test_same_as_ours(engine: str, name: str, drivers: Callable[[str], Driver], ours: Callable[[str], list[Any]]) -> None:
    expected = ours(name)
    d = drivers(engine)
    SCENARIOS[name](d, run_of(name))
    assert compared(told(d, run_of(name)), name) == compared(expected, name), json.dumps(
        d.app.engine and dict(d.app.engine.describe(run_of(name)))
    )


# ---- every crash point, through an engine -------------------------------------------------------------------------------------------

POINTS = [
    "claim.after",
    "model.before",
    "model.after",
    "commit.before",
    "commit.after",
    "tool.before:get_ticket",
    "tool.after:get_ticket",
    "release.after",
]
KILLED = [
    (engine, point)
    for engine in ENGINES
    for point in POINTS
    if engine != "temporal" and (LONG or (engine, point) == ("dbos", "claim.after"))
]


@pytest.mark.parametrize("engine, point", KILLED)
def test_killed_at(engine: str, point: str, drivers: Callable[[str], Driver]) -> None:
    """Once at the point, and once more after the gate: the story ends, with one reply."""
    d, run_id = drivers(engine), f"killed-{re.sub('[^a-z]', '-', point)}"
    worker = d.worker()
    d.world.kill_at(point)
    d.start("story", run_id)
    d.died(worker)
    worker = d.worker()
    d.reaches(run_id, "waiting_for_approval")
    d.world.kill_at(point.replace("get_ticket", "reply_to_customer"))
    d.app.decide(run_id, approved=True, decided_by="priya")
    d.died(worker)
    d.worker()
    d.reaches(run_id, "done")
    assert count(d, "reply", run_id) == 1
    assert d.app.store_check() == []

"""Every crash point × every effect, in this process: a simulated death at the nth pass of a point, for every n of the undisturbed run.

A life ends by `Crash`; from then on nothing of it can commit any more, as of a process that was killed. The next life has the same file, the
same code and another owner. Where a person is asked, they look at the world first. Then the run is as if nothing had happened: the same
messages, effects by policy, and at most one more model call for each death.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.crash.scripts import RUN, SCRIPTS
from tests.support.world import EFFECTS, GATE, Ledger, assert_whole, finish, tools

from outlast import Agent, Outlast
from outlast.models import ScriptedModel
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.runtime.drive import Drive
from outlast.stores import owner
from support.postgres import Server

SEED = 20261129
LONG = os.environ.get("OUTLAST_TESTS") == "long"
SLICE = 1 if LONG else 4  # every point in the long tier, else every fourth, others every day
TODAY = datetime.now(UTC).toordinal()
PAIRS = ["deliver", "act", "act_checked", "a batch"]
PG_PAIRS = 500


class Crash(BaseException):
    """This life is over."""


class Death:
    """Lets `at - 1` points pass and ends the life at the next; from then on every point ends it again."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.passed: list[str] = []

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        if self.at is not None and len(self.passed) >= self.at:
            raise Crash(name)


@dataclass
class Outcome:
    messages: list[dict[str, Any]]
    model_calls: int
    deaths: list[str]
    passed: list[str]  # points of the last life
    ledger: Ledger

    @property
    def points(self) -> int:
        return len(self.passed)


def live(folder: Path, script: str, *, gated: bool, approve: bool = True, die_at: Sequence[int] = (), store: str | None = None) -> Outcome:
    """One life after the other on the same file, or on `store`; the last one ends with the run."""
    folder.mkdir()
    ledger, log, clock = Ledger(folder / "ledger"), folder / "model.log", ManualClock()
    deaths: list[str] = []
    for at in [*die_at, None]:
        made = tools(GATE if gated else None)
        agent = Agent("crashing", model=ScriptedModel(SCRIPTS[script], log=log), tools=list(made.values()))
        app = Outlast(store or folder / "outlast.db", agents=[agent], deps=ledger, clock=clock)
        death = Death(at)
        owners = _dying() if at is not None else _living()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "me", lambda owners=owners: owners)
            crashpoints.arm(death)
            try:
                run = finish(app, app.run_sync(agent, "go", run_id=RUN), ledger, clock, approve=approve)
            except Crash:
                deaths.append(death.passed[at - 1] if at else "")
                app.close()
                continue
            finally:
                crashpoints.arm(None)
        with app:
            assert run.status == "done", (run.status, run.reason)
            assert_whole(app, RUN)
            return Outcome(run.messages, len(log.read_text().splitlines()), deaths, death.passed, ledger)
    raise AssertionError("the last life has no end")


_me = owner.me()


def _living() -> str:
    return _me


def _dying() -> str:
    """The owner of a life that ends by a crash: a process that is provably not there."""
    return "/".join([*_me.split("/")[:4], "another-start"])


def counts(ledger: Ledger) -> dict[str, int]:
    return {name: len(ledger.lines(name)) for name in EFFECTS}


def assert_as_undisturbed(found: Outcome, calm: Outcome) -> None:
    assert found.messages == calm.messages
    assert found.model_calls <= calm.model_calls + len(found.deaths), found.deaths
    expected, was = counts(calm.ledger), counts(found.ledger)
    assert was.pop("look") >= expected.pop("look")
    assert was == expected, found.deaths
    keys = {line["key"] for line in found.ledger.lines()}
    assert keys == {line["key"] for line in calm.ledger.lines()}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    crashpoints.arm(None)


def points_of(calm: Outcome) -> range:
    return range(1 + TODAY % SLICE, calm.points + 1, SLICE)


@pytest.mark.parametrize("gated", [False, True], ids=["open", "gated"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_point_once(tmp_path: Path, script: str, gated: bool) -> None:
    calm = live(tmp_path / "calm", script, gated=gated)
    for at in points_of(calm):
        found = live(tmp_path / f"death-{at}", script, gated=gated, die_at=[at])
        assert len(found.deaths) == 1
        assert_as_undisturbed(found, calm)
    print(f"{script}: a death at each of {len(points_of(calm))} points")


@pytest.mark.parametrize("script", ["deliver", "act_checked", "a batch"])
def test_every_point_once_where_a_person_says_no(tmp_path: Path, script: str) -> None:
    calm = live(tmp_path / "calm", script, gated=True, approve=False)
    for at in points_of(calm):
        found = live(tmp_path / f"death-{at}", script, gated=True, approve=False, die_at=[at])
        assert_as_undisturbed(found, calm)
        assert found.ledger.lines() == []


@pytest.mark.parametrize("script", ["act", "act_checked", "act_unsure", "deliver"])
def test_every_point_of_the_life_that_finds_a_call_in_doubt(tmp_path: Path, script: str) -> None:
    """The first death leaves a call begun and unanswered; the second one strikes anywhere on the way out of that doubt."""
    calm = live(tmp_path / "calm", script, gated=False)
    first = calm.passed.index(f"tool.after:{script}") + 1
    found = live(tmp_path / "first", script, gated=False, die_at=[first])
    for at in points_of(found):
        assert_as_undisturbed(live(tmp_path / f"death-{at}", script, gated=False, die_at=[first, at]), calm)
    passed = {name.partition(":")[0] for name in [*calm.passed, *found.passed]}
    missing = (
        set(crashpoints.POINTS) - {"notice.before", "notice.after", "renewal.before", "renewal.after"} - passed
    )  # a matrix that misses a point would prove less than it says
    assert missing == (set() if script in ("act_checked", "act_unsure") else {"check.before", "check.after"})


@pytest.mark.parametrize("gated", [False, True], ids=["open", "gated"])
@pytest.mark.parametrize("script", ["deliver", "act", "act_checked", "act_unsure", "a batch"])
def test_sampled_pairs_of_deaths(tmp_path: Path, script: str, gated: bool) -> None:
    calm = live(tmp_path / "calm", script, gated=gated)
    rng = random.Random(f"{SEED}-{script}-{gated}")
    for n in range(8):
        die_at = [rng.randint(1, calm.points), rng.randint(1, calm.points)]
        found = live(tmp_path / f"pair-{n}", script, gated=gated, die_at=die_at)
        assert_as_undisturbed(found, calm)


# ---- Postgres, and every pair: a few here, all of them in the long tier --------------------------------------------------------

_schemas = count(1)


@pytest.fixture
def new_store(postgres: Server) -> Callable[[], str]:
    """The URL of a migrated schema of its own."""

    def made() -> str:
        url = postgres.url(schema=f"crash{next(_schemas)}")
        with Outlast(url, agents=[]) as app:
            app.store_migrate()
        return url

    return made


@pytest.mark.parametrize("gated", [False, True], ids=["open", "gated"])
@pytest.mark.parametrize("script", SCRIPTS if LONG else [sorted(SCRIPTS)[TODAY % len(SCRIPTS)]])
def test_every_point_once_on_postgres(tmp_path: Path, new_store: Callable[[], str], script: str, gated: bool) -> None:
    calm = live(tmp_path / "calm", script, gated=gated, store=new_store())
    points = range(1 + TODAY % SLICE, calm.points + 1, 1 if LONG else 2 * SLICE)
    for at in points:
        found = live(tmp_path / f"death-{at}", script, gated=gated, die_at=[at], store=new_store())
        assert len(found.deaths) == 1
        assert_as_undisturbed(found, calm)
    print(f"Postgres, {script}: a death at each of {len(points)} points")


@pytest.mark.parametrize("script", ["act_checked"] if not LONG else PAIRS)
def test_pairs_of_deaths_on_postgres(tmp_path: Path, new_store: Callable[[], str], script: str) -> None:
    calm = live(tmp_path / "calm", script, gated=True, store=new_store())
    rng = random.Random(f"{TODAY}-{script}")
    pairs = PG_PAIRS // len(PAIRS) if LONG else 2
    for n in range(pairs):
        die_at = [rng.randint(1, calm.points), rng.randint(1, calm.points)]
        assert_as_undisturbed(live(tmp_path / f"pair-{n}", script, gated=True, die_at=die_at, store=new_store()), calm)
    print(f"Postgres, {script}: {pairs} pairs of deaths")


if LONG:

    @pytest.mark.parametrize("script", PAIRS)
    def test_all_ordered_pairs_of_deaths(tmp_path: Path, script: str) -> None:
        """The second death strikes the life that takes up what the first has left, at each point that this one passes."""
        calm = live(tmp_path / "calm", script, gated=True)
        pairs = 0
        for first in range(1, calm.points + 1):
            taken_up = live(tmp_path / f"first-{first}", script, gated=True, die_at=[first])
            for second in range(1, taken_up.points + 1):
                folder = tmp_path / f"pair-{first}-{second}"
                assert_as_undisturbed(live(folder, script, gated=True, die_at=[first, second]), calm)
                shutil.rmtree(folder)
                pairs += 1
        print(f"{script}: {pairs} ordered pairs of {calm.points} points")


def test_the_matrix_is_red_without_intents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: a call that leaves no intent is made twice, and the matrix says so."""

    async def unsaved(self: Drive, call: object, tool: object, decided_on: object) -> bool:
        return True

    monkeypatch.setattr(Drive, "_intend", unsaved)
    calm = live(tmp_path / "calm", "act", gated=False)
    found = live(tmp_path / "death", "act", gated=False, die_at=[calm.passed.index("tool.after:act") + 1])
    with pytest.raises(AssertionError):
        assert_as_undisturbed(found, calm)

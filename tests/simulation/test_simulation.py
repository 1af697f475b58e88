"""A slice of the simulation, and the simulator itself: same seed, same trace; what is broken on purpose is found, cut down, and repeats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from outlast.runtime import writer
from outlast.testing.simulate import (
    ENOUGH,
    ENOUGH_FOR_PAIRS,
    MUST_MEET,
    MUST_REACH,
    Found,
    Result,
    command,
    play,
    run,
    shrink,
)
from outlast.testing.simulation.loop import Choices
from outlast.testing.simulation.schedule import quiet

FIRST = 20261129
CHUNKS, CHUNK = 4, ENOUGH  # 20,000 schedules, in pieces that several cores share; script/proof plays the many
TODAY = datetime.now(UTC).toordinal()  # the last piece has other seeds every day

BREAKS = 5  # from this seed on the planted fault is soon met


@pytest.mark.parametrize("first", [*range(FIRST, FIRST + (CHUNKS - 1) * CHUNK, CHUNK), TODAY * CHUNK])
def test_a_slice_of_schedules_breaks_nothing(first: int) -> None:
    result = run(range(first, first + CHUNK))
    assert result.found is None, f"{result.found.why}\n{command(result.found)}"
    assert result.schedules == CHUNK
    assert result.unreached == []


def test_what_was_never_reached_is_an_error() -> None:
    """After enough schedules: each state, and each pair of what happens and what it happens in the middle of."""
    few = Result(schedules=ENOUGH - 1)
    assert few.unreached == []
    reached = dict.fromkeys(MUST_REACH, 1)
    enough = Result(schedules=ENOUGH, reached=Counter({**reached, "died at wire": 0}))
    assert enough.unreached == ["died at wire"]
    pairs = dict.fromkeys(MUST_MEET, 1)
    one, other = "a death", "somebody is paused"
    many = Result(schedules=ENOUGH_FOR_PAIRS, reached=Counter(reached), pairs=Counter({**pairs, (one, other): 0}))
    assert many.unreached == [f"{one} / {other}"]


def test_every_event_is_counted_with_what_it_happened_in_the_middle_of() -> None:
    met = run(range(FIRST, FIRST + 40)).pairs
    assert met["a death", "the model is asked"]
    assert met["a death", "a process was paused past its lease"]


def test_same_seed_same_trace_in_any_process() -> None:
    """Whatever the hash seed: no set, no address, no clock of this machine decides anything."""

    def trace(hash_seed: str) -> str:
        command = [sys.executable, "-m", "outlast.testing.simulate", "--only", str(FIRST + 3)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    first = trace("1")
    assert "trace" in first
    assert trace("2") == first
    with quiet():
        schedule, why = play(FIRST + 3)
    assert why is None
    assert schedule.loop.trace in first


def test_another_seed_another_trace() -> None:
    with quiet():
        assert play(1)[0].loop.trace != play(2)[0].loop.trace


def test_kept_choices_repeat_a_schedule() -> None:
    with quiet():
        drawn, _ = play(11)
        again, _ = play(11, drawn.choices.made)
    assert drawn.choices.made
    assert again.loop.trace == drawn.loop.trace


def test_choices_are_drawn_from_the_seed_or_played() -> None:
    def draws(choices: Choices) -> list[int]:
        return [choices.pick(5, 0.5) for _ in range(50)]

    drawn = Choices(3)
    made = draws(drawn)
    assert made == draws(Choices(3)) != draws(Choices(4))
    assert draws(Choices(9, drawn.made)) == made
    assert draws(Choices(9, {})) == [0] * 50  # without choices all is calm


def test_what_is_broken_on_purpose_is_found_cut_down_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an unknown commit the same is written again without looking: a plain second try."""
    monkeypatch.setattr(writer.Writer, "_stood", lambda self, batch, stop: self._settle(stop) and False)
    with quiet():
        found = run(range(BREAKS, BREAKS + 100)).found
        assert found is not None
        tries = iter(range(25))
        small = shrink(found, lambda kept: play(found.seed, kept)[1] if next(tries, None) is not None else None)
        assert len(small.choices) <= len(found.choices)
        assert play(small.seed, small.choices)[1] == small.why
    assert command(small).startswith(f"python -m outlast.testing.simulate --only {found.seed} --choices ")


def test_cutting_down_keeps_what_is_needed() -> None:
    def breaks(kept: Mapping[int, int]) -> str | None:
        return "I1: both" if kept.get(3) == 2 and kept.get(17) else None

    small = shrink(Found(1, "I1: both", dict.fromkeys(range(30), 2)), breaks)
    assert small.choices == {3: 2, 17: 2}

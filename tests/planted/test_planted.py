"""Planted faults: each still fits the source, and a few of them, others every day, are caught. `script/proof` plants them all."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.planted import plant
from tests.planted.plant import PYTEST, ROOT, TIERS, Edit, Fault, all_faults, caught, copy_of_the_source, planted

QUICK = ("contract", "people", "unknown commit")  # tiers of a few seconds
A_DAY = 3
on_the_source = pytest.mark.skipif("OUTLAST_PLANTED" in os.environ, reason="these tests run on a copy with a fault")


def named(name: str) -> Fault:
    [fault] = [f for f in all_faults() if f.name == name]
    return fault


def test_there_are_enough_and_each_says_what_it_is() -> None:
    faults = all_faults()
    assert len(faults) >= 30
    for fault in faults:
        assert fault.why and fault.edits, fault.name
        assert fault.caught_by in TIERS, fault.name
        assert bool(fault.breaks) == (fault.caught_by == "simulation"), fault.name
    assert {f.caught_by for f in faults} == set(TIERS)


@pytest.mark.parametrize("name", [f.name for f in all_faults()])
def test_it_fits_the_source(name: str) -> None:
    """Whoever changes these lines plants the fault anew, or takes it away with a reason."""
    fault = named(name)
    texts: dict[str, str] = {}
    for edit in fault.edits:
        text = texts.get(edit.file) or (ROOT / "src" / "outlast" / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = planted(text, edit)
        assert texts[edit.file] != text


def todays() -> list[str]:
    names = [f.name for f in all_faults() if f.caught_by in QUICK]
    start = datetime.now(UTC).toordinal() * A_DAY % len(names)
    return [names[(start + n) % len(names)] for n in range(A_DAY)]


@on_the_source
@pytest.mark.parametrize("name", todays())
def test_it_is_caught(name: str) -> None:
    fault = named(name)
    found, said = caught(fault)
    assert found, f"{name}, which is meant to be caught by {fault.caught_by}, went through: {said}"


def test_a_text_that_is_not_there_once_is_refused() -> None:
    for text in ("nothing", "old old"):
        with pytest.raises(LookupError):
            planted(text, Edit("x", "old", "new"))


@on_the_source
@pytest.mark.parametrize("name", ["decision_overwritten", "same_word_twice"])
def test_what_is_red_without_the_fault_too_is_no_catch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = named(name)
    monkeypatch.setattr(plant, "copy_of_the_source", lambda _: copy_of_the_source(fault))
    found, said = caught(fault)
    assert not found
    assert "; and without the fault: " in said


@on_the_source
def test_an_invariant_that_is_not_meant_is_no_catch() -> None:
    found, said = caught(replace(named("decision_overwritten"), breaks=("I2", "I30")))
    assert not found
    assert said.endswith(", which is none of I2, I30")


def test_the_copy_is_what_is_tested(tmp_path: Path) -> None:
    """By a program, and by pytest, whose settings have paths of their own."""
    program = tmp_path / "test_where.py"
    program.write_text("import outlast\n\nprint(outlast.__file__)\n\ndef test() -> None: pass\n")
    with copy_of_the_source(None) as env:
        for command in ([str(program)], [*PYTEST, "-s", str(program)]):
            assert str(Path(env["PYTHONPATH"]) / "outlast" / "__init__.py") in plant.run(command, env).stdout.splitlines()

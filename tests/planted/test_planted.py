"""Planted faults: each still fits the source, and a few of them, others every day, are caught. `script/proof` plants them all."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest
from tests.planted.plant import ROOT, TIERS, Edit, all_faults, caught, copy_of_the_source, planted

QUICK = ("contract", "people", "unknown commit")  # tiers of a few seconds
A_DAY = 3


def test_there_are_enough_and_each_says_what_it_is() -> None:
    faults = all_faults()
    assert len(faults) >= 30
    for fault in faults:
        assert fault.why and fault.edits, fault.name
        assert fault.caught_by in TIERS, fault.name
    assert {f.caught_by for f in faults} == set(TIERS)


@pytest.mark.parametrize("name", [f.name for f in all_faults()])
def test_it_fits_the_source(name: str) -> None:
    """Whoever changes these lines plants the fault anew, or takes it away with a reason."""
    [fault] = [f for f in all_faults() if f.name == name]
    texts: dict[str, str] = {}
    for edit in fault.edits:
        text = texts.get(edit.file) or (ROOT / "src" / "outlast" / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = planted(text, edit)
        assert texts[edit.file] != text


def todays() -> list[str]:
    names = [f.name for f in all_faults() if f.caught_by in QUICK]
    start = datetime.now(UTC).toordinal() * A_DAY % len(names)
    return [names[(start + n) % len(names)] for n in range(A_DAY)]


@pytest.mark.skipif("OUTLAST_PLANTED" in os.environ, reason="these tests run on a copy with a fault")
@pytest.mark.parametrize("name", todays())
def test_it_is_caught(name: str) -> None:
    [fault] = [f for f in all_faults() if f.name == name]
    found, said = caught(fault)
    assert found, f"{name}, which is meant to be caught by {fault.caught_by}, went through: {said}"


def test_a_text_that_is_not_there_once_is_refused() -> None:
    for text in ("nothing", "old old"):
        with pytest.raises(LookupError):
            planted(text, Edit("x", "old", "new"))


def test_the_copy_is_what_is_tested() -> None:
    with copy_of_the_source(None) as env:
        assert env["PYTHONPATH"] != str(ROOT / "src")

"""Our frozen records behave as the standard library's dataclasses do: the same class, made both ways, side by side."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from dataclasses import field
from typing import Any

import pytest

from outlast.core import records


class Body:
    """A record."""

    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: int = field(default=4, compare=False, repr=False)
    e: int = field(default=5, kw_only=True)
    hidden: int | None = field(default=None, init=False, compare=False, repr=False)


def made(decorate: Any, *, slots: bool) -> Any:
    cls = type("Body", (), {**{k: v for k, v in vars(Body).items() if k not in ("__dict__", "__weakref__")}})
    return decorate(frozen=True, slots=slots)(cls)


@dataclasses.dataclass(frozen=True, slots=True)
class Theirs:
    a: int
    b: str = "b"


@records.dataclass(frozen=True, slots=True)
class Ours:
    a: int
    b: str = "b"


@records.dataclass(frozen=True, slots=True)
class Below(Ours):
    c: int = 3


@pytest.mark.parametrize("slots", [True, False])
def test_as_the_standard_library_makes_them(slots: bool) -> None:
    theirs, ours = made(dataclasses.dataclass, slots=slots), made(records.dataclass, slots=slots)
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert [(f.name, f.init, f.compare) for f in dataclasses.fields(ours)] == [
        (f.name, f.init, f.compare) for f in dataclasses.fields(theirs)
    ]
    assert ours.__match_args__ == theirs.__match_args__
    for cls in (theirs, ours):
        one = cls(1, c=[2], e=6)
        assert repr(one).endswith("Body(a=1, b='b', c=[2], e=6)")
        assert one == cls(1, "b", [2], d=9, e=6) and one != cls(2, c=[2], e=6) and one != (1, "b")
        assert one.hidden is None and cls(1).c == [] and cls(1).c is not cls(1).c
        assert dataclasses.replace(one, a=7) == cls(7, c=[2], e=6)
        assert dataclasses.asdict(one)["c"] == [2]
        assert copy.deepcopy(one) == one and copy.copy(one) == one
        assert hasattr(one, "__dict__") != slots
        with pytest.raises(TypeError, match="unhashable"):
            hash(one)
        with pytest.raises(dataclasses.FrozenInstanceError, match="'a'"):
            one.a = 2
        with pytest.raises(dataclasses.FrozenInstanceError, match="'a'"):
            del one.a
        with pytest.raises(TypeError):
            cls()
        with pytest.raises(TypeError):
            cls(1, "b", [], 4, 5)


def test_hashes_copies_and_heirs() -> None:
    for cls in (Theirs, Ours):
        assert len({cls(1), cls(1), cls(2)}) == 2
        assert copy.copy(cls(1, "x")) == cls(1, "x")
    below = Below(1, c=4)
    assert (below, below == Ours(1), repr(below)) == (Below(1, "b", 4), False, "Below(a=1, b='b', c=4)")
    match below:
        case Ours(a, b):
            assert (a, b) == (1, "b")


def test_an_own_method_stays() -> None:
    @records.dataclass(frozen=True)
    class Loud:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]  # as its equality needs

        def __repr__(self) -> str:
            return "!"

    assert Loud(1) == 2 and repr(Loud(1)) == "!" and Loud.__hash__ is None

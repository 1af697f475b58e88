"""A simulated death: at a named point everything of a life stops, and its lease is one of a process that is provably gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outlast.runtime import crashpoints
from outlast.stores import owner

_me = owner.me()


class Crash(BaseException):
    """This life is over."""


def gone() -> str:
    """An owner whose process is provably not there."""
    return "/".join([*_me.split("/")[:4], "another-start"])


@contextmanager
def as_owner(name: str) -> Iterator[None]:
    """Leases that are taken in here are this owner's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "me", lambda: name)
        yield


@contextmanager
def dying_at(point: str, nth: int = 1) -> Iterator[None]:
    """What runs in here dies at the nth pass of the point; from then on nothing of it can commit. Passing it too seldom is a failure."""
    left = nth
    dead = False

    def hook(name: str) -> None:
        nonlocal left, dead
        if name == point:
            left -= 1
            dead = dead or left == 0
        if dead:
            raise Crash(name)

    crashpoints.arm(hook)
    try:
        with as_owner(gone()):
            yield
    except Crash:
        return
    finally:
        crashpoints.arm(None)
    raise AssertionError(f"{point} was not passed {nth} times")

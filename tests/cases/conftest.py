"""What every case has: a store of its own, a world outside of it, applications that are closed at the end, and no way to hang for ever."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from tests.support.world import Ledger

from outlast import Agent, Outlast
from outlast.models import Anthropic
from outlast.runtime import crashpoints
from outlast.runtime.clock import ManualClock
from outlast.testing import FakeMessagesAPI

HANG_S = 100  # a case that takes longer hangs: its threads are shown and the session ends


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # pytest's copy from before it captures
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    crashpoints.arm(None)


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store that is there already: the first commit that a case sees is its own."""
    url = f"sqlite:///{tmp_path / 'outlast.db'}"
    with Outlast(url) as app:
        assert app.unfinished_runs() == []
    return url


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class MakeApp(Protocol):
    def __call__(self, *agents: Agent[Any], **options: Any) -> Outlast: ...


@pytest.fixture
def make_app(store_url: str, ledger: Ledger) -> Iterator[MakeApp]:
    """Another process's view of the same store: `make_app(agent, clock=…)`; its tools' world is the ledger."""
    made: list[Outlast] = []

    def make(*agents: Agent[Any], **options: Any) -> Outlast:
        if "lifespan" not in options:
            options.setdefault("deps", ledger)
        made.append(Outlast(options.pop("store", store_url), agents=list(agents), **options))
        return made[-1]

    yield make
    for app in made:
        app.close()


class Provider(Protocol):
    def __call__(self, *turns: Any) -> tuple[FakeMessagesAPI, Anthropic]: ...


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """The strict stand-in with these turns, and the real SDK in front of it."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "mock")
    running: list[FakeMessagesAPI] = []

    def start(*turns: Any) -> tuple[FakeMessagesAPI, Anthropic]:
        api = FakeMessagesAPI(list(turns))
        api.__enter__()
        running.append(api)
        return api, Anthropic("any-name", base_url=api.url)

    yield start
    for api in running:
        assert api.refused == [], "the provider refused a request"
        api.__exit__(None, None, None)

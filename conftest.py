"""What holds for every test, those of the examples too: the environment is ours, and with CI=1 nothing is left out.

With CI=1 a test that skips, or is expected to fail, makes the session fail and is named at its end: a check that did not
run must not look like one that passed. Without it (on a laptop) such tests are only listed by pytest's own summary.
"""

import functools
import os
import random
import signal
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No test asserts how long anything takes. In CI the examples are the same each time; on a laptop they are others.
settings.register_profile("outlast", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=os.environ.get("CI") == "1")
settings.load_profile("outlast")

# A developer's own settings must not reach the tests: no real model is asked, no real store is opened. What says how much is tested stays.
_ABOUT_TESTS = {"OUTLAST_TESTS", "OUTLAST_TEMPORAL_SERVER"}
for _name in [n for n in os.environ if n.startswith(("OUTLAST_", "ANTHROPIC_")) and n not in _ABOUT_TESTS]:
    del os.environ[_name]

# A shell that begins something with `&` has it ignore Ctrl-C, and so would every program that a test begins and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_left_out: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: with several processes they would be what one of them does at the end, while the others wait."""
    items.sort(key=lambda item: not item.name.startswith("test_a_slice_of_schedules_breaks_nothing"))


@pytest.fixture(autouse=True)
def _chance_is_the_same_each_time() -> None:
    """A back-off is drawn from nothing to its longest: once in a thousand times it is no wait at all."""
    random.seed(0)


@pytest.fixture(autouse=True)
def _what_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Applications are closed at the end of the test that made them: a server has so many connections, and the collector comes when it likes."""
    from outlast import Outlast

    opened: weakref.WeakSet[Outlast] = weakref.WeakSet()
    made = Outlast.__init__

    @functools.wraps(made)
    def noted(self: Outlast, *args: Any, **more: Any) -> None:
        opened.add(self)
        made(self, *args, **more)

    monkeypatch.setattr(Outlast, "__init__", noted)
    yield
    for app in list(opened):
        if hasattr(app, "_opened"):  # else its arguments were refused
            app.close()


def _in_ci() -> bool:
    return os.environ.get("CI") == "1"


def _note(report: pytest.CollectReport | pytest.TestReport) -> None:
    if hasattr(report, "wasxfail"):
        _left_out.append(f"{report.nodeid}: expected to fail ({report.wasxfail})")
    elif report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        _left_out.append(f"{report.nodeid}: {why}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (servers := sys.modules.get("support.postgres")) is not None:
        servers.remove_all()
    if _in_ci() and _left_out and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _in_ci() and _left_out:
        terminalreporter.section("left out, which fails with CI=1", red=True)
        for line in _left_out:
            terminalreporter.line(line)

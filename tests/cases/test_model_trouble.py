"""A provider that is slow, full, cut off or wrong: durable retries that nothing multiplies, and nothing half saved."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cases.conftest import MakeApp, Provider
from tests.support.deaths import dying_at
from tests.support.world import Ledger, assert_whole, tools, use

from outlast import Agent, Limits, Retry
from outlast.documents import Event
from outlast.errors import ModelError
from outlast.models import ScriptedModel
from outlast.runtime.clock import ManualClock
from outlast.testing import Attempts, Cut, ErrorInStream, Fault, Garbage


def in_20_seconds(body: Any) -> Fault:
    return Fault(429, retry_after=format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True))


def test_retry_after_ignored_or_blocks_the_worker(make_app: MakeApp, provider: Provider) -> None:
    """Both forms are honoured, the wait is a row and no process, and one request is one request."""
    clock = ManualClock(datetime.now(UTC))
    api, model = provider(Attempts([Fault(429, retry_after=7), in_20_seconds, Fault(529), "Done."]))
    agent = Agent("a", model=model)
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    for n, least in enumerate((7, 17, 0), 1):
        assert (run.status, len(api.requests)) == ("waiting_for_timer", n)
        assert run.wake_at is not None and run.lease_owner is None
        assert run.wake_at >= clock.now + timedelta(seconds=least)
        assert run.wake_at <= clock.now + timedelta(minutes=5)
        if least:
            clock.move(timedelta(seconds=least) - timedelta(seconds=1))
            due = run.wake_at
            again = make_app(agent, clock=clock).resume_sync("r")  # a restart starts neither early nor from zero
            assert (again.status, again.wake_at, len(api.requests)) == ("waiting_for_timer", due, n)
        clock.move(max(run.wake_at - clock.now, timedelta(0)))
        run = make_app(agent, clock=clock).resume_sync("r")
    assert (run.status, run.output, run.model_calls) == ("done", "Done.", 1)
    assert len(api.requests) == 4
    assert_whole(app, "r")


def test_retry_after_longer_than_the_wall_limit(make_app: MakeApp, provider: Provider, clock: ManualClock) -> None:
    """The run does not sleep past its own end: it fails then, with the reason, and the model is not asked again."""
    api, model = provider(Fault(429, retry_after=3600))
    agent = Agent("a", model=model, limits=Limits(wall=timedelta(seconds=60), then="fail"))
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    assert run.status == "waiting_for_timer"
    assert run.wake_at == run.created_at + timedelta(seconds=60)
    clock.move(timedelta(seconds=60))
    run = app.resume_sync("r")
    assert (run.status, len(api.requests)) == ("failed", 1)
    assert "limit of 1 minute reached" in (run.reason or "")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_other_refusals_fail_at_once_and_retry_goes_on(status: int, make_app: MakeApp, provider: Provider) -> None:
    api, model = provider(Attempts([Fault(status), "Done."]))
    agent = Agent("a", model=model)
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, len(api.requests)) == ("failed", 1)
    assert str(status) in (run.reason or "") and "req_fake_0001" in (run.reason or "")
    app.retry("r", by="priya")
    assert app.resume_sync("r").output == "Done."


def test_retries_are_spent_and_counted(make_app: MakeApp, provider: Provider, clock: ManualClock) -> None:
    api, model = provider(Fault(500))
    agent = Agent("a", model=model, retry=Retry(3))
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    while run.status == "waiting_for_timer":
        assert run.wake_at is not None
        clock.move(max(run.wake_at - clock.now, timedelta(0)))
        run = app.resume_sync("r")
    assert (run.status, len(api.requests), run.model_calls) == ("failed", 3, 0)
    assert "tried 3 times" in (run.reason or "")


BROKEN: dict[str, Any] = {
    "error in the stream": lambda turn: ErrorInStream(turn=turn, after=6),
    "error at once": lambda turn: ErrorInStream(turn=turn, after=1),
    "connection cut": lambda turn: Cut(turn, after=6),
    "no message_stop": lambda turn: Cut(turn, after=6, abrupt=False),
    "a proxy's page": lambda turn: Garbage(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_overloaded_inside_a_200_stream(kind: str, make_app: MakeApp, provider: Provider, ledger: Ledger, clock: ManualClock) -> None:
    """Half an answer with half a call is no answer: nothing of it is saved or run, whoever watches is told to forget it."""
    half = [{"type": "text", "text": "First half, second half."}, use("act", "half", text="no")]
    _, model = provider(Attempts([BROKEN[kind](half), [{"type": "text", "text": "Whole."}, use("act", "whole", text="yes")]]), "Done.")
    agent = Agent("a", model=model, tools=[tools()["act"]])
    seen: list[Event] = []
    app = make_app(agent, clock=clock, on_event=seen.append)
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.seq, ledger.lines()) == ("waiting_for_timer", 1, [])
    assert run.wake_at is not None
    clock.move(run.wake_at - clock.now)
    run = app.resume_sync("r")
    assert run.status == "done"
    assert [b["id"] for b in run.messages[1]["content"] if b["type"] == "tool_use"] == ["whole"]
    assert [line["key"] for line in ledger.lines()] == ["r:whole"]
    shown = ""
    for event in seen:
        if event.seq == 2 and event.type in ("text", "reset"):
            shown = "" if event.type == "reset" else shown + (event.text or "")
    assert shown == "Whole."
    assert_whole(app, "r")


@pytest.mark.parametrize(
    "odd", [None, 7, object(), {"role": "user", "content": "x"}, [7], {"content": 5}, b"bytes"], ids=lambda v: type(v).__name__
)
def test_an_answer_that_is_no_message(odd: Any, make_app: MakeApp) -> None:
    async def model(request: Any) -> Any:
        return odd

    agent = Agent("a", model=model)
    app = make_app(agent)
    run = app.run_sync(agent, "go", run_id="r")
    assert (run.status, run.seq) == ("failed", 1) or (odd is None and run.status in ("failed", "done"))
    assert_whole(app, "r")


@pytest.mark.parametrize(
    "thrown", [ValueError("x"), ModelError("no", retryable=False), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_model_that_throws(thrown: BaseException, make_app: MakeApp) -> None:
    async def model(request: Any) -> Any:
        raise thrown

    agent = Agent("a", model=model)
    app = make_app(agent)
    if isinstance(thrown, Exception):
        assert app.run_sync(agent, "go", run_id="r").status == "failed"
    else:
        with pytest.raises(type(thrown)):
            app.run_sync(agent, "go", run_id="r")


@pytest.mark.parametrize("then", ["ask", "fail"])
def test_limits_reset_at_each_resume(then: Any, make_app: MakeApp, tmp_path: Path, clock: ManualClock, ledger: Ledger) -> None:
    """Killed after every turn: the limit is of the run, not of a process; what a death may have cost counts too."""
    model = ScriptedModel([[use("look", f"c{n}", text="x")] for n in range(20)], log=tmp_path / "log")
    agent = Agent("a", model=model, tools=[tools()["look"]], limits=Limits(model_calls=5, then=then, to="owner"))
    app = make_app(agent, clock=clock)
    deaths = 0
    app.start(agent, "go", run_id="r")
    for _ in range(3):
        with dying_at("model.after"):
            make_app(agent, clock=clock).resume_sync("r")
        deaths += 1
    run = app.resume_sync("r")
    calls = len((tmp_path / "log").read_text().splitlines())
    assert calls <= 5 + deaths
    if then == "fail":
        assert run.status == "failed" and "limit of 5 model calls" in (run.reason or "")
        return
    assert run.status == "waiting_for_budget"
    gate = run.gates[0]
    assert (gate.role, gate.args["limit"]) == ("owner", "model_calls")
    assert make_app(agent, clock=clock).resume_sync("r").status == "waiting_for_budget"
    assert len((tmp_path / "log").read_text().splitlines()) == calls
    app.decide("r", approved=True, decided_by="priya", args={"raise_to": gate.args["used"] + 2})
    assert app.resume_sync("r").status == "waiting_for_budget"
    assert len((tmp_path / "log").read_text().splitlines()) == calls + 2
    app.decide("r", approved=False, decided_by="priya", note="enough")
    run = app.resume_sync("r")
    assert run.status == "failed" and "enough" in (run.reason or "")
    assert_whole(app, "r")


def test_token_limit_counts_an_answer_once(make_app: MakeApp, provider: Provider, clock: ManualClock, ledger: Ledger) -> None:
    """An answer that was never received costs nothing in our books; one that was, once."""

    def turn(n: int) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": [use("look", f"c{n}", text="x")],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 100, "output_tokens": 10},
        }

    api, model = provider(turn(0), Attempts([Cut(turn(1), after=3), turn(1)]), turn(2), "Done.")
    agent = Agent("a", model=model, tools=[tools()["look"]], limits=Limits(tokens=220))
    app = make_app(agent, clock=clock)
    run = app.run_sync(agent, "go", run_id="r")
    while run.status == "waiting_for_timer":
        assert run.wake_at is not None
        clock.move(run.wake_at - clock.now)
        run = app.resume_sync("r")
    assert run.status == "waiting_for_budget"
    assert (run.input_tokens, run.output_tokens, run.model_calls, len(api.requests)) == (200, 20, 2, 3)
    assert run.gates[0].args == {"limit": "tokens", "used": 220, "raise_to": 440}

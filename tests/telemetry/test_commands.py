"""`costs`, `runs --cost`, `show`, `watch`, `tail`, and what the log's lines carry."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outlast import Agent, Outlast, approval, tool
from outlast.cli import main
from outlast.cli.costs import money
from outlast.cli.watch import Tail
from outlast.models import ScriptedModel

PRICES = {"scripted": {"input": Decimal(1000), "output": Decimal(5000)}}
USAGE = {"input_tokens": 100, "output_tokens": 10}  # 0.10 + 0.05 USD
LIMIT_S = 60


@tool(gate=approval(to="lead", within=None))
def refund(amount: int) -> str:
    """Pay money back."""
    return "paid"


def cashier() -> Agent[str]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "refund", "input": {"amount": 3}}
    turns = [{"content": [call], "usage": USAGE}, {"content": [{"type": "text", "text": "Paid back."}], "usage": USAGE}]
    return Agent("cashier", model=ScriptedModel(turns), tools=[refund])


def app_on(file: Path) -> Outlast:
    return Outlast(file, agents=[cashier()], prices=PRICES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A store with a run that waits and one that is done."""
    with app_on(tmp_path / "a.db") as app:
        for run_id in ("waits", "done"):
            app.run_sync(app.agents["cashier"], "go", run_id=run_id)
        app.decide("done", approved=True, decided_by="ada")
        app.resume_sync("done")
    return tmp_path / "a.db"


def said(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    capfd.readouterr()
    assert main(list(args)) == 0
    return capfd.readouterr().out


def documents(*args: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "outlast", *args, "--json"], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def columns(text: str, first: str) -> list[list[str]]:
    """The table below the line that begins with `first`, as words."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(first))
    return [line.split() for line in lines[begin + 1 :] if line]


def test_costs(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = said(capfd, "costs", "--store", str(file))
    assert columns(text, "AGENT")[0][:7] == ["cashier", "3", "300", "30", "0", "0", "0.45"]
    tools = columns(said(capfd, "costs", "--per", "tool", "--store", str(file)), "TOOL")
    assert [row[:2] for row in tools] == [["refund", "1"], ["(no", "tool)"]]
    (found,) = documents("costs", "--per", "model", "--store", str(file))
    assert (found["type"], found["per"], found["calls"], found["cost_usd"], found["unpriced"]) == ("cost", "model", 3, "0.45", 0)


@pytest.mark.parametrize("args", [("--per", "planet"), ("--since", "yesterday-ish")])
def test_costs_that_cannot_be_meant(file: Path, args: tuple[str, ...]) -> None:
    assert main(["costs", *args, "--store", str(file)]) == 2


def test_costs_of_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no answers" in said(capfd, "costs", "--store", str(tmp_path / "new.db"))
    assert not (tmp_path / "new.db").exists()


def test_runs_with_their_cost(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = columns(said(capfd, "runs", "--cost", "--store", str(file)), "RUN")
    assert [(row[0], row[3], row[-1]) for row in rows] == [("done", "2", "0.30"), ("waits", "1", "0.15")]


def test_show_says_what_each_step_took_and_cost(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = columns(said(capfd, "show", "done", "--store", str(file)), "CHECKPOINT")
    assert [row[:2] for row in rows] == [["2", "model"], ["2", "refund"], ["4", "model"], ["all", "200"]]
    assert rows[-1][:6] == ["all", "200", "20", "0", "0", "0.30"]
    (shown,) = documents("show", "done", "--journal", "--store", str(file))
    assert [(s["kind"], s["cost_usd"]) for s in shown["steps"]] == [("model", "0.15"), ("tool", None), ("model", "0.15")]


@pytest.mark.parametrize(
    "amount, text",
    [
        (None, "unknown"), (Decimal(0), "0.00"), (Decimal("0.00006"), "0.00006"), (Decimal("1.5"), "1.50"), (Decimal("12.3456789"), "12.345679"),
        (Decimal("1E+3"), "1000.00")],
)  # fmt: skip
def test_money(amount: Decimal | None, text: str) -> None:
    assert money(amount) == text


# ---- as it happens ----------------------------------------------------------------------------------------------------------


def child(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "outlast", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watch_follows_a_run_until_it_is_over(file: Path) -> None:
    watching = child("watch", "waits", "--store", str(file), "--json")
    assert watching.stdout is not None
    lines = [json.loads(watching.stdout.readline()) for _ in range(3)]
    assert [line["type"] for line in lines] == ["checkpoint", "checkpoint", "run"]
    assert lines[-1]["status"] == "waiting_for_approval"
    with app_on(file) as app:
        app.decide("waits", approved=True, decided_by="ada")
        app.resume_sync("waits")
    rest, _ = watching.communicate(timeout=LIMIT_S)
    documents = [json.loads(line) for line in rest.splitlines()]
    assert [d["seq"] for d in documents if d["type"] == "checkpoint"] == [3, 4]
    assert (documents[-1]["type"], documents[-1]["status"], watching.returncode) == ("run", "done", 0)


def test_watch_of_a_run_that_is_over_in_words(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = said(capfd, "watch", "done", "--store", str(file)).splitlines()
    assert lines[0] == "checkpoint 1  running               user: go"
    assert lines[-2:] == ["checkpoint 4  done                  model: Paid back.", "done is done"]
    assert main(["watch", "nobody", "--store", str(file)]) == 1


def test_watch_draws_on_a_terminal(file: Path) -> None:
    command = f"{sys.executable} -m outlast watch done --store {file}"
    drawn = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, check=True, env={**os.environ, "TERM": "xterm"}
    )
    assert "done  cashier  done" in drawn.stdout
    assert "0.30 USD" in drawn.stdout
    assert "model: Paid back." in drawn.stdout


def test_tail_tells_what_is_new_of_every_run(file: Path) -> None:
    with app_on(file) as app:
        tail = Tail(app)
        assert tail.look() == []
        assert tail.look() == []
        app.run_sync(app.agents["cashier"], "go", run_id="new")
        found = [(d["type"], d["run_id"], d["seq"]) for d in tail.look()]
        assert found == [("checkpoint", "new", 1), ("checkpoint", "new", 2), ("run", "new", 2)]
        app.decide("new", approved=True, decided_by="ada")
        app.resume_sync("new")
        app.cancel("waits", by="ada")
        found = [(d["type"], d["run_id"], d["seq"]) for d in tail.look()]
        assert found[:3] == [("checkpoint", "new", 3), ("checkpoint", "new", 4), ("run", "new", 4)]
        assert found[-1][:2] == ("run", "waits")
        assert tail.look() == []


def test_tail_prints_documents_until_it_is_stopped(file: Path) -> None:
    following = child("tail", "--store", str(file))
    assert following.stdout is not None and following.stderr is not None
    assert "following" in following.stderr.readline()
    with app_on(file) as app:
        app.run_sync(app.agents["cashier"], "go", run_id="new")
    found: list[tuple[str, str, int]] = []
    while ("checkpoint", "new", 2) not in found:
        document = json.loads(following.stdout.readline())
        found.append((document["type"], document["run_id"], document["seq"]))
    assert [d for d in found if d[0] == "checkpoint"] == [("checkpoint", "new", 1), ("checkpoint", "new", 2)]
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=LIMIT_S)
    assert following.returncode == 130


# ---- the log ------------------------------------------------------------------------------------------------------------------


def test_the_log_of_a_worker_says_whose_step_it_was(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with app_on(file) as app:
        app.decide("waits", approved=True, decided_by="ada")
        with caplog.at_level(logging.INFO, "outlast"):
            app.work_sync(until_idle=True)
        fence = next(app.journal("waits", after=5)).fence
    (record,) = [r for r in caplog.records if getattr(r, "run_id", None) == "waits"]
    assert (record.seq, record.call_id) == (4, None)  # type: ignore[attr-defined]  # what we add
    assert record.fence >= fence > 0  # type: ignore[attr-defined]  # what we add
    assert record.worker  # type: ignore[attr-defined]  # what we add

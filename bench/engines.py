"""What does an engine cost? One run of many turns with 20 kB a turn on each: time a step, what stays in the engine, time to fail over.

The agent, the store (SQLite) and the worker are the same each time; a step is a model call or a batch of calls, and both are instant here, so
what is measured is the driver. Run by `script/engines bench [ENGINE...]`: it needs the engines' SDKs and servers, as the tests do.
`--turns 500` says how many; 200 is the default. Peer: a Temporal workflow that carries the messages itself, ended by the server's limits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
PAD = 20_000  # bytes of each tool result
PATIENCE_S = 900.0


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers end with us
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", nargs="*")
    parser.add_argument("--turns", type=int, default=200)
    given = parser.parse_args()
    # This folder goes: the tests' folder `engines` is called like this file.
    sys.path[:] = [str(TESTS), str(TESTS / "engines"), *(p for p in sys.path if Path(p).resolve() != Path(__file__).parent)]
    os.environ.update(SCENE_PAD=str(PAD), SCENE_TURNS=str(given.turns))
    try:
        from engines.drivers import KINDS
    except ModuleNotFoundError as e:
        sys.exit(f"{e.name} is not installed here: script/engines bench")
    there = [name for name in KINDS if name != "dbos-postgres" and (name != "temporal-server" or "OUTLAST_TEMPORAL_SERVER" in os.environ)]
    print(f"engines: {given.turns} turns of {PAD // 1000} kB, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print("| driver | ms a step | bytes in the engine a run | fail-over s |\n|---|---|---|---|")
    for name in given.engines or there:
        print(row(name, given.turns), flush=True)
    if "OUTLAST_TEMPORAL_SERVER" in os.environ and (not given.engines or "temporal-server" in given.engines):
        print(f"\nmessages inside of a Temporal workflow: {asyncio.run(carried(given.turns))}")


def row(name: str, turns: int) -> str:
    from engines.drivers import driver

    with driver(name) as d:
        d.worker()
        d.start("busy", "warm")  # the worker is up
        done(d, "warm")
        before = time.monotonic()
        d.start("long", "long")
        done(d, "long")
        each = (time.monotonic() - before) / (2 * turns + 1)
        size = kept(d, "long")
        return f"| {name} | {each * 1000:.1f} | {size if size is not None else '–'} | {failover(d)} |"


def done(d: Any, run_id: str) -> None:
    end, seen = time.monotonic() + PATIENCE_S, None
    while d.app.head(run_id).status != "done":
        if time.monotonic() > end:
            sys.exit(f"{d.name}: {run_id} is {d.app.head(run_id).status}\n{d.logs()}")
        seen = d.app._store.wait_for_change(seen, 0.2)


def failover(d: Any) -> str:
    """From the death of a worker between an effect and its record, with another one alive, to the end of the run."""
    if d.name in ("temporal", "inngest"):  # the test server never notices; the stand-in is ours
        return "–"
    first = d.worker()
    second = d.another() if d.takes_over_a_stopped_worker else None
    d.start("busy", "settle")
    done(d, "settle")
    d.world.kill_at("tool.after:get_ticket")
    d.start("busy", "dies")
    while first.poll() is None and (second is None or second.poll() is None):
        d.app._store.wait_for_change(None, 0.05)
    died = time.monotonic()
    if second is None:
        d.another()  # one address: a restarted process takes over
    done(d, "dies")
    return f"{time.monotonic() - died:.1f}"


def kept(d: Any, run_id: str) -> int | None:
    """What the engine holds of the run, in bytes; None where it cannot be told."""
    if d.name.startswith("temporal"):
        from temporalio.client import Client

        async def size() -> int:
            client = await Client.connect(f"127.0.0.1:{d.ports[0]}")
            history = await client.get_workflow_handle(run_id).fetch_history()
            return sum(event.ByteSize() for event in history.events)

        return asyncio.run(size())
    if d.name == "dbos":
        import sqlalchemy as sa

        with sa.create_engine(d.app.engine.url).connect() as db:
            return int(db.execute(sa.text("SELECT sum(length(output) + length(function_name)) FROM operation_outputs")).scalar() or 0)
    if d.name == "restate":
        from outlast.engines._http import http

        query = f"SELECT sum(raw_length) AS held FROM sys_journal WHERE id IN (SELECT id FROM sys_invocation WHERE target_service_key = '{run_id}')"
        return int(http("POST", f"http://127.0.0.1:{d.ports[1]}/query", {"query": query})["rows"][0]["held"])
    if d.name == "inngest":
        return sum(len(line) for line in (d.folder / "events").read_text().splitlines() if f'"{run_id}' in line or '"step"' in line)
    return None


async def carried(turns: int) -> str:
    """The same loop with the message list as an activity's argument: how far it comes."""
    from importlib.util import module_from_spec, spec_from_file_location

    from temporalio.client import Client, WorkflowFailureError
    from temporalio.runtime import Runtime, TelemetryConfig
    from temporalio.worker import UnsandboxedWorkflowRunner, Worker

    from engines.drivers import driver

    spec = spec_from_file_location("carrying", Path(__file__).with_name("carrying.py"))
    assert spec is not None and spec.loader is not None
    carrying = sys.modules["carrying"] = module_from_spec(spec)
    spec.loader.exec_module(carrying)
    with driver("temporal-server") as d:
        silent = Runtime(telemetry=TelemetryConfig(logging=None))  # else it warns of each message list that is sent
        client = await Client.connect(f"127.0.0.1:{d.ports[0]}", runtime=silent)
        async with Worker(
            client,
            task_queue="carried",
            workflows=[carrying.Carrying],
            activities=[carrying.turn],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            handle = await client.start_workflow(
                carrying.Carrying.run, args=[turns, PAD], id="carried", task_queue="carried", execution_timeout=timedelta(minutes=5)
            )
            try:
                return f"all {await handle.result()} turns"
            except WorkflowFailureError as e:
                history = await handle.fetch_history()
                reached = sum(1 for event in history.events if event.HasField("activity_task_completed_event_attributes"))
                return f"ended after {reached} turns, {sum(event.ByteSize() for event in history.events):,} bytes of history: {e.cause}"


if __name__ == "__main__":
    main()

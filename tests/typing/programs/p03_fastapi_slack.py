"""3. FastAPI + Slack button, worker in the same process (small shop)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from outlast import Gate, Notice, Outlast
from outlast.errors import GateClosed, NotAllowed, RunNotFound
from p02_kitebase import lifespan, support

LEADS = {"slack:U1": {"support-lead"}}


async def tell_slack(notice: Notice) -> None:
    value = json.dumps([notice.gate.run_id, notice.gate.gate_id, notice.gate.digest])
    await post("/chat.postMessage", {"text": notice.text, "button": value, "client_msg_id": notice.id})


def may_decide(person: str, gate: Gate) -> bool:
    return gate.role in LEADS.get(person, set()) and gate.tags.get("tenant") == "northwind"


app = Outlast("postgresql:///kitebase", agents=[support], lifespan=lifespan, notify=[tell_slack], may_decide=may_decide)


@asynccontextmanager
async def running(_: FastAPI) -> AsyncIterator[None]:
    worker = asyncio.create_task(app.work(concurrency=20))
    yield
    worker.cancel()  # drains: results that come in are saved, leases released
    await asyncio.gather(worker, return_exceptions=True)
    app.close()


api = FastAPI(lifespan=running)


@api.post("/tickets/{key}", status_code=202)
def new_ticket(key: str) -> dict[str, Any]:  # plain def: FastAPI runs it in a thread
    run = app.start(support, f"Ticket {key} just came in.", run_id=f"run-{key.lower()}", tags={"tenant": "northwind"})
    return run.to_dict()


@api.post("/slack")
async def slack(request: Request) -> dict[str, str]:
    payload = json.loads(str((await request.form())["payload"]))  # after checking Slack's signature
    run_id, gate_id, digest = json.loads(payload["actions"][0]["value"])
    try:
        await asyncio.to_thread(
            app.decide,
            run_id,
            gate_id,
            digest=digest,
            approved=payload["actions"][0]["action_id"] == "approve",
            decided_by=f"slack:{payload['user']['id']}",
        )
    except GateClosed as e:
        return {"text": f"Already {e.gate.outcome} by {e.gate.decided_by} at {e.gate.decided_at:%H:%M}."}
    except NotAllowed as e:
        return {"text": str(e)}
    except RunNotFound as e:
        raise HTTPException(404, str(e)) from e
    return {"text": "Thank you."}


async def post(path: str, body: dict[str, Any]) -> None: ...

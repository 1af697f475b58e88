"""12. Tokens to a browser while the run is durable: SSE; the id of an SSE event is the checkpoint's seq."""

import json
from collections.abc import AsyncIterator

from fastapi import FastAPI, Header
from fastapi.responses import StreamingResponse

from p03_fastapi_slack import app

api = FastAPI()


@api.get("/runs/{run_id}/events")
async def events(run_id: str, last_event_id: int = Header(0)) -> StreamingResponse:
    async def body() -> AsyncIterator[str]:
        async for event in app.stream(run_id, after=last_event_id):
            if event.type == "checkpoint":
                yield f"id: {event.seq}\n"
            yield f"event: {event.type}\ndata: {json.dumps(event.to_dict())}\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")

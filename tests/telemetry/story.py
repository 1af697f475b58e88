"""One process of the support agent's story, with the real SDK and its exporter: `python story.py NUMBER FOLDER COLLECTOR`.

1 starts the run and ends where a person is asked; 2 resumes it (the caller has set a crash point); 3 is a worker that finds it.
The model makes a client span of its own, as an instrumented SDK does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from agent import SCRIPTS, open_app
from outlast.models import ModelRequest, ScriptedModel
from outlast.runtime import metrics

RUN, TICKET = "run-kite-142", "KITE-142"


class Instrumented(ScriptedModel):
    async def __call__(self, request: ModelRequest, /) -> Any:
        with trace.get_tracer("a-models-sdk").start_as_current_span("chat scripted"):
            said = await super().__call__(request)
        usage = {"input_tokens": 100, "output_tokens": 10}
        return {**said, "usage": usage} if isinstance(said, dict) else {"role": "assistant", "content": said, "usage": usage}


def main(number: str, folder: Path, collector: str) -> None:
    provider = TracerProvider(resource=Resource({"service.name": f"process-{number}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector)))
    trace.set_tracer_provider(provider)
    with open_app(folder, Instrumented(SCRIPTS[TICKET])) as app:
        if number == "1":
            app.start("kitebase-support", "Ticket KITE-142 just came in.", run_id=RUN)
            app.resume_sync(RUN)
        elif number == "2":
            app.resume_sync(RUN)
        else:
            app.work_sync(until_idle=True)
        print(metrics.text({}))
    provider.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

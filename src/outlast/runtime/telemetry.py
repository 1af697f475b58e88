"""Traces of what a run did, by OpenTelemetry's API alone: without its SDK everything here does nothing.

A run may last for days and cross many processes, so a span never stays open over a wait: each time a run is driven is a segment, a root span
`invoke_agent AGENT` with links to the segment before (its traceparent is kept in the journal, in the meta of the segment's first entry).
Tool attempts are `execute_tool TOOL` below it; the model SDK's own client span is its child as well. Content (arguments, results) is exported
only with OUTLAST_TRACE_CONTENT=1; keys never.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from outlast.core import codec
from outlast.core import run as r
from outlast.runtime import genai

if TYPE_CHECKING:
    from outlast.core.step import RunCall
    from outlast.runtime.perform import Ended
    from outlast.stores.base import Lease

TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
MAX_CONTENT = 8192  # characters of an argument or result in an attribute


@lru_cache(maxsize=1)
def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return None
    return trace.get_tracer("outlast")


def content_wanted() -> bool:
    return os.environ.get("OUTLAST_TRACE_CONTENT") == "1"


class Segment:
    """One time that a run is driven. Without OpenTelemetry every method does nothing."""

    def __init__(self, span: Any) -> None:
        self.span = span

    def traceparent(self) -> str | None:
        """What the next segment links to; None where nothing is recorded."""
        context = self.span.get_span_context() if self.span is not None else None
        if context is None or not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def event(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
        if self.span is not None:
            self.span.add_event(name, {k: v for k, v in (attributes or {}).items() if v is not None})

    def set(self, name: str, value: Any) -> None:
        if self.span is not None and value is not None:
            self.span.set_attribute(name, value)

    def entry(self, entry: r.Entry) -> None:
        """What an entry is on a timeline."""
        if self.span is None:
            return
        match entry:
            case r.GateOpened():
                self.event("gate.opened", {"gate": entry.gate_id, "kind": entry.kind, genai.TOOL: entry.tool})
            case r.GateExpired():
                self.event("gate.expired", {"gate": entry.gate_id})
            case r.GateDecided():
                self.event("gate.decided", {"gate": entry.gate_id, "outcome": entry.outcome})
            case r.ModelFailed():
                self.event("retried" if entry.retry_at else "model.failed", {"attempt": entry.attempt, "status": entry.status})
            case r.CallFailed() | r.CallDoubted():
                self.event("retried" if isinstance(entry, r.CallFailed) else "call.doubted", {genai.CALL: entry.call_id})
            case r.ModelCallLost():
                self.event("model.call_lost")


@contextlib.contextmanager
def segment(lease: Lease, worker: str, before: str | None) -> Iterator[Segment]:
    """A root span for one time that this run is driven, linked to the one before."""
    tracer = _tracer()
    if tracer is None:
        yield Segment(None)
        return
    from opentelemetry import context as otel_context
    from opentelemetry import trace

    attributes = {
        genai.OPERATION: genai.INVOKE_AGENT, genai.AGENT: lease.agent, genai.CONVERSATION: lease.run_id, genai.FENCE: lease.fence, genai.WORKER: worker,
        genai.RECOVERED: lease.taken_over,
    }  # fmt: skip
    links = [trace.Link(earlier)] if (earlier := _context_of(before)) is not None else []
    root = otel_context.Context()  # whoever happens to call us is not this run's parent
    with tracer.start_as_current_span(f"{genai.INVOKE_AGENT} {lease.agent}", context=root, attributes=attributes, links=links) as span:
        found = Segment(span)
        if lease.taken_over:
            found.event("recovered", {"attempts": lease.attempts})
        yield found


def _context_of(traceparent: str | None) -> Any:
    match = TRACEPARENT.match(traceparent or "")
    if match is None:
        return None
    from opentelemetry import trace

    return trace.SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(match[3], 16)))


@contextlib.contextmanager
def tool(call: RunCall, run_id: str, attempt: int) -> Iterator[Any]:
    """A span for one attempt of a tool; gives a function that takes how it ended."""
    tracer = _tracer()
    if tracer is None:
        yield _ignore
        return
    attributes: dict[str, Any] = {
        genai.OPERATION: genai.EXECUTE_TOOL, genai.TOOL: call.name, genai.CALL: call.call_id, genai.TOOL_TYPE: "function", genai.CONVERSATION: run_id,
        genai.EFFECT: call.effect, genai.ATTEMPT: attempt, genai.REPLAY: attempt > 1,
        genai.KEY_DIGEST: hashlib.sha256(call.key.encode()).hexdigest()[:16],
    }  # fmt: skip
    if content_wanted():
        attributes[genai.ARGUMENTS] = codec.encode(call.args)[:MAX_CONTENT]
    with tracer.start_as_current_span(f"{genai.EXECUTE_TOOL} {call.name}", attributes=attributes, record_exception=False) as span:

        def ended(how: Ended) -> None:
            if how.raised is not None:
                from opentelemetry.trace import Status, StatusCode

                span.set_attribute(genai.ERROR, type(how.raised).__name__)
                span.set_status(Status(StatusCode.ERROR))
            elif content_wanted():
                span.set_attribute(genai.RESULT, str(codec.result_content(how.value)[0])[:MAX_CONTENT])

        yield ended


def _ignore(_how: Any) -> None:
    """Nobody listens."""

"""Traces of what a run did, by OpenTelemetry's API alone: without its SDK everything here does nothing.

A run may last for days and cross many processes, so a span never stays open over a wait: each time a run is driven is a segment, a root span
`invoke_agent AGENT` with links to the segments before (their traceparents are kept in the journal, in the meta of each segment's first entry).
Tool attempts are `execute_tool TOOL` below it; the model SDK's own client span is its child as well. Content (arguments, results) is exported
only with OUTLAST_TRACE_CONTENT=1; keys never.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from outlast.core import codec
from outlast.core import run as r
from outlast.errors import LeaseLost
from outlast.prices import usage_of
from outlast.runtime import genai, metrics

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
    """One time that a run is driven. `span` is None where nothing is recorded; then every method does nothing but count."""

    def __init__(self, span: Any) -> None:
        self.span = span
        self.cost: Decimal | None = None  # of its answers; None: none yet, or a price is unknown
        self.tokens: dict[str, int] = {}
        self._unpriced = False

    def traceparent(self) -> str | None:
        """What the next segment links to; None where nothing is recorded."""
        if self.span is None:
            return None
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def event(self, name: str, attributes: Mapping[str, Any] | None = None) -> None:
        if self.span is not None:
            self.span.add_event(name, {k: v for k, v in (attributes or {}).items() if v is not None})

    def failed(self) -> None:
        if self.span is not None:
            from opentelemetry.trace import Status, StatusCode

            self.span.set_status(Status(StatusCode.ERROR))

    def set(self, name: str, value: Any) -> None:
        if self.span is not None and value is not None:
            self.span.set_attribute(name, value)

    def follows(self, traceparents: Sequence[str]) -> None:
        """Link to the segments before: they are known once the journal is read."""
        for traceparent in traceparents if self.span is not None else ():
            if (earlier := _context_of(traceparent)) is not None:
                self.span.add_link(earlier)

    def entry(self, entry: r.Entry) -> None:
        """What an entry is on a timeline, and what it adds to the counts."""
        match entry:
            case r.MessageAdded(meta=meta) if meta and "usage" in meta and not meta.get("imported"):
                self._answered(meta)
            case r.ModelFailed(retry_at=at) if at is not None:
                metrics.add("outlast_retries_total", what="model")
            case r.CallFailed():
                metrics.add("outlast_retries_total", what="tool")
        if self.span is not None:
            self._event_of(entry)

    def _answered(self, meta: Mapping[str, Any]) -> None:
        usage, paid = usage_of(meta.get("usage")), r.money(meta.get("cost_usd"))
        if usage is not None:
            written = usage.cache_write + usage.cache_write_1h
            for kind, n in (("input", usage.input), ("output", usage.output), ("cache_read", usage.cache_read), ("cache_write", written)):
                if n:
                    self.tokens[kind] = self.tokens.get(kind, 0) + n
                    metrics.add("outlast_tokens_total", n, kind=kind)
        if paid is not None:
            metrics.add("outlast_cost_usd_total", float(paid))
        self._unpriced = self._unpriced or paid is None
        self.cost = None if self._unpriced else (self.cost or Decimal(0)) + (paid or 0)

    def end(self, status: str, seq: int) -> None:
        """What is known of a segment once it is over."""
        if self.span is None:
            return
        self.set(genai.STATUS, status)
        self.set(genai.SEQ, seq)
        if self.tokens:
            cached = self.tokens.get("cache_read", 0), self.tokens.get("cache_write", 0)
            self.set(genai.INPUT_TOKENS, self.tokens.get("input", 0) + sum(cached))
            self.set(genai.OUTPUT_TOKENS, self.tokens.get("output", 0))
            self.set(genai.CACHE_READ_TOKENS, cached[0] or None)
            self.set(genai.CACHE_WRITE_TOKENS, cached[1] or None)
        self.set(genai.COST, float(self.cost) if self.cost is not None else None)

    def _event_of(self, entry: r.Entry) -> None:
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
            case r.RunCancelled():
                self.event("cancelled")
            case r.EventReceived():
                self.event("event.received", {"name": entry.name})


@contextlib.contextmanager
def segment(lease: Lease, worker: str, model: str | None = None) -> Iterator[Segment]:
    """A root span for one time that this run is driven; `follows` links it to the one before."""
    metrics.add("outlast_claims_total")
    if lease.taken_over:
        metrics.add("outlast_recovered_total")
    tracer = _tracer()
    if tracer is None:
        with _counting(Segment(None)) as found:
            yield found
        return
    from opentelemetry import context as otel_context

    attributes = {
        genai.OPERATION: genai.INVOKE_AGENT, genai.AGENT: lease.agent, genai.CONVERSATION: lease.run_id, genai.FENCE: lease.fence, genai.WORKER: worker,
        genai.RECOVERED: lease.taken_over, **({genai.REQUEST_MODEL: model} if model else {}),
    }  # fmt: skip
    root = otel_context.Context()  # whoever happens to call us is not this run's parent
    with (
        tracer.start_as_current_span(
            f"{genai.INVOKE_AGENT} {lease.agent}",
            context=root,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span,
        _counting(Segment(span if span.is_recording() else None)) as found,
    ):
        if lease.taken_over:
            found.event("recovered", {"attempts": lease.attempts})
        yield found


@contextlib.contextmanager
def _counting(found: Segment) -> Iterator[Segment]:
    """A lease that is lost is an event and not an error; anything else that ends a segment early is one."""
    try:
        yield found
    except LeaseLost:
        metrics.add("outlast_lease_losses_total")
        found.event("fenced")
        raise
    except Exception as e:
        found.set(genai.ERROR, type(e).__name__)
        found.failed()
        raise


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
    }  # fmt: skip
    with tracer.start_as_current_span(f"{genai.EXECUTE_TOOL} {call.name}", attributes=attributes, record_exception=False) as span:
        if not span.is_recording():
            yield _ignore
            return
        span.set_attribute(genai.KEY_DIGEST, hashlib.sha256(call.key.encode()).hexdigest()[:16])
        if content_wanted():
            span.set_attribute(genai.ARGUMENTS, codec.encode(call.args)[:MAX_CONTENT])

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

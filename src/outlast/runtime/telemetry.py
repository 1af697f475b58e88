"""Traces of what a run did, by OpenTelemetry's API alone: without its SDK everything here does nothing.

A run may last for days and cross many processes, so a span never stays open over a wait: each time a run is driven is a segment, a root span
`invoke_agent AGENT` with links to the segments before (their traceparents are kept in the journal, in the meta of each segment's first entry).
Tool attempts are `execute_tool TOOL` below it; the model SDK's own client span is its child as well. Content (arguments, results) is exported
only with OUTLAST_TRACE_CONTENT=1; keys never.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import SimpleNamespace
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


_found: Any = None


def _api() -> Any:
    """OpenTelemetry's API, or None where nobody has set up tracing. Kept: an `import` for every span would cost a tenth of it."""
    global _found
    if _found is None and metrics.set_up("opentelemetry.trace", "OTEL_PYTHON_TRACER_PROVIDER"):
        from opentelemetry import context, trace

        _found = SimpleNamespace(context=context, trace=trace, tracer=trace.get_tracer("outlast"))
    return _found


def _tracer() -> Any:
    api = _api()
    return api.tracer if api is not None else None


def content_wanted() -> bool:
    return os.environ.get("OUTLAST_TRACE_CONTENT") == "1"


_TOKENS: tuple[metrics.Key, ...] = tuple(
    ("outlast_tokens_total", (("kind", kind),)) for kind in ("input", "output", "cache_read", "cache_write")
)
_COST: metrics.Key = ("outlast_cost_usd_total", ())


class Segment:
    """One time that a run is driven. `span` is None where nothing is recorded; then every method does nothing but count."""

    __slots__ = ("_unpriced", "cost", "span", "tokens")

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
            _failed(self.span)

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
        kind = type(entry)
        if kind is r.MessageAdded:
            meta = entry.meta
            if meta and "usage" in meta and not meta.get("imported"):
                self._answered(meta)
            return
        if kind is r.CallFinished:
            return
        if isinstance(entry, r.ModelFailed) and entry.retry_at is not None:
            metrics.add("outlast_retries_total", what="model")
        elif kind is r.CallFailed:
            metrics.add("outlast_retries_total", what="tool")
        if self.span is not None:
            self._event_of(entry)

    def _answered(self, meta: Mapping[str, Any]) -> None:
        usage, paid, tokens = usage_of(meta.get("usage")), r.money(meta.get("cost_usd")), self.tokens
        counted: list[tuple[metrics.Key, float]] = []
        if usage is not None:
            written = usage.cache_write + usage.cache_write_1h
            for key, n in zip(_TOKENS, (usage.input, usage.output, usage.cache_read, written), strict=True):
                if n:
                    kind = key[1][0][1]
                    tokens[kind] = tokens.get(kind, 0) + n
                    counted.append((key, n))
        if paid is None:
            self._unpriced, self.cost = True, None
        else:
            counted.append((_COST, float(paid)))
            if not self._unpriced:
                self.cost = paid if self.cost is None else self.cost + paid
        metrics.add_all(counted)

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


class segment:  # noqa: N801 - used like a function, in a `with`; a generator would cost as much again as the span
    """A root span for one time that this run is driven; `follows` links it to the one before.

    A lease that is lost is an event and not an error; anything else that ends a segment early is one.
    """

    __slots__ = ("_found", "_lease", "_model", "_token", "_worker")

    def __init__(self, lease: Lease, worker: str, model: str | None = None) -> None:
        self._lease, self._worker, self._model = lease, worker, model
        self._found, self._token = Segment(None), None

    def _attributes(self) -> dict[str, Any]:
        lease = self._lease
        return {
            genai.OPERATION: genai.INVOKE_AGENT, genai.AGENT: lease.agent, genai.CONVERSATION: lease.run_id, genai.FENCE: lease.fence,
            genai.WORKER: self._worker, genai.RECOVERED: lease.taken_over, **({genai.REQUEST_MODEL: self._model} if self._model else {}),
        }  # fmt: skip

    def __enter__(self) -> Segment:
        lease = self._lease
        metrics.add("outlast_claims_total")
        if lease.taken_over:
            metrics.add("outlast_recovered_total")
        tracer = _tracer()
        if tracer is None:
            return self._found
        root = _api().context.Context()  # whoever happens to call us is not this run's parent
        span = tracer.start_span(
            f"{genai.INVOKE_AGENT} {lease.agent}",
            root,
            attributes=self._attributes(),
            record_exception=False,
            set_status_on_exception=False,
        )
        self._token = _made_current(span, root)
        if span.is_recording():
            self._found.span = span
            if lease.taken_over:
                self._found.event("recovered", {"attempts": lease.attempts})
        return self._found

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _trace: object) -> None:
        found = self._found
        if isinstance(raised, LeaseLost):
            metrics.add("outlast_lease_losses_total")
            found.event("fenced")
        elif isinstance(raised, Exception):
            found.set(genai.ERROR, type(raised).__name__)
            found.failed()
        _over(found.span, self._token)


def _made_current(span: Any, within: Any = None) -> Any:
    """The span as the parent of what is called now; what undoes it, or None: it is nobody's parent."""
    if not span.get_span_context().is_valid:
        return None
    api = _api()
    return api.context.attach(api.trace.set_span_in_context(span, within))


def _failed(span: Any, why: str | None = None) -> None:
    trace = _api().trace
    span.set_status(trace.Status(trace.StatusCode.ERROR, why))


def _over(span: Any, token: Any) -> None:
    if token is not None:
        _api().context.detach(token)
    if span is not None:
        span.end()


def _context_of(traceparent: str | None) -> Any:
    match = TRACEPARENT.match(traceparent or "")
    if match is None or (api := _api()) is None:
        return None
    trace = api.trace
    return trace.SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(match[3], 16)))


class tool:  # noqa: N801 - used like a function, in a `with`
    """A span for one attempt of a tool; gives a function that takes how it ended."""

    __slots__ = ("_attempt", "_call", "_run_id", "_span", "_token")

    def __init__(self, call: RunCall, run_id: str, attempt: int) -> None:
        self._call, self._run_id, self._attempt = call, run_id, attempt
        self._span = self._token = None

    def __enter__(self) -> Callable[[Ended], None]:
        tracer = _tracer()
        if tracer is None:
            return _ignore
        call = self._call
        attributes = {
            genai.OPERATION: genai.EXECUTE_TOOL, genai.TOOL: call.name, genai.CALL: call.call_id, genai.TOOL_TYPE: "function",
            genai.CONVERSATION: self._run_id, genai.EFFECT: call.effect, genai.ATTEMPT: self._attempt, genai.REPLAY: self._attempt > 1,
        }  # fmt: skip
        self._span = span = tracer.start_span(f"{genai.EXECUTE_TOOL} {call.name}", attributes=attributes, record_exception=False)
        self._token = _made_current(span)
        if not span.is_recording():
            return _ignore
        span.set_attribute(genai.KEY_DIGEST, hashlib.sha256(call.key.encode()).hexdigest()[:16])
        if content_wanted():
            span.set_attribute(genai.ARGUMENTS, codec.encode(call.args)[:MAX_CONTENT])
        return self._ended

    def _ended(self, how: Ended) -> None:
        span: Any = self._span
        if how.raised is not None:
            span.set_attribute(genai.ERROR, type(how.raised).__name__)
            _failed(span)
        elif content_wanted():
            span.set_attribute(genai.RESULT, str(codec.result_content(how.value)[0])[:MAX_CONTENT])

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _trace: object) -> None:
        if isinstance(raised, Exception) and self._span is not None and self._span.is_recording():  # ours: what a tool raises is a value
            _failed(self._span, f"{type(raised).__name__}: {raised}")
        _over(self._span, self._token)


def _ignore(_how: Any) -> None:
    """Nobody listens."""

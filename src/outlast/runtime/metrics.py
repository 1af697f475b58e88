"""Counts of this process, as Prometheus text and, where OpenTelemetry's API is installed, as its instruments.

Counting is a dict entry and an addition. What is true of the store and not of a process (gates that wait, calls in doubt, stuck runs) is read
when somebody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

Labels = tuple[tuple[str, str], ...]

# name -> (type, what it counts, the OpenTelemetry unit)
NAMES: dict[str, tuple[str, str, str]] = {
    "outlast_steps_total": ("counter", "appends that moved a run on", "1"),
    "outlast_append_seconds_sum": ("counter", "time spent in appends", "s"),
    "outlast_append_seconds_count": ("counter", "appends", "1"),
    "outlast_claims_total": ("counter", "runs taken", "1"),
    "outlast_recovered_total": ("counter", "runs taken over from a lease that nobody released", "1"),
    "outlast_lease_losses_total": ("counter", "leases lost to somebody else", "1"),
    "outlast_effects_total": ("counter", "tool calls that acted, replays not counted", "1"),
    "outlast_replays_total": ("counter", "attempts whose earlier attempt's outcome was not saved", "1"),
    "outlast_retries_total": ("counter", "model and tool calls put off", "1"),
    "outlast_tokens_total": ("counter", "tokens of answers, by kind", "1"),
    "outlast_cost_usd_total": ("counter", "what answers cost, where the price is known", "USD"),
    "outlast_runs_held": ("gauge", "runs that this process drives", "1"),
    "outlast_gates_waiting": ("gauge", "open gates by kind", "1"),
    "outlast_gates_waiting_oldest_seconds": ("gauge", "age of the oldest open gate by kind", "s"),
    "outlast_calls_in_doubt": ("gauge", "open gates of calls in doubt", "1"),
    "outlast_runs_stuck": ("gauge", "runs that nobody will move", "1"),
}

_lock = threading.Lock()
_counts: dict[tuple[str, Labels], float] = {}


def add(name: str, by: float = 1, **labels: str) -> None:
    """Count. `name` is one of NAMES."""
    key = (name, tuple(sorted(labels.items())))
    with _lock:
        _counts[key] = _counts.get(key, 0) + by


def counts() -> dict[tuple[str, Labels], float]:
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Forget all counts: for tests, and for a child after a fork."""
    with _lock:
        _counts.clear()


def text(gauges: Mapping[tuple[str, Labels], float]) -> str:
    """All of it in Prometheus' text format."""
    found = {**counts(), **gauges}
    lines: list[str] = []
    for name, (kind, help_text, _) in NAMES.items():
        mine = sorted((labels, value) for (n, labels), value in found.items() if n == name)
        if not mine and kind == "counter":
            mine = [((), 0.0)]
        if mine:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in mine]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{k}="{quoted(v)}"' for k, v in labels) + "}" if labels else ""


_exported = False


def export() -> None:
    """Offer the counts to OpenTelemetry's meter, once; nothing where its API is not installed."""
    global _exported
    if _exported:
        return
    _exported = True
    try:
        from opentelemetry import metrics as otel
    except ModuleNotFoundError:
        return
    meter = otel.get_meter("outlast")
    for name, (kind, help_text, unit) in NAMES.items():
        if kind == "counter":
            meter.create_observable_counter(
                name.removesuffix("_total").replace("_", ".", 1), callbacks=[_observed(name)], unit=unit, description=help_text
            )


def _observed(name: str) -> Any:
    def observe(_options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [Observation(value, dict(labels)) for (n, labels), value in counts().items() if n == name]

    return observe

"""Counts of this process, as Prometheus text and, where OpenTelemetry's API is installed, as its instruments.

Counting is a dict entry and an addition. What is true of the store and not of a process (gates that wait, calls in doubt, stuck runs) is read
when somebody asks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from outlast.errors import StoreError
from outlast.runtime.clock import monotonic

if TYPE_CHECKING:
    from outlast.stores.pages import Waiting

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # what `text` gives, as a content type
Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # a name of NAMES, and its labels by name
Gauges = Callable[[], Mapping[Key, float]]

log = logging.getLogger("outlast")

# name -> (type, what it counts, the OpenTelemetry unit)
NAMES: dict[str, tuple[str, str, str]] = {
    "outlast_steps_total": ("counter", "appends that moved a run on", "1"),
    "outlast_append_seconds": ("histogram", "how long an append took, its commit included", "s"),
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

BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
)  # an fsync takes from 0.1 ms (a good disk) to seconds (a full one)

_lock = threading.Lock()
_appends = [0] * (len(BUCKETS_S) + 1)  # per bucket; the last one is what took longer
_seconds = 0.0  # in appends
_steps = 0
_counts: dict[Key, float] = {}


def add(name: str, by: float = 1, **labels: str) -> None:
    """Count. `name` is one of NAMES."""
    key = (name, tuple(labels.items() if len(labels) < 2 else sorted(labels.items())))
    with _lock:
        _counts[key] = _counts.get(key, 0) + by


def add_all(counted: Iterable[tuple[Key, float]]) -> None:
    """Count several at once."""
    with _lock:
        for key, by in counted:
            _counts[key] = _counts.get(key, 0) + by


def appended(seconds: float, *, step: bool) -> None:
    """Count an append. `step`: it moved the run on."""
    global _seconds, _steps
    bucket = bisect_left(BUCKETS_S, seconds)
    with _lock:
        _appends[bucket] += 1
        _seconds += seconds
        _steps += step


def counts() -> dict[tuple[str, Labels], float]:
    """All but the histogram."""
    with _lock:
        return {**_counts, ("outlast_steps_total", ()): _steps}


def reset() -> None:
    """Forget all counts: for tests, and for a child after a fork."""
    global _seconds, _steps
    with _lock:
        _counts.clear()
        _appends[:] = [0] * len(_appends)
        _seconds, _steps = 0.0, 0


def gauges(waiting: Waiting, now: datetime) -> dict[Key, float]:
    """What a store says of itself, as gauges. Calls in doubt are those that wait for a person's word."""
    out: dict[tuple[str, Labels], float] = {("outlast_runs_stuck", ()): waiting.stuck}
    for kind, n, oldest in waiting.open:
        out["outlast_gates_waiting", (("kind", kind),)] = n
        out["outlast_gates_waiting_oldest_seconds", (("kind", kind),)] = max((now - oldest).total_seconds(), 0) if oldest else 0
        if kind == "verification":
            out["outlast_calls_in_doubt", ()] = n
    return out


def text(gauges: Mapping[Key, float]) -> str:
    """All of it in Prometheus' text format."""
    found = {**counts(), **gauges}
    lines: list[str] = []
    for name, (kind, help_text, _) in NAMES.items():
        if kind == "histogram":
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} histogram", *_histogram(name)]
            continue
        mine = sorted((labels, value) for (n, labels), value in found.items() if n == name)
        if not mine and kind == "counter":
            mine = [((), 0.0)]
        if mine:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value:.15g}" for labels, value in mine]
    return "\n".join(lines) + "\n"


def _histogram(name: str) -> list[str]:
    with _lock:
        appends, seconds = list(_appends), _seconds
    out, total = [], 0
    for top, n in zip((*map(str, BUCKETS_S), "+Inf"), appends, strict=True):
        total += n
        out.append(f'{name}_bucket{{le="{top}"}} {total}')
    return [*out, f"{name}_sum {seconds:.9g}", f"{name}_count {total}"]


def _labels(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{k}="{quoted(v)}"' for k, v in labels) + "}" if labels else ""


def set_up(module: str, provider: str) -> bool:
    """May a provider be set up? Whoever does that imports OpenTelemetry's API first, or names one in the environment.

    Where nobody did, it is not imported: that would take a tenth of the time to a first checkpoint, for instruments that do nothing.
    """
    return module in sys.modules or (provider in os.environ and find_spec("opentelemetry") is not None)


_exported = False
_stores: dict[WeakMethod[Gauges], tuple[float, Mapping[Key, float]]] = {}  # what each said when it was asked last, and when
FRESH_S = 1.0  # one collection asks for every gauge; the store is read once


def _gone(ref: WeakMethod[Gauges]) -> None:
    _stores.pop(ref, None)  # no lock: whoever holds it may be the one that the garbage collector interrupted


def withdraw(gauges: Gauges) -> None:
    """Its store is closed: it is not asked any more."""
    with _lock:
        _stores.pop(WeakMethod(gauges), None)


def export(gauges: Gauges) -> None:
    """Offer the counts to OpenTelemetry's meter, once, and what a store says of itself; nothing where nobody set one up.

    `gauges`: a method that reads them. It is asked when somebody collects, so without the SDK never.
    """
    global _exported
    with _lock:
        _stores.setdefault(WeakMethod(gauges, _gone), (float("-inf"), {}))
    if _exported or not set_up("opentelemetry.metrics", "OTEL_PYTHON_METER_PROVIDER"):
        return
    _exported = True
    from opentelemetry import metrics as otel

    meter = otel.get_meter("outlast")
    for name, (kind, help_text, unit) in NAMES.items():
        if kind == "counter":
            meter.create_observable_counter(
                name.removesuffix("_total").replace("_", ".", 1), callbacks=[_observed(name)], unit=unit, description=help_text
            )
        elif kind == "histogram":  # the API has no observable one: how many there were and how long they took together
            meter.create_observable_counter("outlast.appends", callbacks=[_observed_appends(0)], unit="1", description="appends")
            meter.create_observable_counter("outlast.append_seconds", callbacks=[_observed_appends(1)], unit="s", description=help_text)
        else:
            meter.create_observable_gauge(name.replace("_", ".", 1), callbacks=[_observed_gauge(name)], unit=unit, description=help_text)


def _observed(name: str) -> Any:
    def observe(_options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [Observation(value, dict(labels)) for (n, labels), value in counts().items() if n == name]

    return observe


def _observed_gauge(name: str) -> Any:
    def observe(_options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        found: dict[Labels, float] = {}
        for said in _of_stores():
            for (n, labels), value in said.items():
                if n == name:  # of several stores: all that waits, and the oldest of it
                    found[labels] = max(found.get(labels, 0), value) if name.endswith("_seconds") else found.get(labels, 0) + value
        return [Observation(value, dict(labels)) for labels, value in found.items()]

    return observe


def _of_stores() -> list[Mapping[Key, float]]:
    """What each open store says of itself. One that cannot be read says nothing: a gap in a graph is true, an old figure is not."""
    with _lock:
        stores = dict(_stores)
    out = []
    for ref, (read_at, before) in stores.items():
        gauges = ref()
        if gauges is None:
            continue
        said = before
        if monotonic() - read_at >= FRESH_S:
            try:
                said = gauges()
            except StoreError as e:
                log.warning("what waits could not be counted: %s", e)
                continue
            with _lock:
                if ref in _stores:
                    _stores[ref] = (monotonic(), said)
        out.append(said)
    return out


def _observed_appends(which: int) -> Any:
    def observe(_options: Any) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        with _lock:
            return [Observation((sum(_appends), _seconds)[which])]

    return observe

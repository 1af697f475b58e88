"""What do counts and traces cost? Off: at most 2 % of an append. On, with the SDK's batch processor: at most 50 µs a step.

The same scripted runs in turns: with every count and span taken out, with them as they are and no SDK, and with the SDK and an exporter that
throws away what it gets. Compared is the CPU time of the process, so that the disk says nothing; the batch thread's is in it. CPU time grows with
what the neighbours do (caches, a shared core), so the first decile of many short rounds is compared; medians stand beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import measure
from ours import Ours
from outlast.runtime import metrics, telemetry
from step import one

TURNS, ROUNDS = 50, 60
OFF_SHARE, ON_US = 0.02, 50.0  # the targets


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Without:
    def __init__(self, *_args: Any) -> None:
        """Nothing is kept."""

    def __exit__(self, *_raised: object) -> None:
        """Nothing ends."""


@contextlib.contextmanager
def taken_out() -> Iterator[None]:
    """No counts and no spans at all: what everything is compared with."""

    class Segment(Without):
        def __enter__(self) -> telemetry.Segment:
            return telemetry.Segment(None)

    class Tool(Without):
        def __enter__(self) -> Callable[[Any], None]:
            return nothing

    def nothing(*_args: Any, **_more: Any) -> None:
        """Not counted."""

    with contextlib.ExitStack() as stack:
        for where, name, instead in ((telemetry, "segment", Segment), (telemetry, "tool", Tool), (telemetry.Segment, "entry", nothing),
                                     (metrics, "add", nothing), (metrics, "add_all", nothing), (metrics, "appended", nothing)):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


@contextlib.contextmanager
def traced_by(tracer: Any) -> Iterator[None]:
    with mock.patch.object(telemetry, "_tracer", lambda: tracer):  # noqa: PT008 - a mock that is called takes as long as a span
        yield


def main() -> None:
    measure.header("telemetry: counts and traces")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    modes = {
        "taken out": taken_out,
        "off": lambda: traced_by(trace.NoOpTracerProvider().get_tracer("outlast")),
        "on": lambda: traced_by(provider.get_tracer("outlast")),
    }
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    appends: list[float] = []
    for n in range(ROUNDS):
        for mode, within in modes.items():
            with measure.folder(measure.memory_folder()) as folder, within():
                _, cpu, saved = one(folder, TURNS)
                took[mode].append(cpu / saved)
        if n % 6 == 0:
            with measure.folder(None) as folder:
                appends += Ours(measure.sub(folder, "appends")).steps(2, 50)
    provider.shutdown()
    quiet = {mode: sorted(all_)[len(all_) // 10] for mode, all_ in took.items()}
    base, append = quiet["taken out"], measure.median(appends)
    measure.table(
        ["mode", "CPU, µs a message: quiet", "median", "more than taken out, µs: quiet", "median of pairs"],
        [
            (
                mode,
                measure.us(quiet[mode]),
                measure.us(measure.median(all_)),
                f"{(quiet[mode] - base) * 1e6:,.1f}",
                f"{measure.median([a - b for a, b in zip(all_, took['taken out'], strict=True)]) * 1e6:,.1f}",
            )
            for mode, all_ in took.items()
        ],
    )
    alone = calls_alone()
    off, on = quiet["off"] - base, quiet["on"] - base
    print(f"an append on disk takes {measure.us(append)} µs; the calls of one append, alone and off: {alone * 1e6:.1f} µs")
    for what, got, most in (("off", off / append, OFF_SHARE), ("off, the calls alone", alone / append, OFF_SHARE), ("on", on * 1e6, ON_US)):
        shown = (f"{got:.2%}", f"{most:.0%}") if most < 1 else (f"{got:.1f} µs", f"{most:.0f} µs")
        print(f"{what}: {shown[0]} (target: at most {shown[1]}) {'met' if got <= most else 'MISSED'}")


def calls_alone(times: int = 20_000) -> float:
    """Seconds of CPU that the calls of one append take where nobody listens: what a difference of two noisy runs cannot show."""
    from outlast.core import run as r

    found = telemetry.Segment(None)
    entry = r.MessageAdded(
        {"role": "assistant", "content": []}, meta={"usage": {"input_tokens": 100, "output_tokens": 20}, "cost_usd": "0.01"}
    )
    begin = time.thread_time()
    for _ in range(times):
        found.entry(entry)
        metrics.appended(0.001, step=True)
    return (time.thread_time() - begin) / times


if __name__ == "__main__":
    main()

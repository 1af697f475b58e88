"""Pictures, made here as SVG: x in per cent so that bars stretch and text does not, y in pixels; numbers in attributes, no style.

Each has a sentence that says what to see, a label for those who cannot see it, and its table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from markupsafe import Markup

from outlast.documents import Gate
from outlast.web import text

HOUR = timedelta(hours=1)
BARS_MOST = 48  # more hours than that are put together
ROWS_MOST = 8  # roles, agents, tools in one picture; the table has all
OUTCOMES = (("done", "fill-done"), ("cancelled", "fill-cancelled"), ("failed", "fill-failed"))


@dataclass(frozen=True)
class Chart:
    title: str
    sentence: str
    legend: Markup
    svg: Markup | None
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def all_of(figures: Any, decided: Sequence[Gate], clock: text.Clock, long: timedelta, label: str) -> list[Chart]:
    return [
        ended(figures.ended, clock, long, label),
        waited(decided, clock),
        spent(figures.spent, figures.summed),
        steps(figures.steps),
    ]


def ended(found: Sequence[tuple[int, str, int]], clock: text.Clock, long: timedelta, label: str) -> Chart:
    """Runs that ended, per hour (or per several), by outcome."""
    hours = max(1, math.ceil(long / HOUR))
    wide = max(1, math.ceil(hours / BARS_MOST))
    now = int(clock.now.timestamp()) // 3600
    first = now - hours + 1
    bars = [dict.fromkeys((s for s, _ in OUTCOMES), 0) for _ in range(math.ceil(hours / wide))]
    for hour, status, n in found:
        if 0 <= (place := (hour - first) // wide) < len(bars) and status in bars[place]:
            bars[place][status] += n
    totals = {s: sum(b[s] for b in bars) for s, _ in OUTCOMES}
    top = _nice(max((sum(b.values()) for b in bars), default=0))
    out = [_grid(top)]
    step = 94 / len(bars)
    table = []
    for n, bar in enumerate(bars):
        at = datetime.fromtimestamp((first + n * wide) * 3600, UTC)
        here = clock.local(at)
        name = f"{here:%H:%M}" if hours <= 24 else f"{here.day} {here:%b %H:%M}"
        table.append((name, *(text.number(bar[s]) for s, _ in OUTCOMES)))
        y = 166.0
        for status, css in OUTCOMES:
            height = 144 * bar[status] / top
            if height:
                y -= height
                out.append(
                    _m(
                        '<rect class="{}" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}"/>',
                        css,
                        6 + n * step + step * 0.16,
                        y,
                        step * 0.68,
                        height,
                    )
                )
        if n % max(1, len(bars) // 8) == 0:
            minor = " tick-minor" if n % (2 * max(1, len(bars) // 8)) else ""
            words = name if hours <= 24 else f"{here.day} {here:%b}"
            out.append(_m('<text class="axis{}" x="{:.2f}%" y="184" text-anchor="middle">{}</text>', minor, 6 + (n + 0.5) * step, words))
    out.append(Markup('<line class="base" x1="6%" x2="100%" y1="166" y2="166"/>'))
    each = "hour" if wide == 1 else f"{wide} hours"
    sentence = ", ".join(f"{text.number(totals[s])} {s}" for s, _ in (OUTCOMES[0], OUTCOMES[2], OUTCOMES[1])) + f" in {label}"
    legend = _legend([(f'<rect class="{css}" x=".5" y=".5" width="13" height="9"/>', s) for s, css in OUTCOMES])
    svg = _plot(190, f"Stacked bars, one for each {each}: {sentence}.", out) if sum(totals.values()) else None
    return Chart(
        "Runs per hour, by outcome" if wide == 1 else f"Runs per {each}, by outcome",
        sentence,
        legend,
        svg,
        ("From", "Done", "Cancelled", "Failed"),
        table,
    )


def waited(decided: Sequence[Gate], clock: text.Clock) -> Chart:
    """Each approval, placed by how much of the time to its deadline was used; one line a role."""
    asked = [
        g for g in decided if g.kind == "approval" and g.outcome in ("approved", "rejected", "expired") and g.deadline and g.decided_at
    ]
    roles: dict[str, list[Gate]] = {}
    for g in asked:
        roles.setdefault(g.role or "anyone", []).append(g)
    shown = sorted(roles.items(), key=lambda kv: -len(kv[1]))[:ROWS_MOST]
    bottom = 20 + 40 * max(1, len(shown))
    out = [_m('<line class="limit" x1="78%" x2="78%" y1="14" y2="{}"/><text x="78%" y="9" text-anchor="middle">deadline</text>', bottom)]
    for n, (role, gates) in enumerate(shown):
        y = 28 + 40 * n
        out.append(_m('<text x="0" y="{}">{}</text><text class="axis" x="0" y="{}">{}</text><line class="grid" x1="22%" x2="100%" y1="{}" y2="{}"/>',
                      y + 2, text.seen(role[:22]), y + 15, text.plural(len(gates), "approval"), y, y))  # fmt: skip
        for g in gates[:200]:
            assert g.deadline is not None and g.decided_at is not None
            used = (g.decided_at - g.created_at) / max(g.deadline - g.created_at, timedelta(milliseconds=1))
            x = 22 + 56 * min(1.35, max(0.0, used))
            size, shift = (11, 2) if g.outcome == "expired" else (10, -5)
            out.append(
                _m(
                    '<use href="#k-{}" x="{:.2f}%" y="{}" width="{}" height="{}" transform="translate({})"/>',
                    g.outcome,
                    x,
                    y - 5,
                    size,
                    size,
                    shift,
                )
            )
    out.append(_m('<text class="axis" x="22%" y="{}">asked</text><text class="axis" x="50%" y="{}" text-anchor="middle">half of the time used</text>'
                  '<text class="axis" x="100%" y="{}" text-anchor="end">nobody decided</text>', bottom + 12, bottom + 12, bottom + 12))  # fmt: skip
    late = sum(g.outcome == "expired" for g in asked)
    sentence = f"{len(asked) - late:,} decided in time, {late:,} passed their deadline"
    legend = _legend([(f'<use href="#k-{k}" width="10" height="10"/>', words) for k, words in
                      (("approved", "approved"), ("rejected", "rejected"), ("expired", "nobody decided"))])  # fmt: skip
    table = [(g.run_id, g.role or "anyone", str(g.outcome), text.span(g.decided_at - g.created_at), text.span(g.deadline - g.created_at))
             for g in asked if g.decided_at and g.deadline]  # fmt: skip
    svg = (
        _plot(
            bottom + 20, f"One mark an approval, placed by how much of the time to its deadline was used, one line a role: {sentence}.", out
        )
        if asked
        else None
    )
    return Chart(
        "How long approvals waited, against their deadlines", sentence, legend, svg, ("Run", "Asked", "Outcome", "Waited", "Had"), table
    )


def spent(found: Sequence[tuple[int, str, int, int, int, float | None, int]], summed: int | None) -> Chart:
    """Tokens and cost of the runs that were started, per agent and day."""
    agents: dict[str, dict[int, tuple[int, int, int, int, float | None, int]]] = {}
    for day, agent, n, tokens_in, tokens_out, usd, unknown in found:
        agents.setdefault(agent, {})[day] = (n, tokens_in, tokens_out, day, usd, unknown)
    days = sorted({row[0] for row in found})
    days = list(range(max(days[-1] - 29, days[0]), days[-1] + 1)) if days else []
    shown = sorted(agents.items(), key=lambda kv: -sum(x[1] + x[2] for x in kv[1].values()))[:ROWS_MOST]
    top = max((x[1] + x[2] for per in agents.values() for x in per.values()), default=0) or 1
    out: list[Markup] = []
    step = 70 / max(1, len(days))
    for n, (agent, per) in enumerate(shown):
        base = 66 + 70 * n
        usd_of = [x[4] for x in per.values() if x[4] is not None]
        words = f"{text.money(sum(usd_of))} known" if usd_of else "cost unknown"
        out.append(_m('<text x="0" y="{}">{}</text><text class="axis" x="0" y="{}">{}</text><line class="base" x1="30%" x2="100%" y1="{}" y2="{}"/>',
                      base - 26, text.seen(agent[:26]), base - 11, words, base, base))  # fmt: skip
        most = max(per.values(), key=lambda x: x[1] + x[2])
        for k, day in enumerate(days):
            if day not in per:
                continue
            _, tokens_in, tokens_out, _, _, _ = per[day]
            high, low = 44 * tokens_in / top, max(44 * tokens_out / top, 1.0)
            x, width = 30 + step * k + step * 0.14, step * 0.72
            out.append(_m('<rect class="fill-input" x="{0:.2f}%" y="{1:.1f}" width="{2:.2f}%" height="{3:.1f}"/>'
                          '<rect class="fill-output" x="{0:.2f}%" y="{4:.1f}" width="{2:.2f}%" height="{5:.1f}"/>',
                          x, base - low - high, width, high, base - low, low))  # fmt: skip
            if per[day] is most:
                out.append(
                    _m(
                        '<text class="axis" x="{:.2f}%" y="{:.1f}" text-anchor="middle">{}</text>',
                        x + width / 2,
                        base - low - high - 4,
                        _short(tokens_in + tokens_out),
                    )
                )
    bottom = 66 + 70 * max(0, len(shown) - 1)
    for k, day in enumerate(days):
        if k % max(1, len(days) // 7) == 0:
            at = datetime.fromtimestamp(day * 86400, UTC)
            out.append(
                _m(
                    '<text class="axis" x="{:.2f}%" y="{}" text-anchor="middle">{}</text>',
                    30 + step * (k + 0.5),
                    bottom + 18,
                    f"{at:%a} {at.day} {at:%b}" if len(days) < 9 else f"{at.day} {at:%b}",
                )
            )
    tokens = sum(row[3] + row[4] for row in found)
    known, unknown = sum(row[5] or 0.0 for row in found), sum(row[6] for row in found)
    sentence = f"{text.number(tokens)} tokens" + (f", {text.money(known)}" if known else "") + (
        f"; {text.plural(unknown, 'run')} of unknown cost {'is' if unknown == 1 else 'are'} not counted" if unknown else "") + (
        f"; of the newest {text.number(summed)} runs" if summed else "")  # fmt: skip
    legend = _legend(
        [
            ('<rect class="fill-input" width="14" height="10"/>', "input tokens"),
            ('<rect class="fill-output" width="14" height="10"/>', "output tokens"),
        ]
    )
    table = [(f"{datetime.fromtimestamp(day * 86400, UTC):%Y-%m-%d}", agent, text.number(n), text.number(i), text.number(o), text.money(usd), text.number(u))
             for day, agent, n, i, o, usd, u in found]  # fmt: skip
    svg = _plot(bottom + 26, f"Small bars, one a day, one row an agent: {sentence}.", out) if found else None
    return Chart(
        "Tokens and cost, per agent and day", sentence, legend, svg, ("Day", "Agent", "Runs", "Input", "Output", "Cost", "Unknown"), table
    )


def steps(found: Sequence[tuple[str | None, int]]) -> Chart:
    """How long model answers and tools take: half, 95 and 99 of 100, on a logarithmic scale."""
    of: dict[str, list[int]] = {}
    for tool, ms in found:
        of.setdefault("model answer" if tool is None else tool, []).append(max(1, int(ms)))
    rows = [(name, _at(v, 50), _at(v, 95), _at(v, 99), len(v)) for name, v in ((n, sorted(v)) for n, v in of.items())]
    rows.sort(key=lambda r: (r[0] != "model answer", -r[4]))
    shown = rows[: ROWS_MOST + 1]
    decades = max(4, math.ceil(math.log10(max((r[3] for r in shown), default=1) + 1)))
    bottom = 22 + 29 * max(1, len(shown))

    def x(ms: int) -> float:
        return 27 + 73 * math.log10(max(1, ms)) / decades

    out = []
    for d in range(decades + 1):
        anchor = "start" if d == 0 else "end" if d == decades else "middle"
        out.append(_m('<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="14" y2="{1}"/><text class="axis" x="{0:.2f}%" y="8" text-anchor="{2}">{3}</text>',
                      x(10**d), bottom, anchor, _ms(10**d)))  # fmt: skip
    for n, (name, half, most, last, _) in enumerate(shown):
        y = 32 + 29 * n
        out.append(_m('<text x="0" y="{}">{}</text><line class="range" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>'
                      '<circle class="range-mid" cx="{:.2f}%" cy="{}" r="5"/>'
                      '<line class="range-end" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>',
                      y + 4, text.seen(name[:24]), x(half), x(most), y, y, x(half), y, x(last), x(last), y - 6, y + 6))  # fmt: skip
    model = next((r for r in rows if r[0] == "model answer"), None)
    sentence = f"Model answers take {_ms(model[1])} at the median" if model else "No model answers in this span"
    legend = _legend([('<circle class="range-mid" cx="7" cy="5" r="5"/>', "half are faster"),
                      ('<line class="range" x1="0" x2="14" y1="5" y2="5"/>', "up to 95 of 100"),
                      ('<line class="range-end" x1="7" x2="7" y1="0" y2="10"/>', "99 of 100")])  # fmt: skip
    table = [(name, _ms(half), _ms(most), _ms(last), text.number(n)) for name, half, most, last, n in rows]
    svg = _plot(bottom + 8, f"Latency of each step on a logarithmic scale. {sentence}.", out) if rows else None
    return Chart("How long a step takes", sentence, legend, svg, ("Step", "Half", "95 of 100", "99 of 100", "Steps"), table)


# ---- inside -----------------------------------------------------------------------------------------------------------------


def _m(pattern: str, *values: object) -> Markup:
    return Markup(pattern).format(*values)  # noqa: S704 - the patterns stand in this file; values are escaped


def _plot(height: int, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="plot" height="{}" role="img" aria-label="{}">{}</svg>').format(
        height, text.plain(label), Markup("").join(parts)
    )


def _legend(parts: Sequence[tuple[str, str]]) -> Markup:
    pattern = Markup('<span><svg aria-hidden="true">{}</svg>{}</span>')
    return Markup("").join(pattern.format(Markup(shape), words) for shape, words in parts)  # noqa: S704 - our own shapes


def _grid(top: int) -> Markup:
    parts = []
    for n in range(1, 5):
        y = 166 - 144 * n / 4
        parts.append(
            _m(
                '<line class="grid" x1="6%" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/><text class="axis" x="0" y="{1:.1f}">{2}</text>',
                y,
                y + 4,
                _short(top * n // 4),
            )
        )
    return Markup("").join(parts)


def _nice(most: int) -> int:
    """The next number of 4, 8, 20, 40, 80, 200, …: four lines at whole numbers."""
    step = 1
    while True:
        for top in (4, 8, 20):
            if most <= top * step:
                return top * step
        step *= 10


def _short(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n >= 1_000_000 else f"{n / 1e3:.0f} k" if n >= 10_000 else f"{n:,}"


def _ms(ms: int) -> str:
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.0f} s" if ms % 1000 == 0 or ms >= 10_000 else f"{ms / 1000:.1f} s"


def _at(values: Sequence[int], percent: int) -> int:
    return values[min(len(values) - 1, max(0, math.ceil(len(values) * percent / 100) - 1))]

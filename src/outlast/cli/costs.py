"""`costs`: what answers cost, by agent, day, model or tool; and the table of one run's steps. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import render, values
from outlast.cli.options import Options, command
from outlast.cli.target import opened, or_empty
from outlast.errors import UsageError

if TYPE_CHECKING:
    from outlast.reader import Step
    from outlast.stores.pages import Cost

PER = ("agent", "day", "model", "tool")
MONTH = timedelta(days=30)
NO_NAME = {"model": "(not named)", "tool": "(no tool)"}


def register(cli: typer.Typer) -> None:
    command(cli, "costs")(costs)


def costs(
    options: Options,
    *,
    per: Annotated[str, typer.Option("--per", metavar="|".join(PER), help="agent, day, model or tool")] = "agent",
    agent: Annotated[str | None, typer.Option("--agent", metavar="A", help="only runs of this agent")] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="WHEN", help="of runs that began since; default: 30d")] = None,
) -> int:
    """What answers cost, dearest first. Unknown prices are counted, never taken for 0."""
    if per not in PER:
        raise UsageError(f"--per is {per!r}: it must be one of {', '.join(PER)}")
    begin = values.when(since, "--since") if since else datetime.now(UTC) - MONTH
    with opened(options, only_reads=True) as app:
        found = or_empty(app).reader.costs(per=per, since=begin, agent=agent)
    if options.json:
        for cost in found:
            render.document(document(per, cost))
        return 0
    if not found:
        render.say(f"no answers of runs that began since {render.instant(begin)}\nlook further back with: outlast costs --since 90d")
        return 0
    head = (per.upper(), "CALLS", "TOKENS IN", "OUT", "CACHE READ", "WRITTEN", "USD", "PERHAPS LOST", "MS")
    render.table(head, [cells(per, cost) for cost in found])
    return 0


def cells(per: str, cost: Cost) -> tuple[str, ...]:
    lost = f"{money(cost.lost_usd)} ({cost.lost})" if cost.lost else ""
    unknown = f" + {cost.unpriced} unknown" if cost.unpriced and cost.cost_usd is not None else ""
    paid = money(cost.cost_usd) + unknown if cost.cost_usd is not None or cost.unpriced else ""
    tokens = (cost.input_tokens, cost.output_tokens, cost.cache_read_tokens, cost.cache_write_tokens)
    mean = str(round(cost.ms / cost.timed)) if cost.timed else ""
    return (cost.key or NO_NAME.get(per, ""), str(cost.calls), *(str(n) for n in tokens), paid, lost, mean)


def document(per: str, cost: Cost) -> dict[str, Any]:
    return {
        "type": "cost", "per": per, "key": cost.key, "calls": cost.calls, "input_tokens": cost.input_tokens, "output_tokens": cost.output_tokens,
        "cache_read_tokens": cost.cache_read_tokens, "cache_write_tokens": cost.cache_write_tokens, "cost_usd": plain(cost.cost_usd),
        "unpriced": cost.unpriced, "lost": cost.lost, "lost_usd": plain(cost.lost_usd),
        "mean_ms": round(cost.ms / cost.timed) if cost.timed else None}  # fmt: skip


def plain(amount: Decimal | None) -> str | None:
    return f"{amount:f}" if amount is not None else None


def money(amount: Decimal | None) -> str:
    """To a millionth of a dollar: a step costs less than a cent."""
    if amount is None:
        return "unknown"
    whole, _, rest = f"{amount:.6f}".partition(".")
    return f"{whole}.{rest.rstrip('0').ljust(2, '0')}"


def steps_table(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """The rows of a run's table, the sum last."""
    rows = []
    for step in steps:
        what = {"model": f"model {step.name}", "lost": "model call, lost: perhaps paid for", "run": f"run of {step.name}"}.get(
            step.kind, step.name
        )
        tokens = (step.input_tokens, step.output_tokens, step.cache_read_tokens, step.cache_write_tokens)
        shown = [str(n) if step.kind != "tool" else "" for n in tokens]
        rows.append((str(step.seq), what.strip(), *shown, money(step.cost_usd) if step.kind != "tool" else "",
                     str(step.ms) if step.ms is not None else "", str(step.attempt or "")))  # fmt: skip
    paid = [s for s in steps if s.kind in ("model", "run")]
    known = sum((s.cost_usd for s in paid if s.cost_usd is not None), Decimal(0))
    unknown = sum(s.cost_usd is None for s in paid)
    total = money(None) if unknown and not known else money(known) + (f" + {unknown} unknown" if unknown else "")
    sums = [sum(getattr(s, f"{kind}_tokens") for s in paid) for kind in ("input", "output", "cache_read", "cache_write")]
    return [*rows, ("", "all", *(str(n) for n in sums), total, str(sum(s.ms or 0 for s in steps)), "")]


STEPS_HEAD = ("CHECKPOINT", "STEP", "TOKENS IN", "OUT", "CACHE READ", "WRITTEN", "USD", "MS", "ATTEMPT")

"""What an answer cost, from its usage alone: prices given in Python first, then genai-prices' offline table.

An unknown model's cost is unknown (None), never 0. Amounts are USD, exact decimals. Cache writes have two prices, by how long they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from outlast.errors import UsageError

MILLION = Decimal(1_000_000)
KINDS = ("input", "output", "cache_read", "cache_write", "cache_write_1h")  # USD per million tokens
CHARS_PER_TOKEN = 4  # rough, for an estimate before a call
DEFAULT_MAX_TOKENS = 4096  # what an answer may have where the settings do not say

Prices = Mapping[str, Mapping[str, Decimal]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. `input` are those that were neither read from nor written to the cache."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0  # kept for 5 minutes
    cache_write_1h: int = 0


def usage_of(raw: Any) -> Usage | None:
    """The usage block of a Messages API answer; None where there is none, or it is no usage."""
    if not isinstance(raw, Mapping) or not ("input_tokens" in raw or "output_tokens" in raw):
        return None

    def count(value: Any) -> int:
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    written = count(raw.get("cache_creation_input_tokens"))
    detail = raw.get("cache_creation")
    hour = count(detail.get("ephemeral_1h_input_tokens")) if isinstance(detail, Mapping) else 0
    return Usage(
        count(raw.get("input_tokens")),
        count(raw.get("output_tokens")),
        count(raw.get("cache_read_input_tokens")),
        max(written - hour, 0),
        hour,
    )


def checked(prices: object) -> dict[str, dict[str, Decimal]]:
    """`Outlast(prices=)`, or UsageError that says what is wrong."""
    if not isinstance(prices, Mapping):
        raise UsageError(
            f"prices must be model -> prices, not {prices!r:.100}", hint='prices={"my-model": {"input": Decimal(3), "output": Decimal(15)}}'
        )
    out: dict[str, dict[str, Decimal]] = {}
    for model, given in prices.items():
        if not isinstance(given, Mapping) or not {"input", "output"} <= given.keys() or given.keys() - set(KINDS):
            raise UsageError(f"prices of {model!r} need input and output, and may have {', '.join(KINDS[2:])}: USD per million tokens")
        for kind, amount in given.items():
            if (
                isinstance(amount, bool)
                or not isinstance(amount, Decimal | int | float)
                or not Decimal(str(amount)).is_finite()
                or amount < 0
            ):
                raise UsageError(f"prices of {model!r}: {kind} must be an amount of USD per million tokens, not {amount!r}")
        out[model] = {kind: Decimal(str(amount)) for kind, amount in given.items()}
    return out


def cost(model: str | None, usage: Usage | None, prices: Prices) -> Decimal | None:
    """What an answer of that usage cost, or None: the model or its usage is unknown."""
    if model is None or usage is None:
        return None
    if (given := prices.get(model)) is not None:
        write = given.get("cache_write", given["input"] * Decimal("1.25"))  # the provider's own factors, where only input is given
        rates = {
            "input": given["input"],
            "output": given["output"],
            "cache_read": given.get("cache_read", given["input"] * Decimal("0.1")),
            "cache_write": write,
            "cache_write_1h": given.get("cache_write_1h", given["input"] * 2),
        }
        return sum((Decimal(getattr(usage, kind)) * rate for kind, rate in rates.items()), Decimal(0)) / MILLION
    return _listed(model, usage)


def _listed(model: str, usage: Usage) -> Decimal | None:
    calc = _table()
    return calc(model, usage) if calc is not None else None


@lru_cache(maxsize=1)
def _table() -> Callable[[str, Usage], Decimal | None] | None:
    """genai-prices' offline table, or None where the package is not installed."""
    try:
        import genai_prices
    except ModuleNotFoundError:
        return None

    def calc(model: str, usage: Usage) -> Decimal | None:
        name = model.partition(":")[2] or model
        raw = {
            "input_tokens": usage.input,
            "output_tokens": usage.output,
            "cache_read_input_tokens": usage.cache_read,
            "cache_creation_input_tokens": usage.cache_write + usage.cache_write_1h,
            "cache_creation": {"ephemeral_5m_input_tokens": usage.cache_write, "ephemeral_1h_input_tokens": usage.cache_write_1h},
        }
        try:
            found = genai_prices.extract_usage({"model": name, "usage": raw}, provider_id="anthropic")
            return Decimal(found.calc_price().total_price)
        except (LookupError, ValueError):
            return None

    return calc


def estimate(model: str | None, characters: int, max_tokens: int, prices: Prices) -> Decimal | None:
    """What the next call may cost at most, roughly: the message list as input and `max_tokens` of output."""
    return cost(model, Usage(input=characters // CHARS_PER_TOKEN + 1, output=max_tokens), prices)


def name_of(model: Any) -> str | None:
    """The name by which a model is priced: what follows the provider, or the `name`/`model` of a model object."""
    if isinstance(model, str):
        return model.partition(":")[2] or model
    for attr in ("model", "name"):
        if isinstance(value := getattr(model, attr, None), str):
            return value
    return None

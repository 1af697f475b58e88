"""Arguments as a form and back: made from the tool's schema, every number exact, nothing guessed.

Rules
1. A field is a text (`t.NAME`) or JSON (`j.NAME`). A text is sent as a text only if a browser gives it back as it is: what holds a carriage
   return or a character that would not be seen is JSON.
2. A number is the JSON that is stored: 20 digits stay 20 digits, 1.0 stays 1.0. An empty JSON field leaves the argument out.
3. The whole as one JSON text (`whole`) is the fallback for everything. Whether the arguments fit is judged by the tool, not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from outlast.errors import UsageError
from outlast.web.text import UNSEEN, json_text

MAX_FIELDS = 500


@dataclass(frozen=True)
class Field:
    name: str  # of the argument
    key: str  # of the field: t.NAME, j.NAME
    label: str
    kind: str  # text, line, choice, json
    value: str
    about: str = ""
    choices: tuple[tuple[str, str], ...] = ()  # (JSON, shown)
    rows: int = 1
    needed: bool = False


def fields(schema: Mapping[str, Any], args: Mapping[str, Any], entered: Mapping[str, str] = {}) -> list[Field]:
    """One a parameter, in the schema's order; then arguments that the schema does not know. `entered`: what a person typed before."""
    properties = dict(schema.get("properties") or {})
    needed = set(schema.get("required") or ())
    out = []
    for name in [*properties, *(n for n in args if n not in properties)]:
        field = _field(name, _resolved(properties.get(name, {}), schema), name in args, args.get(name), needed=name in needed)
        if field.key in entered:
            field = Field(**{**field.__dict__, "value": entered[field.key]})
        out.append(field)
    return out


def _resolved(prop: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    ref = prop.get("$ref") if isinstance(prop, Mapping) else None
    if isinstance(ref, str) and ref.startswith("#/$defs/"):
        return dict((schema.get("$defs") or {}).get(ref.removeprefix("#/$defs/"), {}))
    return prop if isinstance(prop, Mapping) else {}


def _field(name: str, prop: Mapping[str, Any], given: bool, value: Any, *, needed: bool) -> Field:
    about = str(prop.get("description") or "")
    label = name if needed else f"{name}, may be empty"
    choices = prop.get("enum")
    if isinstance(choices, list) and 0 < len(choices) <= 50 and (not given or value in choices):
        options = tuple((json_text(c), c if isinstance(c, str) else json_text(c)) for c in choices)
        empty = () if needed else (("", "left out"),)
        return Field(name, f"j.{name}", label, "choice", json_text(value) if given else "", about, (*empty, *options), needed=needed)
    if isinstance(value, bool) or (not given and prop.get("type") == "boolean"):
        options = (("true", "true"), ("false", "false"), *(() if needed else (("", "left out"),)))
        return Field(name, f"j.{name}", label, "choice", json_text(value) if given else "", about, options, needed=needed)
    if isinstance(value, str) and not UNSEEN.search(value):
        lines = value.count("\n") + 1
        return Field(name, f"t.{name}", label, "text" if lines > 1 or len(value) > 80 else "line", value, about,
                     rows=min(24, max(lines, len(value) // 80 + 1)), needed=needed)  # fmt: skip
    shown = json_text(value) if given else ""
    return Field(
        name, f"j.{name}", f"{label} (JSON)", "json", shown, about, rows=min(12, shown.count("\n") + len(shown) // 80 + 1), needed=needed
    )


def arguments(form: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that a form holds. Raises UsageError that names the field."""
    if "whole" in form:
        value = parsed(form["whole"], "the arguments")
        if not isinstance(value, dict):
            raise UsageError("the arguments must be one JSON object")
        return value
    out: dict[str, Any] = {}
    for key, given in form.items():
        kind, _, name = key.partition(".")
        if kind == "t" and name:
            out[name] = given
        elif kind == "j" and name and given.strip():
            out[name] = parsed(given, name)
    return out


def parsed(text: str, what: str) -> Any:
    """Strict JSON: no NaN, no key twice."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{what}: this is no JSON ({str(e)[:200]})", hint="a text needs its quotes") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key[:60]!r} is there twice")
        out[key] = value
    return out


def read(body: bytes) -> dict[str, str]:
    """A form's fields, each once. Browsers send line breaks as CR LF: they become the line feeds that they were."""
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=MAX_FIELDS, errors="strict"
        )
    except (ValueError, UnicodeError):
        raise UsageError("the form cannot be read") from None
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"the field {key[:60]!r} is there twice")
        found[key] = value.replace("\r\n", "\n")
    return found


def same(a: Any, b: Any) -> bool:
    """The same JSON, kinds of numbers included."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)

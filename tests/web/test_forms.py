"""Arguments as a form and back, exactly."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.web import forms

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), inner, max_size=4), max_leaves=12)  # fmt: skip
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)


def through_a_browser(fields: list[forms.Field]) -> dict[str, str]:
    """What a form sends: a line break of a field becomes CR LF; a line field has none."""
    body = urlencode([(f.key, f.value.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")) for f in fields]).encode()
    return forms.read(body)


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_what_was_not_touched_comes_back_as_it_was(args: dict[str, Any]) -> None:
    schema = {"properties": {name: {} for name in args}, "required": list(args)}
    assert forms.same(forms.arguments(through_a_browser(forms.fields(schema, args))), args)
    assert forms.same(forms.arguments({"whole": forms.json_text(args, indent=2)}), args)


@pytest.mark.parametrize("value, key, shown", [
    (20261109000000004711, "j.x", "20261109000000004711"),
    (1.0, "j.x", "1.0"),
    (1e300, "j.x", "1e+300"),
    ("text", "t.x", "text"),
    ("1.0", "t.x", "1.0"),  # a text that looks like a number stays a text
    ("two\nlines", "t.x", "two\nlines"),
    ("carriage\rreturn", "j.x", '"carriage\\rreturn"'),
    ("zero\u200bwidth", "j.x", '"zero\\u200bwidth"'),
    (True, "j.x", "true"),
    (None, "j.x", "null"),
    ([1, 2.50], "j.x", "[1, 2.5]"),
])  # fmt: skip
def test_the_field_of_a_value(value: Any, key: str, shown: str) -> None:
    [field] = forms.fields({"properties": {"x": {}}}, {"x": value})
    assert (field.key, field.value) == (key, shown)


def test_an_optional_argument_can_be_left_out_and_given() -> None:
    schema = {"properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}}, "required": []}
    fields = forms.fields(schema, {})
    assert [f.value for f in fields] == ["", ""]
    assert forms.arguments(through_a_browser(fields)) == {}
    assert forms.arguments({"j.x": "3", "j.y": '"b"'}) == {"x": 3, "y": "b"}


@pytest.mark.parametrize("form, why", [
    ({"j.x": "one"}, "x: this is no JSON"),
    ({"j.x": "NaN"}, "x: this is no JSON"),
    ({"whole": "[1]"}, "one JSON object"),
    ({"whole": '{"a": 1, "a": 2}'}, "twice"),
    ({"whole": "[" * 100_000}, "no JSON"),
    ({"j.x": "9" * 5000}, "no JSON"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(form: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        forms.arguments(form)


@pytest.mark.parametrize("body", [b"a=1&a=2", b"a", b"%", b"\xff=1", b"a=%ff", b"&".join(b"a%d=1" % n for n in range(600))])
def test_forms_that_no_browser_sends(body: bytes) -> None:
    with pytest.raises(UsageError):
        forms.read(body)

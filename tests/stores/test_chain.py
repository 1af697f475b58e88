"""The digest chain, worked out a second time from its description: what another program that verifies a journal would do."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from outlast.stores.base import chain, genesis

ROW: dict[str, Any] = {
    "entry_no": 7, "seq": 3, "kind": "CallFinished", "at_ms": 1_700_000_000_123, "by": None, "entry_id": "x-1", "fence": 2, "status": "running",
    "meta": '{"ms":4}', "body": '{"call_id":"toolu_01"}'}  # fmt: skip


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_it_is_what_its_description_says() -> None:
    before = genesis("run-1")
    assert before == sha(b"run-1")
    head = b"7|3|CallFinished|1700000000123|2|running|"
    expected = sha(before + head + sha(b"") + sha(b"x-1") + sha(b'{"ms":4}') + sha(b'{"call_id":"toolu_01"}'))
    assert chain(before, **ROW) == expected


@pytest.mark.parametrize("changed", [*ROW, "previous"])
def test_everything_is_in_it(changed: str) -> None:
    before = genesis("run-1")
    row = dict(ROW)
    if changed == "previous":
        before = genesis("run-2")
    else:
        row[changed] = row[changed] + 1 if isinstance(row[changed], int) else f"{row[changed]} "
    assert chain(before, **row) != chain(genesis("run-1"), **ROW)


def test_an_erased_body_leaves_its_digest() -> None:
    assert chain(b"", **{**ROW, "body": sha(ROW["body"].encode())}) == chain(b"", **ROW)

"""What is written down on taking over is worked out on the run as it is when it is written."""

from __future__ import annotations

from dataclasses import replace

from outlast.core.step import Policy
from outlast.runtime.drive import POISON, taken_over
from outlast.runtime.writer import Writer
from outlast.stores.sqlite import SQLiteStore
from outlast.testing.store_contract import begin, calls, send


def test_a_text_that_comes_while_a_run_is_given_up_is_shown_to_whoever_takes_it_up_again() -> None:
    store = SQLiteStore(":memory:")
    lease = begin(store).save(calls("c1")).lease
    writer = Writer(store, replace(lease, attempts=POISON, taken_over=True), Policy())
    writer.load()
    send(store, "run-1", "hurry up")
    saved = writer.save(lambda run, now: taken_over(run, writer.policy, now, POISON))
    assert saved.status == "failed"
    assert {"type": "text", "text": "hurry up"} in writer.run.messages[-1]["content"]
    store.close()

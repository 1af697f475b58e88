"""Notices reach people: after the commit, at least once, under one id; what fails is tried again, shows, and harms no run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.notices.receiver import NEW, OLD, receiving
from tests.support.world import assert_whole
from tests.waits.conftest import NewStore
from tests.waits.desk import FRIDAY, HOUR, LADDER, MONDAY_NOON, Desk, kinds, use

from outlast import Notice, Outlast, approval
from outlast.errors import GateClosed, StoreError, UsageError
from outlast.runtime import notices
from outlast.runtime.clock import wall


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_WEBHOOK_SECRET", NEW)


@pytest.fixture
def desk(tmp_path: Path, new_store: NewStore) -> Desk:
    return Desk(tmp_path, gate=LADDER, url=new_store())


TEXT = [
    "desk wants to send this reply",
    "Asked: support-lead, until Monday 2026-11-30 12:00 CET (Europe/Berlin)",
    "reply",
    "  text: Hello.",
    "Run run-1, approval:toolu_01",
]

# ---- what it says ----------------------------------------------------------------------------------------------------------


def test_it_says_what_is_asked_of_whom_until_when_in_their_zone(desk: Desk) -> None:
    desk.waiting()
    [notice] = desk.notices
    assert notice.text.splitlines() == TEXT
    assert notice.kind == "opened" and notice.gate.call_id == "toolu_01" and notice.url is None


def test_without_hours_the_zone_is_utc(desk: Desk) -> None:
    desk.gate = approval(to="support-lead", noun="reply", within=4 * HOUR)
    desk.waiting()
    assert "until Friday 2026-11-27 19:00 UTC" in desk.notices[0].text


def test_arguments_are_shown_whole_or_it_says_how_much_more_there_is(desk: Desk) -> None:
    long = "x" * (notices.MAX_ARGS_CHARS + 1234)
    desk.turns = ([use("reply", text=long)], "Done.")
    desk.waiting()
    text = desk.notices[0].text
    assert "x" * notices.MAX_ARGS_CHARS in text and "x" * (notices.MAX_ARGS_CHARS + 1) not in text
    assert "1,234 more characters are not shown here: outlast show run-1" in text


def test_no_value_can_pass_for_one_of_our_lines_or_hide(desk: Desk) -> None:
    desk.turns = ([use("reply", text="ok\nRun run-2, approval:toolu_09\x1b[2K\u202egnp\u200b")], "Done.")
    desk.waiting()
    lines = desk.notices[0].text.splitlines()
    assert [line for line in lines if line.startswith("Run ")] == ["Run run-1, approval:toolu_01"]
    assert "\\u001b[2K\\u202egnp\\u200b" in desk.notices[0].text


def test_a_link_leads_to_the_gate_on_the_runs_page(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_WEB_URL", "https://agents.example.com/")
    desk.waiting()
    assert desk.notices[0].url == "https://agents.example.com/runs/run-1#approval:toolu_01"


def test_an_expiry_says_that_nobody_decided(desk: Desk) -> None:
    app = desk.waiting()
    desk.at(MONDAY_NOON + 2 * HOUR)
    app.sweep()
    assert desk.notices[-1].text.startswith("Nobody decided on this reply within 6 working hours, so it was not sent.\n")


def test_an_escalation_says_who_did_not_decide(desk: Desk) -> None:
    app = desk.waiting()
    desk.at(MONDAY_NOON)
    app.sweep()
    assert desk.notices[-1].text.startswith(
        "A support lead did not decide in time: desk wants to send this reply\nAsked: duty-manager, until Monday 2026-11-30 14:00 CET"
    )


# ---- when ------------------------------------------------------------------------------------------------------------------


def test_decision_arrives_before_the_wait_is_saved(tmp_path: Path, new_store: NewStore) -> None:
    """The fastest approver there can be decides inside the hook: it is called after the commit, so the decision finds the gate and stands."""
    seen: list[str] = []

    def approve_at_once(notice: Notice) -> None:
        with Outlast(desk.store, clock=desk.clock) as other:
            seen.append(other.head(notice.gate.run_id).status)
            other.decide(notice.gate.run_id, notice.gate.call_id, approved=True, decided_by="bot")

    desk = Desk(tmp_path, url=new_store(), more={"notify": [approve_at_once]})
    app = desk.app()
    run = app.run_sync(app.agents["desk"], "A ticket came in.", run_id="run-1")  # no further poke
    assert run.status == "done"
    assert seen == ["waiting_for_approval"] and desk.sent == ["run-1:toolu_01"]
    app.start(app.agents["desk"], "Another one.", run_id="run-2")
    app.work_sync(until_idle=True)  # a worker, too
    assert app.head("run-2").status == "done" and len(desk.sent) == 2
    assert_whole(app, "run-1")


def test_none_for_a_transaction_that_did_not_stand(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append that opens the gate fails at its commit: nobody is told of a gate that is not there."""
    app = desk.app()
    told_before = []
    append = type(app._store).append

    def once_lost(self: Any, lease: Any, place: Any, batch: Any, *, now: Any) -> Any:
        if batch.notices and not told_before:
            told_before.append(list(desk.notices))
            raise StoreError("the disk is full")
        return append(self, lease, place, batch, now=now)

    monkeypatch.setattr(type(app._store), "append", once_lost)
    assert app.run_sync(app.agents["desk"], "A ticket came in.", run_id="run-1").status == "waiting_for_approval"
    assert told_before == [[]] and len(desk.notices) == 1


def test_a_coroutine_is_awaited_and_each_target_gets_its_own(desk: Desk) -> None:
    got: list[str] = []

    async def first(notice: Notice) -> None:
        await asyncio.sleep(0)
        got.append(f"first {notice.id}")

    class Second:
        def __call__(self, notice: Notice) -> None:
            got.append(f"second {notice.id}")

    desk.more = {"notify": [first, Second(), Second()]}
    app = desk.waiting()
    assert sorted(x.split()[0] for x in got) == ["first", "second", "second"]
    assert len({x.split()[1] for x in got}) == 1
    assert app.sweep() == 0


def test_inside_a_running_loop_too(desk: Desk) -> None:
    desk.waiting()
    desk.at(MONDAY_NOON)

    async def main() -> int:
        return desk.app().sweep()

    assert asyncio.run(main()) == 2


# ---- failing ---------------------------------------------------------------------------------------------------------------


def test_a_failing_notifier_is_tried_again_shows_and_harms_nothing(desk: Desk) -> None:
    tries: list[str] = []

    def down(notice: Notice) -> None:
        tries.append(notice.id)
        raise ConnectionError("chat is down")

    desk.more = {"notify": [down]}
    desk.at(FRIDAY + timedelta(weeks=5200))  # the view has the world's clock: its reminder must not be due
    app = desk.waiting()
    assert app.inbox()[0].notified_at is None
    assert app.stuck() == []
    for _ in range(3):
        assert app.sweep() == 0
        desk.clock.move(timedelta(hours=1, seconds=1))
    assert len(tries) >= 3 and len(set(tries)) == 1
    [stuck] = [x for x in app.stuck() if "chat is down" in x.reason]
    assert stuck.command == "outlast sweep" and stuck.run_id == "run-1"
    assert [r.run_id for r in app.runs(stuck=True)] == ["run-1"]
    app.decide("run-1", approved=True, decided_by="priya")
    assert app.resume_sync("run-1").status == "done"
    assert_whole(app, "run-1")


def test_pauses_grow_and_end(desk: Desk) -> None:
    assert [notices.pause(n).total_seconds() for n in (1, 2, 3, 4, 9, 99)] == [5, 20, 80, 320, 3600, 3600]
    tries: list[str] = []

    def down(notice: Notice) -> None:
        tries.append(notice.id)
        raise SystemExit(3)

    desk.gate = approval(to="support-lead", noun="reply", within=timedelta(days=30))
    desk.more = {"notify": [down]}
    app = desk.waiting()
    for _ in range(100):
        desk.clock.move(timedelta(hours=2))
        app.sweep()
    assert notices.GIVE_UP_AFTER < 200 * HOUR
    assert len(tries) < 45
    assert [x.reason for x in app.stuck() if "not tried again" in x.reason]


def test_it_is_told_once_the_notifier_is_back(desk: Desk) -> None:
    up: list[bool] = []

    def shaky(notice: Notice) -> None:
        if not up:
            raise TimeoutError("no answer")
        desk.notices.append(notice)

    desk.more = {"notify": [shaky]}
    app = desk.waiting()
    up.append(True)
    assert app.sweep() == 0  # not yet
    desk.clock.move(timedelta(seconds=5))
    assert app.sweep() == 1
    assert app.inbox()[0].notified_at == desk.clock.now
    assert desk.notices[0].gate.notified_at is None


@pytest.mark.parametrize(
    "notify, said",
    [
        ("https://example.com/hook", "a list"),
        ([42], "takes callables"),
        (["ops@example.com"], "takes callables"),
        (["https://"], "no webhook"),
        (["https://user:pw@example.com/x"], "user name or password"),
        (["https://example.com/a b"], "characters that no URL"),
        (["https://example.com:99999/x"], "cannot be read"),
        (["nonsense://x"], "none that apprise knows"),
    ],
)
def test_what_is_no_target_is_refused_where_it_is_written(notify: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as e:
        Outlast(":memory:", notify=notify)
    assert "pw" not in str(e.value)


# ---- webhooks --------------------------------------------------------------------------------------------------------------


def test_a_webhook_is_signed_as_standard_webhooks(desk: Desk) -> None:
    with receiving() as hook:
        desk.more = {"notify": [hook.url]}
        app = desk.waiting()
        assert hook.refused == []
        [(notice_id, document)] = hook.accepted.items()
        assert document["type"] == "gate.opened" and document["data"]["id"] == notice_id
        assert document["data"]["gate"]["run_id"] == "run-1" and document["data"]["gate"]["args"] == {"text": "Hello."}
        assert hook.requests[0]["content-type"] == "application/json"
        assert hook.path == ["/hooks/secret-path-of-this-hook"]
        assert app.inbox()[0].notified_at is not None


def test_keys_are_rotated_with_both_in_use(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_WEBHOOK_SECRET", f"{NEW} {OLD}")
    with receiving(secret=OLD) as old, receiving(secret=NEW) as new:
        desk.more = {"notify": [old.url, new.url]}
        desk.waiting()
        assert len(old.accepted) == len(new.accepted) == 1 and old.refused == new.refused == []
        assert len(old.requests[0]["webhook-signature"].split(" ")) == 2


def test_a_receiver_with_another_key_refuses(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_WEBHOOK_SECRET", OLD)
    with receiving(secret=NEW) as hook:
        desk.more = {"notify": [hook.url]}
        app = desk.waiting()
        assert len(hook.refused) == 1 and hook.accepted == {} and app.inbox()[0].notified_at is None


def test_a_receiver_that_fails_twice_gets_it_under_the_same_id(desk: Desk) -> None:
    with receiving([500, 503]) as hook:
        desk.more = {"notify": [hook.url]}
        app = desk.waiting()
        desk.clock.move(timedelta(seconds=5))
        assert app.sweep() == 0
        desk.clock.move(timedelta(seconds=20))
        assert app.sweep() == 1
        assert len({r["webhook-id"] for r in hook.requests}) == 1 and len(hook.requests) == 3
        assert len(hook.accepted) == 1
        assert app.sweep() == 0


def test_arguments_that_are_too_long_for_a_hook_are_counted(desk: Desk) -> None:
    desk.turns = ([use("reply", text="x" * 100_000)], "Done.")
    with receiving() as hook:
        desk.more = {"notify": [hook.url]}
        desk.waiting()
        [document] = hook.accepted.values()
        assert document["data"]["gate"]["args"] is None and document["data"]["args_bytes"] > 100_000
        assert document["data"]["gate"]["digest"].startswith("sha256:")


KILLED = """
    import os, signal, sys
    from datetime import timedelta
    from outlast import Agent, Outlast, approval, tool
    from outlast.models import ScriptedModel

    @tool(effect="idempotent", gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)))
    def reply(text: str) -> str:
        "Reply."
        return "sent"

    def die(self, notice, **more):  # the receiver has said yes, and nothing is recorded yet
        os.kill(os.getpid(), signal.SIGKILL)

    use = {"type": "tool_use", "id": "toolu_01", "name": "reply", "input": {"text": "Hello."}}
    agent = Agent("desk", model=ScriptedModel([[use], "Done."]), tools=[reply])
    app = Outlast(sys.argv[1], agents=[agent], notify=[sys.argv[2]])
    type(app._store).notice_done = die
    app.start(agent, "A ticket came in.", run_id="run-1")
    app.work_sync(until_idle=True)
"""


def test_a_worker_killed_between_sending_and_recording(desk: Desk, tmp_path: Path) -> None:
    """The next one sends it again, under the same id: a receiver that dedupes has it once."""
    with receiving() as hook:
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), desk.store, hook.url],
            env={**os.environ, "OUTLAST_WEBHOOK_SECRET": NEW}, capture_output=True, timeout=60, check=False)  # fmt: skip
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
        assert len(hook.requests) == 1
        desk.at(wall())
        desk.more = {"notify": [hook.url]}
        with desk.app() as app:
            assert app.sweep() == 0  # for a while it is the dead worker's to deliver
            assert app.inbox()[0].notified_at is None
            desk.clock.move(timedelta(minutes=2))
            assert app.sweep() == 1
            assert len(hook.requests) == 2 and len(hook.accepted) == 1 and hook.refused == []
            assert app.inbox()[0].notified_at is not None


def test_apprise_urls(desk: Desk) -> None:
    """Through the real library, to a JSON receiver on this machine; the URL stays out of the store, for it may hold secrets."""
    with receiving([500], secret="") as service:
        where = service.url.removeprefix("http://").removesuffix("/hooks/secret-path-of-this-hook")
        desk.more = {"notify": [f"json://operator:secret-of-this-hook@{where}/path"]}
        app = desk.waiting()
        assert app.inbox()[0].notified_at is None
        desk.clock.move(timedelta(seconds=5))
        assert app.sweep() == 1
        [document] = service.accepted.values()
        assert document["title"] == "desk wants to send this reply"
        assert document["message"].split("\n") == TEXT
        assert "secret" not in json.dumps(app._store.notice_targets("run-1", "approval:toolu_01"))


def test_the_loser_of_two_hooks_hears_who_decided(tmp_path: Path, new_store: NewStore) -> None:
    heard: list[str] = []

    def decides(notice: Notice) -> None:
        with Outlast(desk.store, clock=desk.clock) as other:
            try:
                other.decide("run-1", approved=not heard, decided_by="a" if not heard else "b")
                heard.append("decided")
            except GateClosed as e:
                heard.append(f"{e.gate.outcome} by {e.gate.decided_by}")

    desk = Desk(tmp_path, url=new_store())
    app = desk.app(notify=[decides])
    app.run_sync(app.agents["desk"], "A ticket came in.", run_id="run-1")
    assert heard == ["decided"] and kinds(app)["GateDecided"] == 1

"""The ladder of `escalation.py`, line by line: when who is asked, and what becomes of the reply."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpdesk import HelpDesk
from outlast import Outlast

HERE = Path(__file__).parent
LADDER = """\
Friday 16:00
checkpoint 2  running               model asks for get_ticket(ticket_id="KITE-142")
checkpoint 3  running               tool result: {"id": "KITE-142", "title": "Customer locked...
checkpoint 4  running               model asks for search_help(query="locked out after SSO ch...
checkpoint 5  running               tool result: [account-recovery#2] Locked out of your acco...
checkpoint 6  waiting_for_approval  model asks for reply_to_customer(ticket_id="KITE-142", me...
  notice (opened): kitebase-support wants to send this reply | Asked: support-lead, until Monday 2026-11-30 12:00 CET (Europe/Berlin)
Monday 10:00
  notice (reminder): Reminder: kitebase-support wants to send this reply | Asked: support-lead, until Monday 2026-11-30 12:00 CET (Europe/Berlin)
Monday 12:00
  notice (escalated): A support lead did not decide in time: kitebase-support wants to send this reply | Asked: duty-manager, until Monday 2026-11-30 14:00 CET (Europe/Berlin)
"""  # noqa: E501 - as it is printed
NOBODY = """\
Monday 14:00
  notice (expired): Nobody decided on this reply within 6 working hours, so it was not sent.
checkpoint 7  running               tool result: Nobody decided on this reply within 6 workin...
checkpoint 8  running               model asks for close_ticket(ticket_id="KITE-142", comment...
checkpoint 9  running               tool result: {"ticket_id": "KITE-142", "status": "closed"...
checkpoint 10  done                  model: I sent nothing to Northwind Studio and closed KITE...
Replies Northwind Studio got on KITE-142: 0
KITE-142 is closed; comment: Please answer this one yourselves. Nobody decided on this reply within 6 working hours, so it was not sent.
"""
DUTY_MANAGER = """\
Monday 12:30
  sam, the duty manager, approves
  help desk: sent reply #1 to Northwind Studio (key run-kite-142:toolu_03)
checkpoint 7  running               tool result: {"reply_id": 1, "status": "sent"}
checkpoint 8  done                  model: Replied to Northwind Studio on KITE-142.
Replies Northwind Studio got on KITE-142: 1
KITE-142 is open
"""


def play(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTLAST_", "ANTHROPIC_", "KITEBASE_"))}
    command = [sys.executable, str(HERE / "escalation.py"), "--keep", str(folder / "demo"), *args]
    done = subprocess.run(command, env={**env, "TZ": "Asia/Tokyo"}, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_stories(tmp_path: Path) -> None:
    assert play(tmp_path) == f"== Nobody answers ==\n{LADDER}{NOBODY}\n== The duty manager answers ==\n{LADDER}{DUTY_MANAGER}"


@pytest.mark.parametrize("story, replies, outcome", [("nobody", 0, "expired"), ("duty-manager", 1, "approved")])
def test_what_is_left_in_the_files(tmp_path: Path, story: str, replies: int, outcome: str) -> None:
    play(tmp_path, "--story", story)
    desk = HelpDesk(tmp_path / "demo" / "helpdesk.db")
    assert desk.replies_to("KITE-142") == replies
    assert len(desk.comments_on("KITE-142")) == 1 - replies
    with Outlast(tmp_path / "demo" / "agent.db") as app:
        [gate] = app.get("run-kite-142").gates
        assert (gate.outcome, gate.level) == (outcome, 1)
        assert gate.notified_at is not None
        assert app.store_check() == []


def test_a_ticket_is_closed_once(tmp_path: Path) -> None:
    desk = HelpDesk(tmp_path / "helpdesk.db")
    first = desk.close_ticket("KITE-142", "Please answer this one.", "key")
    assert desk.close_ticket("KITE-142", "Please answer this one.", "key") == first
    assert desk.get_ticket("KITE-142")["status"] == "closed" and desk.comments_on("KITE-142") == ["Please answer this one."]

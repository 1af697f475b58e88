"""Version 2 as it should be deployed: the tool answers to its older name too, so runs that wait for it go on, and their approvals count."""

from __future__ import annotations

from datetime import timedelta

import v2
from v1 import HelpDesk, add_internal_comment, folder, get_ticket, search_help

from outlast import Outlast, approval, tool

answer_ticket = tool(
    effect="idempotent",
    gate=approval(to="support-lead", noun="reply", within=timedelta(hours=4)),
    aliases=["reply_to_customer"],
)(v2.answer_ticket.fn)

agent = v2.agent.replace(tools=[get_ticket, search_help, answer_ticket, add_internal_comment])
app = Outlast(folder / "agent.db", agents=[agent], deps=HelpDesk(folder / "helpdesk.db"))

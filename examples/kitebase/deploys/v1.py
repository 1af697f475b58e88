"""Version 1 of the support agent: what is running today. `outlast worker v1`"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the agent stands in the folder above

from agent import INSTRUCTIONS, add_internal_comment, choose_model, get_ticket, reply_to_customer, search_help
from helpdesk import HelpDesk
from outlast import Agent, Limits, Outlast

folder = Path(os.environ.get("KITEBASE_DIR", ".demo"))
TICKET = os.environ.get("KITEBASE_TICKET", "KITE-142")

agent = Agent(
    "kitebase-support",
    version="1",
    model=choose_model(folder, TICKET, scripted=True),
    instructions=INSTRUCTIONS,
    tools=[get_ticket, search_help, reply_to_customer, add_internal_comment],
    limits=Limits(model_calls=20),
)
app = Outlast(folder / "agent.db", agents=[agent], deps=HelpDesk(folder / "helpdesk.db"))

"""6. MCP tools mounted."""

from datetime import timedelta

from outlast import Agent, Outlast, approval
from outlast.mcp import MCPServer

linear = MCPServer(
    "https://mcp.linear.app/mcp",
    prefix="linear_",
    only=["list_issues", "create_issue", "delete_issue"],
    effects={"list_issues": "read", "create_issue": "at_most_once"},
    gates={"delete_issue": approval(to="team-lead", within=timedelta(days=1))},
)
agent = Agent("triage", model="anthropic:claude-haiku-5-5", tools=[linear])
app = Outlast(agents=[agent])

"""What the types must say: `assert_type` for what they infer, `# error` on each line that a checker must refuse."""

from typing import assert_type

from pydantic import BaseModel

from outlast import Agent, Outlast, Run, RunHead, ToolContext, approval, tool


class Summary(BaseModel):
    x: int


plain = Agent("plain", model="m")
typed = Agent("typed", model="m", output=Summary)
app = Outlast(agents=[plain, typed])

assert_type(app.run_sync(plain, "x"), Run[str])
assert_type(app.run_sync(plain, "x").output, str | None)
assert_type(app.run_sync(typed, "x").output, Summary | None)
assert_type(app.start("typed", "x"), RunHead)


@tool
def add(ctx: ToolContext[int], y: str) -> int:
    return ctx.deps + len(y)


def undecorated() -> int:
    return 1


def refused(ctx: ToolContext[int]) -> None:
    assert_type(add(ctx, "y"), int)
    add("wrong")  # error
    print(app.start("typed", "x").output)  # error
    app.decide("r", approved="yes", decided_by="p")  # error
    app.decide("r", approved=True)  # error
    app.run_sync()  # error
    approval(to="lead")  # error
    approval(within=None, then="approve_reads")  # error
    tool(effect="twice")  # error
    Agent("c", model="m", tools=[undecorated])  # error

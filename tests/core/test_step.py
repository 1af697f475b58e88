"""What comes next: a table, one row a rule. A row is (what it shows, journal so far, policy, now, calls in flight) -> step.

A step is written as `build.brief` shows it: `calls id#attempt` (`!`: an intent is saved first), `check id`, `settle` with its entries, `model`, a status with
the second at which something new can be said and what the code lacks, or how the run ended. Every bug adds a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.build import (
    ALL,
    CHECKED,
    FORGETS,
    GATED,
    HELLO,
    KEYED,
    ONCE,
    READ,
    STARTED,
    answer,
    asks,
    at,
    begun,
    brief,
    called,
    decided,
    gate,
    hear,
    journal,  # fmt: skip
    policy,
    result,
    rung,
    s,
    says,
    t,
    use,
)

from outlast.core import messages as m
from outlast.core import run as r
from outlast.core.step import LimitPolicy, Policy, Settle, Wait, next_step, settled

A, B, C = use("a", "look"), use("b", "look"), use("c", "look")
P, Q = use("p", "pay"), use("q", "pay")
K = use("k", "post")
G = use("g", "reply")
SENT = r.TextSent("hurry up", by="ben")
CUT = asks(A, stop="max_tokens")
NOT_RUN = says("x")  # stands for the user message that answers a batch
APPROVAL = gate("g", "approval", rung(100), closes=100)
DOUBT = gate("p", "verification", n=1)
BUDGET = r.GateOpened(
    "budget:1",
    "budget",
    None,
    None,
    "d",
    args={"limit": "model_calls", "raise_to": 4},
    rungs=(rung(None),),
    why="limit of 2 model calls reached",
)
RETRY = r.ModelFailed("529 overloaded", 1, t(30))
ASKED = asks(A)
WAIT = gate("a", "event", rung(None), args={"event": "paid"})

LIMIT_2 = LimitPolicy(model_calls=2)
TWICE = (*HELLO, asks(A), result("a"), NOT_RUN, asks(B), result("b"), NOT_RUN)  # two model calls, ready for the third


def wall(then: Any = "ask") -> LimitPolicy:
    return LimitPolicy(wall=s(60), then=then)


TURN = [  # ---- between batches: a text, an answer, an end
    ("a new run asks the model", journal(*HELLO), "model"),
    ("an empty journal asks the model", r.Run("x"), "model"),
    ("a whole answer ends the run", journal(*HELLO, answer("hi")), "settle done"),
    ("so does a stop sequence", journal(*HELLO, answer("hi", stop="stop_sequence")), "settle done"),
    ("the end is said once", journal(*HELLO, answer("hi"), r.RunEnded("done")), "done"),
    ("cut without calls", journal(*HELLO, answer("hi", stop="max_tokens")), "settle failed"),
    ("a refusal", journal(*HELLO, answer("no", stop="refusal")), "settle failed"),
    ("context window", journal(*HELLO, answer("hi", stop="model_context_window_exceeded")), "settle failed"),
    ("a reason nobody knows", journal(*HELLO, answer("hi", stop="some_new_reason")), "settle failed"),
    ("null is no reason", journal(*HELLO, answer("hi", stop=None)), "settle failed"),
    ("a reason of another type", journal(*HELLO, answer("hi", stop={"why": [1]})), "settle failed"),
    ("tool_use without a call", journal(*HELLO, answer("hi", stop="tool_use")), "settle failed"),
    ("a paused turn is sent back unchanged", journal(*HELLO, answer("…", stop="pause_turn")), "model"),
    ("ten times", journal(*HELLO, *[answer("…", stop="pause_turn")] * 10), "model"),
    ("no more", journal(*HELLO, *[answer("…", stop="pause_turn")] * 11), "settle failed"),
    (
        "in a row",
        journal(*HELLO, *[answer("…", stop="pause_turn")] * 10, ASKED, result("a"), NOT_RUN, answer("…", stop="pause_turn")),
        "model",
    ),
    ("a text goes before the next model call", journal(*HELLO, SENT), "settle 'hurry up'"),
    ("instead of finishing", journal(*HELLO, SENT, answer("hi")), "settle 'hurry up'"),
    ("two texts are one message", journal(*HELLO, SENT, SENT, answer("hi")), "settle 'hurry up'+'hurry up'"),
    ("it wakes a run that is done", journal(*HELLO, answer("hi"), r.RunEnded("done"), SENT), "settle 'hurry up'"),
    ("it mends a refusal", journal(*HELLO, answer("no", stop="refusal"), r.RunEnded("failed"), SENT), "settle 'hurry up'"),
    ("it waits while a turn is paused", journal(*HELLO, answer("…", stop="pause_turn"), SENT), "model"),
    (
        "it gives a run that paused too often a new start",
        journal(*HELLO, *[answer("…", stop="pause_turn")] * 11, r.RunEnded("failed"), SENT),
        "model",
    ),
    ("retry does too", journal(*HELLO, *[answer("…", stop="pause_turn")] * 11, r.RunEnded("failed"), r.RetryAsked()), "model"),
    ("retry goes on from the last message", journal(*HELLO, r.ModelFailed("401", 1, None), r.RunEnded("failed"), r.RetryAsked()), "model"),
    ("retry alone repeats a refusal", journal(*HELLO, answer("no", stop="refusal"), r.RunEnded("failed"), r.RetryAsked()), "settle failed"),
    ("after a cancel it can be taken up", journal(*HELLO, r.RunCancelled("enough"), SENT), "settle 'hurry up'"),
    ("a cancelled run", journal(*HELLO, r.RunCancelled("enough")), "cancelled"),
    ("a moved run", journal(*HELLO, r.RunMoved("temporal")), "cancelled"),
    ("the model is asked again when its time comes", journal(*HELLO, RETRY), "waiting_for_timer 30"),
    ("a text does not hurry a provider that said later", journal(*HELLO, RETRY, SENT, says("hurry up")), "waiting_for_timer 30"),
    ("retry does", journal(*HELLO, RETRY, r.RetryAsked()), "model"),
    ("an answer ends the retries", journal(*HELLO, RETRY, answer("hi")), "settle done"),
    ("never by a machine", journal(*HELLO, r.ModelFailed("400", 1, None)), "settle failed"),
]

STOPS = [  # ---- answers with calls that are not to be run
    ("cut: answered, nothing was run", journal(*HELLO, CUT), "settle a=refused a"),
    ("three times in a row", journal(*HELLO, *[CUT, NOT_RUN] * 2, CUT), "settle a=refused a"),
    ("the fourth fails the run", journal(*HELLO, *[CUT, NOT_RUN] * 3, CUT), "settle a=refused a failed"),
    ("a good one between", journal(*HELLO, *[CUT, NOT_RUN] * 3, asks(B), result("b"), NOT_RUN, CUT), "settle a=refused a"),
    (
        "a text after the failure is a new start",
        journal(*HELLO, *[CUT, NOT_RUN] * 4, r.RunEnded("failed"), SENT, says("x"), CUT),
        "settle a=refused a",
    ),
    ("paused with a call of ours", journal(*HELLO, asks(A, stop="pause_turn")), "settle a=refused a"),
    ("whole with a call", journal(*HELLO, asks(A, stop="end_turn")), "settle a=refused a done"),
    ("unless a text came", journal(*HELLO, SENT, asks(A, stop="end_turn")), "settle a=refused a+'hurry up'"),
    ("refused with calls", journal(*HELLO, asks(A, B, stop="refusal")), "settle a=refused b=refused a+b failed"),
    ("unknown with calls", journal(*HELLO, asks(A, stop="some_new_reason")), "settle a=refused a failed"),
    ("null with calls", journal(*HELLO, asks(A, stop=None)), "settle a=refused a failed"),
    (
        "a call of the provider's own server is none of ours",
        journal(*HELLO, answer({"type": "server_tool_use", "id": "s", "name": "web"}, stop="pause_turn")),
        "model",
    ),
]

BATCH = [  # ---- a batch of calls
    ("all side by side", called(A, B, C), "calls a#1, b#1, c#1"),
    ("those without a result", called(A, B, C, then=[result("b")]), "calls a#1, c#1"),
    ("one user message, in the order of the calls", called(A, B, C, then=[result("c"), result("a"), result("b")]), "settle a+b+c"),
    ("texts after the results", called(A, then=[SENT, result("a")]), "settle a+'hurry up'"),
    ("texts never before them", called(A, then=[SENT]), "calls a#1"),
    ("the first result stands", called(A, then=[result("a", "1"), result("a", "2")]), "settle a"),
    ("at most once: an intent, one after the other", called(P, A, Q), "calls p#1!, a#1"),
    ("the later waits for the earlier that is in doubt", called(P, Q, then=[begun("p"), DOUBT]), "waiting_for_verification"),
    ("not for a later one", called(P, Q, then=[begun("q"), gate("q", "verification")]), "calls p#1!"),
    ("nor for one that waits for its approval", called(G, P, then=[APPROVAL]), "calls p#1!"),
    ("idempotent: again with the same key, no person", called(K, then=[begun("k", "idempotent")]), "calls k#2"),
    ("a failed attempt waits for its time", called(A, then=[r.CallFailed("a", "busy", t(9))]), "waiting_for_timer 9"),
    ("read attempts are counted", called(A, then=[r.CallFailed("a", "busy", t(0))]), "calls a#2"),
    ("skipped is surely not done", called(P, then=[begun("p"), r.CallSkipped("p", "too late")]), "calls p#2!"),
    ("a gate opens in the append that saves the answer", called(G), "settle open approval:g"),
    ("every gate of the batch at once", called(G, use("h", "reply")), "settle open approval:g open approval:h"),
    ("gated beside a call that may run", called(G, A, then=[APPROVAL]), "calls a#1"),
    ("pending", called(G, then=[APPROVAL]), "waiting_for_approval 100"),
    ("approved", called(G, then=[APPROVAL, decided("approval:g")]), "calls g#1"),
    ("rejected", called(G, then=[APPROVAL, decided("approval:g", "rejected", note="no")]), "settle g=refused"),
    ("anything but yes is no", called(G, then=[APPROVAL, decided("approval:g", "yes")]), "settle g=refused"),
    ("the first decision stands", called(G, then=[APPROVAL, decided("approval:g", "rejected"), decided("approval:g")]), "settle g=refused"),
    ("a decision for another gate", called(G, then=[APPROVAL, decided("approval:h")]), "waiting_for_approval 100"),
    ("a refused decision changes nothing", called(G, then=[APPROVAL, r.DecisionRefused("approval:g", "late")]), "waiting_for_approval 100"),
    ("an event answers it", called(A, then=[WAIT, r.EventReceived("paid", {"eur": 5})]), "settle a=answered"),
    ("one that came before", called(A, then=[r.EventReceived("paid"), WAIT]), "settle a=answered"),
    ("another does not", called(A, then=[WAIT, r.EventReceived("lost")]), "waiting_for_event"),
    ("a timer", called(A, then=[gate("a", "event", rung(9), closes=9, args={"timer": True})]), "waiting_for_timer 9"),
    ("a run of its own", called(A, then=[r.GateOpened("run:a", "run", "a", "look", "d")]), "waiting_for_run"),
    ("answers when it ends", called(A, then=[r.GateOpened("run:a", "run", "a", "look", "d"), r.ChildFinished("a", "failed")]), "settle a=answered"),
    ("of several waits the first in order, the least instant", called(G, K, P, then=[
        APPROVAL, r.CallFailed("k", "busy", t(9)), begun("p"), DOUBT]), "waiting_for_approval 9"),
    ("doubt before a timer", called(K, P, then=[r.CallFailed("k", "busy", t(9)), begun("p"), DOUBT]), "waiting_for_verification 9"),
    ("a timer before missing code", called(use("z", "gone"), K, then=[r.CallFailed("k", "busy", t(9))]), "waiting_for_timer 9"),
    ("missing code", called(use("z", "gone")), "waiting_for_code [tool:gone]"),
    ("a schema that changed", called(use("z", "strict")), "waiting_for_code [schema:strict:d1]"),
    ("a run that ended with calls open answers them", called(A, then=[r.RunEnded("failed", "worker died 5 times")]), "settle a=cancelled a"),
    ("and says of a begun one what is known", called(A, P, then=[begun("p"), r.RunCancelled()]), "settle a=cancelled p=unknown a+p"),
    ("a text that came before the cancel is not lost", called(A, then=[SENT, r.RunCancelled()]), "settle a=cancelled a+'hurry up'"),
]  # fmt: skip

DOUBTS = [  # ---- begun and unanswered
    ("at most once: a person is asked", called(P, then=[begun("p")]), ONCE, 0, "settle open verification:p"),
    ("whatever the code says now", called(P, then=[begun("p")]), replace(ONCE, effect="read"), 0, "settle open verification:p"),
    ("or does not say", called(P, then=[begun("p")]), READ, 0, "settle open verification:p"),
    ("even where the arguments no longer fit", called(P, then=[begun("p")]), replace(ONCE, problem=lambda a: "bad"), 0, "settle open verification:p"),
    ("a gate that the code lost stays", called(G, then=[APPROVAL]), replace(GATED, gate=None), 0, "waiting_for_approval 100"),
    ("a gate that the code lost with its tool too", called(G, then=[APPROVAL, decided("approval:g", "rejected")]), READ, 0, "settle g=refused"),
    ("approved, then the tool is gone", called(G, then=[APPROVAL, decided("approval:g")]), READ, 0, "waiting_for_code [tool:reply]"),
    ("a stored yes is not asked for again", called(G, then=[APPROVAL, decided("approval:g")]), GATED, 500, "calls g#1"),
    ("a new gate does not reach what is begun", called(P, then=[begun("p")]), replace(ONCE, gate=GATED.gate), 0, "settle open verification:p"),
    ("when= said no once", called(G, then=[r.GateWaived("g")]), GATED, 0, "calls g#1"),
    ("check first", called(P, then=[begun("p")]), CHECKED, 60, "calls check p#2!"),
    ("not while the earlier attempt may act", called(P, then=[begun("p")]), CHECKED, 59, "waiting_for_timer 60"),
    ("a dead process may have something on the wire", called(P, then=[begun("p"), r.WorkerDied(["p"], t(5))]), CHECKED, 4, "waiting_for_timer 5"),
    ("not longer", called(P, then=[begun("p"), r.WorkerDied(["p"], t(5))]), CHECKED, 5, "calls check p#2!"),
    ("a thread that outlived its timeout moves it on", called(P, then=[begun("p"), r.CallDoubted("p", "timeout", t(90))]), CHECKED, 60, "waiting_for_timer 90"),
    ("a check that could not tell", called(P, then=[begun("p"), r.CallDoubted("p", "503", checked=True)]), CHECKED, 60, "settle open verification:p"),
    ("a check that comes with new code does not overrule the question", called(P, then=[begun("p"), DOUBT]), CHECKED, 60, "waiting_for_verification"),
    ("nor the answer", called(P, then=[begun("p"), DOUBT, decided("verification:p", "happened")]), CHECKED, 60, "settle p=verified"),
    ("it happened", called(P, then=[begun("p"), DOUBT, decided("verification:p", "happened")]), ONCE, 0, "settle p=verified"),
    ("do not repeat", called(P, then=[begun("p"), DOUBT, decided("verification:p", "give_up")]), ONCE, 0, "settle p=unknown"),
    ("anything else is no order to repeat", called(P, then=[begun("p"), DOUBT, decided("verification:p", "again")]), ONCE, 0, "settle p=unknown"),
    ("run again while the attempt might act: its process is dead, and the wire is waited for", called(P, then=[
        at(0, begun("p")), DOUBT, at(9, decided("verification:p", "run_again"))]), ONCE, 10, "waiting_for_timer 14"),
    ("then it runs", called(P, then=[at(0, begun("p")), DOUBT, at(9, decided("verification:p", "run_again"))]), ONCE, 14, "calls p#2!"),
    ("run again", called(P, then=[begun("p"), DOUBT, at(60, decided("verification:p", "run_again"))]), CHECKED, 0, "calls p#2!"),
    ("used up by the next intent", called(P, then=[
        begun("p"), DOUBT, at(60, decided("verification:p", "run_again")), begun("p", attempt=2)]), ONCE, 0, "settle open verification:p.2"),
    ("that question is a new one", called(P, then=[
        begun("p"), DOUBT, at(60, decided("verification:p", "run_again")), begun("p", attempt=2), gate("p", "verification", n=2)]),
        ONCE, 0, "waiting_for_verification"),
    ("a late result answers an open question", called(P, then=[begun("p"), DOUBT, r.LateResult("p", "paid")]), ONCE, 0, "settle p=result"),
    ("nor is it asked where one is there already", called(P, then=[begun("p"), r.LateResult("p", "paid")]), ONCE, 0, "settle p=result"),
    ("nor looked for", called(P, then=[begun("p"), r.CallDoubted("p", "cut off"), r.LateResult("p", "paid")]), CHECKED, 0, "settle p=result"),
    ("nor asked for anew under its key", called(K, then=[begun("k", "idempotent"), r.LateResult("k", "ok")]), FORGETS, 0, "settle k=result"),
    ("a late failure is no answer", called(P, then=[begun("p"), r.LateResult("p", "no", is_error=True)]), ONCE, 0, "settle open verification:p"),
    ("one with other arguments is none", called(P, then=[
        begun("p"), r.LateResult("p", "paid"), r.CallUpgraded("p", "pay", {"n": 2})]), ONCE, 0, "settle open verification:p"),
    ("it overrules nobody", called(P, then=[begun("p"), DOUBT, decided("verification:p", "give_up"), r.LateResult("p", "paid")]), ONCE, 0, "settle p=unknown"),
    ("spent retries go to a person", called(K, then=[r.CallFailed("k", "503", t(0)), r.CallDoubted("k", "503")]), KEYED, 0, "settle open verification:k"),
    ("the receiver still knows the key", called(K, then=[at(0, begun("k", "idempotent"))]), FORGETS, 49, "calls k#2!"),
    ("the receiver has forgotten the key", called(K, then=[at(0, begun("k", "idempotent"))]), FORGETS, 50, "settle open verification:k"),
    ("after a failed attempt too",
     called(K, then=[at(0, begun("k", "idempotent")), r.CallFailed("k", "503", t(49))]), FORGETS, 50, "settle open verification:k"),
    ("a retry beyond its memory waits no longer",
     called(K, then=[at(0, begun("k", "idempotent")), r.CallFailed("k", "503", t(99))]), FORGETS, 9, "waiting_for_timer 50"),
    ("after a skipped one too", called(K, then=[
        at(0, begun("k", "idempotent")), begun("k", "idempotent", attempt=2), r.CallSkipped("k", "late")]), FORGETS, 50, "settle open verification:k"),
    ("a person's answer counts, whatever the time", called(K, then=[
        at(0, begun("k", "idempotent")), gate("k", "verification"), decided("verification:k", "happened")]), KEYED, 50, "settle k=verified"),
    ("run again starts its memory anew", called(K, then=[
        at(0, begun("k", "idempotent")), gate("k", "verification"), at(60, decided("verification:k", "run_again"))]), FORGETS, 99, "calls k#2!"),
    ("begun, and its schema changed", called(K, then=[
        at(0, begun("k", "idempotent"))]), replace(FORGETS, problem=lambda a: "bad", schema_digest="d"), 0, "waiting_for_code 50 [schema:post:d]"),
    ("begun, and its tool is gone", called(K, then=[begun("k", "idempotent")]), READ, 0, "waiting_for_code [tool:post]"),
    ("a validator that stumbles", called(A), replace(READ, problem=lambda a: a["n"], schema_digest="d"), 0, "waiting_for_code [schema:look:d]"),
    ("a key= that stumbles: surely not run", called(K), replace(KEYED, key=lambda a: a["n"]), 0, "settle k=refused"),
    ("a key that is none", called(K), replace(KEYED, key=lambda a: ""), 0, "settle k=refused"),
]  # fmt: skip

LIMITS = [  # ---- limits: counted from the journal, checked before each model call
    ("reached: a gate", journal(*TWICE), LIMIT_2, 0, "settle open budget:1"),
    ("a call lost with its worker counts", journal(*HELLO, ASKED, result("a"), NOT_RUN, r.ModelCallLost()), LIMIT_2, 0, "settle open budget:1"),
    ("it waits for a person", journal(*TWICE, BUDGET), LIMIT_2, 0, "waiting_for_budget"),
    ("raised", journal(*TWICE, BUDGET, decided("budget:1")), LIMIT_2, 0, "model"),
    ("raised to as much as was asked", journal(*TWICE, BUDGET, decided("budget:1", args={"raise_to": 2})), LIMIT_2, 0, "settle open budget:2"),
    ("not raised", journal(*TWICE, BUDGET, decided("budget:1", "rejected", note="too dear")), LIMIT_2, 0, "settle failed"),
    ("retry asks anew", journal(*TWICE, BUDGET, decided("budget:1", "rejected"), r.RunEnded("failed"), r.RetryAsked()), LIMIT_2, 0, "settle open budget:2"),
    ("so does a text", journal(*TWICE, BUDGET, decided("budget:1", "rejected"), r.RunEnded("failed"), SENT, says("x")), LIMIT_2, 0, "settle open budget:2"),
    ("fail", journal(*TWICE), replace(LIMIT_2, then="fail"), 0, "settle failed"),
    ("a finished answer is not thrown away", journal(*TWICE, answer("hi")), replace(LIMIT_2, then="fail"), 0, "settle done"),
    ("tokens",
     journal(*HELLO, asks(A, usage={"input_tokens": 60, "output_tokens": 40}), result("a"), NOT_RUN), LimitPolicy(tokens=100), 0, "settle open budget:1"),
    ("fewer tokens", journal(*HELLO, asks(A, usage={"input_tokens": 60, "output_tokens": 39}), result("a"), NOT_RUN), LimitPolicy(tokens=100), 0, "model"),
    ("tokens lost", journal(*HELLO, r.ModelCallLost(60, 40)), LimitPolicy(tokens=100), 0, "settle open budget:1"),
    ("usage of a strange shape counts nothing", journal(*HELLO, asks(A, usage=[7]), result("a"), NOT_RUN), LimitPolicy(tokens=100), 0, "model"),
    ("wall time", journal(*HELLO), wall(), 60, "settle open budget:1"),
    ("not yet", journal(*HELLO), wall(), 59, "model"),
    ("wall time, fail", journal(*HELLO), wall("fail"), 60, "settle failed"),
    ("wherever it stands", called(A, G, then=[APPROVAL]), wall("fail"), 60, "settle a=refused g=refused a+g failed"),
    ("a wait wakes for it", called(G, then=[APPROVAL]), wall("fail"), 9, "waiting_for_approval 60"),
    ("a timer too", journal(*HELLO, r.ModelFailed("429", 1, t(3600))), wall("fail"), 9, "waiting_for_timer 60"),
    ("and a question about a budget", journal(*TWICE, BUDGET), replace(wall("fail"), model_calls=2), 9, "waiting_for_budget 60"),
    ("not past it", journal(*HELLO, r.ModelFailed("429", 1, t(3600))), wall("fail"), 60, "settle failed"),
    ("asking only before a model call", called(G, then=[APPROVAL]), wall(), 70, "waiting_for_approval 100"),
    ("a begun call first needs somebody's word", called(P, then=[begun("p"), DOUBT]), wall("fail"), 70, "waiting_for_verification"),
    ("a text before the end is not lost", called(A, then=[SENT]), wall("fail"), 60, "settle a=refused a+'hurry up' failed"),
    ("raised beyond any instant", journal(*HELLO, replace(BUDGET, args={"limit": "wall", "raise_to": 1e20}), decided("budget:1")), wall(), 9e7, "model"),
]  # fmt: skip

FLIGHT = [  # ---- while calls run
    ("nothing to do", called(A), ALL, 0, ["a"], "running"),
    ("the rest of the batch", called(A, B), ALL, 0, ["a"], "calls b#1"),
    ("no more than parallel_calls", called(A, B, C), policy(READ, parallel_calls=2), 0, ["a"], "calls b#1"),
    ("at the limit", called(A, B, C), policy(READ, parallel_calls=2), 0, ["a", "b"], "running"),
    ("a gate beside them is not deaf", called(A, G, then=[APPROVAL]), ALL, 100, ["a"], "settle expired approval:g"),
    ("nor its clock", called(A, G, then=[APPROVAL]), ALL, 0, ["a"], "running 100"),
    ("nor its decision", called(A, G, then=[APPROVAL, decided("approval:g")]), ALL, 0, ["a"], "calls g#1"),
    ("one in flight is not in doubt", called(P, then=[begun("p")]), ALL, 0, ["p"], "running"),
    ("the second waits for one in flight", called(P, Q, then=[begun("p")]), ALL, 0, ["p"], "running"),
    ("even before its intent stands", called(P, Q), ALL, 0, ["p"], "running"),
    ("not for a read", called(A, Q), ALL, 0, ["a"], "calls q#1!"),
    ("the wall limit waits for their end", called(A), policy(READ, limits=wall("fail")), 60, ["a"], "running"),
    ("and wakes for it", called(A), policy(READ, limits=wall("fail")), 9, ["a"], "running 60"),
    ("a cancel is heard", called(A, then=[r.RunCancelled()]), ALL, 0, ["a"], "settle a=cancelled a"),
]

LADDER = (rung(100, "support-lead", 40, 80), rung(200, "head-of-support", 140))


def ladder(*then: r.Entry, closes: float | None = 200) -> r.Run:
    return called(G, then=[gate("g", "approval", *LADDER, closes=closes), *then])


GATES = [  # ---- a gate's clock
    ("first its reminder", ladder(), 0, "waiting_for_approval 40"),
    ("it is due", ladder(), 40, "settle level 0"),
    ("once", ladder(r.GateMoved("approval:g", 0, t(40))), 40, "waiting_for_approval 80"),
    ("slept through: only the last", ladder(), 99, "settle level 0"),
    ("and not again", ladder(r.GateMoved("approval:g", 0, t(80))), 99, "waiting_for_approval 100"),
    ("the next rung is asked", ladder(r.GateMoved("approval:g", 0, t(80))), 100, "settle level 1"),
    ("its own reminder", ladder(r.GateMoved("approval:g", 1)), 100, "waiting_for_approval 140"),
    ("a rung slept through", ladder(), 150, "settle level 1"),
    ("its reminder is not made up for", ladder(r.GateMoved("approval:g", 1, t(140))), 150, "waiting_for_approval 200"),
    ("one millisecond before", ladder(r.GateMoved("approval:g", 1, t(140))), 199.999, "waiting_for_approval 200"),
    ("expired at exactly the end", ladder(), 200, "settle expired approval:g"),
    ("the model hears of it", ladder(r.GateExpired("approval:g")), 200, "settle g=refused"),
    ("decided on the last rung", ladder(r.GateMoved("approval:g", 1), decided("approval:g")), 500, "calls g#1"),
    ("a decision stands after the end", ladder(decided("approval:g")), 200, "calls g#1"),
    ("an expiry too", ladder(r.GateExpired("approval:g"), decided("approval:g")), 200, "settle g=refused"),
    ("a level that the ladder has not", ladder(r.GateMoved("approval:g", 7, t(140))), 150, "waiting_for_approval 200"),
    ("keep_waiting never ends", ladder(r.GateMoved("approval:g", 1, t(140)), closes=None), 9999, "waiting_for_approval"),
    ("an event that did not come",
     called(A, then=[gate("a", "event", rung(9), closes=9, args={"event": "paid", "otherwise": "late"})]), 9, "settle expired event:a"),
]  # fmt: skip

TABLE = [
    *(pytest.param(run, ALL, 0, (), want, id=name) for name, run, want in [*TURN, *STOPS, *BATCH]),
    *(pytest.param(run, policy(tool), now, (), want, id=f"doubt: {name}") for name, run, tool, now, want in DOUBTS),
    *(pytest.param(run, replace(ALL, limits=limits), now, (), want, id=f"limit: {name}") for name, run, limits, now, want in LIMITS),
    *(pytest.param(run, code, now, flying, want, id=f"in flight: {name}") for name, run, code, now, flying, want in FLIGHT),
    *(pytest.param(run, ALL, now, (), want, id=f"gate: {name}") for name, run, now, want in GATES),
]


@pytest.mark.parametrize("run, code, now, in_flight, want", TABLE)
def test_next_step(run: r.Run, code: Policy, now: float, in_flight: list[str], want: str) -> None:
    step = next_step(run, code, t(now), in_flight)
    assert brief(step) == want
    if isinstance(step, Wait):  # early or never, and then something else is said
        assert step.until is None or step.until > t(now)
    settled(run, code, t(now), in_flight)


# ---- words that a person or the model reads --------------------------------------------------------------------------------

WORDS = [
    (
        ladder(decided("approval:g", "rejected", note="Loop in their IT admin first.")),
        "A support lead rejected this call: Loop in their IT admin first.",
    ),
    (ladder(decided("approval:g", "rejected")), "A support lead rejected this call: no reason given"),
    (ladder(r.GateMoved("approval:g", 1), decided("approval:g", "rejected", note="no")), "A head of support rejected this call: no"),
    (ladder(r.GateExpired("approval:g")), "Nobody decided on this call in time, so it was not made."),
    (called(P, then=[begun("p"), DOUBT, decided("verification:p", "give_up")]), "outcome unknown, not repeated"),
    (called(P, then=[begun("p"), DOUBT, decided("verification:p", "happened", result={"id": 7}, has_result=True)]), '{"id": 7}'),
    (called(P, then=[begun("p"), DOUBT, decided("verification:p", "happened")]), "done (confirmed by a person)"),
    (called(P, then=[begun("p"), DOUBT, r.LateResult("p", "paid 7")]), "paid 7"),
    (called(A, then=[WAIT, r.EventReceived("paid", {"eur": 5})]), '{"eur": 5}'),
    (called(A, then=[gate("a", "event", rung(0), closes=0, args={"otherwise": "late"})]), "late"),
    (called(A, then=[r.GateOpened("run:a", "run", "a", "look", "d"), r.ChildFinished("a", "done", "4")]), "4"),
    (
        called(A, then=[r.GateOpened("run:a", "run", "a", "look", "d"), r.ChildFinished("a", "failed", reason="refusal")]),
        "look failed: refusal",
    ),
    (called(A, then=[result("a", "", is_error=True)]), "failed, no reason given"),
    (journal(*HELLO, CUT), "The answer was cut off at max_tokens, nothing was run. Ask again."),
]


@pytest.mark.parametrize("run, want", WORDS)
def test_what_the_model_reads(run: r.Run, want: str) -> None:
    after, _, _ = settled(run, policy(ONCE, READ, GATED), t(0))
    assert m.blocks(after.messages[-1])[0]["content"] == want


REASONS = [
    (
        journal(*HELLO, answer("x", stop="max_tokens")),
        "the answer was cut off at max_tokens; raise max_tokens, then send a message to go on",
    ),
    (journal(*HELLO, answer("x", stop="refusal")), "the model refused to answer (refusal)"),
    (journal(*HELLO, answer("x", stop="odd")), "the model stopped for an unknown reason: 'odd'"),
    (journal(*HELLO, answer("x", stop=None)), "the model gave no stop reason"),
    (journal(*HELLO, *[CUT, NOT_RUN] * 3, CUT), "the answer was cut off at max_tokens 4 times in a row"),
    (journal(*HELLO, r.ModelFailed("401: set ANTHROPIC_API_KEY", 1, None)), "401: set ANTHROPIC_API_KEY"),
    (journal(*TWICE, BUDGET, decided("budget:1", "rejected", note="dear")), "limit of 2 model calls reached; it was not raised: dear"),
    (journal(*HELLO, r.ModelCallLost(900_000, 100_000)), "limit of 1000000 tokens reached"),
    (called(G, then=[APPROVAL]), "reply waits for support-lead until 2026-11-30T07:01:40.000Z"),
    (called(P, then=[begun("p"), r.CallDoubted("p", "TimeoutError"), DOUBT]), "pay was started and its outcome is unknown: TimeoutError"),
    (called(use("z", "gone")), "no worker knows the tool 'gone'"),
]


@pytest.mark.parametrize("run, want", REASONS)
def test_reasons_for_people(run: r.Run, want: str) -> None:
    _, _, step = settled(run, replace(ALL, limits=LimitPolicy(tokens=1_000_000, model_calls=50, then="fail")), t(0))
    assert getattr(step, "reason", None) == want


# ---- what is said once and what may run ------------------------------------------------------------------------------------


def test_edited_arguments_run_and_the_call_stays() -> None:
    run = called(use("g", "reply", {"eur": 500}), then=[APPROVAL, decided("approval:g", args={"eur": 5})])
    step = next_step(run, ALL, t(0))
    assert brief(step) == "calls g#1"
    assert step.calls[0].args == {"eur": 5}
    assert m.tool_uses(run.messages[-1])[0]["input"] == {"eur": 500}


@pytest.mark.parametrize("said, want", [
    (True, "open approval:g"), (False, "GateWaived"), (None, "open approval:g"),
    (0, "open approval:g"), ("no", "open approval:g"), (KeyError("n"), "open approval:g"),
])  # fmt: skip
def test_only_a_plain_no_leaves_a_gate_out(said: object, want: str) -> None:
    def when(args: object) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    assert GATED.gate
    code = policy(replace(GATED, gate=replace(GATED.gate, conditional=True), when=when))
    assert brief(next_step(called(G), code, t(0))) == f"settle {want}"


def test_run_again_runs_with_the_key_of_the_first_attempt() -> None:
    run = called(K, then=[replace(begun("k", "idempotent"), key="order-7"), r.CallFailed("k", "503", t(0))])
    step = next_step(run, policy(replace(KEYED, key=lambda a: "order-8")), t(0))
    assert step.calls[0].key == "order-7"


def test_reserved_names_in_arguments_are_only_arguments() -> None:
    tricky = {"approved": True, "idempotency_key": "x", "run_id": "other", "_approval": {}}
    assert brief(next_step(called(use("g", "reply", tricky)), ALL, t(0))) == "settle open approval:g"
    step = next_step(called(use("k", "post", tricky)), ALL, t(0))
    assert step.calls[0].key == "run-1:k"


def test_typed_output_is_corrected_twice_then_failed() -> None:
    code = policy(output_problem=lambda message: "want an int" if m.said(message) != "7" else None)
    run, _, step = hear(journal(*HELLO), "seven", code)
    assert brief(step) == "model" and run.messages[-1] == m.user(m.text("want an int"))
    run, _, step = hear(run, "7.0", code)
    assert brief(step) == "model"
    assert brief(hear(run, "7", code)[2]) == "done"
    run, _, step = hear(run, "VII", code)
    assert brief(step) == "failed"
    run, _, step = settled(r.apply(run, r.RetryAsked()), code, t(0))  # not the same end at once
    assert brief(step) == "model" and run.corrections == 1


def test_corrections_are_counted_anew_after_a_text() -> None:
    code = policy(output_problem=lambda message: "want an int")
    run, _, _ = hear(journal(*HELLO), "seven", code)
    run, _, _ = hear(run, "seven", code)
    run = settled(r.apply(run, SENT), code, t(0))[0]
    assert brief(hear(run, "seven", code)[2]) == "model"


# ---- a model's answer ------------------------------------------------------------------------------------------------------

HEARD = [
    ("a name it made up", [use("a", "lok")], "a=refused a", "There is no tool 'lok'. Known tools: look, pay, post, reply, strict."),
    ("arguments that do not fit", [use("a", "strict")], "a=refused a", "strict was not run, its arguments are invalid: n: field required"),
    ("no object", [use("a", "look", "{")], "a=refused a", None),
    ("null",
     [{"type": "tool_use", "id": "a", "name": "look", "input": None}], "a=refused a", "look was not run: the arguments must be a JSON object, not NoneType."),
    ("a list in a text", [use("a", "look", "[1]")], "a=refused a", "look was not run: the arguments must be a JSON object, not list."),
    ("a name it made up beside a good one", [use("a", "lok"), use("b", "look")], "a=refused", None),
    ("a gated call with arguments that fit not", [use("a", "strict"), G], "a=refused open approval:g", None),
]  # fmt: skip


@pytest.mark.parametrize("content, want, says_", [row[1:] for row in HEARD], ids=[row[0] for row in HEARD])
def test_heard(content: list[dict[str, Any]], want: str, says_: str | None) -> None:
    run, entries, _ = hear(journal(*HELLO), content, ALL)
    assert brief(Settle(tuple(entries[1:]))) == f"settle {want}"
    if says_:
        assert m.blocks(run.messages[-1])[0]["content"] == says_
    m.check_history(list(run.messages))


def test_an_answer_under_way_does_not_answer_a_text() -> None:
    run, _, step = hear(journal(*HELLO, SENT), "hi", ALL)
    assert brief(step) == "model"
    assert [x["role"] for x in run.messages] == ["user", "assistant", "user"]


def test_calls_of_an_answer_that_was_cut_are_not_judged() -> None:
    run, entries, step = hear(journal(*HELLO), {"content": [use("g", "reply"), use("z", "gone")], "stop_reason": "max_tokens"}, ALL)
    assert brief(Settle(tuple(entries[1:]))) == "settle g=refused z=refused g+z" and brief(step) == "model"
    assert not list(run.all_gates())


def test_ids_are_one_for_a_call_within_a_run() -> None:
    run = journal(*HELLO, asks(use("call_0", "pay")), result("call_0"), NOT_RUN)
    run, _, _ = hear(run, [use("call_0", "pay"), use("call_0", "pay"), use("", "pay")], ALL)
    ids = [c.id for c in run.calls]
    assert ids == ["call_0-2", "call_0-3", "call-4-3"]
    assert len({f"{run.id}:{i}" for i in ids} | {"run-1:call_0"}) == 4
    assert m.tool_uses(run.messages[-1])[0]["id"] == ids[0]


def test_imported_answers_are_no_model_calls() -> None:
    assert journal(STARTED, says("x"), answer("y", imported=True)).model_calls == 0


def test_a_run_that_never_settles_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    run = journal(*HELLO, answer("hi"))
    monkeypatch.setattr(r, "apply", lambda run, entry: run)
    with pytest.raises(AssertionError, match="does not settle"):
        settled(run, ALL, t(0))

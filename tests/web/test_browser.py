"""What a person does in a real browser: decide, be told, be second, use keys, a phone, the dark, and no JavaScript."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from web.conftest import Visit, on_both_stores, visiting
from web.kite import BIG, Kite, Running


def card(page: Page, run_id: str) -> Any:
    return page.locator(f"details.ask[id^='ask-{run_id}.']")


def opened(page: Page, run_id: str) -> Any:
    ask = card(page, run_id)
    expect(ask).to_be_visible()
    if ask.get_attribute("open") is None:
        ask.locator("summary").first.click()
    return ask


@on_both_stores
def test_from_the_start_to_the_end_without_a_reload(visit: Visit, kite: Kite) -> None:
    page = visit.go("/inbox")
    expect(page.get_by_role("heading", name="Nothing waits for you")).to_be_visible()
    page.evaluate("window.same = true")
    kite.run("support", "run-1")
    ask = card(page, "run-1")
    expect(ask.get_by_role("heading", name="support wants to send this reply")).to_be_visible()  # it came by itself
    assert page.evaluate("window.same")
    run_page = visit.new_page()
    run_page.goto(visit.running.url + "/runs/run-1")
    expect(run_page.get_by_text("waiting for approval")).to_be_visible()
    run_page.evaluate("window.same = true")
    opened(page, "run-1").get_by_role("button", name="Approve", exact=False).first.click()
    expect(page.get_by_role("status").first).to_contain_text("Priya approved reply_to_customer")
    gate = kite.app.get("run-1").gates[0]
    assert (gate.outcome, gate.decided_by) == ("approved", "priya")
    kite.resume("run-1")  # a worker
    expect(run_page.locator(".run-title .status")).to_have_text("done")
    expect(run_page.locator(".messages").get_by_text("Replied to Northwind Studio on KITE-142.")).to_be_visible()
    assert run_page.evaluate("window.same")
    assert len(kite.effects) == 1


def test_a_page_whose_scripts_come_slowly_is_live_too(visit: Visit, kite: Kite) -> None:
    def late(route: Route) -> None:
        visit.page.evaluate(  # until htmx is there and has done what it put off to the next moment
            "new Promise((done) => { const look = () => window.htmx ? setTimeout(() => setTimeout(done)) : setTimeout(look, 5); look() })"
        )
        route.continue_()

    visit.page.route("**/hx-sse.min.js", late)
    visit.go("/inbox")
    kite.run("support", "run-1")
    expect(card(visit.page, "run-1")).to_be_visible()


def test_reject_needs_a_note_and_the_model_reads_it(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    ask.get_by_role("button", name="Reject with note").click()  # the browser keeps it: the note is empty
    assert kite.app.get("run-1").gates[0].outcome is None
    ask.get_by_label("Note, needed to reject").fill("Ask for the invoice number first.")
    ask.get_by_role("button", name="Reject with note").click()
    expect(page.get_by_role("status").first).to_contain_text("Priya rejected")
    kite.resume("run-1")
    assert "A support lead rejected this reply: Ask for the invoice number first." in str(kite.app.get("run-1").messages)
    assert kite.effects == []


def test_numbers_are_exact_through_the_form(visit: Visit, kite: Kite) -> None:
    kite.run("credit", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    assert str(BIG) in ask.inner_text() and "1.0" in ask.inner_text()
    ask.locator("summary", has_text="Approve with edits").click()
    ask.get_by_label("memo, may be empty").fill("first line\nsecond line")
    ask.get_by_role("button", name="Approve these arguments").click()
    expect(page.get_by_role("status").first).to_contain_text("Priya approved")
    kite.resume("run-1")
    [(_, args)] = kite.effects
    assert args == {"invoice": BIG, "amount_eur": 1.0, "lines": [1, 2], "memo": "first line second line", "urgent": True}
    assert isinstance(args["amount_eur"], float) and isinstance(args["invoice"], int)
    gate = kite.app.get("run-1").gates[0]
    assert gate.args["memo"] == "as agreed" and gate.edited_args is not None


def test_what_does_not_fit_comes_back_with_what_was_typed(visit: Visit, kite: Kite) -> None:
    kite.run("credit", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    ask.locator("summary", has_text="Approve with edits").click()
    ask.get_by_label("invoice (JSON)").fill('"no number"')
    ask.get_by_role("button", name="Approve these arguments").click()
    expect(page.get_by_role("alert")).to_contain_text("invoice")
    expect(card(page, "run-1").get_by_label("invoice (JSON)")).to_have_value('"no number"')
    assert kite.app.get("run-1").gates[0].outcome is None
    card(page, "run-1").get_by_text("Edit as JSON instead").click()
    whole = card(page, "run-1").get_by_label("All arguments, JSON")
    whole.fill(f'{{"invoice": {BIG + 1}, "amount_eur": 2.50, "lines": [], "urgent": false}}')
    card(page, "run-1").get_by_role("button", name="Approve this JSON").click()
    expect(page.get_by_role("status").first).to_contain_text("Priya approved")
    assert kite.app.get("run-1").gates[0].edited_args == {"invoice": BIG + 1, "amount_eur": 2.5, "lines": [], "urgent": False}


@on_both_stores
def test_the_deadline_passes_while_the_page_is_open(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    page = visit.go("/inbox")
    opened(page, "run-1")
    kite.clock.move(timedelta(hours=5))
    kite.app.sweep()
    expect(page.get_by_role("heading", name="Nothing waits for you")).to_be_visible()
    expect(page.locator(".inbox-aside")).to_contain_text("nobody decided on reply_to_customer")


def test_too_late_is_said_and_changes_nothing(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    kite.clock.move(timedelta(hours=5))  # and no sweeper came by
    ask.get_by_role("button", name="Approve", exact=False).first.click()
    expect(page.get_by_text("nobody had decided")).to_be_visible()
    expect(page.get_by_text("a decision is no longer accepted")).to_be_attached()
    kite.resume("run-1")
    assert kite.effects == []


@on_both_stores
def test_two_decide_at_once_and_the_second_sees_who_won(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    ask.get_by_label("Note, needed to reject").fill("No.")  # typing: the page leaves it alone
    kite.app.decide("run-1", approved=True, decided_by="sam")
    expect(ask.get_by_text("This one was answered meanwhile")).to_be_visible()
    ask.get_by_role("button", name="Reject with note").click()
    expect(page.get_by_role("status").first).to_contain_text("Already approved by sam at")
    expect(page.get_by_role("status").first).to_contain_text("Your rejection of run-1 changed nothing.")
    assert kite.app.get("run-1").gates[0].decided_by == "sam"


def test_a_field_in_use_is_never_swapped(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    page = visit.go("/inbox")
    note = opened(page, "run-1").get_by_label("Note, needed to reject")
    note.fill("I am still wri")
    kite.run("credit", "run-2")
    heard = page.wait_for_event("response", lambda r: r.url.endswith("/inbox") and r.request.resource_type == "fetch")
    assert heard.ok
    note.press_sequentially("ting")
    expect(note).to_have_value("I am still writing")
    note.fill("")
    page.locator("h1").click()  # the focus leaves: what was put off comes now
    expect(card(page, "run-2")).to_be_visible()


@pytest.mark.parametrize("answer, outcome", [("It happened", "happened"), ("Run it again", "run_again"), ("Give up on it", "give_up")])
def test_verify_a_call_in_doubt(visit: Visit, kite: Kite, answer: str, outcome: str) -> None:
    kite.run("billing", "run-1")
    kite.clock.move(timedelta(minutes=10))  # the attempt can no longer act
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    expect(ask.get_by_role("heading", name="Did this issue_refund happen?")).to_be_visible()
    expect(ask).to_contain_text("run-1:toolu_01")  # the key to look for
    expect(ask).to_contain_text("This may act twice")
    if outcome == "run_again":
        ask.get_by_role("button", name=answer).click()
        assert kite.app.get("run-1").gates[0].outcome is None  # not before somebody looked
        ask.get_by_role("checkbox").check()
    if outcome == "happened":
        ask.get_by_label("Result, JSON, may be empty").fill('{"refund": 7}')
    ask.get_by_role("button", name=answer).click()
    expect(page.get_by_role("status").first).to_contain_text("Priya")
    assert kite.app.get("run-1").gates[0].outcome == outcome
    kite.down = False
    kite.resume("run-1")
    assert kite.app.get("run-1").status == "done"
    assert len(kite.effects) == (2 if outcome == "run_again" else 1)


def test_raise_a_limit(visit: Visit, kite: Kite) -> None:
    kite.run("import", "run-1")
    page = visit.go("/inbox")
    ask = opened(page, "run-1")
    ask.get_by_label("Raise to").fill("7")
    ask.get_by_role("button", name="Raise the limit").click()
    expect(page.get_by_role("status").first).to_contain_text("Priya approved the limit")
    assert kite.app.get("run-1").gates[0].edited_args == {"raise_to": 7}
    kite.resume("run-1")
    assert kite.app.get("run-1").status == "done"


def test_keyboard_only(visit: Visit, kite: Kite) -> None:
    kite.run("support", "run-1")
    kite.run("credit", "run-2")
    page = visit.go("/inbox")
    page.keyboard.press("j")
    expect(card(page, "run-1").locator("summary").first).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"  # it is seen where one is
    page.keyboard.press("j")
    expect(card(page, "run-2").locator("summary").first).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("a")  # first it is only opened: nobody approves what is not shown
    expect(card(page, "run-1")).to_have_attribute("open", "")
    assert kite.app.get("run-1").gates[0].outcome is None
    page.keyboard.press("r")
    expect(card(page, "run-1").get_by_label("Note, needed to reject")).to_be_focused()
    page.keyboard.type("a j k r")  # keys are letters again
    page.keyboard.press("Escape")
    expect(card(page, "run-1").get_by_label("Note, needed to reject")).to_have_value("a j k r")
    page.keyboard.press("e")
    expect(card(page, "run-1").get_by_label("ticket_id")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    expect(page.get_by_role("status").first).to_contain_text("Priya approved")
    assert kite.app.get("run-1").gates[0].outcome == "approved"


@on_both_stores
def test_without_javascript_every_action_works(chromium: Browser, running: Running, kite: Kite) -> None:
    kite.run("support", "run-1")
    kite.run("support", "run-2")
    kite.run("billing", "run-3")
    kite.run("waiter", "run-4")
    kite.run("short", "run-5")
    kite.run("failing", "run-6")
    kite.run("credit", "run-7")
    with visiting(chromium, running, java_script_enabled=False) as visit:
        page = visit.go("/inbox")
        opened(page, "run-1").get_by_role("button", name="Approve", exact=False).first.click()
        expect(page.get_by_role("status").first).to_contain_text("Priya approved reply_to_customer")
        opened(page, "run-2").get_by_label("Note, needed to reject").fill("No.")
        card(page, "run-2").get_by_role("button", name="Reject with note").click()
        expect(page.get_by_role("status").first).to_contain_text("Priya rejected reply_to_customer")
        opened(page, "run-3").get_by_role("button", name="Give up on it").click()
        expect(page.get_by_role("status").first).to_contain_text("Priya gave it up: issue_refund")
        opened(page, "run-7").locator("summary", has_text="Approve with edits").click()
        card(page, "run-7").get_by_label("memo, may be empty").fill("changed")
        card(page, "run-7").get_by_role("button", name="Approve these arguments").click()
        expect(page.get_by_role("status").first).to_contain_text("Priya approved credit_invoice")
        page = visit.go("/runs/run-4")
        expect(page.get_by_label("Event", exact=True)).to_have_value("bank.statement")  # it is open: that is what the run waits for
        page.get_by_role("button", name="Report the event").click()
        expect(page.locator(".timeline")).to_contain_text("The event bank.statement came")
        page = visit.go("/runs/run-5")
        page.get_by_text("Send a message…").click()
        page.get_by_label("Message to the agent").fill("And now?")
        page.get_by_role("button", name="Send the message").click()
        expect(page.locator(".timeline")).to_contain_text("priya sent a message to the run")
        page = visit.go("/runs/run-6")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".timeline")).to_contain_text("priya asked to try again")
        page = visit.go("/runs/run-1")
        page.get_by_text("Fork…").click()
        expect(page.get_by_label("Up to message")).to_have_value("4")
        page.get_by_label("Id of the new run, may be empty").fill("run-1-again")
        page.get_by_role("button", name="Fork the run").click()
        expect(page.locator("h1")).to_have_text("run-1-again")
        expect(page.locator(".timeline")).to_contain_text("priya forked run-1 at message 4")
        page = visit.go("/runs/run-1")
        page.get_by_text("Cancel the run…").click()
        page.get_by_label("Note, may be empty").fill("not needed")
        page.get_by_role("button", name="Cancel the run", exact=True).click()
        expect(page.locator(".run-title .status")).to_have_text("cancelled")
        page.get_by_role("button", name="Dark").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()


def test_the_zone_of_the_viewer(chromium: Browser, running: Running, kite: Kite) -> None:
    kite.run("short", "run-1")
    at = kite.app.head("run-1").created_at
    for zone, hours in (("Asia/Tokyo", 9), ("America/Phoenix", -7)):
        with visiting(chromium, running, timezone_id=zone) as visit:
            page = visit.go("/runs/run-1")
            expect(page.get_by_text(f"Times in {zone}")).to_be_visible()
            expect(page.locator(".facts time").first).to_contain_text(f"{at + timedelta(hours=hours):%H:%M:%S}")


def everything(kite: Kite) -> None:
    kite.run("support", "run-1", tags={"tenant": "northwind"})
    kite.app.decide("run-1", approved=True, decided_by="sam", note="Matches what I told their admin.")
    kite.resume("run-1")
    for n, agent in enumerate(("support", "credit", "billing", "import", "waiter", "short", "failing"), 2):
        kite.run(agent, f"run-{n}")


PAGES = ("/inbox", "/inbox?role=nobody", "/runs", "/runs?q=nothing-like-this", "/runs/run-1", "/runs/run-2", "/runs/run-3", "/runs/run-4", "/runs/run-5",
         "/runs/run-6", "/runs/run-8", "/charts", "/runs/nope", "/login")  # fmt: skip


@pytest.mark.parametrize("scheme, width", [("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)])
def test_no_page_violates_a_rule_of_axe(chromium: Browser, running: Running, kite: Kite, scheme: str, width: int) -> None:
    everything(kite)
    with visiting(chromium, running, color_scheme=scheme, viewport={"width": width, "height": 900}) as visit:
        for path in PAGES:
            page = visit.go(path)
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            found = Axe().run(page).response["violations"]
            assert not found, (path, [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found])
            sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert sideways <= 0, (path, width, sideways)


@pytest.mark.parametrize("width", [390, 820, 1600])
def test_nothing_jumps_when_a_countdown_runs(chromium: Browser, running: Running, kite: Kite, width: int) -> None:
    kite.run("support", "run-1")
    with visiting(chromium, running, viewport={"width": width, "height": 900}) as visit:
        page = visit.go("/inbox")
        due = page.locator("[data-deadline]").first
        before = page.locator(".ask-title").first.bounding_box()
        page.evaluate("document.querySelector('[data-deadline]').dataset.deadline = new Date(Date.now() + 61000).toISOString()")
        expect(due).to_have_class("due-left due-soon")
        assert page.locator(".ask-title").first.bounding_box() == before

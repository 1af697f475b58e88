"""What others wrote, on a page: everything is there to be read before a decision, nothing of it acts, and nothing is loaded for it."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, expect

from outlast.cli import render
from outlast.web import text
from web.conftest import visiting
from web.kite import TOKEN, Kite, Running, call, new_kite, serving

PAYLOADS = [
    "<img src=x onerror=fetch('/runs/run-1/decide',{method:'POST'})>",
    "</script><script>alert(1)</script>",
    "![x](http://outside.example/pixel.png) [click](javascript:alert(1))",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</textarea></details></pre><iframe src=//outside.example></iframe>",
    "<a href='http://outside.example' ping='http://outside.example'>x</a><link rel=stylesheet href=http://outside.example/x.css>",
    "<form action=http://outside.example><input name=digest></form>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img&#62;",
    "\u202egnp.exe\u202c \u200b\u2066\U000e0041\x1b[31m\x00",
]
PAYLOAD = " ".join(p.replace("\x00", "") for p in PAYLOADS)
OURS = {"html", "head", "meta", "title", "link", "script", "body", "svg", "symbol", "circle", "path", "rect", "line", "text", "use", "pattern", "a", "header",
        "div", "nav", "p", "b", "i", "form", "button", "main", "footer", "span", "time", "section", "h1", "h2", "h3", "h4", "details", "summary", "dl", "dt", "dd",
        "pre", "code", "ol", "ul", "li", "label", "textarea", "input", "select", "option", "aside", "kbd", "table", "caption", "thead", "tbody", "tr", "th", "td",
        "figure", "figcaption"}  # fmt: skip


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.targets: list[str] = []
        self.sources: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name.startswith("on") or name in ("style", "srcdoc", "ping", "formaction"):
                self.handlers.append(f"{tag} {name}")
            if name in ("href", "action", "hx-get", "hx-sse:connect"):
                self.targets.append(value or "")
            if name == "src":
                self.sources.append(value or "")


@pytest.fixture
def nasty(tmp_path: Path) -> Iterator[Running]:
    """The corpus in every field that somebody else fills."""
    kite = new_kite(tmp_path)
    turns = [
        [{"type": "thinking", "thinking": PAYLOAD, "signature": "s"}, {"type": "text", "text": PAYLOAD},
         {"type": "image", "source": {"type": "url", "url": "http://outside.example/pixel.png"}}, {"type": "surprise", PAYLOAD[:60]: PAYLOAD},
         call("toolu_01", "get_ticket", ticket_id=PAYLOAD)],
        [call("toolu_02", "reply_to_customer", ticket_id=PAYLOAD, message=PAYLOAD + "\n" + PAYLOAD),
         call("toolu_03", "no_such_tool_" + "x" * 20, **{"<b>": PAYLOAD})],
        PAYLOAD,
    ]  # fmt: skip
    kite.turns["support"][:] = turns
    from outlast import Agent
    from outlast.models import ScriptedModel

    evil = Agent("evil", model=ScriptedModel(turns), tools=kite.tools, version=PAYLOAD[:40])
    kite.agents["evil"] = evil
    kite.app = type(kite.app)(tmp_path / "agent.db", agents=list(kite.agents.values()), clock=kite.clock)
    with serving(kite) as running:
        for n in (1, 2, 3):
            kite.run("evil", f"run-{n}", PAYLOAD, tags={"<i>k": PAYLOAD[:200]})
        kite.app.decide("run-1", approved=False, decided_by=PAYLOAD[:200], note=PAYLOAD)
        kite.app.decide("run-2", approved=True, decided_by="<script>", args={"ticket_id": PAYLOAD, "message": "x"})
        kite.app.send("run-3", PAYLOAD, by=PAYLOAD[:200])
        kite.app.event("run-3", PAYLOAD[:100], {"<k>": PAYLOAD})
        kite.resume("run-1")
        kite.resume("run-2")
        kite.app.cancel("run-1", note=PAYLOAD)
        kite.app.start("evil", PAYLOAD, run_id="run-4", by=PAYLOAD[:200])
        kite.app.cancel("run-4", by=PAYLOAD[:200], note=PAYLOAD)
        yield running


PAGES = ("/inbox", "/runs", "/runs/run-1", "/runs/run-2", "/runs/run-3", "/runs/run-4", "/charts")


def escaped_query(name: str) -> str:
    return str(httpx.QueryParams({name: PAYLOAD}))


def test_stored_xss_in_the_ui(nasty: Running) -> None:
    extra = [f"/runs?{escaped_query(k)}" for k in ("q", "agent", "tag", "since", "status")] + [
        f"/inbox?{escaped_query(k)}" for k in ("role", "kind", "agent", "run")
    ]
    with httpx.Client(base_url=nasty.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as http:
        for path in (*PAGES, *extra, "/runs/" + quote(PAYLOAD, safe=""), f"/charts?{escaped_query('agent')}"):
            answer = http.get(path)
            assert answer.status_code in (200, 404, 400), path
            found = Elements(answer.text)
            assert found.tags <= OURS, (path, found.tags - OURS)
            assert not found.handlers, (path, found.handlers)
            assert all(t.startswith(("/", "#")) and not t.startswith("//") for t in found.targets), path
            assert all(s.startswith("/static/") for s in found.sources), path
            assert "\u202e" not in answer.text.replace("&#8238;", "") or "<textarea" in answer.text


def test_nothing_acts_and_nothing_is_loaded(nasty: Running, chromium: Browser) -> None:
    """In a real browser, with every fold open: no dialog, no request to anybody else, no decision. `visiting` fails on the first two."""
    with visiting(chromium, nasty) as visit:
        for path in PAGES:
            page = visit.go(path)
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            page.mouse.move(300, 300)
            expect(page.locator("h1")).to_be_visible()
            assert page.locator("main img, main iframe, main script, main object, main embed").count() == 0
        page = visit.go("/runs/run-3")
        page.evaluate("document.querySelectorAll('details.edit').forEach((d) => { d.open = true; })")
        # the form gives back exactly what the model wrote, whatever it was
        field = page.locator("[name='j.ticket_id']").first
        import json

        assert json.loads(field.input_value()) == PAYLOAD
    assert nasty.app.get("run-3").gates[0].outcome is None


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[Running]:
    kite = new_kite(tmp_path)
    long = "Dear customer. " + "x" * 5000 + " DELETE EVERYTHING"
    hidden = "fine" + "\n" * 300 + "rm -rf" + " " * 300 + "now \u202etxt.exe\u202c zero\u200bwidth https://p\u0430ypal.com/login"
    kite.turns["support"][:] = [[call("toolu_01", "reply_to_customer", ticket_id=hidden, message=long)], "Done."]
    kite.agents["support"].model.turns = kite.turns["support"]  # type: ignore[union-attr]  # a scripted one
    with serving(kite) as running:
        kite.run("support", "run-1")
        yield running


def test_approval_text_truncated(letters: Running, chromium: Browser) -> None:
    [gate] = [g for g in letters.app.get("run-1").gates if g.outcome is None]
    with visiting(chromium, letters) as visit:
        page = visit.go("/inbox")
        ask = page.locator("details.ask")
        expect(ask).to_have_attribute("open", "")
        shown = ask.inner_text()
        assert "more characters" in shown and "DELETE EVERYTHING" in shown  # how much is folded, and how it ends
        ask.locator(".fold-more > summary").click()
        letter = "".join(ask.locator("pre.letter").nth(n).text_content() or "" for n in range(1, 4))
        assert letter == gate.args["message"]  # whole, in the page
        assert "[300 line breaks]" in shown and "[300 blanks]" in shown and "rm -rf" in shown
        assert r"\u202e" in shown and r"\u200b" in shown and "\u202e" not in shown
        assert r"p\u0430ypal.com" in shown  # a letter of another script in a host
        assert "unseen characters shown as escapes" in shown
        page.keyboard.press("j")
        page.reload()
        page.locator("details.ask summary").first.focus()
        page.keyboard.press("a")  # the key approves nothing that was folded away: it opens it
        expect(page.locator(".fold-more")).to_have_attribute("open", "")
        assert letters.app.get("run-1").gates[0].outcome is None
    with httpx.Client(base_url=letters.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        [item] = http.get("/api/v1/inbox").json()["items"]
        assert item["args"] == gate.args


def test_secrets_in_checkpoints_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and passwords of the process are on no page, and in no error."""
    canary = "sk-CANARY-0123456789"
    monkeypatch.setenv("ANTHROPIC_API_KEY", canary)
    monkeypatch.setenv("OUTLAST_WEBHOOK_SECRET", canary)
    kite = new_kite(tmp_path)
    with serving(kite) as running:
        kite.run("failing", "run-1")
        kite.run("support", "run-2")
        with httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as http:
            for path in (
                "/inbox",
                "/runs",
                "/runs/run-1",
                "/runs/run-2",
                "/charts",
                "/api/v1/runs/run-1",
                "/api/v1/runs/run-1/journal",
                "/api/v1/openapi.json",
                "/nope",
            ):
                answer = http.get(path)
                assert canary not in answer.text and TOKEN not in answer.text and canary not in str(answer.headers)
    assert canary.encode() not in b"".join(f.read_bytes() for f in tmp_path.glob("agent.db*"))
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in tmp_path.glob("agent.db*"))


def test_a_store_s_password_is_on_no_page(kite: Kite) -> None:
    from outlast import settings

    assert "hunter2" not in settings.parse_store("postgresql://u:hunter2@h/db").shown


def test_the_page_and_the_command_line_escape_the_same() -> None:
    assert text.UNSEEN.pattern == render._UNSAFE.pattern


# ---- words -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, html", [
    ("<b>", "&lt;b&gt;"),
    ("a\u202eb", 'a<span class="escape">\\u202e</span>b'),
    ("\x1b[31m", '<span class="escape">\\x1b</span>[31m'),
    ("line\nline\t.", "line\nline\t."),
    ("https://\u0430.com/\u0430", "https://\\u0430.com/\u0430"),
    ("M\u00fcnchen", "M\u00fcnchen"),
])  # fmt: skip
def test_seen(given: str, html: str) -> None:
    assert str(text.seen(given)) == html


@pytest.mark.parametrize(
    "seconds, words",
    [(0.04, "0.04 s"), (1.25, "1.25 s"), (12, "12 s"), (720, "12 min"), (6120, "1 h 42 min"), (3600, "1 h"), (241_200, "2 d 19 h")],
)
def test_span(seconds: float, words: str) -> None:
    assert text.span(seconds) == words


def test_a_folded_text_is_whole() -> None:
    long = "".join(chr(0x41 + n % 26) for n in range(9_999))
    made = text.folded(long)
    assert made.rest is not None and made.tail is not None
    assert str(made.head) + str(made.rest) + str(made.tail) == long and made.more == len(made.rest)


def test_cost_that_is_not_known_is_never_zero() -> None:
    assert text.money(None) == "unknown" and text.money("0.0183") == "$0.0183" and text.money("1234.5") == "$1,234.50"

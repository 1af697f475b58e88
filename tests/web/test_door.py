"""Who gets in, what they may send, and what every answer carries; by raw requests, so that no client tidies them up."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from outlast import Outlast
from outlast.documents import RunHead
from outlast.errors import UsageError
from outlast.web import create_app
from outlast.web.security import COOKIE, HEADERS, MAX_BODY_BYTES
from web.kite import TOKEN, Running, new_kite, serving

BEARER = {"Authorization": f"Bearer {TOKEN}"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Content-Type": "application/json"}


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        self.text = self.body.decode()


def ask(running: Running, method: str, path: str, body: bytes | str | None = None, **headers: str) -> Answer:
    """`headers`: names with `_` for `-`. Host is the right one unless it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    sent = {"Host": f"127.0.0.1:{running.port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    data = body.encode() if isinstance(body, str) else body
    if data is not None and "Content-Length" not in sent and "Transfer-Encoding" not in sent:
        sent["Content-Length"] = str(len(data))
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders(data)
    answer = Answer(connection.getresponse())
    connection.close()
    return answer


def asked(running: Running, method: str, path: str, headers: dict[str, str], body: bytes | str | None = None) -> Answer:
    return ask(running, method, path, body, **{k.replace("-", "_"): v for k, v in headers.items()})


@pytest.fixture
def waiting(running: Running) -> Running:
    running.kite.run("support", "run-1")
    return running


def approve(running: Running, run_id: str = "run-1", **more: str) -> str:
    gate = running.app.get(run_id).gates[0]
    return urlencode({"gate": gate.gate_id, "digest": gate.digest, "decision": "approve", **more})


def open_still(running: Running, run_id: str = "run-1") -> bool:
    return running.app.get(run_id).gates[0].outcome is None


# ---- logging in -------------------------------------------------------------------------------------------------------------


def test_approve_by_a_person_without_right(waiting: Running) -> None:
    origin = {"Origin": waiting.url}
    body = approve(waiting)
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"{COOKIE}=1.2.3"},
        {"Cookie": f"{COOKIE}="},
    ):
        answer = asked(waiting, "POST", "/runs/run-1/decide", FORM | origin | headers, body)
        assert answer.status == 401 and "reply_to_customer" not in answer.text and "run-1" not in answer.text
        call = asked(waiting, "POST", "/api/v1/runs/run-1/decide", JSON | headers, '{"approved": true}')
        assert call.status == 401 and json.loads(call.body)["error"]["type"] == "not_logged_in"
    assert asked(waiting, "POST", "/runs/run-2/decide", FORM | origin | BEARER, body).status == 404  # an id of another run
    assert asked(waiting, "POST", "/api/v1/runs/run-2/decide", JSON | BEARER, '{"approved": true}').status == 404
    assert open_still(waiting)
    assert asked(waiting, "POST", "/runs/run-1/decide", FORM | origin | BEARER, body).status == 303
    assert not open_still(waiting)


@pytest.mark.parametrize("path", [
    "/inbox", "/runs", "/runs/run-1", "/charts", "/live", "/api/v1/runs", "/api/v1/inbox", "/api/v1/openapi.json", "/api/v1/runs/health",
    "/api/v1/health/", "/api/v1//health", "/api/v1/health/.", "/api/v1/health/../runs", "/api/v1/Health", "/api/v1/health.", "/runs/login", "/login/",
    "/login/..", "/login/../inbox", "//login", "/inbox?/login", "/inbox;/login", "/inbox%2e", "/inbox/login", "/runs/static/style.css",
    "/static/../inbox", "/static/%2e%2e/inbox", "/static/..%2finbox", "/static/x/../../inbox", "/static//inbox", "/x/api/v1/health", "/inbox%00/login",
])  # fmt: skip
def test_no_path_slips_past_the_door(waiting: Running, path: str) -> None:
    answer = ask(waiting, "GET", path)
    assert answer.status in (401, 404), answer.status
    assert "run-1" not in answer.text and "reply_to_customer" not in answer.text


@pytest.mark.parametrize("path", ["/login", "/api/v1/health", "/static/style.css"])
def test_what_is_free(running: Running, path: str) -> None:
    assert ask(running, "GET", path).status == 200


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/....//app.py", "/static//etc/passwd", "/static/"]
)
def test_no_file_but_those_of_the_folder(running: Running, path: str) -> None:
    answer = asked(running, "GET", path, BEARER)
    assert answer.status == 404 and "import" not in answer.text and "root:" not in answer.text


def test_the_link_is_good_once_and_a_preview_does_not_use_it_up(running: Running) -> None:
    link = running.link().removeprefix(running.url)
    code = link.partition("code=")[2]
    for _ in range(3):
        preview = ask(running, "GET", link)
        assert preview.status == 200 and "set-cookie" not in preview.headers
    assert ask(running, "HEAD", link).status in (200, 405)
    first = asked(running, "POST", "/login", FORM | {"Origin": running.url}, urlencode({"code": code}))
    cookie = first.headers["set-cookie"]
    assert first.status == 303 and first.headers["location"] == "/inbox"
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie and TOKEN not in cookie
    assert asked(running, "POST", "/login", FORM | {"Origin": running.url}, urlencode({"code": code})).status == 401
    assert asked(running, "GET", "/inbox", {"Cookie": cookie.partition(";")[0]}).status == 200
    assert asked(running, "POST", "/login", FORM | {"Origin": running.url}, urlencode({"token": TOKEN})).status == 303
    assert asked(running, "POST", "/login", FORM | {"Origin": running.url}, urlencode({"token": TOKEN + "x"})).status == 401
    assert asked(running, "GET", f"/inbox?token={TOKEN}", {}).status == 401  # never in an address


def test_a_session_ends(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.tokens is not None
    cookie = running.tokens.cookie()
    assert running.tokens.session(cookie)
    until, nonce, mac = cookie.split(".")
    assert not running.tokens.session(f"{int(until) + 1}.{nonce}.{mac}")
    monkeypatch.setattr("outlast.web.security.time.time", lambda: float(until) + 1)
    assert not running.tokens.session(cookie)


# ---- where a request comes from ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [
    "evil.com", "127.0.0.1.evil.com", "evil.com:{port}", "localhost:1", "127.0.0.1", "127.0.0.1:{port}.evil.com", "localhost:{port}@evil.com", "", "[::1",
    "127.0.0.1:{port}, evil.com", "0.0.0.0:{port}", "LOCALHOST.:{port}",
])  # fmt: skip
def test_dns_rebinding(waiting: Running, host: str) -> None:
    named = {"Host": host.format(port=waiting.port)}
    assert asked(waiting, "GET", "/inbox", BEARER | named).status in (400, 421)
    answer = asked(waiting, "POST", "/runs/run-1/decide", BEARER | FORM | named | {"Origin": f"http://{named['Host']}"}, approve(waiting))
    assert answer.status in (400, 421) and open_still(waiting)


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LocalHost:{port}", "[::1]:{port}"])
def test_names_of_this_machine(running: Running, host: str) -> None:
    assert asked(running, "GET", "/inbox", BEARER | {"Host": host.format(port=running.port)}).status == 200


CROSS = [
    {"Origin": "http://evil.com"},
    {"Origin": "null"},
    {"Origin": "http://localhost"},
    {"Origin": "http://localhost.evil.com:{port}"},
    {"Origin": "http://127.0.0.1:{port}.evil.com"},
    {"Origin": "https://127.0.0.1:{port}"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:{port}"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "null"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.com"},
    {"Sec-Fetch-Site": "none", "Origin": "http://evil.com"},
    {"Sec-Fetch-Site": "Same-Origin"},
    {},
]


@pytest.mark.parametrize("headers", CROSS, ids=str)
def test_csrf_on_approve(waiting: Running, headers: dict[str, str]) -> None:
    assert waiting.tokens is not None
    cookie = {"Cookie": f"{COOKIE}={waiting.tokens.cookie()}"}
    given = {k: v.format(port=waiting.port) for k, v in headers.items()}
    answer = asked(waiting, "POST", "/runs/run-1/decide", cookie | FORM | given, approve(waiting))
    assert answer.status == 403 and open_still(waiting)
    call = asked(waiting, "POST", "/api/v1/runs/run-1/decide", cookie | JSON | given, '{"approved": true}')
    assert (call.status, open_still(waiting)) == ((403, True) if headers else (200, False))  # JSON without both is no browser's form


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://127.0.0.1:{port}"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-origin", "Origin": "null"}],
)
def test_our_own_page_may(waiting: Running, headers: dict[str, str]) -> None:
    assert waiting.tokens is not None
    given = {k: v.format(port=waiting.port) for k, v in headers.items()} | {"Cookie": f"{COOKIE}={waiting.tokens.cookie()}"}
    assert asked(waiting, "POST", "/runs/run-1/decide", FORM | given, approve(waiting)).status == 303


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/json", "", "application/x-www-form-urlencoded-x"]
)
def test_only_forms_for_pages(waiting: Running, kind: str) -> None:
    answer = asked(waiting, "POST", "/runs/run-1/decide", BEARER | {"Origin": waiting.url, "Content-Type": kind}, approve(waiting))
    assert answer.status == 415 and open_still(waiting)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_only_json_for_the_api(waiting: Running, kind: str) -> None:
    answer = asked(waiting, "POST", "/api/v1/runs/run-1/decide", BEARER | {"Content-Type": kind}, '{"approved": true}')
    assert answer.status == 415 and open_still(waiting)


def test_get_never_changes(waiting: Running) -> None:
    for path in ("decide", "verify", "send", "cancel", "retry", "event"):
        for at in (f"/runs/run-1/{path}?{approve(waiting)}", f"/api/v1/runs/run-1/{path}?approved=true"):
            for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
                assert asked(waiting, method, at, BEARER).status in (404, 405), (method, at)
    assert open_still(waiting) and waiting.app.head("run-1").status == "waiting_for_approval"


def test_bodies_have_a_limit(waiting: Running) -> None:
    big = b'{"input": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert asked(waiting, "POST", "/api/v1/runs/run-1/send", BEARER | JSON, big).status == 413
    lying = asked(waiting, "POST", "/api/v1/runs/run-1/send", BEARER | JSON | {"Content-Length": "1e3"}, b"{}")
    assert lying.status in (400, 413)
    chunks = b"".join(b"10000\r\n" + b"x" * 0x10000 + b"\r\n" for _ in range(17)) + b"0\r\n\r\n"
    chunked = asked(waiting, "POST", "/api/v1/runs/run-1/send", BEARER | JSON | {"Transfer-Encoding": "chunked"}, chunks)
    assert chunked.status in (400, 413)
    zipped = asked(waiting, "POST", "/api/v1/runs/run-1/send", BEARER | JSON | {"Content-Encoding": "gzip"}, b"{}")
    assert zipped.status == 415
    fields = "&".join(f"a{n}=1" for n in range(1000))
    assert asked(waiting, "POST", "/runs/run-1/send", BEARER | FORM | {"Origin": waiting.url}, fields).status == 400


# ---- what every answer carries ---------------------------------------------------------------------------------------------------


def test_headers_on_every_answer(waiting: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["/", "/inbox", "/runs", "/runs/run-1", "/runs/nope", "/charts", "/login", "/static/style.css", "/static/nope", "/nope", "/api/v1/runs",
             "/api/v1/runs/nope", "/api/v1/health", "/api/v1/nope", "/live?topic=nope", "/runs/run-1/messages/1"]  # fmt: skip
    answers = [asked(waiting, "GET", path, BEARER) for path in paths] + [ask(waiting, "GET", "/inbox"), ask(waiting, "POST", "/inbox"),
               ask(waiting, "TRACE", "/inbox"), ask(waiting, "GET", "/inbox", Host="evil.com")]  # fmt: skip

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("sk-CANARY in a traceback")

    monkeypatch.setattr("outlast.reader.Reader.inbox", broken)
    answers += [asked(waiting, "GET", "/inbox", BEARER), asked(waiting, "GET", "/api/v1/inbox", BEARER)]
    assert [a.status for a in answers[-2:]] == [500, 500]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers.get(name.lower()) == value, (answer.status, name)
        assert "unsafe" not in answer.headers["content-security-policy"] and "server" not in answer.headers
        assert "cache-control" in answer.headers and "CANARY" not in answer.text and "Traceback" not in answer.text
        assert "access-control-allow-origin" not in answer.headers


def test_no_page_has_code_or_styles_in_it(waiting: Running) -> None:
    import re

    for path in ("/inbox", "/runs", "/runs/run-1", "/charts", "/login", "/nope"):
        html = asked(waiting, "GET", path, BEARER).text
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\")|javascript:", html), path


def test_nothing_that_a_secret_could_hide_in_is_logged(
    waiting: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("sk-CANARY")

    monkeypatch.setattr("outlast.reader.Reader.inbox", broken)
    asked(waiting, "GET", "/inbox?role=sk-CANARY", BEARER | {"Cookie": "x=sk-CANARY"})
    asked(waiting, "GET", "/runs/sk-CANARY", BEARER)
    asked(waiting, "POST", "/login", FORM | {"Origin": waiting.url}, urlencode({"token": "sk-CANARY"}))
    ours = [r for r in caplog.records if not r.name.startswith(("asyncio", "httpcore", "httpx"))]
    assert any(r.name == "outlast.web" for r in ours)  # it is named
    assert (
        "CANARY" not in "".join(f"{r.getMessage()}{r.exc_text or ''}" for r in ours if r.name.startswith("outlast"))
        and TOKEN not in caplog.text
    )


# ---- whose page it is ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Running]:
    """Behind a login of its own, by a header; anna sees northwind only and operates nothing."""

    def get_user(request: Any) -> str | None:
        name = request.headers.get("x-user")
        if name == "boom":
            raise RuntimeError("the login is down")
        return name

    def may_view(who: str, run: RunHead) -> bool:
        return who == "root" or run.tags.get("tenant") == "northwind"

    kite = new_kite(tmp_path, may_decide={"support-lead": ["priya", "root"]})
    with serving(kite, get_user=get_user, may_view=may_view, may_operate=lambda who, _: who == "root") as running:
        kite.run("support", "run-north", tags={"tenant": "northwind"})
        kite.run("support", "run-south", "secret of the south", tags={"tenant": "southwind"})
        yield running


def test_get_user_may_view_may_operate(mounted: Running) -> None:
    origin = {"Origin": mounted.url}
    assert ask(mounted, "GET", "/inbox").status == 401
    assert asked(mounted, "GET", "/inbox", {"X-User": " "}).status == 401
    assert asked(mounted, "GET", "/inbox", {"X-User": "boom"}).status == 500
    assert ask(mounted, "GET", "/login").status == 404
    anna = {"X-User": "anna"}
    for path in ("/inbox", "/runs", "/runs?q=secret", "/api/v1/runs", "/api/v1/inbox"):
        answer = asked(mounted, "GET", path, anna)
        assert answer.status == 200 and "run-south" not in answer.text and "secret of" not in answer.text, path
    assert "run-north" in asked(mounted, "GET", "/inbox", anna).text
    for path in (
        "/runs/run-south",
        "/api/v1/runs/run-south",
        "/api/v1/runs/run-south/journal",
        "/runs/run-south/messages/1",
        "/live?topic=run:run-south",
    ):
        hidden, absent = asked(mounted, "GET", path, anna), asked(mounted, "GET", path.replace("south", "none"), anna)
        assert hidden.status == absent.status == 404
        assert hidden.text.replace("south", "none") == absent.text
    body = approve(mounted, "run-north")
    assert asked(mounted, "POST", "/runs/run-north/decide", FORM | origin | anna, body).status == 403
    assert asked(mounted, "POST", "/runs/run-north/cancel", FORM | origin | anna, "").status == 403
    assert asked(mounted, "POST", "/api/v1/runs/run-north/cancel", JSON | anna, "{}").status == 403
    assert asked(mounted, "POST", "/api/v1/runs", JSON | anna, '{"agent": "short", "input": "x", "run_id": "run-new"}').status == 403
    assert asked(mounted, "POST", "/runs/run-south/decide", FORM | origin | anna, approve(mounted, "run-south")).status == 404
    assert open_still(mounted, "run-north") and open_still(mounted, "run-south")
    assert asked(mounted, "GET", "/charts", anna).status == 400  # sums would tell
    priya = {"X-User": "priya"}
    assert "You cannot decide this" in asked(mounted, "GET", "/inbox", anna).text
    assert "You can make 1 of them" in asked(mounted, "GET", "/inbox", priya).text
    assert asked(mounted, "POST", "/runs/run-north/decide", FORM | origin | priya, body).status == 303
    assert mounted.app.get("run-north").gates[0].decided_by == "priya"


def test_create_app_wants_to_know_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Outlast(tmp_path / "a.db")
    with pytest.raises(UsageError, match="neither get_user nor OUTLAST_WEB_TOKEN"):
        create_app(app)
    monkeypatch.setenv("OUTLAST_WEB_TOKEN", "short")
    with pytest.raises(UsageError, match="at least 32"):
        create_app(app)
    monkeypatch.setenv("OUTLAST_WEB_TOKEN", "x" * 40)
    monkeypatch.setenv("OUTLAST_BY", "priya")
    assert callable(create_app(app))
    assert callable(create_app(app, get_user=lambda request: "anna"))
    assert not (tmp_path / "a.db").exists()  # making it is no I/O


def test_mounted_under_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    monkeypatch.setenv("OUTLAST_WEB_URL", "https://tools.example.org/agents")
    kite = new_kite(tmp_path)
    kite.run("support", "run-1")
    outer = Starlette(routes=[Mount("/agents", create_app(kite.app, get_user=lambda request: "anna"))])
    with TestClient(outer, base_url="https://tools.example.org", follow_redirects=False) as client:
        page = client.get("/agents/inbox")
        assert page.status_code == 200 and 'href="/agents/runs/run-1"' in page.text and 'href="/runs' not in page.text
        gate = kite.app.get("run-1").gates[0]
        form = {"gate": gate.gate_id, "digest": gate.digest, "decision": "approve"}
        done = client.post("/agents/runs/run-1/decide", data=form, headers={"Origin": "https://tools.example.org"})
        assert done.status_code == 303 and done.headers["location"].startswith("/agents/inbox?")
        assert kite.app.get("run-1").gates[0].decided_by == "anna"
        assert client.get("/agents/api/v1/health", headers={"Host": "evil.org"}).status_code == 421
    kite.app.close()

"""FakeMessagesAPI: every rule is refused by its name, what is right passes, and the faults are real."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from outlast.testing import Attempts, Cut, ErrorInStream, FakeMessagesAPI, Fault, Garbage, Slow
from outlast.testing.protocol import SentAnswer, Violation, canonical, check_request

HEADERS = {"content-type": "application/json", "x-api-key": "mock", "anthropic-version": "2023-06-01"}
TOOL = {"name": "f", "description": "", "input_schema": {"type": "object"}}


def user(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks), **more}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str = "Hello") -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(n: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{n:02d}", "name": "f", "input": {}, **more}


def result(n: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{n:02d}", "content": "ok", **more}


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": list(messages) or [user(text())], "tools": [TOOL], **more}


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in body().items() if key != field}


def post(
    api: FakeMessagesAPI, request: Any, *, headers: dict[str, str] = HEADERS, path: str = "/v1/messages"
) -> tuple[int, dict[str, Any]]:
    raw = request if isinstance(request, bytes) else json.dumps(request).encode()
    ask = urllib.request.Request(api.url + path, data=raw, headers=headers)  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(ask, timeout=10) as response:  # noqa: S310 - our own server
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


# --- the rules: what is right, and each rule broken -------------------------------------------------------------------------

RIGHT: list[Any] = [
    body(),
    body({"role": "user", "content": "Hello"}, system="Be brief.", temperature=0.5),
    body(user(text()), assistant(text(), call()), user(result())),
    body(user(text()), assistant(call(1), call(2)), user(result(1), result(2, is_error=True), text("And hurry."))),
    body(user(text()), assistant(call()), user(result(content=[text(), {"type": "image", "source": {}}]))),
    body(user(text()), assistant(call()), user(result(content=""))),
    body(user(text()), {"role": "system", "content": "Be brief."}),
    body(user(text()), assistant(text()), user(text()), {"role": "system", "content": [text()]}, assistant(text()), user(text())),
    body(user(text()), assistant({"type": "server_tool_use", "id": "s", "name": "w", "input": {}}, text()), user(text())),
    body(tools=[TOOL, {"type": "web_search_20260209", "name": "web_search"}]),
    body(user({"type": "a_block_of_next_year", "x": 1})),
    body(user(text()), user(text("And hurry."))),  # merged by the provider
    body(user(text()), assistant(call()), user(result()), user(text("Go on."))),
]

WRONG: list[tuple[str, Any]] = [
    ("body-is-an-object", [1]),
    ("model", without("model")),
    ("max-tokens", without("max_tokens")),
    ("max-tokens", body(max_tokens=0)),
    ("max-tokens", body(max_tokens=True)),
    ("known-fields", body(tags={"tenant": "x"})),
    ("system", body(system="")),
    ("system", body(system=[text(" ")])),
    ("messages", body() | {"messages": []}),
    ("tool-schema", body(tools=[{"name": "f"}])),
    ("tool-schema", body(tools=[TOOL, TOOL])),
    ("tool-schema", body(tools=[{**TOOL, "name": "a b"}])),
    ("tool-schema", body(tools=[{**TOOL, "input_schema": {"type": "string"}}])),
    ("message-fields", body(user(text(), seq=1))),
    ("message-fields", body({"role": "user"})),
    ("content-not-empty", body(user())),
    ("content-not-empty", body({"role": "user", "content": ""})),
    ("content-not-empty", body(user(text()), assistant(), user(text()))),
    ("block", body(user("Hello"))),
    ("block", body(user({"text": "no type"}))),
    ("block", body(user(call()))),
    ("block", body(user(text()), assistant(result()), user(text()))),
    ("block-fields", body(user({**text(), "seq": 1}))),
    ("block-fields", body(user(text()), assistant(call()), user(result(seq=1)))),
    ("text-not-empty", body(user(text("")))),
    ("text-not-empty", body(user(text(" \n")))),
    ("text-not-empty", body({"role": "user", "content": " "})),
    ("text-not-empty", body(user(text()), assistant(text("")), user(text()))),
    ("text-not-empty", body(user(text()), assistant(call()), user(result(content=[text("")])))),
    ("unicode", body(user(text("\ud800")))),
    ("calls-answered", body(user(text()), assistant(call()), user(text()), user(result()))),
    ("roles-alternate", body(assistant(text()), user(text()))),
    ("roles-alternate", body(user(text()), assistant(text()), assistant(text()), user(text()))),
    ("roles-alternate", body({"role": "tool", "content": "x"})),
    ("system-role", body({"role": "system", "content": "x"}, user(text()))),
    ("system-role", body(user(text()), assistant(text()), {"role": "system", "content": "x"})),
    ("ends-with-user", body(user(text()), assistant(text()))),
    ("call-id", body(user(text()), assistant(call(id="")), user(result()))),
    ("call-id", body(user(text()), assistant(call(id="a:b")), user(result()))),
    ("call-id", body(user(text()), assistant(call(id="x" * 65)), user(result()))),
    ("call-id-unique", body(user(text()), assistant(call(), call()), user(result()))),
    ("call-id-unique", body(user(text()), assistant(call()), user(result()), assistant(call()), user(result()))),
    ("call-input", body(user(text()), assistant(call(input='{"a": 1}')), user(result()))),
    ("call-has-schema", body(user(text()), assistant(call(name="g")), user(result()))),
    ("call-has-schema", body(user(text()), assistant(call()), user(result()), tools=[])),
    ("calls-answered", body(user(text()), assistant(call()), user(text("Hurry!")), assistant(text()), user(result()))),
    ("calls-answered", body(user(text()), assistant(call(1), call(2)), user(result(1)))),
    ("calls-answered", body(user(text()), assistant(call()))),
    ("calls-answered", body(user(text()), assistant(call()), assistant(text()), user(result()))),
    ("results-first", body(user(text()), assistant(call()), user(text(), result()))),
    ("results-first", body(user(text()), assistant(call(1), call(2)), user(result(1), text(), result(2)))),
    ("no-result-without-call", body(user(result()))),
    ("no-result-without-call", body(user(text()), assistant(call()), user(result()), assistant(text()), user(result()))),
    ("no-result-without-call", body(user(text()), assistant({**call(), "type": "server_tool_use"}), user(result()))),
    ("one-result-per-call", body(user(text()), assistant(call()), user(result(), result()))),
    ("results-in-order", body(user(text()), assistant(call(1), call(2)), user(result(2), result(1)))),
    ("result-content", body(user(text()), assistant(call()), user(result(content={"a": 1})))),
    ("result-content", body(user(text()), assistant(call()), user(result(content="", is_error=True)))),
    ("result-content", body(user(text()), assistant(call()), user(result(is_error="yes")))),
    ("result-content", body(user(text()), assistant(call()), user(result(content=[result()])))),
]


def refused(request: Any, sent: dict[int, list[SentAnswer]] | None = None) -> str:
    with pytest.raises(Violation) as raised:
        check_request(request, sent or {})
    assert f"[rule: {raised.value.rule}]" in str(raised.value)
    return raised.value.rule


@pytest.mark.parametrize("request_body", RIGHT)
def test_what_is_right_passes(request_body: Any) -> None:
    check_request(request_body, {})


@pytest.mark.parametrize("rule,request_body", WRONG)
def test_each_rule_is_refused_by_its_name(rule: str, request_body: Any) -> None:
    assert refused(request_body) == rule


def test_every_rule_that_is_documented_has_a_row() -> None:
    from outlast.testing import protocol

    assert protocol.__doc__ is not None
    named = {word for line in protocol.__doc__.splitlines() if line.startswith("    ") for word in line.split()}
    assert named == {rule for rule, _ in WRONG} | {"answer-unchanged"}


# --- an answer comes back as it was sent -------------------------------------------------------------------------------------

SENT: list[Any] = [
    {"type": "thinking", "thinking": "Spaces  \u2028🦉", "signature": "a+b/c=="},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "some_future_block", "foo": 1, "bar": {"z": 1, "a": None}},
    text("Looking. "),
    call(input={"z": 1.0, "a": 10**20, "n": {"y": 1, "x": 2}}),
]


def returned(*blocks: Any, sent: list[Any] = SENT, declared: frozenset[str] = frozenset({"f"})) -> None:
    check_request(body(user(text()), assistant(*blocks), user(result())), {0: [SentAnswer(sent, "tool_use", declared)]})


def changed(i: int, **fields: Any) -> list[Any]:
    return [*SENT[:i], {**SENT[i], **fields}, *SENT[i + 1 :]]


def test_the_same_comes_back_and_the_order_of_a_blocks_own_keys_is_free() -> None:
    returned(*SENT)
    returned(*[dict(sorted(block.items())) for block in SENT])


@pytest.mark.parametrize(
    "blocks",
    [
        SENT[1:],
        [SENT[1], SENT[0], *SENT[2:]],
        [*SENT[:3], *SENT[4:]],
        [*SENT[:4], text("more"), SENT[4]],
        changed(0, thinking="Spaces \u2028🦉"),
        changed(0, thinking="Spaces  \n🦉"),
        changed(0, signature="a+b/c="),
        changed(2, foo=1.0),
        changed(2, foo=True),
        changed(2, foo="1"),
        changed(2, bar={"z": 1}),
        changed(2, extra=None),
        changed(3, text="Looking."),
        changed(4, input={"z": 1, "a": 10**20, "n": {"y": 1, "x": 2}}),
        changed(4, input={"z": 1.0, "a": 1e20, "n": {"y": 1, "x": 2}}),
        changed(4, input={"z": 1.0, "a": 10**20 + 1, "n": {"y": 1, "x": 2}}),
        changed(4, input={"a": 10**20, "z": 1.0, "n": {"y": 1, "x": 2}}),
        changed(4, input={"z": 1.0, "a": 10**20, "n": {"x": 2, "y": 1}}),
        changed(4, input={}),
        changed(4, caller={"type": "direct"}),
    ],
)
def test_any_change_of_an_answer_is_refused(blocks: list[Any]) -> None:
    with pytest.raises(Violation) as raised:
        returned(*blocks)
    assert raised.value.rule == "answer-unchanged"


def test_the_message_names_what_changed() -> None:
    with pytest.raises(Violation, match=r"messages\.1\.content\.3: came back as .* and was sent as"):
        returned(*changed(3, text="Looking."))


@pytest.mark.parametrize("bad", ["", None, "a:b", "x" * 65])
def test_a_malformed_id_may_be_mended(bad: Any) -> None:
    returned(call(), sent=[call(id=bad)])


def test_an_id_that_was_used_before_may_be_mended_and_no_other() -> None:
    messages = [user(text()), assistant(call(1)), user(result(1)), assistant(call(2)), user(result(2))]
    first = SentAnswer([call(1)], "tool_use", frozenset({"f"}))
    check_request(body(*messages), {0: [first], 1: [first]})
    assert refused(body(*messages), {0: [first], 1: [SentAnswer([call(3)], "tool_use", frozenset({"f"}))]}) == "answer-unchanged"
    twice = [SentAnswer([call(1), call(1)], "tool_use", frozenset({"f"}))]
    check_request(body(user(text()), assistant(call(1), call(2)), user(result(1), result(2))), {0: twice})


@pytest.mark.parametrize("bad", ['{"path": "a', None, [1], 5])
def test_an_input_that_is_no_object_comes_back_empty(bad: Any) -> None:
    returned(call(), sent=[call(input=bad)])
    with pytest.raises(Violation) as raised:
        returned(call(input={"path": "a"}), sent=[call(input=bad)])
    assert raised.value.rule == "answer-unchanged"


def test_characters_that_cannot_be_stored_come_back_replaced() -> None:
    returned(text("a\ufffdb"), call(), sent=[text("a\x00b"), call()])
    returned(text("a\ufffdb"), call(), sent=[text("a\ud800b"), call()])


def test_a_name_that_the_model_made_up_needs_no_schema_and_a_dropped_tool_is_refused() -> None:
    made_up = call(name="g")
    returned(made_up, sent=[made_up], declared=frozenset({"f"}))
    with pytest.raises(Violation) as raised:
        returned(made_up, sent=[made_up], declared=frozenset({"f", "g"}))
    assert raised.value.rule == "call-has-schema"


def test_after_a_pause_the_list_goes_back_as_it_is() -> None:
    paused = {0: [SentAnswer([text("Searching.")], "pause_turn", frozenset())]}
    ended = {0: [SentAnswer([text("Searching.")], "end_turn", frozenset())]}
    once = [user(text()), assistant(text("Searching."))]
    twice = [*once, assistant(text("Found.")), user(text())]
    check_request(body(*once), paused)
    check_request(body(*twice), paused)
    assert refused(body(*once), ended) == "ends-with-user"
    assert refused(body(*twice), ended) == "roles-alternate"


def test_canonical_tells_numbers_apart() -> None:
    values = [1, 1.0, True, "1", 10**20, 1e20, -0.0, 0.0, 0, None]
    assert len({canonical(value) for value in values}) == len(values)


# --- the server ----------------------------------------------------------------------------------------------------------------


def test_a_refusal_has_the_apis_form_and_stands_in_the_journal() -> None:
    with FakeMessagesAPI(["Hello"]) as api:
        status, document = post(api, body(assistant(text()), user(text())))
        assert status == 400
        assert document["type"] == "error"
        assert document["error"]["type"] == "invalid_request_error"
        assert "messages.0" in document["error"]["message"]
        assert "[rule: roles-alternate]" in document["error"]["message"]
        assert document["request_id"] == "req_fake_0001"
        assert api.refused == ["roles-alternate"]
        assert api.requests == [body(assistant(text()), user(text()))]
        assert json.loads(api.raw_requests[0]) == api.requests[0]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"model": "m", "model": "n"}', b'{"max_tokens": NaN}', b'{"a": Infinity}', b"\xff"]
)
def test_a_body_that_is_no_json_is_refused(raw: bytes) -> None:
    with FakeMessagesAPI(["Hello"]) as api:
        status, document = post(api, raw)
        assert (status, api.refused) == (400, ["body-is-json"])
        assert len(api.raw_requests) == 1
    assert document["error"]["type"] == "invalid_request_error"


def test_headers_and_path() -> None:
    with FakeMessagesAPI(["Hello"]) as api:
        assert post(api, body(), headers={**HEADERS, "x-api-key": ""})[1]["error"]["type"] == "authentication_error"
        no_version = {key: value for key, value in HEADERS.items() if key != "anthropic-version"}
        assert "version-header" in post(api, body(), headers=no_version)[1]["error"]["message"]
        assert post(api, body(), path="/v1/nowhere")[0] == 404
        assert post(api, body(), path="/v1/messages?beta=true")[0] == 200


def test_the_turn_is_chosen_by_the_number_of_assistant_messages() -> None:
    with FakeMessagesAPI([[call()], lambda request: f"{len(request['messages'])} messages"]) as api:
        first = post(api, body())[1]
        assert first["stop_reason"] == "tool_use"
        again = post(api, body(user(text()), assistant(*first["content"]), user(result())))[1]
        assert again["content"] == [text("3 messages")]
        assert post(api, body())[1]["content"] == [call()]
        assert again["usage"]["input_tokens"] > 0
        assert again["id"] != first["id"]


def test_a_whole_message_as_a_turn() -> None:
    with FakeMessagesAPI([{"content": "No.", "stop_reason": "refusal", "id": "msg_own", "model": "own"}]) as api:
        message = post(api, body())[1]
    assert (message["stop_reason"], message["id"], message["model"]) == ("refusal", "msg_own", "own")


def test_past_the_end_of_the_script() -> None:
    with FakeMessagesAPI([]) as api:
        assert "[rule: script-has-the-turn]" in post(api, body())[1]["error"]["message"]


def test_a_changed_answer_is_refused_over_http() -> None:
    with FakeMessagesAPI([SENT, "Done."]) as api:
        post(api, body())
        assert post(api, body(user(text()), assistant(*SENT), user(result())))[0] == 200
        assert post(api, body(user(text()), assistant(*changed(3, text="Looking.")), user(result())))[0] == 400
        assert api.refused == ["answer-unchanged"]


def test_an_answer_that_never_went_out_whole_may_not_come_back() -> None:
    with FakeMessagesAPI([Attempts([Cut("Half an answer."), "Whole."]), "Done."]) as api:
        with pytest.raises((OSError, ValueError, http_exception())):
            post(api, body())
        post(api, body())
        post(api, body(user(text()), assistant(text("Half an answer.")), user(text())))
        assert api.refused == ["answer-unchanged"]


def http_exception() -> type[Exception]:
    from http.client import HTTPException

    return HTTPException


def test_attempts_go_one_by_one_and_the_last_one_stays() -> None:
    with FakeMessagesAPI([Attempts([Fault(429, retry_after="7"), ErrorInStream(), Garbage(b"{}", status=503), "Hello"])]) as api:
        answers = [post(api, body()) for _ in range(5)]
    assert [status for status, _ in answers] == [429, 529, 503, 200, 200]
    assert answers[0][1]["error"]["type"] == "rate_limit_error"
    assert answers[1][1]["error"]["type"] == "overloaded_error"


def test_a_failing_assertion_in_a_turn_fails_the_test() -> None:
    def turn(request: dict[str, Any]) -> str:
        assert request["model"] == "another"
        return "Hello"

    with pytest.raises(AssertionError, match="another"), FakeMessagesAPI([turn]) as api:
        assert "[rule: script-works]" in post(api, body())[1]["error"]["message"]


def test_slow_is_held_until_it_is_let_go() -> None:
    slow = Slow("Hello")
    found: list[int] = []
    with FakeMessagesAPI([slow]) as api:
        thread = threading.Thread(target=lambda: found.append(post(api, body())[0]))
        thread.start()
        assert slow.arrived.wait(10)
        assert found == []
        slow.release.set()
        thread.join(10)
    assert found == [200]


def test_the_end_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    with FakeMessagesAPI(["Hello"]) as api, socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2]))) as idle:
        idle.sendall(b"POST /v1/messages HTTP/1.1\r\n")  # a client that never finishes its request
        post(api, body())
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match=r".*"):
        post(api, body())


def test_importing_the_helpers_loads_no_server() -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", "import sys, outlast.testing; sys.exit('http.server' in sys.modules)"], check=True)


def test_a_stream_is_the_same_message() -> None:
    from outlast.models.answer import Answer
    from outlast.testing.sse import events_of

    message = {"role": "assistant", "content": SENT, "stop_reason": "tool_use", "usage": {"input_tokens": 3, "output_tokens": 7}}
    answer, names = Answer(), []
    for name, data in events_of(message):
        names.append(name)
        answer.add(data)
    assert answer.message() == {**message, "stop_sequence": None}
    assert {
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    } == set(names)


def test_the_wire_is_utf_8_with_nothing_escaped() -> None:
    from outlast.testing.sse import dumps

    assert dumps("é\u2028🦉") == '"é\u2028🦉"'.encode()
    assert dumps("\ud800") == b'"\\ud800"'

"""The Anthropic adapter, with the real SDK over real HTTP against the strict stand-in."""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import pytest

from outlast.errors import ModelError, UsageError
from outlast.models import Anthropic, ModelRequest
from outlast.models.answer import Answer, BrokenAnswer
from outlast.models.anthropic import DEFAULT_MAX_TOKENS
from outlast.models.failures import retry_after
from outlast.testing import Attempts, Cut, ErrorInStream, FakeMessagesAPI, Fault, Garbage, Slow

USER = {"role": "user", "content": "Refund order 42"}
TOOL = {"name": "get_order", "description": "An order.", "input_schema": {"type": "object", "properties": {"order_id": {}}}}
CALL = {"type": "tool_use", "id": "toolu_01", "name": "get_order", "input": {"order_id": 42}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01", "content": "paid"}]}
KEY = "sk-ant-mock-SECRET"

AWKWARD: list[dict[str, Any]] = [
    {"type": "redacted_thinking", "data": "EmwK+AhgB/EAEY=="},
    {"type": "thinking", "thinking": "Trailing spaces   \n\u2028 and \u2029, \u0085 and 🦉  ", "signature": "Eq+/ab==cd/+=="},
    {"type": "thinking", "thinking": "", "signature": "x"},
    {"type": "some_future_block", "foo": 1, "bar": 1.0, "deep": {"z": [None, True], "a": "  "}},
    {"type": "text", "text": "  Looking it up.\u2028 \n\n", "future": {"kept": None}},
    {"type": "server_tool_use", "id": "srvtoolu_01", "name": "web_search", "input": {"query": "x", "a": 2.0}},
    {"type": "mcp_tool_use", "id": "mcptoolu_01", "name": "m", "server_name": "s", "input": {"z": 1.0, "a": 10**20}},
    {
        "type": "tool_use",
        "id": "toolu_01",
        "name": "get_order",
        "input": {"z": 1.0, "a": 1, "big": 10**20, "tiny": 1e-7, "b": {"y": 'é\u2028"\\', "x": [1.0, -0.0]}, "order_id": None, "": ""},
        "caller": {"type": "direct"},
    },
]

ClientOf = Callable[[str], Any]


def async_client(url: str) -> Any:
    return anthropic.AsyncAnthropic(api_key=KEY, base_url=url)


def sync_client(url: str) -> Any:
    return anthropic.Anthropic(api_key=KEY, base_url=url)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # a profile of whoever runs this


@pytest.fixture(params=[async_client, sync_client], ids=["async", "sync"])
def client_of(request: pytest.FixtureRequest) -> ClientOf:
    found: ClientOf = request.param
    return found


def ask(api: FakeMessagesAPI, client_of: ClientOf = async_client, *messages: dict[str, Any], **request: Any) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        client = client_of(api.url)
        try:
            return await Anthropic("claude-sonnet-5-5", client=client)(ModelRequest(messages=list(messages) or [USER], **request))
        finally:
            closing = client.close()
            if closing is not None:
                await closing

    return asyncio.run(go())


def failure(api: FakeMessagesAPI, client_of: ClientOf = async_client, **request: Any) -> ModelError:
    with pytest.raises(ModelError) as raised:
        ask(api, client_of, **request)
    assert KEY not in str(raised.value)
    assert "\n" not in str(raised.value)
    return raised.value


# --- the answer ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_streamed_and_returned_whole(client_of: ClientOf) -> None:
    pieces: list[str] = []
    with FakeMessagesAPI(["Hello, Priya. All is well."]) as api:
        message = ask(api, client_of, emit=pieces.append)
        assert api.requests[0]["stream"] is True
    assert len(pieces) > 1
    assert "".join(pieces) == "Hello, Priya. All is well." == message["content"][0]["text"]
    assert (message["role"], message["stop_reason"]) == ("assistant", "end_turn")
    assert message["usage"]["input_tokens"] > 0
    assert message["usage"]["output_tokens"] > 1
    assert message["id"].startswith("msg_")


def test_emit_runs_on_the_event_loops_thread(client_of: ClientOf) -> None:
    threads: set[int] = set()
    with FakeMessagesAPI(["Hello, Priya."]) as api:
        ask(api, client_of, emit=lambda _: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_awkward_blocks_go_there_and_back_unchanged(client_of: ClientOf) -> None:
    with FakeMessagesAPI([AWKWARD, "Done."]) as api:
        first = ask(api, client_of, tools=[TOOL])
        stored = json.loads(json.dumps(first["content"], ensure_ascii=False))  # through a database
        ask(api, client_of, USER, {"role": "assistant", "content": stored}, RESULT, tools=[TOOL])  # refused if anything changed
        assert api.refused == []
    assert [dict(sorted(block.items())) for block in stored] == [dict(sorted(block.items())) for block in AWKWARD]
    assert json.dumps(stored[-1]["input"]) == json.dumps(AWKWARD[-1]["input"])
    assert first["stop_reason"] == "tool_use"


def test_everything_of_the_message_is_kept(client_of: ClientOf) -> None:
    turn = {
        "content": "I cannot.",
        "stop_reason": "refusal",
        "stop_details": {"type": "refusal", "category": "x", "explanation": None},
        "container": {"id": "container_01", "expires_at": "2026-11-30T11:00:00Z"},
        "usage": {"input_tokens": 7, "output_tokens": 9, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3, "new_count": 1},
        "new_field": {"a": None},
    }
    with FakeMessagesAPI([turn]) as api:
        message = ask(api, client_of)
    assert message["stop_details"] == turn["stop_details"]
    assert message["container"]["id"] == "container_01"
    assert message["usage"] == turn["usage"]
    assert message["new_field"] == {"a": None}
    assert message["stop_reason"] == "refusal"


@pytest.mark.parametrize("stop_reason", ["pause_turn", "model_context_window_exceeded", "some_new_reason", None])
def test_every_stop_reason_comes_through(stop_reason: str | None) -> None:
    with FakeMessagesAPI([{"content": "x", "stop_reason": stop_reason}]) as api:
        message = ask(api)
    assert "stop_reason" in message
    assert message["stop_reason"] == stop_reason


def test_a_call_that_was_cut_off_has_no_arguments() -> None:
    cut = {"content": [{**CALL, "input": '{"order_id": 4'}], "stop_reason": "max_tokens"}
    with FakeMessagesAPI([cut]) as api:
        assert ask(api, tools=[TOOL])["content"] == [{**CALL, "input": {}}]


@pytest.mark.parametrize("raw,given", [('{"path": "a', '{"path": "a'), ("null", None), ("[1]", [1])])
def test_arguments_that_are_no_object_are_handed_on_for_the_model_to_mend(raw: str, given: Any) -> None:
    with FakeMessagesAPI([[{**CALL, "input": raw}]]) as api:
        assert ask(api, tools=[TOOL])["content"][0]["input"] == given


# --- the request ---------------------------------------------------------------------------------------------------------


def test_the_request_holds_what_the_agent_says(client_of: ClientOf) -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    with FakeMessagesAPI(["{}"]) as api:
        ask(
            api,
            client_of,
            instructions="Be brief.",
            tools=[TOOL],
            output_schema=schema,
            settings={
                "output_config": {"effort": "low"},
                "thinking": {"type": "adaptive"},
                "container": "container_01",
                "temperature": 0.5,
            },
        )
    assert api.requests[0] == {
        "model": "claude-sonnet-5-5",
        "max_tokens": DEFAULT_MAX_TOKENS,
        "messages": [USER],
        "system": "Be brief.",
        "tools": [TOOL],
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
        "thinking": {"type": "adaptive"},
        "container": "container_01",
        "temperature": 0.5,  # the SDK has no parameter for it
        "stream": True,
    }


def test_settings_win_and_what_is_empty_is_left_out() -> None:
    with FakeMessagesAPI(["x"]) as api:
        ask(api, settings={"max_tokens": 9, "model": "other", "container": None})
    assert api.requests[0] == {"model": "other", "max_tokens": 9, "messages": [USER], "stream": True}


def test_the_request_is_left_as_it_was() -> None:
    settings = {"output_config": {"effort": "low"}}
    with FakeMessagesAPI(["x"]) as api:
        ask(api, settings=settings, output_schema={"type": "object"})
    assert settings == {"output_config": {"effort": "low"}}


def test_betas_go_to_the_beta_api() -> None:
    with FakeMessagesAPI([[*AWKWARD]]) as api:
        message = ask(api, settings={"betas": ["context-1m-2025-08-07"]}, tools=[TOOL])
    assert [block["type"] for block in message["content"]] == [block["type"] for block in AWKWARD]
    assert json.dumps(message["content"][-1]["input"]) == json.dumps(AWKWARD[-1]["input"])


# --- errors: what may be tried again, from when, and what the text says -----------------------------------------------------


@pytest.mark.parametrize(
    "status,retryable",
    [(status, False) for status in (400, 401, 402, 403, 404, 413, 418, 422)]
    + [(s, True) for s in (408, 409, 429, 500, 502, 503, 504, 529)],
)
def test_error_statuses(status: int, retryable: bool, client_of: ClientOf) -> None:
    with FakeMessagesAPI([Fault(status, message=f"because of {KEY}")]) as api:
        error = failure(api, client_of)
        assert len(api.requests) == 1, "the SDK's own retries are off, for a client that was given too"
    assert (error.status, error.retryable) == (status, retryable)
    assert f"HTTP {status}" in str(error)
    assert "req_fake_0001" in str(error)
    assert error.hint
    assert error.hint in str(error)


@pytest.mark.parametrize("key", ["sk-ant-api03-SECRET", "a-proxys-own-SECRET"])
@pytest.mark.parametrize("echoed", ["the clients own", "sk-ant-another-SECRET"])
def test_a_key_that_the_provider_echoes_is_not_repeated(key: str, echoed: str, client_of: ClientOf) -> None:
    said = key if echoed == "the clients own" else echoed
    for fault in (Fault(401, message=f"invalid: {said}."), Garbage(f"<html>{said}", status=502), ErrorInStream(message=said)):
        with FakeMessagesAPI([fault]) as api:
            error = failure(api, lambda url: client_of(url).copy(api_key=key))
        assert "SECRET" not in str(error)
        assert "[key]" in str(error)


@pytest.mark.parametrize(
    "headers,wait",
    [
        ({"Retry-After": "7"}, timedelta(seconds=7)),
        ({"Retry-After": "0.5"}, timedelta(seconds=0.5)),
        ({"Retry-After": "3600"}, timedelta(hours=1)),
        ({"Retry-After": "Fri, 27 Nov 2026 15:00:07 GMT", "Date": "Fri, 27 Nov 2026 15:00:00 GMT"}, timedelta(seconds=7)),
        ({"Retry-After": "Fri, 27 Nov 2026 14:00:00 GMT", "Date": "Fri, 27 Nov 2026 15:00:00 GMT"}, timedelta(0)),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], wait: timedelta | None) -> None:
    with FakeMessagesAPI([Fault(429, headers=headers)]) as api:
        assert failure(api).retry_after == wait


def test_retry_after_as_a_date_without_a_date_header_counts_from_now() -> None:
    now = datetime(2026, 11, 27, 15, 0, 0, tzinfo=UTC)
    assert retry_after({"retry-after": "Fri, 27 Nov 2026 15:01:00 GMT"}, now) == timedelta(minutes=1)
    assert retry_after({"retry-after": "Fri, 27 Nov 2026 15:01:00 -0000"}, now) == timedelta(minutes=1)


@pytest.mark.parametrize(
    "kind,retryable,status",
    [
        ("overloaded_error", True, 529),
        ("api_error", True, 500),
        ("rate_limit_error", True, 429),
        ("a_new_error", True, 500),
        ("invalid_request_error", False, 400),
    ],
)
def test_an_error_event_inside_a_200_stream(kind: str, retryable: bool, status: int, client_of: ClientOf) -> None:
    turn = [{"type": "text", "text": "Half of"}, CALL]
    with FakeMessagesAPI([ErrorInStream(kind, turn=turn, after=6)]) as api:
        error = failure(api, client_of, tools=[TOOL])
    assert (error.retryable, error.status) == (retryable, status)
    assert "HTTP 200" in str(error)
    assert kind in str(error)
    assert "req_fake_0001" in str(error)


@pytest.mark.parametrize("after", [0, 1, 3, 5, 99])
@pytest.mark.parametrize("abrupt", [True, False])
def test_a_stream_that_breaks_off_is_no_answer(after: int, abrupt: bool, client_of: ClientOf) -> None:
    with FakeMessagesAPI([Attempts([Cut([{"type": "text", "text": "Half"}, CALL], after=after, abrupt=abrupt), "Whole."])]) as api:
        error = failure(api, client_of, tools=[TOOL])
        assert error.retryable
        assert ask(api, client_of)["content"] == [{"type": "text", "text": "Whole."}]


@pytest.mark.parametrize("body", ["<html>Bad Gateway</html>", "", b"\xff\xfe", 'event: message_start\ndata: {"type": "mess\n\n', "{}"])
@pytest.mark.parametrize("content_type", ["text/html", "text/event-stream"])
def test_a_body_that_is_no_answer(body: str | bytes, content_type: str, client_of: ClientOf) -> None:
    with FakeMessagesAPI([Garbage(body, content_type=content_type)]) as api:
        assert failure(api, client_of).retryable


def test_an_error_page_of_a_proxy() -> None:
    with FakeMessagesAPI([Garbage("<html>" + "x" * 5000, status=502)]) as api:
        error = failure(api)
    assert error.retryable
    assert error.status == 502
    assert len(str(error)) < 800


def test_nobody_listens() -> None:
    with FakeMessagesAPI([]) as api:
        pass
    error = failure(api)
    assert error.retryable
    assert error.status is None
    assert "could not be reached" in str(error)


def test_no_answer_in_time(client_of: ClientOf) -> None:
    with FakeMessagesAPI([Slow("late"), "x"]) as api:
        error = failure(api, client_of, settings={"timeout": 0.05})
    assert error.retryable
    assert "in time" in str(error)


def test_no_more_of_an_answer_in_time(client_of: ClientOf) -> None:
    with FakeMessagesAPI([Slow("late", after=4), "x"]) as api:
        error = failure(api, client_of, settings={"timeout": 0.2})
    assert error.retryable


def test_a_missing_key_is_said_before_anything_is_sent() -> None:
    with FakeMessagesAPI(["x"]) as api:
        with pytest.raises(ModelError, match="ANTHROPIC_API_KEY") as raised:
            asyncio.run(Anthropic("m", base_url=api.url)(ModelRequest(messages=[USER])))
        assert api.requests == []
    assert not raised.value.retryable
    assert "ANTHROPIC_API_KEY" in raised.value.hint


def test_a_request_that_cannot_be_sent_is_not_tried_again() -> None:
    with FakeMessagesAPI(["x"]) as api:
        error = failure(api, settings={"metadata": object()})
        assert api.requests == []
    assert not error.retryable


def test_what_emit_raises_is_not_the_providers_fault() -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError

    with FakeMessagesAPI(["x"]) as api, pytest.raises(ZeroDivisionError):
        ask(api, emit=broken)


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "anthropic":
            raise ModuleNotFoundError("No module named 'anthropic'", name="anthropic")
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError) as raised:
        asyncio.run(Anthropic("m")(ModelRequest(messages=[USER])))
    assert raised.value.hint == "pip install 'outlast[anthropic]'"


def test_client_and_base_url_exclude_each_other() -> None:
    with pytest.raises(UsageError):
        Anthropic("m", client=object(), base_url="http://x")


# --- clients -------------------------------------------------------------------------------------------------------------


def test_one_client_for_each_event_loop_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(anthropic.AsyncAnthropic):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            made.append(self)

    monkeypatch.setattr(anthropic, "AsyncAnthropic", Counted)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "mock")
    with FakeMessagesAPI(["x"]) as api:
        model = Anthropic("m", base_url=api.url)

        async def several() -> None:
            await asyncio.gather(*(model(ModelRequest(messages=[USER])) for _ in range(3)))
            assert not made[-1].is_closed()

        asyncio.run(several())
        asyncio.run(several())
    assert len(made) == 2
    assert all(client.is_closed() for client in made)
    assert all(client.max_retries == 0 for client in made)


def test_an_async_client_in_a_second_event_loop_is_told_apart_from_a_dead_network() -> None:
    with FakeMessagesAPI(["x"]) as api:
        model = Anthropic("m", client=async_client(api.url))
        asyncio.run(model(ModelRequest(messages=[USER])))
        with pytest.raises(ModelError, match="one event loop"):
            asyncio.run(model(ModelRequest(messages=[USER])))


def test_an_answer_nobody_waits_for_is_let_go(client_of: ClientOf) -> None:
    slow = Slow("Hello, Priya. All is well.", after=6)

    pieces: list[str] = []

    async def go(url: str) -> int:
        task = asyncio.ensure_future(Anthropic("m", client=client_of(url))(ModelRequest(messages=[USER], emit=pieces.append)))
        await asyncio.to_thread(slow.arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.release.set()
        return len(pieces)

    with FakeMessagesAPI([slow]) as api:
        assert asyncio.run(go(api.url)) == len(pieces), "the loop's end waited for its threads, and nothing came any more"


def test_importing_the_adapter_loads_no_sdk() -> None:
    code = "import sys; from outlast.models import Anthropic; Anthropic('x'); sys.exit('anthropic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the fold of events: rows that no server sends ------------------------------------------------------------------------

START: dict[str, Any] = {
    "type": "message_start",
    "message": {"role": "assistant", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}},
}
STOP: dict[str, Any] = {"type": "message_stop"}
BLOCK: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STOP],
        [START],
        [BLOCK, STOP],
        [START, START, STOP],
        [START, {**BLOCK, "index": 1}, STOP],
        [START, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}}, STOP],
        [START, BLOCK, {"type": "content_block_delta", "index": 0, "delta": {"type": "new_delta", "x": 1}}, STOP],
        [START, BLOCK, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}],
    ],
)
def test_events_that_make_no_message(events: list[dict[str, Any]]) -> None:
    answer = Answer()
    with pytest.raises(BrokenAnswer):
        for event in events:
            answer.add(event)
        answer.message()


def test_the_rows_above_fail_by_what_they_show() -> None:
    answer = Answer()
    for event in [START, BLOCK, STOP]:
        answer.add(event)
    assert answer.message()["content"] == [{"type": "text", "text": ""}]


def test_null_counts_do_not_replace_and_unknown_events_are_passed_over() -> None:
    answer = Answer()
    for event in [START, BLOCK, {"type": "new_event", "x": 1}]:
        answer.add(event)
    citation = {"type": "char_location", "cited_text": "x"}
    answer.add({"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": citation}})
    answer.add({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"input_tokens": None, "output_tokens": 9}})
    answer.add({"type": "message_stop"})
    message = answer.message()
    assert message["usage"] == {"input_tokens": 3, "output_tokens": 9}
    assert message["content"] == [{"type": "text", "text": "", "citations": [citation]}]

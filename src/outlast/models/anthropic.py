"""`Anthropic`: the Messages API through its official SDK.

Rules
1. The SDK takes seconds to import: it is loaded by the first request, never before, and in a thread.
2. It streams inside and returns only a whole answer, exactly as sent; stored messages are sent back exactly as stored.
3. It never tries twice: retries are the runtime's, durable and counted, so the SDK's own are off. The API knows no idempotency for
   requests: an answer that was lost before it was saved is paid for again.
4. The key is the SDK's business: nothing here reads, checks or stores one.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, NoReturn

from outlast.errors import UsageError
from outlast.models import failures
from outlast.models.answer import Answer
from outlast.models.base import ModelRequest

if TYPE_CHECKING:
    from types import ModuleType

# Tokens. The API wants a number. This holds a long letter and its tool calls, and every model takes it; who needs more says so in
# `model_settings`. An answer that is cut off by it runs no tool.
DEFAULT_MAX_TOKENS = 4096

# Events that are on the wire. The SDK mixes helpers of its own among them, which repeat what these say.
_WIRE_EVENTS = {"message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop"}


class Anthropic:
    """A model behind Anthropic's Messages API, or behind any server that speaks it (`base_url`).

    `"anthropic:NAME"` as an agent's `model` is `Anthropic("NAME")`. The agent's `model_settings` are sent as they are and win over
    everything set here; one that the SDK does not know goes into the request's body; with `betas` the beta API is used.

    Args:
        model: the model's name, for instance `claude-sonnet-5-5`.
        client: the SDK's client, sync or async, for a proxy, other credentials or another cloud. Only its retries are switched off.
            A sync client's call runs in a thread of the event loop's own pool. An async client belongs to the event loop that used it
            first, so do not share one between two `run_sync` calls. Left out: one is made for each event loop and closed with it.
        base_url: where the API is; not together with `client`.

    Raises:
        UsageError: from a call, when the SDK is not installed.
        ModelError: from a call, when no whole answer came; `retryable` and `retry_after` say what may help.
    """

    def __init__(self, model: str, *, client: Any = None, base_url: str | None = None) -> None:
        if client is not None and base_url is not None:
            raise UsageError("client= and base_url= exclude each other", hint="give the client its base_url")
        self.model = model
        self._given = client
        self._base_url = base_url
        self._open: dict[asyncio.AbstractEventLoop, AsyncGenerator[Any, None]] = {}
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    def __repr__(self) -> str:
        return f"Anthropic({self.model!r})"

    async def __call__(self, request: ModelRequest, /) -> dict[str, Any]:
        sdk = await asyncio.to_thread(_sdk)
        client = await self._client(sdk)
        arguments = self._arguments(request)
        messages = client.beta.messages if "betas" in arguments else client.messages
        arguments = _known_to(messages.stream, arguments)
        call = _Call(sdk, client)
        if not hasattr(client, "__aenter__"):
            return await _in_thread(call, request.emit, messages, arguments)
        async with aclosing(call.pieces(messages, arguments)) as pieces:
            async for text in pieces:
                request.emit(text)
        return call.message

    def _arguments(self, request: ModelRequest) -> dict[str, Any]:
        arguments: dict[str, Any] = {"model": self.model, "max_tokens": DEFAULT_MAX_TOKENS, "messages": request.messages}
        if request.instructions:
            arguments["system"] = request.instructions
        if request.tools:
            arguments["tools"] = request.tools
        settings = {key: value for key, value in request.settings.items() if not (key == "container" and value is None)}
        if request.output_schema is not None:
            form = {"format": {"type": "json_schema", "schema": request.output_schema}}
            settings["output_config"] = {**form, **(settings.get("output_config") or {})}
        return {**arguments, **settings}

    async def _client(self, sdk: ModuleType) -> Any:
        if self._given is not None:
            if getattr(self._given, "max_retries", 0):  # gives a copy that shares everything else, connections too
                self._given = self._given.with_options(max_retries=0)
            return self._given
        loop = asyncio.get_running_loop()
        if loop not in self._clients:  # no await between this and the last line of `_keep` before its yield: one client a loop
            keeper = self._keep(sdk, loop)
            self._open[loop] = keeper
            await anext(keeper)
        return self._clients[loop]

    async def _keep(self, sdk: ModuleType, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Any, None]:
        # `asyncio.run` closes the async generators that its loop began: that is the one moment at which this loop's connections can
        # still be closed. So the client lives in one.
        try:
            client = sdk.AsyncAnthropic(base_url=self._base_url, max_retries=0)
        except Exception as error:
            self._open.pop(loop, None)
            raise failures.unsendable(error, to_do=failures.NO_KEY) from error
        self._clients[loop] = client
        try:
            yield client
        finally:
            self._clients.pop(loop, None)
            self._open.pop(loop, None)
            await client.close()


class _Call:
    """One request through one client, and what its exceptions mean. `message` is there once all its pieces came."""

    message: dict[str, Any]

    def __init__(self, sdk: ModuleType, client: Any) -> None:
        self._sdk = sdk
        self._secrets = tuple(value for name in ("api_key", "auth_token") if isinstance(value := getattr(client, name, None), str))
        self._answer = Answer()
        self._headers: Mapping[str, str] = {}
        self._begun = False

    async def pieces(self, messages: Any, arguments: dict[str, Any]) -> AsyncGenerator[str, None]:
        """The answer's text, piece by piece."""
        try:
            async with messages.stream(**arguments) as stream:
                self._begin(stream)
                async for event in stream:
                    if text := self._take(event):
                        yield text
            self.message = self._answer.message()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is sorted and raised again
            self._fail(error)

    def pieces_sync(self, messages: Any, arguments: dict[str, Any]) -> Generator[str, None, None]:
        """The same with a sync client."""
        try:
            with messages.stream(**arguments) as stream:
                self._begin(stream)
                for event in stream:
                    if text := self._take(event):
                        yield text
            self.message = self._answer.message()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is sorted and raised again
            self._fail(error)

    def _begin(self, stream: Any) -> None:
        self._begun = True
        self._headers = getattr(getattr(stream, "response", None), "headers", {})

    def _take(self, event: Any) -> str:
        if event.type not in _WIRE_EVENTS:
            return ""
        if event.type == "message_stop":  # the SDK hangs its own copy of the whole message on it
            return self._answer.add({"type": "message_stop"})
        return self._answer.add(event.to_dict(mode="json", warnings=False))

    def _fail(self, error: Exception) -> NoReturn:
        sdk, secrets = self._sdk, self._secrets
        if isinstance(error, sdk.APIStatusError):
            body = error.body if isinstance(error.body, Mapping) else {}
            said = body.get("error")
            said = said if isinstance(said, Mapping) else {}
            raise failures.status_error(
                error.status_code,
                kind=said.get("type"),
                detail=str(said.get("message") or _excerpt(error.message)),
                headers=error.response.headers,
                secrets=secrets,
                in_stream=self._begun,
            ) from error
        if isinstance(error, sdk.APIConnectionError) and not self._begun:
            raise failures.connection_error(error, timed_out=isinstance(error, sdk.APITimeoutError), secrets=secrets) from error
        if self._begun:
            raise failures.broken_stream(error, headers=self._headers, secrets=secrets) from error
        if "authentication" in str(error) or any(kind.__name__ == "CredentialsError" for kind in type(error).__mro__):
            raise failures.unsendable(error, to_do=failures.NO_KEY, secrets=secrets) from error
        raise failures.unsendable(error, to_do="check model_settings and the client", secrets=secrets) from error


async def _in_thread(call: _Call, emit: Callable[[str], None], messages: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    given_up = threading.Event()

    def work() -> None:
        with closing(call.pieces_sync(messages, arguments)) as pieces:
            for text in pieces:
                if given_up.is_set():
                    return
                # `emit` belongs to the event loop; what is handed to it keeps its order and comes before the answer.
                loop.call_soon_threadsafe(emit, text)

    try:
        await asyncio.to_thread(work)
    except asyncio.CancelledError:
        given_up.set()  # a thread cannot be stopped; it lets go of the stream at the next piece
        raise
    return call.message


def _known_to(stream: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the SDK's method takes them: what has no parameter of its own goes into the body as it is."""
    parameters = inspect.signature(stream).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    rest = {key: value for key, value in arguments.items() if key not in parameters}
    if not rest:
        return arguments
    known = {key: value for key, value in arguments.items() if key in parameters}
    return {**known, "extra_body": {**rest, **(known.get("extra_body") or {})}}


def _excerpt(text: str) -> str:
    # A proxy's error page may be long; its first 300 characters say whose it is.
    return text if len(text) <= 300 else f"{text[:300]}..."


def _sdk() -> ModuleType:
    try:
        import anthropic
    except ModuleNotFoundError as error:
        if error.name != "anthropic":
            raise
        raise UsageError("the Anthropic SDK is not installed", hint="pip install 'outlast[anthropic]'") from error
    return anthropic

"""What went wrong between us and a provider, as `ModelError`: may it be tried again, from when, and what should a person do.

Rules
1. Retryable is what may go away by itself: rate limits, overload, the provider's own failures, the network. Every other 4xx will come
   again, so it is not.
2. The text names the HTTP status and the request id, says what to do, and never holds a key.
3. Nothing here imports the SDK: whoever calls has the exception and hands over its parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from outlast.errors import ModelError

NO_KEY = "set ANTHROPIC_API_KEY (or log in as the SDK describes), or pass Anthropic(client=...) with credentials"

# An error's type in the API's error document -> the HTTP status it stands for. An error that comes in the middle of a stream has
# only the type: the status line said 200 long before. https://docs.anthropic.com/en/api/errors
STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}

_RETRYABLE_4XX = {408, 409, 429}  # timed out, conflict, rate limit

_TO_DO = {
    400: "mend the request; the message says which part of it",
    401: NO_KEY,
    402: "settle the account's billing",
    403: "the key is not allowed to do this: check its workspace and permissions",
    404: "check the model's name and base_url",
    413: "send less: the request is over the provider's size limit",
    429: "wait, or raise the account's rate limit",
    529: "the provider is overloaded: wait",
}

# Anthropic's keys and tokens all look like this; a provider or proxy that echoes one must not bring it into the journal.
_KEY = re.compile(r"sk-ant-[A-Za-z0-9_-]+")


def status_error(
    status: int, *, kind: str | None, detail: str, headers: Mapping[str, str], secrets: tuple[str, ...] = (), in_stream: bool = False
) -> ModelError:
    """The provider answered with an error: a status, or an error event in the middle of a 200 stream."""
    answered = f"HTTP {status}" + (f" {kind}" if kind else "")
    if in_stream:
        status = STATUS_OF_TYPE.get(kind or "", 500)
        answered = f"HTTP 200 and then {kind or 'an error'} in the middle of the answer"
    retryable = status in _RETRYABLE_4XX or status >= 500
    to_do = _TO_DO.get(status) or ("the provider failed: try again later" if status >= 500 else "mend the request")
    request_id = headers.get("request-id") or headers.get("x-request-id") or "none given"
    text = f"the model provider answered {answered}: {detail or 'no message'} (request id {request_id}); {to_do}"
    wait = retry_after(headers)
    return ModelError(without_secrets(text, secrets), retryable=retryable, retry_after=wait, status=status, hint=to_do)


def connection_error(cause: BaseException, *, timed_out: bool, secrets: tuple[str, ...] = ()) -> ModelError:
    """No answer came: refused, unreachable or timed out. Whether the provider did the work is not known; nothing was saved."""
    inner = cause.__cause__ or cause
    what = "did not answer in time" if timed_out else "could not be reached"
    to_do = "check the network and base_url"
    if isinstance(inner, RuntimeError) and "Event loop is closed" in str(inner):
        to_do = "an async client belongs to one event loop: leave client= out, or give the sync client"
    text = f"the model provider {what} (no HTTP status, no request id): {type(inner).__name__}: {inner}; {to_do}"
    return ModelError(without_secrets(text, secrets), retryable=True, hint=to_do)


def broken_stream(cause: BaseException, *, headers: Mapping[str, str], secrets: tuple[str, ...] = ()) -> ModelError:
    """The answer began and did not come whole, or cannot be read. Nothing of it was saved; asking again is paid for again."""
    request_id = headers.get("request-id") or "none given"
    text = (
        f"the model provider's answer (HTTP 200, request id {request_id}) broke off or could not be read: "
        f"{type(cause).__name__}: {cause}; nothing of it was saved, ask again"
    )
    return ModelError(without_secrets(text, secrets), retryable=True, status=200)


def unsendable(cause: BaseException, *, to_do: str, secrets: tuple[str, ...] = ()) -> ModelError:
    """The request never left: no credentials, or arguments that the SDK does not take."""
    text = f"the request to the model provider could not be made: {type(cause).__name__}: {cause}; {to_do}"
    return ModelError(without_secrets(text, secrets), retryable=False, hint=to_do)


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> timedelta | None:
    """How long the provider asks us to wait; None where it does not say, or not so that one could understand it.

    Both forms of RFC 9110, section 10.2.3: seconds, and a date. A date is measured from the response's own `Date`, so that a clock
    that is wrong here does no harm; without one, from `now`.
    """
    value = (headers.get("retry-after") or "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return timedelta(seconds=float(value))
    until = _instant(value)
    if until is None:
        return None
    since = _instant(headers.get("date") or "") or now or datetime.now(UTC)
    return max(until - since, timedelta(0))


def _instant(value: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(value)
    except (TypeError, ValueError):  # TypeError: Python 3.11 on some texts that are no date at all
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)  # "-0000" and the obsolete forms are UTC


def without_secrets(text: str, secrets: tuple[str, ...]) -> str:
    """The text in one line with every key in it replaced."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[key]")
    return " ".join(_KEY.sub("[key]", text).split())

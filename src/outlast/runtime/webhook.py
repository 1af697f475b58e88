"""Webhooks: one POST, signed as Standard Webhooks, to an address that was looked at.

Rules
1. Nothing is sent unsigned: without OUTLAST_WEBHOOK_SECRET a delivery fails and says so. Several keys: one signature each, for rotation.
2. https, or http to this machine itself (a loopback address written as such) or to a network that OUTLAST_WEBHOOK_ALLOW names.
3. The name is resolved once, every address that it has is judged, and the connection goes to the one that was judged: a name that changes
   its mind in between (DNS rebinding) reaches nothing else. Private, link-local, metadata and other special addresses are refused.
4. No redirects, no proxies from the environment, and one time limit over all of it.
5. Neither URL nor key is ever part of an error, a log line or a stored row: hooks carry secrets in their paths.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from outlast.errors import UsageError

LIMIT_S = 10.0  # connecting, sending and the answer's head together
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address in other clothes
# Beside what `ipaddress` says: which of the special-purpose networks it knows changes with the Python version, and of clouds it knows nothing.
SPECIAL = tuple(map(ipaddress.ip_network, (
    "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is a cloud's metadata service
    "192.88.99.0/24", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16",
    "168.63.129.16/32",  # another cloud's, on an address that looks public
)))  # fmt: skip


class Undelivered(Exception):
    """It did not arrive, or the receiver did not say 2xx. The text names neither path nor key."""


@dataclass(frozen=True)
class Hook:
    """A webhook's URL, taken apart. `shown` names it without its path and query, which may be secret."""

    scheme: str
    host: str
    port: int
    path: str
    shown: str


def parse(url: str) -> Hook:
    """Raises UsageError; does no I/O."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError("notify: a webhook's URL cannot be read", hint="https://HOST/PATH") from None
    host = parts.hostname or ""
    shown = f"{parts.scheme}://{host}{f':{port}' if port else ''}"
    if parts.scheme not in ("https", "http") or not host:
        raise UsageError(f"notify: {shown} is no webhook", hint="https://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"notify: the webhook {shown} holds a user name or password", hint="notices are signed: OUTLAST_WEBHOOK_SECRET")
    if not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise UsageError(f"notify: the webhook {shown} holds characters that no URL may hold", hint="percent-encode them")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Hook(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path, shown)


# ---- signing -------------------------------------------------------------------------------------------------------------


def keys(text: str) -> list[bytes]:
    """OUTLAST_WEBHOOK_SECRET: `whsec_` and base64, several of them with blanks between. Raises Undelivered, which names no key."""
    found = []
    for n, word in enumerate(text.split(), 1):
        try:
            key = base64.b64decode(word.removeprefix("whsec_") + "==", validate=False)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) < 16:
            raise Undelivered(f"key {n} of OUTLAST_WEBHOOK_SECRET is not whsec_ and at least 16 bytes in base64")
        found.append(key)
    if not found:
        raise Undelivered("OUTLAST_WEBHOOK_SECRET is not set, and nothing is sent unsigned")
    return found


def signed(notice_id: str, body: bytes, with_keys: Sequence[bytes], at: int) -> dict[str, str]:
    """The three headers of Standard Webhooks (standardwebhooks.com): HMAC-SHA256 over id, timestamp and the body as sent."""
    message = f"{notice_id}.{at}.".encode() + body
    signatures = [base64.b64encode(hmac.digest(key, message, hashlib.sha256)).decode() for key in with_keys]
    return {"webhook-id": notice_id, "webhook-timestamp": str(at), "webhook-signature": " ".join(f"v1,{s}" for s in signatures)}


# ---- addresses -----------------------------------------------------------------------------------------------------------


def networks(text: str) -> list[Network]:
    """OUTLAST_WEBHOOK_ALLOW: networks that notices may go to although they are not public. Raises Undelivered."""
    try:
        return [ipaddress.ip_network(word) for word in text.split()]
    except ValueError as e:
        raise Undelivered(f"OUTLAST_WEBHOOK_ALLOW holds networks, like 10.1.0.0/16: {e}") from None


def resolved(host: str, port: int) -> list[str]:
    """Every address that the name has."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def judged(hook: Hook, addresses: Sequence[str], allow: Sequence[Network]) -> str:
    """The address to connect to. Raises Undelivered where any address is one that a notice must not reach."""
    if not addresses:
        raise Undelivered(f"{hook.shown} has no address")
    loopback_named = _is_loopback_literal(hook.host)
    plain = hook.scheme == "http"
    for text in addresses:
        address = _inner(ipaddress.ip_address(text))
        if any(address in network for network in allow if network.version == address.version):
            continue
        if loopback_named and address.is_loopback:
            continue
        special = any(address in network for network in SPECIAL if network.version == address.version)
        if special or not address.is_global or address.is_multicast:
            raise Undelivered(f"{hook.shown} is {address}, which is not public; if it is meant, name its network in OUTLAST_WEBHOOK_ALLOW")
        if plain:
            raise Undelivered(f"{hook.shown} is not https")
    return addresses[0]


def _is_loopback_literal(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


# ---- sending -------------------------------------------------------------------------------------------------------------


def send(hook: Hook, notice_id: str, body: bytes, *, secret: str, allow: str = "", resolve: Callable[[str, int], list[str]] = resolved,
         limit_s: float = LIMIT_S) -> None:  # fmt: skip
    """One POST. Blocking, `limit_s` at most. Raises Undelivered; where it does, the receiver may have got it all the same."""
    headers = signed(notice_id, body, keys(secret), int(time.time()))
    may_be = networks(allow)
    end = time.monotonic() + limit_s
    try:
        address = judged(hook, resolve(hook.host, hook.port), may_be)
        connection = _Pinned(hook, address, limit_s)
        watchdog = threading.Timer(max(end - time.monotonic(), 0.01), connection.abort)  # a receiver that drips is cut off, too
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request("POST", hook.path, body, {"content-type": "application/json", "user-agent": "outlast", **headers})
            status = connection.getresponse().status
            if time.monotonic() >= end:  # cut off: the client takes the end of the stream for the end of the answer's head
                raise TimeoutError
        finally:
            watchdog.cancel()
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as e:
        late = time.monotonic() >= end
        what = f"no answer within {limit_s:g} s" if late else _why(e)
        raise Undelivered(f"{hook.shown}: {what}") from None
    if 300 <= status < 400:
        raise Undelivered(f"{hook.shown} answered {status}: redirects are not followed")
    if not 200 <= status < 300:
        raise Undelivered(f"{hook.shown} answered {status}")


def _why(e: Exception) -> str:
    if isinstance(e, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {e.verify_message}"
    return f"{type(e).__name__}{f': {e.strerror}' if isinstance(e, OSError) and e.strerror else ''}"


class _Pinned(http.client.HTTPConnection):
    """A connection to one address, whatever the name says by now; TLS still asks for the name's certificate."""

    def __init__(self, hook: Hook, address: str, timeout_s: float) -> None:
        super().__init__(hook.host, hook.port, timeout=timeout_s)
        self.hook, self.address = hook, address
        self.raw: socket.socket | None = None

    def connect(self) -> None:
        sock = self.raw = socket.create_connection((self.address, self.hook.port), self.timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.hook.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self.hook.host)
        self.sock: Any = sock

    def abort(self) -> None:
        """From the watchdog's thread: whoever reads or writes is let go."""
        for sock in (self.sock, self.raw):
            try:
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                pass

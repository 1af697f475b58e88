"""Where a webhook may go: public https, or this machine by its literal name. The resolver is a stub that may lie and change its mind."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.notices.receiver import NEW, OLD, receiving

from outlast.runtime import webhook
from outlast.runtime.webhook import Undelivered, judged, keys, parse, send, signed

PUBLIC = "93.184.215.14"


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.7", "172.16.3.4", "192.168.1.1", "127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "169.254.170.2", "100.64.0.1",
        "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
        "::ffff:10.0.0.7", "::ffff:169.254.169.254", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "2002:a9fe:a9fe::1",
        "2002:7f00:1::", "2001:db8::1", "168.63.129.16", "192.88.99.1", "2001::1", "64:ff9b:1::1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [[], [PUBLIC]], ids=["alone", "beside a public one"])
def test_addresses_that_a_name_must_not_lead_to(address: str, beside: list[str]) -> None:
    with pytest.raises(Undelivered, match="not public"):
        judged(parse("https://hooks.example.com/x"), [*beside, address], [])


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses_are_taken_over_https_and_not_over_http(address: str) -> None:
    assert judged(parse("https://hooks.example.com/x"), [address], []) == address
    with pytest.raises(Undelivered, match="not https"):
        judged(parse("http://hooks.example.com/x"), [address], [])


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8/x", "http://localhost/x", "https://localhost/x", "http://[::1]/x", "http://127.0.0.9/x"]
)
def test_this_machine_by_its_literal_name(url: str) -> None:
    assert judged(parse(url), ["127.0.0.1"], []) == "127.0.0.1"


def test_a_name_that_happens_to_be_this_machine_is_not_its_literal_name() -> None:
    for url in ("http://hooks.example.com/x", "http://localhost.example.com/x", "https://127.0.0.1.nip.example/x"):
        with pytest.raises(Undelivered, match="not public"):
            judged(parse(url), ["127.0.0.1"], [])


def test_localhost_that_is_somewhere_else_is_refused() -> None:
    with pytest.raises(Undelivered, match="not public"):
        judged(parse("http://localhost/x"), ["10.0.0.7"], [])


def test_a_network_that_is_allowed_by_name() -> None:
    allow = webhook.networks("10.1.0.0/16 fd00:1::/32")
    assert judged(parse("http://hooks.internal/x"), ["10.1.2.3"], allow) == "10.1.2.3"
    assert judged(parse("https://hooks.internal/x"), ["fd00:1::7"], allow) == "fd00:1::7"
    for other in ("10.2.0.1", "169.254.169.254"):
        with pytest.raises(Undelivered, match="not public"):
            judged(parse("http://hooks.internal/x"), [other], allow)
    with pytest.raises(Undelivered, match="OUTLAST_WEBHOOK_ALLOW"):
        webhook.networks("everything")


@pytest.mark.parametrize(
    "disguise",
    ["http://2130706433/x", "http://0x7f.1/x", "http://0177.0.0.1/x", "http://127.1/x", "http://0/x", "http://[::ffff:127.0.0.1]/x"],
)
def test_an_address_in_disguise_is_what_the_resolver_says_it_is(disguise: str) -> None:
    """The system's own resolver reads these as this machine; they are not its literal name, or they are plain loopback: never anything else."""
    hook = parse(disguise)
    try:
        addresses = webhook.resolved(hook.host, hook.port)
    except OSError:
        return
    try:
        taken = judged(hook, addresses, [])
    except Undelivered:
        return
    assert webhook._inner(webhook.ipaddress.ip_address(taken)).is_loopback and webhook._is_loopback_literal(hook.host)


def rebinding(*answers: str) -> Callable[[str, int], list[str]]:
    """A name server that gives another answer each time it is asked."""
    left = list(answers)
    return lambda host, port: [left.pop(0)]


def test_the_connection_goes_to_the_address_that_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is asked once; what it would say the second time is nobody's business."""
    went: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float | None = None, *more: object) -> socket.socket:
        went.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: pytest.fail("the name was asked again"))
    with pytest.raises(Undelivered, match="ConnectionRefusedError"):
        send(parse("https://hooks.example.com/x"), "ntc_1", b"{}", secret=NEW, resolve=rebinding(PUBLIC, "169.254.169.254"))
    assert went == [(PUBLIC, 443)]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirects(status: int) -> None:
    with receiving() as other, receiving([status], location=other.url) as hook:
        with pytest.raises(Undelivered, match="redirects are not followed"):
            send(parse(hook.url), "ntc_1", b"{}", secret=NEW)
        assert len(hook.requests) == 1 and other.requests == []


def test_no_proxy_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy, receiving() as hook:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        send(parse(hook.url), "ntc_1", b"{}", secret=NEW)
        assert len(hook.requests) == 1 and proxy.requests == []


def test_a_receiver_that_says_nothing_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Undelivered, match=r"no answer within 0\.2 s"):
        send(parse(f"http://127.0.0.1:{silent.getsockname()[1]}/x"), "ntc_1", b"{}", secret=NEW, limit_s=0.2)


def test_a_receiver_that_drips_is_cut_off() -> None:
    """Each byte comes in time for a timeout between bytes; the limit is one over all."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not over.wait(0.02):
                    try:
                        connection.sendall(b"x-a: b\r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(Undelivered, match=r"no answer within 0\.3 s"):
            send(parse(f"http://127.0.0.1:{server.getsockname()[1]}/x"), "ntc_1", b"{}", secret=NEW, limit_s=0.3)
        over.set()
        thread.join(5)


def test_a_certificate_of_somebody_else_is_refused(tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "1", "-subj", "/CN=localhost"],
        cwd=tmp_path, check=True, capture_output=True, timeout=60)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as plain, context.wrap_socket(plain, server_side=True) as server:

        def accept() -> None:
            try:
                server.accept()
            except OSError:
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with pytest.raises(Undelivered, match="its certificate was refused"):
            send(parse(f"https://localhost:{plain.getsockname()[1] if plain.fileno() != -1 else server.getsockname()[1]}/x"), "ntc_1", b"{}",
                 secret=NEW, resolve=lambda host, port: ["127.0.0.1"])  # fmt: skip
        thread.join(5)


# ---- signatures ------------------------------------------------------------------------------------------------------------


def test_a_signature_by_the_book() -> None:
    """The example of the specification: id, timestamp and body with points between, under the decoded key."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = signed("msg_p5jXN8AQM9LWM0D4loKWxJek", body, keys(secret), 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    by_hand = hmac.new(base64.b64decode(secret[6:]), b"msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330." + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(by_hand).decode()}"


@pytest.mark.parametrize("text", ["", "   ", "whsec_", "whsec_c2hvcnQ=", f"{OLD} whsec_!"])
def test_keys_that_are_none_send_nothing_and_are_not_named(text: str) -> None:
    with receiving() as hook:
        with pytest.raises(Undelivered, match="OUTLAST_WEBHOOK_SECRET") as e:
            send(parse(hook.url), "ntc_1", b"{}", secret=text)
        assert hook.requests == []
        assert "c2hvcnQ" not in str(e.value) and OLD[6:] not in str(e.value)


def test_no_error_names_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving([500]) as hook:
        with pytest.raises(Undelivered) as e:
            send(parse(hook.url), "ntc_1", b"{}", secret=NEW)
        assert "secret-path" not in str(e.value) and "answered 500" in str(e.value)
    with pytest.raises(Undelivered) as e:
        send(parse(hook.url), "ntc_1", b"{}", secret=NEW)  # nobody listens any more
    assert "secret-path" not in str(e.value)

"""`outlast web`: where it listens, whom it lets in, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from outlast.cli import web
from outlast.errors import UsageError


def outlast(folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")} | {"OUTLAST_BY": "priya"} | env
    return subprocess.Popen(
        [sys.executable, "-m", "outlast", "web", *args], cwd=folder, env=kept, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("args, env, why", [
    (["--host", "0.0.0.0"], {}, "OUTLAST_WEB_TOKEN"),
    (["--host", "::"], {}, "OUTLAST_WEB_TOKEN"),
    (["--host", "192.0.2.1"], {}, "OUTLAST_WEB_TOKEN"),
    (["--host", "example.org"], {}, "OUTLAST_WEB_TOKEN"),
    ([], {"OUTLAST_WEB_HOST": "0.0.0.0"}, "OUTLAST_WEB_TOKEN"),
    (["--host", "0.0.0.0"], {"OUTLAST_WEB_TOKEN": "short"}, "at least 32"),
    (["--host", "0.0.0.0"], {"OUTLAST_WEB_TOKEN": "x" * 43}, "OUTLAST_WEB_URL"),
    (["--port", "70000"], {}, "--port"),
    ([], {"OUTLAST_WEB_URL": "ftp://x"}, "OUTLAST_WEB_URL"),
])  # fmt: skip
def test_refused_with_exit_code_2(tmp_path: Path, args: list[str], env: dict[str, str], why: str) -> None:
    process = outlast(tmp_path, "--port", "0", *args, **env)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and why in err and "x" * 43 not in err
    assert not list(tmp_path.iterdir())


def link(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Where it is served, and the code to log in with, as soon as it has said so."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/login\?code=(\S+)", line):
            return found[1], found[2]
    raise AssertionError(f"it said no link and ended with {process.wait(30)}")


def test_served_on_loopback_with_a_link_and_ended_by_a_signal(tmp_path: Path) -> None:
    process = outlast(tmp_path, "--port", "0", "--store", "a.db")
    try:
        base, code = link(process)
        assert httpx.get(base + "/api/v1/health").json()["status"] == "ok"
        assert httpx.get(base + "/inbox").status_code == 401
        with httpx.Client(base_url=base, headers={"Origin": base}) as client:
            assert client.post("/login", data={"code": code}).status_code == 303
            assert client.get("/inbox").status_code == 200
            with client.stream("GET", "/live?topic=inbox") as live:  # an open page does not keep the server
                assert next(live.iter_lines()).startswith("retry")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
    finally:
        process.kill()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_whoever_was_told_the_link_is_not_refused() -> None:
    sock = web.listening("127.0.0.1", 0)
    with contextlib.closing(sock), socket.create_connection(sock.getsockname(), timeout=30):
        pass  # it waits in the queue, however long the server takes to begin


def test_ended_in_the_moment_in_which_the_link_is_said(tmp_path: Path) -> None:
    process = outlast(tmp_path, "--port", "0", "--store", "a.db")
    try:
        link(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_the_names_a_server_answers_to() -> None:
    assert web.names("127.0.0.1", 8142, None) == {"127.0.0.1:8142", "localhost:8142", "[::1]:8142"}
    assert web.names("192.0.2.1", 80, None) == {"192.0.2.1"}
    assert web.names("0.0.0.0", 8142, "https://outlast.example.org") == {
        "127.0.0.1:8142",
        "localhost:8142",
        "[::1]:8142",
        "outlast.example.org",
    }
    assert web.local("127.8.8.8") and web.local("::1") and not web.local("10.0.0.1") and not web.local("localhost.evil.org")


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    sock = web.listening("127.0.0.1", 0)
    with pytest.raises(UsageError, match="cannot be served"):
        web.listening("127.0.0.1", sock.getsockname()[1])
    sock.close()

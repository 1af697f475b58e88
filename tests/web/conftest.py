"""A served application for each test, and one Chromium for all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from support.postgres import Server, postgres
from web.kite import TOKEN, Kite, Running, new_kite, serving

expect.set_options(timeout=20_000)  # a machine that does much else is slow, not wrong


on_both_stores = pytest.mark.parametrize("kite", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def kite(request: pytest.FixtureRequest, tmp_path: Path) -> Kite:
    """On a file in the test's folder, or with `on_both_stores` on Postgres too."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return new_kite(tmp_path)
    return on_postgres(tmp_path, request.getfixturevalue("postgres"))


def on_postgres(folder: Path, server: Server) -> Kite:
    made = new_kite(folder, store=server.url(schema=server.fresh_schema()))
    made.app._store.migrate()  # type: ignore[attr-defined]  # of Postgres: its schema is made on purpose
    return made


@pytest.fixture
def running(kite: Kite) -> Iterator[Running]:
    with serving(kite) as server:
        yield server


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    """Logged in by the bearer token, as a program is."""
    with httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        yield client


def find_chromium() -> str:
    """The system's, or the one that CHROMIUM names."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "these tests need Chromium: apt-get install chromium"
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for all tests of a module; not of a session: while it is there this thread has a running event loop, and `..._sync` refuses to work."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A browser of its own, logged in. What no page may ever do is collected in `wrong`, and fails the test at its end."""

    running: Running
    context: BrowserContext
    page: Page
    wrong: list[str] = field(default_factory=list)

    def go(self, path: str) -> Page:
        self.page.goto(self.running.url + path)
        return self.page

    def watch(self, page: Page) -> Page:
        def asked(request: Any) -> None:
            if not request.url.startswith((self.running.url + "/", "blob:")):
                self.wrong.append(f"asked for {request.url}")

        def said(message: Any) -> None:
            if message.type == "error" and "Failed to load resource" not in message.text:
                self.wrong.append(message.text)

        page.on("request", asked)
        page.on("console", said)
        page.on("pageerror", lambda e: self.wrong.append(str(e)))
        page.on("dialog", lambda d: (self.wrong.append(f"dialog {d.message}"), d.dismiss()))
        page.set_default_timeout(20_000)
        return page

    def new_page(self) -> Page:
        return self.watch(self.context.new_page())


@contextlib.contextmanager
def visiting(browser: Browser, running: Running, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(
        **{"viewport": {"width": 1280, "height": 900}, "timezone_id": "Europe/Berlin", "locale": "en-GB", **options}
    )
    try:
        visit = Visit(running, context, context.new_page())
        visit.watch(visit.page)
        visit.page.goto(running.link())
        if options.get("java_script_enabled", True):
            visit.page.wait_for_url("**/inbox")
        else:
            visit.page.get_by_role("button", name="Log in").click()
        yield visit
        assert not visit.wrong, visit.wrong
    finally:
        context.close()


@pytest.fixture
def visit(chromium: Browser, running: Running) -> Iterator[Visit]:
    with visiting(chromium, running) as one:
        yield one


__all__ = ["postgres"]

"""A browser for the session, a served page for each test, and what must hold of every page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.rag_service.conftest import MakeSettings
from tests.rag_service.pages.browser import Browser
from tests.rag_service.pages.site import Site, serving

OpenPage = Callable[..., Site]


@contextmanager
def chromium_or_skip() -> Iterator[Browser]:
    """A Chromium of one's own; without one on this machine the test is skipped with the reason."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium, chromium-driver)")
    browser = Browser(binary, driver)
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with chromium_or_skip() as browser:
        yield browser


@pytest.fixture
def allowed_complaints() -> list[str]:
    """Parts of console messages that a test expects; a refused request is one to Chromium."""
    return []


@pytest.fixture
def browser(chromium: Browser, allowed_complaints: list[str]) -> Iterator[Browser]:
    """The browser on no page. Afterwards: nothing on the console, no call to anyone but the service."""
    chromium.fresh()
    yield chromium
    chromium.leave()
    complaints = [
        line for line in chromium.complaints if not any(allowed in line for allowed in allowed_complaints)
    ]
    assert complaints == []
    assert chromium.strangers == set()


@pytest.fixture
def open_page(browser: Browser, make_settings: MakeSettings) -> Iterator[OpenPage]:
    """Serve and open a page: ``open_page(path, recorder=None, **settings)``."""
    with ExitStack() as stack:

        def opened(path: str = "/", **changes: object) -> Site:
            recorder = changes.pop("recorder", None)
            site = stack.enter_context(serving(make_settings(**changes), recorder))  # type: ignore[arg-type]
            browser.driver.get(site.address + path)
            return site

        yield opened
        browser.leave()

"""The default service in a real browser: real Ray, the packaged pair with its draft, one who uploads and asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from deployments.app import RunningService, run
from rag_service.config import Settings, cache_folder
from tests.rag_service.pages.browser import Browser
from tests.rag_service.pages.conftest import chromium_or_skip

TEXT = (
    "The Harbour Museum of Wexley opens at ten on weekdays and at noon on Sundays. "
    "Tickets cost six euros; children under twelve enter free. The lighthouse is closed in winter."
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(
        not all(
            (cache_folder() / "models" / name).exists()
            for name in ("smollm2-135m-instruct", "all-minilm-l6-v2")
        ),
        reason="the packaged models are not in the cache (rag-service models fetch)",
    ),
]


@pytest.fixture(scope="module")
def service(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("data")
    settings = Settings.load(None, {"service.port": 0, "data_folder": str(folder)})
    with run(settings, ready_seconds=400) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium_or_skip() as browser:
        yield browser
        browser.leave()
        assert browser.complaints == []
        assert browser.strangers == set()


def test_a_person_uploads_asks_opens_the_source_and_reads_the_dashboard(
    service: RunningService, browser: Browser, tmp_path: Path
) -> None:
    file, other = tmp_path / "museum.txt", tmp_path / "gallery.md"
    file.write_text(TEXT)
    other.write_text("# Gallery\n\nThe gallery of Wexley shows paintings of ships.")
    browser.fresh()
    browser.driver.get(service.url)
    browser.until(lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, "#domain option")) > 1)

    browser.one("#open-documents").click()
    browser.one("#upload-domain").send_keys("general")
    browser.driver.find_element(By.ID, "files").send_keys(f"{file}\n{other}")
    browser.until(lambda: "Added, 2 passages" in browser.text("#uploads"), "the job's end")
    browser.until(lambda: "museum" in browser.text("#indexed"), "the list")
    browser.picture("service-documents")
    browser.one("#close-documents").click()

    browser.one("#domain").send_keys("general")
    browser.one("#question").send_keys("When does the Harbour Museum open on Sundays?" + Keys.ENTER)
    browser.until(lambda: bool(browser.all(".strip")), "the figures")
    assert "noon" in browser.text(".prose")
    assert "α" in browser.text(".strip")
    browser.picture("service-answer")
    browser.one(".sources button").click()
    browser.until(lambda: bool(browser.all("#source-text mark")), "the passage")
    assert "Harbour Museum" in browser.text("#source-text")
    browser.picture("service-source")

    browser.driver.get(f"{service.url}/dashboard")
    browser.until(lambda: "General" in browser.text("#domains"), "the dashboard")
    browser.picture("service-dashboard")
    browser.look(390, 844)
    browser.driver.refresh()
    browser.until(lambda: "General" in browser.text("#domains"), "the dashboard on a phone")
    assert not browser.is_too_wide()
    browser.picture("service-dashboard-phone")

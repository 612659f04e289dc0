"""The dashboard in a real browser, over the real Recorder and its request log."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from selenium.webdriver.common.by import By

from rag_service.config import Settings
from rag_service.recorder import Recorder
from tests.rag_service.conftest import MakeSettings
from tests.rag_service.pages.browser import Browser
from tests.rag_service.pages.conftest import OpenPage
from tests.rag_service.pages.site import Site, serving
from tests.rag_service.records import simulated

pytestmark = pytest.mark.browser
BASELINE = '{"domains": {"finance": {"acceptance_rate": 0.72}}}'


@pytest.fixture
def recorder(make_settings: MakeSettings) -> Iterator[Recorder]:
    """A Recorder of nothing yet."""
    recorder = Recorder(make_settings())
    yield recorder
    recorder.close()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with fifty recorded requests, whose finance domain has a baseline. One for all: its origin stays
    the same, so that Chromium compiles the charts' script once."""
    folder = tmp_path_factory.mktemp("busy")
    (folder / "baseline.json").write_text(BASELINE)
    values = {"data_folder": str(folder), "telemetry.baseline_file": str(folder / "baseline.json")}
    settings = Settings.load(None, values)
    recorder = Recorder(settings)
    record_fifty(recorder)
    with serving(settings, recorder) as site:
        yield site
    recorder.close()


def record_fifty(recorder: Recorder) -> None:
    """30 requests in finance and 20 in legal over the last three hours, by two drafts."""
    rng = np.random.default_rng(7)
    start = time.time() - 3 * 3600
    for domain, count, rate in (("finance", 30, 0.75), ("legal", 20, 0.6)):
        records = simulated(rng, count, rate, start=start, span=3 * 3600 - 30, domain=domain)
        for index, record in enumerate(records):
            draft = "draft-a" if index < count / 2 else "draft-b"
            recorder.record(replace(record, request_id=f"{domain}-{index}", draft=draft))


def drawn(browser: Browser) -> None:
    """Wait until the report is there and every chart is drawn."""
    browser.until(lambda: browser.one("#report").get_attribute("aria-busy") == "false", "the report")
    browser.until(
        lambda: bool(
            browser.js(
                "const c = [...document.querySelectorAll('.chart')];"
                "return c.length && c.every((x) => x.querySelector('svg'))"
            )
        ),
        "the charts",
    )


def cards(browser: Browser) -> dict[str, str]:
    """Title → what it stands on, of every chart."""
    return {
        card.find_element(By.TAG_NAME, "h3").text: card.find_element(By.CLASS_NAME, "stands").text
        for card in browser.all(".card")
    }


def test_shows_fifty_requests_and_what_each_chart_stands_on(browser: Browser, busy: Site) -> None:
    browser.driver.get(f"{busy.address}/dashboard")
    drawn(browser)
    assert browser.text("#stand").startswith("50 requests from ")
    rows = {row.find_element(By.TAG_NAME, "th").text: row.text for row in browser.all("#domains tbody tr")}
    assert list(rows) == ["All domains", "Finance", "Legal"]
    assert rows["Finance"].split()[1] == "30"
    assert " 0.72 " in rows["Finance"]
    shown = cards(browser)
    assert shown.pop("Finance") == "Stands on 30 requests"
    assert shown.pop("Legal") == "Stands on 20 requests"
    assert list(shown) == [
        "Mean acceptance length", "Accepted tokens a round", "Acceptance by position", "Rounds by cause",
        "Drafts compared", "Kinds of drafter", "End to end over time", "By stage", "Tokens per second",
        "Request volume",
    ]  # fmt: skip
    assert all(text.startswith("Stands on 50 requests") for text in shown.values())
    assert shown["Accepted tokens a round"] == "Stands on 50 requests, 500 rounds"
    drafts = browser.one("[aria-label^='Drafts compared']").get_attribute("aria-label") or ""
    assert "draft-a" in drafts
    assert "draft-b" in drafts
    browser.picture("dashboard")
    browser.look(390, 844)
    assert not browser.is_too_wide()
    browser.picture("dashboard-phone")


def test_domain_and_window_are_picked_and_kept_in_the_address(browser: Browser, busy: Site) -> None:
    browser.driver.get(f"{busy.address}/dashboard?window=24h&domain=legal")
    drawn(browser)
    assert browser.text("#stand").startswith("20 requests from ")
    assert all(text.startswith("Stands on 20 requests") for text in cards(browser).values())
    browser.one("[aria-label='Show Finance']").click()
    browser.until(lambda: browser.text("#stand").startswith("30 requests"), "finance")
    assert browser.driver.current_url.endswith("?window=24h&domain=finance")
    browser.driver.find_element(By.CSS_SELECTOR, "input[value='1h']").click()
    browser.until(lambda: int(browser.text("#stand").split()[0]) < 15, "the last hour")
    drawn(browser)
    browser.one("[aria-label='Figures of Accepted tokens a round']").click()
    assert browser.text(".card .table:not([hidden]) thead") == "Accepted Rounds Share"


def test_figures_and_pictures_can_be_taken_away(browser: Browser, busy: Site, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    where = {"behavior": "allow", "downloadPath": str(folder)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    browser.driver.get(f"{busy.address}/dashboard")
    drawn(browser)
    for button in ("#download-csv", "#download-parquet", "[aria-label='PNG of Rounds by cause']"):
        browser.one(button).click()
    names = {"acceptance-all-7d.csv", "acceptance-all-7d.parquet", "rounds-by-cause.png"}
    browser.until(lambda: {path.name for path in folder.iterdir()} == names, "the downloads")
    with (folder / "acceptance-all-7d.csv").open(newline="") as file:
        rows = {(row["domain"], row["draft"]): row["num_requests"] for row in csv.DictReader(file)}
    assert rows["finance", "all"] == "30"
    assert rows["legal", "draft-a"] == "10"
    assert pq.read_table(folder / "acceptance-all-7d.parquet").num_rows == len(rows)
    assert (folder / "rounds-by-cause.png").read_bytes().startswith(b"\x89PNG")


def test_a_drift_is_named_with_its_figures(
    browser: Browser, open_page: OpenPage, make_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "baseline.json").write_text(BASELINE)
    recorder = Recorder(make_settings(telemetry__baseline_file=str(tmp_path / "baseline.json")))
    for record in simulated(np.random.default_rng(7), 120, 0.45, start=time.time() - 3000, span=2900):
        recorder.record(record)
    open_page("/dashboard", recorder=recorder)
    told = browser.text("#drifts .notice")
    assert told.startswith("α of finance fell to 0.")
    assert "from the baseline (0.72), since before this window, on 120 requests." in told
    drawn(browser)
    recorder.close()


def test_an_empty_log_says_so(browser: Browser, open_page: OpenPage, recorder: Recorder) -> None:
    open_page("/dashboard", recorder=recorder)
    assert browser.text("#empty h2") == "No requests in this window."
    assert not browser.all(".card")
    assert browser.barriers() == []
    browser.picture("dashboard-empty")


def test_a_report_that_cannot_be_read_is_told(
    browser: Browser,
    open_page: OpenPage,
    recorder: Recorder,
    allowed_complaints: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: object) -> None:
        raise TimeoutError

    allowed_complaints.append("408")
    monkeypatch.setattr(recorder, "acceptance", broken)
    open_page("/dashboard", recorder=recorder)
    assert browser.text("#trouble") == "The request was not done within its deadline."


@pytest.mark.parametrize("dark", [False, True])
def test_is_accessible(browser: Browser, busy: Site, dark: bool) -> None:
    browser.look(1280, 800, dark)
    browser.driver.get(f"{busy.address}/dashboard")
    drawn(browser)
    browser.one("[aria-label='Figures of By stage']").click()
    if dark:
        browser.picture("dashboard-dark")
    assert browser.barriers() == []

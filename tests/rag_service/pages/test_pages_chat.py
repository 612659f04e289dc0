"""The chat page in a real browser: what a reader does, sees and can rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from generation.types import QueueFull
from rag_service.auth import KeyStore
from retrieval.types import Document
from tests.rag_service.conftest import MakeSettings
from tests.rag_service.pages.browser import Browser
from tests.rag_service.pages.conftest import OpenPage
from tests.rag_service.pages.site import ANSWER, PASSAGE

pytestmark = pytest.mark.browser
QUESTION = "When does the library open?"


def ask(browser: Browser, question: str = QUESTION) -> None:
    """Type a question and press Enter, as soon as the page knows what it may ask."""
    browser.until(lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, "#domain option")) > 1, "domains")
    browser.one("#question").send_keys(question + Keys.ENTER)


def answered(browser: Browser, number: int = 1) -> None:
    browser.until(lambda: len(browser.all(".strip")) == number, "the strip of figures")


def test_streams_a_formatted_answer_with_numbered_sources_and_figures(
    browser: Browser, open_page: OpenPage
) -> None:
    site = open_page()
    site.fakes.generator.delay_seconds = 0.06
    ask(browser)
    browser.until(lambda: "The library" in browser.text(".prose"), "the first words")
    assert "books" not in browser.text(".prose")
    assert browser.all("#stop")
    assert browser.text(".sources .title") == "Rules of the City Library"
    browser.picture("chat-streaming")
    answered(browser)
    assert browser.text(".prose strong") == "nine on weekdays"
    assert browser.text(".prose li").startswith("Members may borrow six books.")
    assert [cite.text for cite in browser.all(".prose .cite")] == ["1", "1"]
    figures = dict(zip(_texts(browser, ".strip dt"), _texts(browser, ".strip dd"), strict=True))
    assert figures["Acceptance rate α"] == "0.80"
    assert figures["Accepted / drafted"] == "8 / 12"
    assert figures["Tokens a round"] == "3.00"
    assert figures["First token"].endswith("s")
    assert not browser.all("#stop")
    assert "Lease" in browser.text(".sources .uncited")


def test_shift_enter_makes_a_line_and_enter_asks(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    ask(browser, f"When{Keys.SHIFT}{Keys.ENTER}{Keys.NULL}does it open?")
    answered(browser)
    assert browser.text(".asked") == "When\ndoes it open?"
    assert site.fakes.retriever.searches[0].query == "When\ndoes it open?"


def test_a_citation_opens_the_document_at_the_passage_used(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    ask(browser)
    answered(browser)
    cite = browser.one(".prose .cite")
    assert cite.accessible_name == "1, source: Rules of the City Library"
    cite.click()
    browser.until(lambda: bool(browser.all("#source-text mark")), "the passage")
    assert "".join(_texts(browser, "#source-text mark")) == PASSAGE
    assert browser.text("#source-title") == "Rules of the City Library"
    assert browser.js(
        "const [box, mark] = ['#source-text', '#source-text mark'].map((s) => document.querySelector(s)"
        ".getBoundingClientRect()); return mark.top >= box.top && mark.bottom <= box.bottom"
    )
    assert browser.js("return document.getElementById('source-text').scrollTop") > 0
    browser.picture("chat-source")
    browser.js("document.activeElement.blur()")
    browser.one("body").send_keys(Keys.ESCAPE)
    assert not browser.all("#source")
    assert browser.js("return document.activeElement.className") == "cite"


def test_escape_stops_the_answer_and_frees_the_target(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    site.fakes.generator.delay_seconds = 0.2
    ask(browser)
    browser.until(lambda: "The l" in browser.text(".prose"), "the first words")
    browser.one("#question").send_keys(Keys.ESCAPE)
    assert browser.text(".note") == "Stopped."
    browser.until(lambda: site.fakes.generator.num_closed_early == 1, "the target to be freed")
    assert "books" not in browser.text(".prose")
    # The service's figures never came; the page shows what it saw itself, and without scrolling.
    figures = browser.text(".strip")
    assert "Tokens until stopped" in figures
    assert "Acceptance rate" not in figures
    browser.picture("chat-stopped")
    site.fakes.generator.delay_seconds = 0.0
    ask(browser, "And on Sundays?")
    answered(browser, 2)


def test_the_figures_of_a_long_answer_are_in_sight_when_it_ends(
    browser: Browser, open_page: OpenPage
) -> None:
    site = open_page()
    site.fakes.generator.text = "The library opens at nine on weekdays.\n\n" * 40
    ask(browser)
    answered(browser)
    below = (
        "const s = document.querySelector('#scroll'); return s.scrollHeight - s.scrollTop - s.clientHeight"
    )
    assert browser.js(below) < 2


def test_a_second_turn_carries_the_first_without_its_markers(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    ask(browser)
    answered(browser)
    ask(browser, "And how many books?")
    answered(browser, 2)
    prompt = "".join(chr(i - 10) for i in site.fakes.generator.requests[1].prompt_ids if i >= 10)
    assert f"user\n{QUESTION}" in prompt
    assert "assistant\nThe library opens at **nine on weekdays**.\n\n- Members" in prompt
    assert "weekdays**. [1]" not in prompt
    browser.one("#new-conversation").click()
    assert browser.one("#welcome")
    ask(browser, "Afresh?")
    answered(browser)
    assert len(site.fakes.generator.requests[2].prompt_ids) < len(prompt)


def test_the_picked_domain_is_the_one_searched(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    ask(browser)
    answered(browser)
    assert site.fakes.retriever.searches[-1].domain is None
    assert "most of what was found is general" in browser.text(".searched")
    browser.one("#domain").send_keys("legal")
    ask(browser, "What deposit does the tenant pay?")
    answered(browser, 2)
    assert site.fakes.retriever.searches[-1].domain == "legal"


def test_accepted_tokens_are_tinted_on_demand(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    ask(browser)
    answered(browser)
    assert not browser.all(".prose mark")
    browser.one(".tint").click()
    tinted = browser.js(
        "return [...document.querySelectorAll('.prose mark')].map((m) => m.textContent).join('')"
    )
    accepted = [character if (index // 4 + 1) % 3 else "" for index, character in enumerate(ANSWER)]
    for index in range(len(ANSWER)):
        if ANSWER[index] in "*\n" or "- " in ANSWER[index : index + 2] or ANSWER[index - 1] == "-":
            accepted[index] = ""  # signs of the Markdown, which the page shows as form
    assert tinted == "".join(accepted)
    browser.picture("chat-tinted")
    browser.one(".tint").click()
    assert not browser.all(".prose mark")


def test_uploads_with_progress_and_asks_about_it(
    browser: Browser, open_page: OpenPage, tmp_path: Path
) -> None:
    site = open_page()
    file = tmp_path / "<img src=x onerror=window.bad=1>.txt"
    file.write_text("The museum opens at ten.")
    browser.until(lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, "#domain option")) > 1)
    browser.one("#open-documents").click()
    browser.one("#upload-domain").send_keys("general")
    browser.driver.find_element(By.ID, "files").send_keys(str(file))
    browser.until(lambda: "Added, 1 passage" in browser.text("#uploads"), "the job's end")
    assert site.fakes.retriever.files == [(file.name, b"The museum opens at ten.")]
    assert file.name in browser.text("#uploads")
    browser.until(lambda: file.name in browser.text("#indexed"), "the list")
    assert browser.js("return window.bad") is None
    assert browser.barriers() == []
    browser.picture("chat-documents")
    browser.one("#close-documents").click()
    ask(browser, "When does the museum open?")
    answered(browser)
    assert file.name in _texts(browser, ".sources .title")


def test_a_refused_upload_says_why(
    browser: Browser, open_page: OpenPage, tmp_path: Path, allowed_complaints: list[str]
) -> None:
    allowed_complaints.append("413")
    open_page(service__max_upload_bytes=2048)
    file = tmp_path / "long.txt"
    file.write_text("x" * 4096)
    browser.until(lambda: len(browser.driver.find_elements(By.CSS_SELECTOR, "#domain option")) > 1)
    browser.one("#open-documents").click()
    browser.driver.find_element(By.ID, "files").send_keys(str(file))
    browser.until(lambda: bool(browser.all("#uploads .failed")), "the reason")
    assert browser.text("#uploads .failed") == "The request is larger than 2048 bytes."


def test_markup_in_titles_questions_and_answers_shows_as_text(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    evil = "<img src=x onerror=window.bad=1>"
    site.fakes.retriever.by_id["evil"] = Document("evil", "general", evil, f"The vault {evil} opens at noon.")
    site.fakes.generator.text = (
        f"The vault {evil} opens at noon. <script>window.bad=2</script> [here](javascript:window.bad=3) "
        f"![x]({evil})\n\n```html\n{evil}\n```\n"
    )
    ask(browser, f"When does the vault {evil} open?")
    answered(browser)
    assert evil in browser.text(".asked")
    assert evil in browser.text(".prose p")
    assert "<script>window.bad=2</script>" in browser.text(".prose")
    assert evil in browser.text(".prose pre")
    assert evil in browser.text(".sources .title")
    browser.one(".sources button").click()
    browser.until(lambda: bool(browser.all("#source-text mark")), "the passage")
    assert browser.text("#source-title") == evil
    assert evil in browser.text("#source-text mark")
    assert (
        browser.js("return document.querySelectorAll('main img, main script, aside img, main a').length") == 0
    )
    assert browser.js("return window.bad") is None


def test_an_error_is_a_sentence_and_asking_again_works(
    browser: Browser, open_page: OpenPage, allowed_complaints: list[str]
) -> None:
    allowed_complaints.append("429")
    site = open_page()
    site.fakes.generator.error = QueueFull(9)
    ask(browser)
    browser.until(lambda: bool(browser.all(".notice.bad")), "the error")
    assert browser.text(".notice.bad").startswith("9 requests are waiting already; try again later.")
    site.fakes.generator.error = None
    browser.one(".notice.bad button").click()
    answered(browser)
    assert not browser.all(".notice.bad")
    site.fakes.generator.error, site.fakes.generator.error_after = QueueFull(7), 5
    site.fakes.generator.delay_seconds = 0.03
    ask(browser, "And in mid-stream?")
    browser.until(lambda: bool(browser.all(".notice.bad")), "the error")
    assert "7 requests" in browser.text(".notice.bad")


def test_asks_for_a_key_when_the_service_does(
    browser: Browser, open_page: OpenPage, make_settings: MakeSettings, allowed_complaints: list[str]
) -> None:
    allowed_complaints.append("401")
    key, _ = KeyStore(make_settings().keys_file).create(scopes=("chat", "search"))
    site = open_page()
    browser.one("#key-value").send_keys("rag-wrong" + Keys.ENTER)
    browser.until(lambda: "not valid" in browser.text("#key-text"), "the refusal")
    browser.until(lambda: bool(browser.all("#key-value")), "the dialog")
    browser.one("#key-value").send_keys(key + Keys.ENTER)
    ask(browser)
    answered(browser)
    assert len(site.fakes.generator.requests) == 1
    assert browser.js("return JSON.stringify(localStorage)").find(key) == -1


def test_keeps_to_the_screen_and_to_the_reader_s_theme(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    browser.look(390, 844, dark=True)
    ask(browser)
    answered(browser)
    assert browser.js("return document.documentElement.dataset.theme") == "dark"
    assert not browser.is_too_wide()
    browser.picture("chat-phone-dark")
    browser.one(".prose .cite").click()
    browser.until(lambda: bool(browser.all("#source-text mark")), "the passage")
    assert not browser.is_too_wide()
    browser.picture("chat-phone-source-dark")
    browser.one("#close-source").click()
    browser.one("#theme").click()
    assert browser.js("return document.documentElement.dataset.theme") == "light"
    browser.driver.refresh()
    assert browser.js("return document.documentElement.dataset.theme") == "light"


@pytest.mark.parametrize("dark", [False, True])
def test_is_accessible(browser: Browser, open_page: OpenPage, dark: bool) -> None:
    open_page()
    browser.look(1280, 800, dark)
    ask(browser)
    answered(browser)
    browser.one(".tint").click()
    browser.all(".tools .link")[1].click()
    browser.one(".prose .cite").click()
    browser.until(lambda: bool(browser.all("#source-text mark")), "the passage")
    browser.picture("chat-answer-dark" if dark else "chat-answer")
    assert browser.barriers() == []


def test_without_documents_it_offers_to_add_some(browser: Browser, open_page: OpenPage) -> None:
    site = open_page()
    site.fakes.retriever.by_id.clear()
    browser.driver.refresh()
    assert browser.one("#welcome-add").text == "Add documents"
    assert browser.text("#welcome-text") == "Nothing is indexed yet. Add documents, then ask about them."
    browser.picture("chat-welcome")


def _texts(browser: Browser, selector: str) -> list[str]:
    return [found.text for found in browser.all(selector)]

"""The HTML report: complete, self-contained, and deaf to markup in names."""

from __future__ import annotations

import io
import re
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
from rich.console import Console

from rag_service import plots
from rag_service.report_html import html_of
from rag_service.report_rendering import Tabular, rich_of
from tests.rag_service.records import NOON, simulated
from tests.rag_service.test_acceptance_report import report_of

EVIL = "<script>alert('$x$')</script>"


class Outline(HTMLParser):
    """Tags, headings and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


@cache
def page() -> Outline:
    rng = np.random.default_rng(8)
    records = simulated(rng, 150, 0.85, span=20_000) + simulated(rng, 40, 0.7, domain="legal", draft=EVIL)
    records += simulated(rng, 60, 0.5, start=NOON + 30_000, draft=EVIL)
    return Outline(html_of(report_of(records, {"finance": 0.85}, group_by="draft", bucket="3h")))


def test_every_section_is_there_and_says_what_it_stands_on() -> None:
    found = page()
    for title in (
        "Acceptance rate by domain", "Drift in finance", "Acceptance rate over time", "Compared by draft",
        "Accepted tokens a round", "Acceptance by position, given that it was tested",
        "Rounds by how they ended", "Latency",
    ):  # fmt: skip
        assert title in found.text, title
    assert found.tags.count("svg") == 7
    assert any("finance 210, legal 40" in text for text in found.text)
    drift = next(text for text in found.text if "fell from 0.850 (baseline)" in text)
    assert "draft was d1 100%" in drift


def test_page_needs_nothing_else_and_runs_nothing() -> None:
    found = page()
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), value


def test_names_show_as_text() -> None:
    assert any(EVIL in text for text in page().text)


def test_empty_report_says_so() -> None:
    found = Outline(html_of(report_of([])))
    assert "There were no requests in this window." in found.text
    assert "svg" not in found.tags


def test_plots_are_well_formed_and_reproducible() -> None:
    rows = [("a & b", 0.5, (0.4, 0.6)), ("$x", None, None)]
    first = plots.rates_with_intervals(rows, "α")
    assert first == plots.rates_with_intervals(rows, "α")
    text = "".join(ElementTree.fromstring(first).itertext())
    assert "a & b" in text
    assert "$x" in text
    assert not re.search(r"https?://(?!www\.w3\.org|matplotlib\.org|purl\.org|creativecommons\.org)", first)
    ElementTree.fromstring(plots.percentiles_by_row([("a", {"p50": 1, "p95": 2, "p99": 3}), ("b", {})], "s"))
    ElementTree.fromstring(plots.lines_by_position({"a": [0.5, None, 0.2]}, "x", "y"))
    ElementTree.fromstring(plots.shares_by_row({"a": {}, "b": {"rejected": 2}}))


def test_no_figure_is_cut_short_on_a_narrow_terminal() -> None:
    draft = "smollm2-135m-instruct-draft@5964fe95"
    header = [
        "domain",
        "draft",
        "requests",
        "α",
        "95 % interval",
        "accepted / drafted",
        "mean length",
        "tokens/s",
    ]
    row = ["finance", draft, "154", "0.789", "0.716–0.844", "0.566", "1.66", "20.4"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_of(Tabular("Acceptance", header, [row])))
    text = console.export_text()
    assert "…" not in text
    assert all(figure in text for figure in row[2:])
    assert draft[-4:] in text

"""The page's Markdown and its tints, in the browser that runs them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rag_service.pages.browser import Browser
from tests.rag_service.pages.conftest import OpenPage

pytestmark = pytest.mark.browser

CASES = [
    ("plain", "<p>plain</p>"),
    (
        "a **b** *c* __d__ _e_ ~~f~~",
        "<p>a <strong>b</strong> <em>c</em> <strong>d</strong> <em>e</em> <del>f</del></p>",
    ),
    ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
    ("**never closed", "<p>**never closed</p>"),
    ("`a <b> **c**`", "<p><code>a &lt;b&gt; **c**</code></p>"),
    ("<b>no</b> &amp; no", "<p>&lt;b&gt;no&lt;/b&gt; &amp;amp; no</p>"),
    (r"\*not em\*", "<p>*not em*</p>"),
    ("# One\n### Three", "<h3>One</h3><h5>Three</h5>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("Text:\n1. a\n2. b", "<p>Text:</p><ol><li>a</li><li>b</li></ol>"),
    ("> said\n> so", "<blockquote><p>said<br>so</p></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("```py\nx = '<a>'\n```\nafter", '<pre tabindex="0"><code>x = \'&lt;a&gt;\'</code></pre><p>after</p>'),
    ("```\nnever closed [1]", '<pre tabindex="0"><code>never closed [1]</code></pre>'),
    ("See [1], not [7] or argv`[1]`.", "<p>See <b>1</b>, not [7] or argv<code>[1]</code>.</p>"),
    ("**Bold [1]**", "<p><strong>Bold <b>1</b></strong></p>"),
    ("[x](javascript:alert(1)) [y](data:text/html,z)", "<p>[x](javascript:alert(1)) [y](data:text/html,z)</p>"),
]  # fmt: skip

RENDER = """
const { render } = await import("/web/js/markdown.js");
const marker = (number) => { const b = document.createElement("b"); b.textContent = number; return b; };
const cite = (number) => (number < 3 ? marker(number) : null);
const context = { cite, leaf: (text) => [document.createTextNode(text)], signature: () => "" };
const shown = (source) => { const box = document.createElement("div"); render(box, source, context); return box; };
"""


def test_markdown_becomes_nodes_and_never_markup(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    shown = browser.js_later(
        f"{RENDER} return given.map((s) => shown(s).innerHTML)", [case[0] for case in CASES]
    )
    assert list(zip([case[0] for case in CASES], shown, strict=True)) == CASES


def test_links_lead_to_the_web_alone(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    text = "[a](https://example.org/a) and https://example.org/b."
    links = browser.js_later(
        f"{RENDER} return [...shown(given).querySelectorAll('a')].map((a) => [a.href, a.rel, a.textContent])",
        text,
    )
    assert [link[0] for link in links] == ["https://example.org/a", "https://example.org/b"]
    assert all("noopener" in link[1] for link in links)
    assert links[1][2] == "https://example.org/b"


def test_tables_keep_a_marker_in_their_last_cell(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    rows = browser.js_later(
        f"{RENDER} const cells = (row) => [...row.children].map((cell) => cell.innerHTML);"
        "return [...shown(given).querySelectorAll('tr')].map(cells)",
        "| a | b |\n|---|--:|\n| 1 | *2* | [1]\n| x \\| y | z |",
    )
    assert rows == [["a", "b"], ["1", "<em>2</em> <b>1</b>"], ["x | y", "z"]]


def test_a_growing_answer_keeps_the_blocks_it_has(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    kept = browser.js_later(
        f"{RENDER} const box = shown('one\\n\\ntwo'); const first = box.firstChild;"
        "render(box, 'one\\n\\ntwo and **more**', context);"
        "return [box.firstChild === first, box.lastChild.innerHTML]"
    )
    assert kept == [True, "two and <strong>more</strong>"]


def test_long_and_hostile_text_is_rendered_in_time(browser: Browser, open_page: OpenPage) -> None:
    open_page()
    texts = ["*" * 4000, "[" * 4000, "`" * 3999, "> " * 2000, "- " * 2000, "_a" * 2000, "|" * 2000 + "\n|-|"]
    lengths = browser.js_later(f"{RENDER} return given.map((s) => shown(s).textContent.length)", texts)
    assert len(lengths) == len(texts)


def test_tints_follow_the_tokens_through_set_and_removed_markers(
    browser: Browser, open_page: OpenPage
) -> None:
    open_page()

    def origins(content: str, *tokens: tuple[str, bool]) -> Any:
        given = [content, [{"text": text, "accepted": accepted} for text, accepted in tokens]]
        script = (
            "const { origins } = await import('/web/js/tint.js'); return [...origins(...given)].join(' ')"
        )
        return browser.js_later(script, given)

    # A space that a marker and a token both begin with is told by neither: whose it is does not show.
    assert origins("ab [1] cd", ("ab", True), (" c", False), ("d", True)) == "1 1 0 -1 -1 -1 -1 0 1"
    assert origins("ab c.", ("ab", True), (" [9]", False), (" c", True), (".", False)) == "1 1 0 1 0"
    assert origins("né!", ("n", True), ("\ufffd", False), ("\ufffd", False), ("!", True)) == "1 0 1"

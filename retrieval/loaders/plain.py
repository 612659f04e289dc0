"""Text, Markdown and HTML."""

from __future__ import annotations

import re

from selectolax.lexbor import LexborHTMLParser, LexborNode

from retrieval.loaders.encoding import decode
from retrieval.loaders.extracted import Extracted, UnreadableFile, table_text

_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_HEADING = re.compile(r"^#{1,2}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
_DROPPED = ("script", "style", "noscript", "template", "svg", "nav", "iframe", "head")
_BLOCK_TAGS = (
    "address article aside blockquote dd div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr li main ol p pre section table tr ul body"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_NESTING_TAG = re.compile(
    r"<(/?)(?:div|span|section|article|blockquote|ul|ol|table|b|i|em|strong|font|a)\b", re.I
)
_TOO_DEEP = "The page's elements are nested too deeply."
_MAX_OPEN_TAGS = 20_000
"""A parser's work grows with the square of the depth; no page that anybody reads comes near."""


def normalise(text: str) -> str:
    """One kind of line end, no NULs, no mark at the start."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").removeprefix("\ufeff")


def load_text(content: bytes) -> Extracted:
    return Extracted(normalise(decode(content)))


def load_markdown(content: bytes) -> Extracted:
    """Markdown stays as it is (its marks carry structure); YAML front matter is cut off."""
    text = normalise(decode(content))
    title = ""
    if match := _FRONT_MATTER.match(text):
        named = re.search(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*$", match[1], re.MULTILINE)
        title = named[1] if named else ""
        text = text[match.end() :].lstrip("\n")
    if not title and (heading := _HEADING.search(text)):
        title = heading[1]
    return Extracted(text, title)


def load_html(content: bytes) -> Extracted:
    """Visible text with headings as ``#`` lines, lists as ``-`` lines and tables as rows. Raises for pages whose
    elements are nested too deeply to be read."""
    source = decode_html(content)
    _refuse_depth(source)
    tree = LexborHTMLParser(source)
    node = tree.css_first("title")
    title = " ".join(node.text().split()) if node else ""
    if not title and (heading := tree.css_first("h1")):
        title = " ".join(heading.text().split())
    tree.strip_tags(list(_DROPPED))
    parts: list[str] = []
    try:
        if tree.body is not None:
            _render(tree.body, parts)
    except RecursionError:
        raise UnreadableFile(_TOO_DEEP) from None
    text = re.sub(r"[ \t]+\n", "\n", "".join(parts))
    return Extracted(normalise(re.sub(r"\n{3,}", "\n\n", text).strip()), title)


def _refuse_depth(source: str) -> None:
    depth = 0
    for match in _NESTING_TAG.finditer(source):
        depth = max(0, depth - 1) if match[1] else depth + 1
        if depth > _MAX_OPEN_TAGS:
            raise UnreadableFile(_TOO_DEEP)


def decode_html(content: bytes) -> str:
    """As the page itself declares, else as any text."""
    declared = re.search(rb"<meta[^>]+charset=[\"']?([A-Za-z0-9_-]+)", content[:4096], re.IGNORECASE)
    if declared:
        try:
            return content.decode(declared[1].decode("ascii"))
        except (LookupError, UnicodeDecodeError):
            pass
    return decode(content)


def _render(node: LexborNode, parts: list[str]) -> None:
    child = node.child
    while child is not None:
        tag = child.tag or ""
        if tag == "-text":
            text = child.text_content or ""
            parts.append(text if _inside_pre(child) else re.sub(r"\s+", " ", text))
        elif tag == "table":
            parts.append("\n\n" + _table(child) + "\n\n")
        elif tag == "br":
            parts.append("\n")
        elif tag in _BLOCKS:
            heading = "#" * int(tag[1]) + " " if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit() else ""
            parts.append("\n\n" + heading if tag != "li" else "\n- ")
            _render(child, parts)
            parts.append("\n\n" if tag != "li" else "")
        else:
            _render(child, parts)
        child = child.next


def _table(table: LexborNode) -> str:
    return table_text([[cell.text(separator=" ") for cell in row.css("th, td")] for row in table.css("tr")])


def _inside_pre(node: LexborNode) -> bool:
    parent = node.parent
    while parent is not None:
        if parent.tag == "pre":
            return True
        parent = parent.parent
    return False

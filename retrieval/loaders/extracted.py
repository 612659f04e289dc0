"""What a parser makes of one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class UnreadableFile(Exception):
    """A file that gives no document; ``str()`` says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """Text and what the file says about it. ``page_starts[i]``: the character where page i + 1 begins."""

    text: str
    title: str = ""
    page_starts: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    """The document's own id, where the file names one (JSON Lines)."""
    domain: str | None = None


def join_pages(pages: list[str]) -> tuple[str, tuple[int, ...]]:
    """Pages as one text, and where each begins."""
    starts: list[int] = []
    position = 0
    for page in pages:
        starts.append(position)
        position += len(page) + 2
    return "\n\n".join(pages), tuple(starts)


def table_text(rows: list[list[str]]) -> str:
    """A table as lines of cells with `` | `` between; empty rows left out."""
    lines = [" | ".join(" ".join(cell.split()) for cell in row) for row in rows]
    return "\n".join(line for line in lines if line.strip(" |"))

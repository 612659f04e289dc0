"""Where a text's headings and enclosing lines are, found from its form alone.

Markdown (``# ...``), underlined headings (``====``), numbered outlines by indentation: whatever stands above
a chunk names what the chunk is about, and a chunk alone often doesn't.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass

_ATX = re.compile(r"^(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'*+#.:_])\1{2,}[ \t]*$")
_FENCE = re.compile(r"^[ \t]*(`{3}|~{3})")
_MAX_LABEL = 160
_MAX_ENCLOSING = 3


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading at character ``offset``; ``level`` 1 is the outermost."""

    offset: int
    level: int
    label: str


def find_headings(text: str) -> list[Heading]:
    """Headings in order of offset. Levels of underlined headings follow the order of their first use."""
    headings: list[Heading] = []
    underline_levels: dict[str, int] = {}
    previous, previous_offset, offset = "", 0, 0
    fenced = False
    for line in text.splitlines(keepends=True):
        stripped = line.rstrip()
        if _FENCE.match(stripped) and not ("~" in stripped and _is_title(previous, stripped)):
            fenced = not fenced
        elif not fenced:
            atx = _ATX.match(stripped)
            underline = _UNDERLINE.match(stripped)
            if atx:
                headings.append(Heading(offset, len(atx[1]), atx[2][:_MAX_LABEL]))
            elif underline and _is_title(previous, stripped):
                level = underline_levels.setdefault(underline[1], len(underline_levels) + 1)
                headings.append(Heading(previous_offset, level, previous.strip()[:_MAX_LABEL]))
        previous, previous_offset = stripped, offset
        offset += len(line)
    return headings


def _is_title(line: str, underline: str) -> bool:
    return (
        bool(line.strip())
        and not line[0].isspace()
        and len(underline) >= len(line.strip()) - 2
        and any(character.isalnum() for character in line)
    )


class Outline:
    """Answers, for any offset of one text, under which headings and enclosing lines it stands."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._headings = find_headings(text)
        self._offsets = [heading.offset for heading in self._headings]

    def sections(self, offset: int) -> tuple[str, ...]:
        """The heading path at ``offset``, outermost first; a heading that starts there is part of it."""
        path: list[Heading] = []
        for heading in self._headings[: bisect.bisect_right(self._offsets, offset)]:
            while path and path[-1].level >= heading.level:
                path.pop()
            path.append(heading)
        return tuple(heading.label for heading in path)

    def enclosing(self, offset: int) -> tuple[str, ...]:
        """Less and less indented lines above the line at ``offset``, outermost first (as in an outline)."""
        line_start = self._text.rfind("\n", 0, offset) + 1
        line_end = self._text.find("\n", offset)
        first = self._text[line_start : len(self._text) if line_end < 0 else line_end]
        indent = _indent(first)
        found: list[str] = []
        position = line_start
        while indent > 0 and position > 0 and len(found) < _MAX_ENCLOSING:
            end = position - 1
            start = self._text.rfind("\n", 0, end) + 1
            line = self._text[start:end]
            if line.strip() and _indent(line) < indent:
                indent = _indent(line)
                found.append(line.strip()[:_MAX_LABEL])
            position = start
        return tuple(reversed(found))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))

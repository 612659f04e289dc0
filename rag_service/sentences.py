"""Where sentences end: for cutting passages and for attributing an answer while it streams.

Rules instead of a model, since a stream must be decided on as it comes: a terminator followed by white space
ends a sentence unless it closes an abbreviation, an initial or a list number; a line break always does.
"""

from __future__ import annotations

import re

_ABBREVIATED = (
    "al approx art cf ch co corp dept dr e.g eq est etc fig figs hon i.e inc jr ltd mr mrs "
    "ms no nos op p par pp prof rev sec sect sr st u.k u.s v vol vs"
)
_ABBREVIATIONS = frozenset(_ABBREVIATED.split())
_BOUNDARY = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s)|[。！？]+["'”’)\]]*|\s*\n+""")
_WORD_BEFORE = re.compile(r"(\S+)\Z")


def sentence_ends(text: str, *, final: bool = True) -> list[int]:
    """End offsets (exclusive, without the white space after) of the sentences of ``text``, ascending.

    ``final`` False: ``text`` may go on, so an end that more text could undo is left out.
    """
    ends = [
        match.end() if match.group().strip() else match.start()
        for match in _BOUNDARY.finditer(text)
        if _is_end(text, match)
    ]
    ends = [end for end in ends if text[:end].strip()]
    stripped = len(text.rstrip())
    if final and stripped and (not ends or ends[-1] < stripped):
        ends.append(stripped)
    return sorted(set(ends))


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text``, each with the white space before it (they join to ``text``)."""
    ends = sentence_ends(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _is_end(text: str, match: re.Match[str]) -> bool:
    if not match.group().startswith(".") or match.group().startswith(".."):
        return True
    before = _WORD_BEFORE.search(text, 0, match.start())
    if before is None:
        return False
    word = before.group().lstrip("(\"'[“‘").lower()
    if word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return False
    starts_line = not text[: before.start()].rpartition("\n")[2].strip()
    return not (word.isdigit() and starts_line)

"""Text out of token ids as they come, never splitting a character nor holding back more than a stop needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "�"


class Decodes(Protocol):
    """What detokenisation needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> Any: ...


class Detokenizer:
    """Decodes one sequence incrementally.

    Decoding starts a few tokens back (``_prefix``), since many tokenizers write a token differently at the
    start of a text; what that prefix alone decodes to is what has been given out already.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Add one token; returns the text it completes (empty inside a multi-token character)."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left at the end: an unfinished character comes out as it is."""
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""


class StopStrings:
    """Holds back just the text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """``(text that is safe to give out, whether a stop string was met)``; the stop itself is cut off."""
        if not self._stops:
            return text, False
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            safe, self._held = self._held[: min(found)], ""
            return safe, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

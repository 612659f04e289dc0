"""Where did this suffix stand before, and what followed? Constant time per token.

Tables of the last place of every n-gram, for a few lengths n. Unlike a suffix automaton it forgets nothing
and never clones states, the newest occurrence wins (a model that repeats itself repeats its latest), and its
memory is ``len(LENGTHS)`` entries a token.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Suffix lengths that are looked up, as in prompt lookup and SuffixDecoding (2411.04975)."""


class SuffixIndex:
    """An append-only text of token ids."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._places: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in LENGTHS}
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append. An n-gram is entered when its continuation is known."""
        text = self.token_ids
        for token_id in token_ids:
            end = len(text)
            for length in LENGTHS:
                if length > end:
                    break
                self._places[length][tuple(text[end - length : end])] = end
            text.append(token_id)

    def separate(self) -> None:
        """Begin a new text: no n-gram crosses this point (the separator matches nothing)."""
        self.extend((-1,))

    def find(self, suffix: Sequence[int]) -> tuple[int, int] | None:
        """``(place, length)``: the longest known ending of ``suffix`` and where its continuation begins."""
        for length in reversed(LENGTHS):
            if length <= len(suffix):
                place = self._places[length].get(tuple(suffix[len(suffix) - length :]))
                if place is not None and self.token_ids[place] >= 0:
                    return place, length
        return None

    def continuation(self, place: int, num_tokens: int) -> tuple[int, ...]:
        """Up to ``num_tokens`` ids from ``place`` on; where the text ends it goes on with what was copied."""
        out: list[int] = []
        for offset in range(num_tokens):
            index = place + offset
            token_id = (
                self.token_ids[index] if index < len(self.token_ids) else out[index - len(self.token_ids)]
            )
            if token_id < 0:
                break
            out.append(token_id)
        return tuple(out)

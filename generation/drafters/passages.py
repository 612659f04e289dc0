"""Proposals copied from the prompt (with its retrieved passages), the answer so far, and past answers.

A match is a point mass: its token is accepted with the target's probability of it. How far it is worth
copying depends on how long the matched suffix is, which is learned while serving.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from generation.drafters.suffix_index import LENGTHS, SuffixIndex
from generation.types import DrafterKind, DraftProposal


@dataclass(frozen=True, slots=True)
class Match:
    """A copied continuation, the length of the suffix that found it, and whose text it is."""

    token_ids: tuple[int, ...]
    match_length: int
    kind: DrafterKind

    def proposal(self) -> DraftProposal:
        return DraftProposal(self.token_ids, kinds=(self.kind,) * len(self.token_ids))


class MatchAcceptance:
    """Acceptance of copied tokens by length of the match: running counts with a prior, old ones fading."""

    _PRIOR: ClassVar = {1: 0.30, 2: 0.50, 3: 0.62, 4: 0.70, 6: 0.78, 8: 0.85, 12: 0.90, 16: 0.93}
    _PRIOR_WEIGHT = 8.0
    _DECAY = 0.998

    def __init__(self) -> None:
        self._accepted = {length: self._PRIOR[length] * self._PRIOR_WEIGHT for length in LENGTHS}
        self._tested = dict.fromkeys(LENGTHS, self._PRIOR_WEIGHT)

    def rate(self, match_length: int) -> float:
        """Probability that a position of such a match is accepted, given that those before it were."""
        return self._accepted[match_length] / self._tested[match_length]

    def update(self, match_length: int, num_accepted: int, num_tested: int) -> None:
        self._accepted[match_length] = self._accepted[match_length] * self._DECAY + num_accepted
        self._tested[match_length] = self._tested[match_length] * self._DECAY + num_tested


class PassageDrafter:
    """One sequence's own text: prompt, extra passages, answer so far."""

    def __init__(self, prompt_ids: Seq[int], passages: Seq[Seq[int]] = (), min_match: int = 2) -> None:
        self._index = SuffixIndex()
        for passage in passages:
            self._index.extend(passage)
            self._index.separate()
        self._index.extend(prompt_ids)
        self._min_match = min_match

    def extend(self, token_ids: Seq[int]) -> None:
        self._index.extend(token_ids)

    def match(self, ahead: Seq[int], num_tokens: int) -> Match | None:
        """The best copy after the text so far and ``ahead`` (tokens proposed but not confirmed)."""
        suffix = [*self._index.token_ids[-LENGTHS[-1] :], *ahead][-LENGTHS[-1] :]
        found = self._index.find(suffix)
        if found is None or found[1] < self._min_match:
            return None
        copied = self._index.continuation(found[0], num_tokens)
        return Match(copied, found[1], "passages") if copied else None


class HistoryDrafter:
    """Past answers of one tenant and domain, in two generations so that memory stays bounded.

    When the young index is full it becomes the old one and the old one is forgotten (REST 2311.08252,
    SuffixDecoding 2411.04975 keep such an index; ours never crosses tenants).
    """

    def __init__(self, max_tokens: int, min_match: int = 3) -> None:
        self._max_tokens = max_tokens
        self._min_match = min_match
        self._young, self._old = SuffixIndex(), SuffixIndex()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, answer_ids: Seq[int]) -> None:
        """Remember a finished answer."""
        if len(self._young) + len(answer_ids) > self._max_tokens // 2:
            self._old, self._young = self._young, SuffixIndex()
        self._young.extend(tuple(answer_ids)[: self._max_tokens // 2])
        self._young.separate()

    def match(self, suffix: Seq[int], num_tokens: int) -> Match | None:
        best: Match | None = None
        for index in (self._young, self._old):
            found = index.find(suffix[-LENGTHS[-1] :])
            if (
                found is not None
                and found[1] >= self._min_match
                and (best is None or found[1] > best.match_length)
            ):
                copied = index.continuation(found[0], num_tokens)
                best = Match(copied, found[1], "history") if copied else best
        return best


class HistoryStore:
    """A ``HistoryDrafter`` for each (tenant, domain), least recently used first out."""

    def __init__(self, max_tokens: int, max_groups: int = 64) -> None:
        self._max_tokens = max_tokens
        self._max_groups = max_groups
        self._groups: dict[tuple[str, str], HistoryDrafter] = {}

    def get(self, tenant: str, domain: str) -> HistoryDrafter:
        key = (tenant, domain)
        drafter = self._groups.pop(key, None) or HistoryDrafter(self._max_tokens)
        self._groups[key] = drafter
        while len(self._groups) > self._max_groups:
            del self._groups[next(iter(self._groups))]
        return drafter

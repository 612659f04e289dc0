"""Counting rounds honestly (speculation.md, section 3), one request at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from generation.types import AcceptanceMethod, DrafterCounts, DraftProposal, SpeculationStats, Verification


@dataclass(slots=True)
class _Counts:
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    overlap_sum: float = 0.0
    num_overlap: int = 0

    def frozen(self) -> DrafterCounts:
        return DrafterCounts(
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_rejections,
            self.overlap_sum,
            self.num_overlap,
        )


@dataclass(slots=True)
class StatsBuilder:
    """Adds up a request's rounds.

    A position is *tested* when every earlier draft token of its round was accepted and the answer had not
    ended. What a stop or the length limit cuts off is censored: neither accepted nor rejected.
    """

    acceptance_method: AcceptanceMethod = "token"
    num_rounds: int = 0
    total: _Counts = field(default_factory=_Counts)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    by_drafter: dict[str, _Counts] = field(default_factory=dict)
    lookahead_hits: int = 0
    lookahead_misses: int = 0
    hidden_draft_seconds: float = 0.0
    waited_draft_seconds: float = 0.0

    def add_round(self, proposal: DraftProposal, verification: Verification, num_kept: int) -> None:
        """Count one round of which the first ``num_kept`` tokens entered the answer."""
        self.num_rounds += 1
        if not len(proposal):
            self.causes[f"no_proposal_{proposal.empty_cause or 'off'}"] += 1
            return
        num_accepted = min(verification.num_accepted, num_kept)
        censored = num_kept < len(verification.token_ids)
        rejected = verification.last_kind == "recovered" and not censored
        self.causes["censored" if censored else "rejected" if rejected else "all_accepted"] += 1
        _grow(self.histogram, num_accepted + 1)
        self.histogram[num_accepted] += 1
        for position in range(len(proposal)):
            self._counts(proposal.kind_at(position)).num_draft_tokens += 1
        self.total.num_draft_tokens += len(proposal)
        for position in range(num_accepted + (1 if rejected else 0)):
            self._add_position(proposal, verification, position, position < num_accepted)

    def _add_position(
        self, proposal: DraftProposal, verification: Verification, position: int, accepted: bool
    ) -> None:
        _grow(self.tested, position + 1)
        _grow(self.accepted, position + 1)
        self.tested[position] += 1
        self.accepted[position] += int(accepted)
        overlap = verification.overlap[position] if position < len(verification.overlap) else None
        for counts in (self.total, self._counts(proposal.kind_at(position))):
            counts.num_accepted_tokens += int(accepted)
            counts.num_rejections += int(not accepted)
            if overlap is not None:
                counts.overlap_sum += overlap
                counts.num_overlap += 1

    def _counts(self, kind: str) -> _Counts:
        return self.by_drafter.setdefault(kind, _Counts())

    def build(self) -> SpeculationStats:
        """The counts so far, frozen."""
        return SpeculationStats(
            num_rounds=self.num_rounds,
            num_draft_tokens=self.total.num_draft_tokens,
            num_accepted_tokens=self.total.num_accepted_tokens,
            num_rejections=self.total.num_rejections,
            tested_per_position=tuple(self.tested),
            accepted_per_position=tuple(self.accepted),
            acceptance_histogram=tuple(self.histogram),
            rounds_by_cause=dict(self.causes),
            overlap_sum=self.total.overlap_sum,
            num_overlap=self.total.num_overlap,
            by_drafter={kind: counts.frozen() for kind, counts in self.by_drafter.items()},
            lookahead_hits=self.lookahead_hits,
            lookahead_misses=self.lookahead_misses,
            hidden_draft_seconds=self.hidden_draft_seconds,
            waited_draft_seconds=self.waited_draft_seconds,
            acceptance_method=self.acceptance_method,
        )


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))

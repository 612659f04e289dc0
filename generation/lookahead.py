"""Which outcomes of a verification are worth preparing for, and finding the one that came true.

Speculative Speculative Decoding (2603.03251): spread a budget of B branches over the number of accepted tokens
k = 0..K. With acceptance α and a draft whose top-F misses fall like F^-r, the best fan-out is
F_k ∝ α^(k/(1+r)) for k < K and F_K = F_0 · α^(K/(1+r)) · (1-α)^(-1/(1+r)).
"""

from __future__ import annotations

from dataclasses import dataclass

from generation.types import DraftProposal, LookaheadTable, Verification


def fan_out(num_draft_tokens: int, budget: int, alpha: float, r: float = 1.0) -> tuple[int, ...]:
    """Branches after each k = 0..K accepted tokens, ``[K + 1]``, summing to at most ``budget``.

    Whole numbers by largest remainder; B = 1 goes to k = K when α is high, PEARL's bet (2408.11850).
    """
    alpha = min(max(alpha, 0.01), 0.99)
    exponent = 1.0 / (1.0 + r)
    shares = [alpha ** (k * exponent) for k in range(num_draft_tokens)]
    shares.append(alpha ** (num_draft_tokens * exponent) * (1.0 - alpha) ** -exponent)
    total = sum(shares)
    exact = [budget * share / total for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: exact[k] - counts[k], reverse=True)
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


def look_up(table: LookaheadTable, verification: Verification) -> DraftProposal | None:
    """The prepared proposal for what the target decided, or None: a miss."""
    return table.branches.get((verification.num_accepted, verification.token_ids[-1]))


@dataclass(slots=True)
class BranchBudget:
    """How many branches fit behind one verification, found by measurement.

    Grows by one while tables take clearly less than a verification, shrinks when they take longer.
    """

    maximum: int
    budget: float = 4.0

    def update(self, table_seconds: float, verification_seconds: float) -> None:
        if table_seconds > verification_seconds:
            self.budget = max(1.0, self.budget * 0.9)
        elif table_seconds < 0.85 * verification_seconds:
            self.budget = min(float(self.maximum), self.budget + 0.25)

    @property
    def branches(self) -> int:
        return max(1, min(self.maximum, int(self.budget)))


@dataclass(slots=True)
class OutcomeModel:
    """Online estimates of α and of r, the exponent by which the draft's top-F misses fall."""

    alpha: float = 0.6
    r: float = 1.0
    _accepted: float = 6.0
    _tested: float = 10.0

    def update(self, num_accepted: int, num_tested: int) -> None:
        self._accepted = 0.99 * self._accepted + num_accepted
        self._tested = 0.99 * self._tested + num_tested
        self.alpha = self._accepted / self._tested if self._tested else self.alpha

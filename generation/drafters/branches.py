"""Branches of a look-ahead table while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from generation.lookahead import acceptance_chance, likeliest_outcomes
from generation.types import NOW, DraftProposal, DraftRequest, Outcome

if TYPE_CHECKING:
    from generation.drafters.draws import DraftSampler


@dataclass(slots=True)
class Branch:
    """The continuation of one outcome ``(num_accepted, token_id)``.

    ``depth``: how far behind the accepted prefix the next token to draw lies; the outcome's own token is the
    first (depth 0), unless the branch is ``NOW``, where nothing is awaited.
    """

    outcome: Outcome
    num_accepted: int
    last_token_id: int
    depth: int = 1
    token_ids: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)
    reach: float = 1.0
    """The chance that all tokens so far are accepted, given the outcome."""
    rows: list[int] = field(default_factory=list)
    """Where in the slot the keys of its own tokens lie."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def grows(self, request: DraftRequest) -> bool:
        """Whether another token is worth drafting. The first one costs no pass of its own."""
        sure = not self.token_ids or self.reach >= request.min_reach
        return sure and len(self) < request.num_draft_tokens

    def add(
        self,
        token_id: int,
        prob: float,
        ids: np.ndarray | None = None,
        probs: np.ndarray | None = None,
    ) -> None:
        """Append a drawn token; ``prob``: the draft's for it."""
        self.reach *= acceptance_chance(prob)
        self.token_ids.append(token_id)
        self.last_token_id = token_id
        self.depth += 1
        if ids is not None and probs is not None:
            self.ids.append(ids)
            self.probs.append(probs)

    def proposal(self) -> DraftProposal:
        supports = np.stack(self.ids).astype(np.int64) if self.ids else None
        probs = np.stack(self.probs) if self.probs else None
        return DraftProposal(tuple(self.token_ids), supports, probs)


def plan_branches(request: DraftRequest, sampler: DraftSampler, logits: Tensor) -> list[Branch]:
    """Open the branches of one request. ``logits [k + 1, n]``: after the confirmed text and each draft token.

    After a rejection at position k + 1 the drafted token cannot come, so it is left out there. A fan-out that
    the target asks for is kept; otherwise the likeliest outcomes under the draft are taken.
    """
    if request.branch_budget == 0:
        now = Branch(NOW, 0, -1, depth=0)
        sampler.extend([now], logits[:1])
        return [now]
    proposed = request.proposal.token_ids
    outcomes = (
        _fanned_out(request.fanout, proposed, sampler, logits)
        if request.fanout
        else likeliest_outcomes(
            *sampler.outlook(logits, proposed, request.branch_budget), request.branch_budget
        )
    )
    return [Branch((k, token_id), k, token_id) for k, token_id in outcomes[: request.branch_budget]]


def _fanned_out(
    counts: Sequence[int], proposed: Sequence[int], sampler: DraftSampler, logits: Tensor
) -> list[Outcome]:
    """The ``counts[k]`` likeliest tokens after each k accepted ones."""
    outcomes: list[Outcome] = []
    for k, count in enumerate(counts[: len(proposed) + 1]):
        excluded = proposed[k] if k < len(proposed) else None
        likeliest = sampler.top_tokens(logits[k], count, excluded) if count else []
        outcomes += [(k, token_id) for token_id in likeliest]
    return outcomes

"""The mathematics of acceptance, pure: distributions in, decisions out.

Every rule here except the two lossy ones returns tokens distributed exactly as the target's own, whatever the
draft proposed (Leviathan et al. 2211.17192, Chen et al. 2302.01318; block verification: Sun et al. 2403.10444;
the coupled rule: Daliri et al. 2408.07978). Distributions are *processed* ones: penalties, bias, grammar,
temperature and truncation are in them already.

Shapes: ``target_probs [k + 1, vocab]`` float; a proposal's draft distribution is either a support
``[k, m]`` of (id, probability) pairs that sum to one and that the token was sampled from, or a point mass.
``uniforms`` are the caller's random numbers in [0, 1), one a draft token and one for the last draw: the
functions are deterministic, so their distribution can be enumerated (``tests/generation/test_acceptance.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from generation.types import DraftProposal, Verification

Probs = npt.NDArray[np.floating]


def inverse_cdf(weights: Probs, uniform: float) -> int:
    """The index whose share of the (unnormalised, non-negative) ``weights [vocab]`` contains ``uniform``."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index >= len(cumulative):  # rounding at the very end
        index = int(np.flatnonzero(weights)[-1])
    return index


def residual(target: Probs, draft: Probs, scale: float = 1.0) -> npt.NDArray[np.float64]:
    """``max(0, scale · target - draft)`` over the vocabulary, unnormalised."""
    return np.maximum(0.0, scale * target.astype(np.float64) - draft)


def recover(target: Probs, draft: Probs, uniform: float, scale: float = 1.0) -> int:
    """Draw from the residual. Where rounding alone caused the rejection nothing is left of it: the target's
    own distribution is then the draft's to within that rounding, so the draw is from it.
    """
    left = residual(target, draft, scale)
    return inverse_cdf(left if left.any() else target, uniform)


def overlap(target: Probs, draft: Probs) -> float:
    """β = Σ min(target, draft) = 1 - total variation."""
    return float(np.minimum(target.astype(np.float64), draft).sum())


class ProposalProbs:
    """The draft's distributions of a proposal, dense on demand."""

    def __init__(self, proposal: DraftProposal, vocab_size: int) -> None:
        self.proposal = proposal
        self.vocab_size = vocab_size

    def is_point_mass(self, position: int) -> bool:
        """A drafter that copies, or a greedy draft, says one token and nothing else."""
        return self.proposal.support_probs is None or self.proposal.kind_at(position) != "model"

    def dense(self, position: int) -> npt.NDArray[np.float64]:
        """``[vocab]`` float64."""
        out = np.zeros(self.vocab_size)
        if self.is_point_mass(position):
            out[self.proposal.token_ids[position]] = 1.0
        else:
            assert self.proposal.support_ids is not None
            assert self.proposal.support_probs is not None
            row = self.proposal.support_probs[position].astype(np.float64)
            np.add.at(out, self.proposal.support_ids[position], row / row.sum())
        return out

    def of(self, position: int) -> float:
        """The draft's probability of the token it proposed."""
        if self.is_point_mass(position):
            return 1.0
        assert self.proposal.support_ids is not None
        assert self.proposal.support_probs is not None
        ids, row = (
            self.proposal.support_ids[position],
            self.proposal.support_probs[position].astype(np.float64),
        )
        return float(row[ids == self.proposal.token_ids[position]].sum() / row.sum())


def verify_token_wise(
    target_probs: Probs, proposal: DraftProposal, uniforms: Sequence[float]
) -> Verification:
    """Accept position by position with probability min(1, target/draft); first rejection → residual."""
    draft = ProposalProbs(proposal, target_probs.shape[-1])
    overlaps: list[float] = []
    for i, token_id in enumerate(proposal.token_ids):
        target = float(target_probs[i, token_id])
        if draft.is_point_mass(i):
            overlaps.append(target)
            accept = target
        else:
            overlaps.append(overlap(target_probs[i], draft.dense(i)))
            accept = target / draft.of(i)
        if uniforms[i] >= accept:
            token = recover(target_probs[i], draft.dense(i), uniforms[-1])
            return Verification(i, (*proposal.token_ids[:i], token), "recovered", tuple(overlaps))
    last = inverse_cdf(target_probs[len(proposal)], uniforms[-1])
    return Verification(len(proposal), (*proposal.token_ids, last), "bonus", tuple(overlaps))


def verify_block(target_probs: Probs, proposal: DraftProposal, uniforms: Sequence[float]) -> Verification:
    """Block verification (Sun et al. 2403.10444): the largest i with u_i ≤ h_i is kept. Never worse.

    ``overlap`` covers the kept positions and the next one, as token-wise: later ones follow a prefix that the
    target did not confirm.
    """
    k = len(proposal)
    draft = ProposalProbs(proposal, target_probs.shape[-1])
    dense = [draft.dense(i) for i in range(k)]
    kept, kept_scale, scale = 0, 1.0, 1.0
    for i in range(1, k + 1):
        token_id = proposal.token_ids[i - 1]
        scale = min(1.0, scale * float(target_probs[i - 1, token_id]) / draft.of(i - 1))
        if i < k:
            surplus = float(residual(target_probs[i], dense[i], scale).sum())
            denominator = surplus + 1.0 - scale
            keep = surplus / denominator if denominator > 0.0 else 1.0
        else:
            keep = scale
        if uniforms[i - 1] < keep:
            kept, kept_scale = i, scale
    tokens = proposal.token_ids[:kept]
    overlaps = tuple(overlap(target_probs[i], dense[i]) for i in range(min(kept + 1, k)))
    if kept == k:
        last = inverse_cdf(target_probs[k], uniforms[-1])
        return Verification(k, (*tokens, last), "bonus", overlaps)
    last = recover(target_probs[kept], dense[kept], uniforms[-1], kept_scale)
    return Verification(kept, (*tokens, last), "recovered", overlaps)


def verify_greedy(target_ids: Sequence[int], proposal: DraftProposal) -> Verification:
    """Temperature 0: the target is one-hot on ``target_ids [k + 1]``; accept while the draft says the same."""
    overlaps: list[float] = []
    for i, token_id in enumerate(proposal.token_ids):
        agrees = token_id == target_ids[i]
        overlaps.append(float(agrees))
        if not agrees:
            return Verification(i, (*proposal.token_ids[:i], target_ids[i]), "recovered", tuple(overlaps))
    return Verification(
        len(proposal), (*proposal.token_ids, target_ids[len(proposal)]), "bonus", tuple(overlaps)
    )


def verify_coupled(target_ids: Sequence[int], target_probs: Probs, proposal: DraftProposal) -> Verification:
    """Drafter-invariant verification: ``target_ids [k + 1]`` were drawn from the target by noise that depends
    on the seed and the position alone (Gumbel-max), so the text is the same whatever was proposed, and a
    request with a seed is reproducible across timeouts, misses and restarts of the draft. Daliri et al.
    2408.07978, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
    """
    draft = ProposalProbs(proposal, target_probs.shape[-1])
    greedy = verify_greedy(target_ids, proposal)
    tested = min(greedy.num_accepted + 1, len(proposal))
    overlaps = tuple(
        float(target_probs[i, proposal.token_ids[i]])
        if draft.is_point_mass(i)
        else overlap(target_probs[i], draft.dense(i))
        for i in range(tested)
    )
    return Verification(greedy.num_accepted, greedy.token_ids, greedy.last_kind, overlaps)


def verify_lossy(
    target_probs: Probs, proposal: DraftProposal, uniforms: Sequence[float], threshold: float, typical: bool
) -> Verification:
    """Accept when the target's probability passes a bar: NOT exact, and labelled ``lossy`` wherever shown.

    ``threshold``: the bar itself. ``typical`` (Medusa, 2401.10774): min(threshold, threshold · exp(-entropy)).
    """
    overlaps: list[float] = []
    for i, token_id in enumerate(proposal.token_ids):
        row = target_probs[i].astype(np.float64)
        bar = threshold
        if typical:
            support = row[row > 0]
            bar = min(threshold, threshold * float(np.exp(np.sum(support * np.log(support)))))
        overlaps.append(float(row[token_id]))
        if row[token_id] <= bar:
            token = inverse_cdf(row, uniforms[-1])
            return Verification(i, (*proposal.token_ids[:i], token), "recovered", tuple(overlaps))
    last = inverse_cdf(target_probs[len(proposal)], uniforms[-1])
    return Verification(len(proposal), (*proposal.token_ids, last), "bonus", tuple(overlaps))

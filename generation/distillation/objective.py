"""What the draft is trained to do: put its mass where the target's is.

At each position the target's top k probabilities are known. The loss mixes forward KL on them, minus the log
of the overlap Σ min(target, draft) (the acceptance rate itself; LK losses, 2602.23881) and, for services that
decode greedily, minus the log-probability of the target's likeliest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ObjectiveWeights:
    """Weights of the loss. ``prompt``: of prompt positions against answer positions."""

    kl: float = 1.0
    overlap: float = 0.5
    greedy: float = 0.3
    prompt: float = 0.3


def position_losses(
    logits: Tensor, top_rows: Tensor, top_logprobs: Tensor, weights: ObjectiveWeights
) -> tuple[Tensor, Tensor]:
    """Loss and overlap at each of N positions.

    ``logits`` ``[N, n]`` of the draft; ``top_rows`` ``[N, k]``: the head's row of each of the target's
    likeliest ids, -1 where the trimmed head lacks it; ``top_logprobs`` ``[N, k]`` descending, natural logs.
    The mass of absent ids is left out of the KL, since no training can place it; the overlap counts it.
    """
    log_draft = logits.float().log_softmax(dim=-1)
    present = top_rows >= 0
    chosen = log_draft.gather(1, top_rows.clamp(min=0))
    target = top_logprobs.float().exp()
    draft = chosen.exp()
    overlap = (torch.minimum(target, draft) * present).sum(dim=-1)
    known = target * present
    tail = (1.0 - target.sum(dim=-1)).clamp(min=1e-6)
    reachable = known.sum(dim=-1) + tail
    draft_tail = (1.0 - (draft * present).sum(dim=-1)).clamp(min=1e-6)
    cross = -(known * chosen).sum(dim=-1) - tail * draft_tail.log()
    entropy = -(known * top_logprobs.float()).sum(dim=-1) - tail * tail.log()
    kl = (cross - entropy) / reachable - reachable.log()
    greedy = -chosen[:, 0] * present[:, 0]
    loss = weights.kl * kl - weights.overlap * overlap.clamp(min=1e-3).log() + weights.greedy * greedy
    # A position whose mass the head can hardly reach teaches nothing but noise.
    return loss * reachable.detach(), overlap

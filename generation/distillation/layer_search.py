"""Which of the target's layers a small draft should begin as.

Two things are measured on random tokens that repeat: how much a layer changes its input (block influence,
ShortGPT 2403.03853), and how well its best head copies: looks at the previous token, or at the token after an
earlier occurrence of the present one (an induction head, 2209.11895). Answers from passages copy, and a draft
without an induction head and a previous-token head below it would have to learn both from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

_PERIOD = 60
_NEAR_BEST = 0.75
_SKIPPED = 10
"""First positions left out of the influence: they carry the attention sink's huge norm."""


class TooManyLayers(ValueError):
    """More layers are asked for than the target has; ``str()`` says both numbers."""


@dataclass(frozen=True, slots=True)
class LayerScores:
    """One layer: mean of 1 - cosine(input, output); largest mean attention of a head to the previous token,
    and of a head to the token after the earlier occurrence."""

    influence: float
    previous: float
    induction: float


@torch.inference_mode()
def score_layers(target: PreTrainedModel, seed: int = 0) -> list[LayerScores]:
    """Scores of every layer, on two random sequences repeated once. Seconds on a CPU."""
    generator = torch.Generator().manual_seed(seed)
    size = int(target.config.vocab_size)
    half = torch.randint(size // 50, size // 2 + 1, (2, _PERIOD), generator=generator)
    ids = torch.cat([half, half], dim=1).to(target.device)
    known = target.config._attn_implementation
    target.set_attn_implementation("eager")  # the only one that returns its weights
    try:
        output = target(ids, output_attentions=True, output_hidden_states=True)
    finally:
        target.set_attn_implementation(known)
    scores = []
    for layer, weights in enumerate(output.attentions):
        before = output.hidden_states[layer][:, _SKIPPED:].float()
        after = output.hidden_states[layer + 1][:, _SKIPPED:].float()
        influence = 1.0 - torch.cosine_similarity(before, after, dim=-1).mean()
        mean = weights.float().mean(dim=0)
        previous = mean.diagonal(-1, 1, 2).mean(dim=-1).max()
        induction = mean.diagonal(1 - _PERIOD, 1, 2)[:, 1:].mean(dim=-1).max()
        scores.append(LayerScores(float(influence), float(previous), float(induction)))
    return scores


def choose_layers(scores: list[LayerScores], count: int) -> list[int]:
    """``count`` layers in order: the first, the last, a previous-token layer, the best induction layer above it,
    then those of most influence.

    The previous-token layer is the lowest that comes near the best: the closer to the embedding, the more of
    what a layer expects of its input the draft has.
    """
    last = len(scores) - 1
    if not 1 <= count <= len(scores):
        raise TooManyLayers(
            f"The target has {len(scores)} layers: a draft of {count} cannot be made of them."
        )
    lower = scores[: len(scores) // 2]
    best = max((score.previous for score in lower), default=0.0)
    previous = next((i for i, score in enumerate(lower) if score.previous >= _NEAR_BEST * best), 0)
    above = range(previous + 1, len(scores))
    induction = max(above, key=lambda layer: scores[layer].induction, default=last)
    by_influence = sorted(range(len(scores)), key=lambda layer: -scores[layer].influence)
    ranked = dict.fromkeys([0, last, induction, previous, *by_influence])
    return sorted(list(ranked)[:count])

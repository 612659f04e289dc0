"""What a draft is worth on recorded outputs of the target, without running the target.

Teacher-forced: the draft sees the target's own tokens, so each position's overlap is what a verification there
would have met. Cheap enough for every few dozen training steps; figures that are published come from the
service's verifier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from generation.distillation.dataset import Example
from generation.distillation.draft_model import DraftModel
from generation.distillation.packing import HeadIndex, PackingCollator


@dataclass(frozen=True, slots=True)
class OfflineAcceptance:
    """Means over positions. ``alpha``: expected acceptance at the temperature the answer was sampled with
    (at 0 the share of positions where both argmaxes agree); ``num_tokens`` stands behind it."""

    alpha: float
    num_tokens: int


@torch.inference_mode()
def offline_acceptance(
    draft: DraftModel, examples: Sequence[Example]
) -> dict[tuple[str, float], OfflineAcceptance]:
    """Acceptance by (domain, temperature); the domain ``all`` pools them."""
    collator = PackingCollator(HeadIndex.of(draft.id_map, draft.config.vocab_size), prompt_positions=0)
    sums: dict[tuple[str, float], list[float]] = defaultdict(lambda: [0.0, 0])
    for example in examples:
        batch = collator([example])
        hidden = draft.hidden(
            batch["input_ids"], position_ids=batch["position_ids"], attention_mask=batch["attention_mask"]
        )[0]
        logits = draft.head(hidden[batch["flat_positions"]]).float()
        at = 0
        for answer in example.continuations:
            rows = slice(at, at + len(answer.token_ids))
            at = rows.stop
            accepted = acceptance(
                logits[rows], batch["top_rows"][rows], batch["top_logprobs"][rows], answer.temperature
            )
            for domain in (example.prompt.domain, "all"):
                entry = sums[domain, answer.temperature]
                entry[0] += float(accepted.sum())
                entry[1] += len(accepted)
    return {key: OfflineAcceptance(total / max(1, count), int(count)) for key, (total, count) in sums.items()}


def acceptance(
    logits: torch.Tensor, top_rows: torch.Tensor, top_logprobs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Expected acceptance at each position ``[N]``: Σ min(target, draft) at ``temperature``.

    The target's top k stands for the whole distribution: at temperatures up to 1 the rest is a few per cent,
    which counts as not accepted.
    """
    if temperature == 0:
        return (logits.argmax(dim=-1) == top_rows[:, 0]).float()
    tail = (1.0 - top_logprobs.float().exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6)
    warm = top_logprobs.float() / temperature
    # The tail at another temperature is unknown; as one lump it is an upper bound of its weight below 1.
    target = torch.cat([warm, tail.log() / temperature], dim=-1).softmax(dim=-1)[:, :-1]
    draft = (logits / temperature).softmax(dim=-1).gather(1, top_rows.clamp(min=0))
    return (torch.minimum(target, draft) * (top_rows >= 0)).sum(dim=-1)

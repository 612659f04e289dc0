"""On-policy rounds: the draft's own answers, with the target's distribution at each of their positions.

In service the draft continues its own tokens, K at a time, and those are not always tokens the target would
have written; what the target holds likely after them is what the draft must learn there (DistillSpec,
2310.08461).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from generation.distillation.continuation import Continuation, Sampling, draw, top_logprobs
from generation.distillation.dataset import Example
from generation.distillation.draft_model import DraftModel
from generation.distillation.packing import visible

Progress = Callable[[int, int], None]


@torch.inference_mode()
def on_policy_examples(
    draft: DraftModel,
    target: PreTrainedModel,
    examples: Sequence[Example],
    sampling: Sampling,
    seed: int,
    progress: Progress | None = None,
) -> list[Example]:
    """Each example's prompt with answers of the draft's own, scored by the target.

    The prompt's recorded log-probabilities are kept: they don't depend on who answers.
    """
    generator = torch.Generator(device=target.device).manual_seed(seed)
    made = []
    for number, example in enumerate(examples, 1):
        answers = draft_answers(draft, example.prompt.token_ids, sampling, generator)
        scored = score(target, example.prompt.token_ids, answers, sampling)
        made.append(replace(example, continuations=tuple(scored)))
        if progress is not None:
            progress(number, len(examples))
    return made


def draft_answers(
    draft: DraftModel, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator
) -> list[list[int]]:
    """One answer of the draft for each temperature, ended as the target's are."""
    device = draft.head.weight.device
    cache = DynamicCache(config=draft.config)
    ids = torch.tensor([list(prompt)], device=device)
    hidden = draft.hidden(ids, cache=cache, use_cache=True)[:, -1]
    cache.batch_repeat_interleave(len(sampling.temperatures))
    hidden = hidden.expand(len(sampling.temperatures), -1)
    temperatures = torch.tensor(sampling.temperatures, device=device)
    chosen: list[Tensor] = []
    running = torch.ones(len(temperatures), dtype=torch.bool)
    for _ in range(sampling.max_new_tokens):
        logits = draft.head(hidden)
        rows = draw(logits, logits.argmax(dim=-1), temperatures, generator)
        next_ids = rows if draft.id_map is None else draft.id_map[rows]
        chosen.append(next_ids.cpu())
        running &= ~torch.isin(chosen[-1], torch.tensor(sorted(sampling.end_ids), dtype=torch.long))
        if not running.any():
            break
        hidden = draft.hidden(next_ids[:, None], cache=cache, use_cache=True)[:, -1]
    return [_ended(row.tolist(), sampling.end_ids) for row in torch.stack(chosen, dim=1)]


def score(
    target: PreTrainedModel, prompt: Sequence[int], answers: Sequence[Sequence[int]], sampling: Sampling
) -> list[Continuation]:
    """The target's top log-probabilities at every position of the answers, in one packed forward pass."""
    ids, positions, segments = list(prompt), list(range(len(prompt))), [0] * len(prompt)
    spans = []
    for number, answer in enumerate(answers, 1):
        spans.append((len(ids), len(answer) - 1))
        ids += answer[:-1]
        positions += range(len(prompt), len(prompt) + len(answer) - 1)
        segments += [number] * (len(answer) - 1)
    mask = visible(torch.tensor([segments])).to(target.device)
    known = target.config._attn_implementation
    target.set_attn_implementation("sdpa")
    try:
        hidden = target.base_model(
            input_ids=torch.tensor([ids], device=target.device),
            position_ids=torch.tensor([positions], device=target.device),
            attention_mask=mask,
            use_cache=False,
        ).last_hidden_state[0]
    finally:
        target.set_attn_implementation(known)
    head: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    scored = []
    for (start, length), answer, temperature in zip(spans, answers, sampling.temperatures, strict=True):
        rows = torch.cat([hidden[len(prompt) - 1 : len(prompt)], hidden[start : start + length]])
        scored.append(Continuation(temperature, tuple(answer), top_logprobs(head(rows), sampling.top_k)))
    return scored


def _ended(ids: list[int], end_ids: frozenset[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in end_ids:
            return ids[: index + 1]
    return ids

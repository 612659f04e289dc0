"""The draft's own answers are scored by the target as the target would score them alone."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from generation.distillation.continuation import top_logprobs
from generation.distillation.dataset import Example
from generation.distillation.draft_model import create_draft
from generation.distillation.on_policy import draft_answers, on_policy_examples
from tests.generation.distillation.conftest import SAMPLING


def test_answers_are_the_drafts_and_scores_the_targets(
    target: PreTrainedModel, examples: list[Example]
) -> None:
    draft = create_draft(target, [0, 2], list(range(2, 64))).eval()
    made = on_policy_examples(draft, target, examples[:3], SAMPLING, seed=1)
    for example, source in zip(made, examples, strict=False):
        prompt = list(example.prompt.token_ids)
        assert example.prompt == source.prompt
        greedy = example.continuations[0].token_ids
        with torch.inference_mode():
            for answer in example.continuations:
                logits = target(torch.tensor([prompt + list(answer.token_ids)])).logits[0]
                want = top_logprobs(logits[len(prompt) - 1 : -1], SAMPLING.top_k)
                np.testing.assert_allclose(answer.top.logprobs, want.logprobs, atol=2e-2)
            ids = torch.tensor([prompt + list(greedy)])
            own = draft.head(draft.hidden(ids)[0, len(prompt) - 1 : -1]).argmax(-1)
        assert draft.id_map is not None
        assert draft.id_map[own].tolist() == list(greedy)


def test_a_full_head_needs_no_map(target: PreTrainedModel) -> None:
    draft = create_draft(target, [0, 1, 2], None).eval()
    answers = draft_answers(draft, [1, 2, 3], SAMPLING, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = target(torch.tensor([[1, 2, 3, *answers[0]]])).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == answers[0]

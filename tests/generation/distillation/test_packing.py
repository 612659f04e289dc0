"""A packed sequence computes what each continuation computes alone."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from generation.distillation.dataset import Example
from generation.distillation.draft_model import create_draft
from generation.distillation.packing import HeadIndex, PackingCollator, visible
from tests.generation.distillation.conftest import VOCABULARY


def test_who_may_see_whom() -> None:
    mask = visible(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_packed_logits_equal_those_of_each_answer_alone(
    target: PreTrainedModel, examples: list[Example]
) -> None:
    draft = create_draft(target, [0, 1, 2], None)
    collator = PackingCollator(HeadIndex.of(None, VOCABULARY), prompt_positions=4)
    pair = examples[:2]  # of different lengths, so that one is padded
    batch = collator(pair)
    with torch.inference_mode():
        hidden = draft.hidden(
            batch["input_ids"], position_ids=batch["position_ids"], attention_mask=batch["attention_mask"]
        )
        logits = draft.head(hidden.flatten(0, 1)[batch["flat_positions"]])
        at = 0
        for example in pair:
            prompt = list(example.prompt.token_ids)
            assert batch["is_prompt"][at : at + 4].all()
            at += 4
            for answer in example.continuations:
                ids = torch.tensor([prompt + list(answer.token_ids[:-1])])
                alone = draft.head(draft.hidden(ids)[0, len(prompt) - 1 :])
                rows = slice(at, at + len(answer.token_ids))
                torch.testing.assert_close(logits[rows], alone, atol=1e-4, rtol=1e-4)
                assert (batch["top_rows"][rows].numpy() == answer.top.ids).all()
                assert not batch["is_prompt"][rows].any()
                at = rows.stop
    assert at == len(logits)


def test_ids_that_the_head_lacks_are_marked(examples: list[Example]) -> None:
    index = HeadIndex.of(torch.tensor([3, 5, 63]), VOCABULARY)
    assert index.rows[[3, 5, 63]].tolist() == [0, 1, 2]
    assert (index.rows == -1).sum() == VOCABULARY - 3
    batch = PackingCollator(index)(examples[:1])
    known = torch.from_numpy(examples[0].continuations[0].top.ids == 5)
    assert ((batch["top_rows"][-len(known) :] == 1).sum() > 0) == bool(
        (torch.from_numpy(examples[0].continuations[-1].top.ids) == 5).any()
    )

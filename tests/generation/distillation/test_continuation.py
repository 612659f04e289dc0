"""Batched continuations over one shared prompt are what the model says alone."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from generation.distillation.continuation import Continuator, Sampling, draw, top_logprobs
from tests.generation.distillation.conftest import END, make_prompts, make_target


def _full_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return logits


def test_greedy_rows_equal_a_plain_loop_and_sampled_rows_are_scored_right() -> None:
    prompts = [list(prompt.token_ids) for prompt in make_prompts(3)]
    reference = make_target()
    sampling = Sampling((0.0, 0.7, 1.0), 10, top_k=8, end_ids=frozenset([END]))
    tops, answers = Continuator(make_target(), sampling).run(prompts, seed=5)
    for prompt, top, continuations in zip(prompts, tops, answers, strict=True):
        assert top.ids.shape == (len(prompt) - 1, 8)
        for answer in continuations:
            logits = _full_logits(reference, prompt + list(answer.token_ids))
            rows = logits[len(prompt) - 1 : -1]
            want = top_logprobs(rows, 8)
            np.testing.assert_allclose(answer.top.logprobs, want.logprobs, atol=2e-2)
            assert (answer.top.ids[:, 0] == want.ids[:, 0]).mean() > 0.9
            if answer.temperature == 0:
                assert list(answer.token_ids) == rows.argmax(-1).tolist()
            assert END not in answer.token_ids[:-1]


def test_the_prompt_is_scored_by_position() -> None:
    prompt = list(make_prompts(1)[0].token_ids)
    tops, _ = Continuator(make_target(), Sampling((0.0,), 2, top_k=64)).run([prompt], seed=0)
    want = _full_logits(make_target(), prompt)[:-1].log_softmax(-1)
    got = torch.zeros_like(want)
    got.scatter_(1, torch.from_numpy(tops[0].ids).long(), torch.from_numpy(tops[0].logprobs).float())
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)


def test_draws_follow_the_distribution_at_its_temperature() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]])).repeat(30_000, 1)
    temperatures = torch.full((30_000,), 2.0)
    drawn = draw(logits, logits.argmax(-1), temperatures, torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn, minlength=3) / 30_000
    want = (logits[0] / 2.0).softmax(-1)
    assert (shares - want).abs().max() < 0.012  # four standard errors


def test_temperature_zero_takes_the_likeliest_and_draws_no_number() -> None:
    logits = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    drawn = draw(logits, logits.argmax(-1), torch.zeros(2), torch.Generator())
    assert drawn.tolist() == [1, 0]


def test_the_same_seed_gives_the_same_answers() -> None:
    prompts = [list(prompt.token_ids) for prompt in make_prompts(2)]
    sampling = Sampling((0.7, 0.7), 8, end_ids=frozenset([END]))
    first = Continuator(make_target(), sampling).run(prompts, seed=3)[1]
    second = Continuator(make_target(), sampling).run(prompts, seed=3)[1]
    other = Continuator(make_target(), sampling).run(prompts, seed=4)[1]
    ids = [[answer.token_ids for answer in row] for row in first]
    assert ids == [[answer.token_ids for answer in row] for row in second]
    assert ids != [[answer.token_ids for answer in row] for row in other]

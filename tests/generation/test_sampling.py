"""Processed distributions against straightforward references, and counted random numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from generation.sampling import (
    RequestRandom,
    TokenCounts,
    adjust_logits,
    is_plain_greedy,
    race_winner,
    to_probs,
)
from generation.types import SamplingParams

V = 8
# Steps of 1/64: two logits closer than float32 tells apart would be one tie here and an order in float64.
LOGITS = st.lists(st.integers(-384, 384).map(lambda n: n / 64), min_size=V, max_size=V, unique=True)


def reference_probs(logits: list[float], sampling: SamplingParams) -> list[float]:
    """Token by token, in plain Python: temperature, top-k, top-p, min-p."""
    weights = np.exp((np.array(logits, dtype=np.float64) - max(logits)) / sampling.temperature)
    order = sorted(range(V), key=lambda t: -logits[t])
    keep = set(order[: sampling.top_k] if sampling.top_k else order)
    total = sum(weights[t] for t in keep)
    probs = {t: weights[t] / total for t in keep}
    if sampling.top_p < 1:
        mass, nucleus = 0.0, set[int]()
        for t in order:
            if t in keep and (mass < sampling.top_p or not nucleus):
                nucleus.add(t)
                mass += probs[t]
        keep = nucleus
    highest = max(probs[t] for t in keep)
    keep = {t for t in keep if probs[t] >= sampling.min_p * highest}
    total = sum(probs[t] for t in keep)
    return [probs[t] / total if t in keep else 0.0 for t in range(V)]


@settings(max_examples=150, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, V, 100]),
    st.sampled_from([0.0, 0.05, 0.3, 0.777, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_truncation_is_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = to_probs(torch.tensor([logits]), sampling)[0].numpy()
    want = np.array(reference_probs(logits, sampling))
    if ((got > 0) != (want > 0)).any():
        # A mass within rounding of a bar may fall either way; nothing else may differ.
        whole = np.array(reference_probs(logits, SamplingParams(temperature=temperature, top_k=top_k)))
        bars = [np.cumsum(np.sort(whole)[::-1]) - top_p, whole / whole.max() - min_p]
        nearest = np.abs(np.concatenate(bars)).min()
        assert nearest < 1e-6
        return
    assert got == pytest.approx(want, abs=2e-6)
    assert got.sum() == pytest.approx(1.0, abs=1e-6)


def test_temperature_zero_is_one_hot_on_the_first_argmax() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 0.0]])
    assert to_probs(rows, SamplingParams(temperature=0.0)).tolist() == [[0, 1, 0], [1, 0, 0]]


def reference_adjusted(
    logits: list[float], sampling: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    out = list(logits)
    for t in range(V):
        if t in prompt or t in answer:
            penalty = sampling.repetition_penalty
            out[t] = out[t] / penalty if out[t] > 0 else out[t] * penalty
        if t in answer:
            out[t] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(t)
        out[t] += sampling.logit_bias.get(t, 0.0)
    return out


@settings(max_examples=150, deadline=None)
@given(
    LOGITS,
    st.sampled_from([1.0, 0.7, 1.4]),
    st.sampled_from([0.0, 0.9, -0.5]),
    st.sampled_from([0.0, 0.4]),
    st.dictionaries(st.integers(-2, V + 3), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    st.lists(st.integers(0, V - 1), max_size=5),
    st.lists(st.integers(0, V - 1), max_size=8),
    st.integers(0, 8),
)
def test_penalties_and_bias_are_the_reference(
    logits: list[float],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    prompt: list[int],
    answer: list[int],
    split: int,
) -> None:
    """``split``: part of the answer is confirmed, the rest only proposed."""
    sampling = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    counts = TokenCounts(prompt)
    counts.extend(answer[:split])
    before = torch.tensor(logits)
    got = adjust_logits(before, sampling, counts.plus(answer[split:]), counts.prompt)
    assert got.tolist() == pytest.approx(reference_adjusted(logits, sampling, prompt, answer), abs=1e-4)
    assert before.tolist() == torch.tensor(logits).tolist()  # the model's own logits are left alone
    assert counts.answer == Counter(answer[:split])  # and so are the confirmed counts


def test_masks_forbid() -> None:
    allowed = torch.tensor([True, True, False, True])
    got = adjust_logits(torch.zeros(4), SamplingParams(), {}, frozenset(), (1,), allowed)
    assert torch.isinf(got).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
    ],
)
def test_what_is_plain_greedy(fields: dict[str, Any], plain: bool) -> None:
    assert is_plain_greedy(SamplingParams(**fields)) is plain


# -- random numbers ------------------------------------------------------------------------------------------


def test_numbers_depend_on_seed_purpose_and_position_alone() -> None:
    one, other = RequestRandom(7, "a"), RequestRandom(7, "b")
    first = one.uniforms("verify", 12, 4)
    one.uniforms("verify", 13, 50)
    one.race(12, 100)
    assert one.uniforms("verify", 12, 4).tolist() == first.tolist()
    assert other.uniforms("verify", 12, 4).tolist() == first.tolist()
    assert one.uniforms("verify", 12, 2).tolist() == first[:2].tolist()
    assert one.race(5, 10).tolist() == one.race(5, 99)[:10].tolist()


def test_everything_else_gives_other_numbers() -> None:
    draws = [
        RequestRandom(seed, name).uniforms(purpose, position, 3).tolist()
        for seed, name in [(1, "x"), (2, "x"), (None, "x"), (None, "y"), (0, ""), (-1, ""), (1 << 80, "")]
        for purpose in ("verify", "draft:0:now", "draft:1:now", "draft:0:table")
        for position in (0, 1, 2, 1 << 20)
    ]
    flat = [number for draw in draws for number in draw]
    assert len(set(flat)) == len(flat)


def test_numbers_are_uniform_across_positions_purposes_and_seeds() -> None:
    by_position = [RequestRandom(3).uniforms("verify", p, 1)[0] for p in range(2000)]
    by_seed = [RequestRandom(s).uniforms("verify", 7, 1)[0] for s in range(2000)]
    by_round = [RequestRandom(3).uniforms(f"draft:{r}:now", 7, 1)[0] for r in range(2000)]
    for sample in (by_position, by_seed, by_round):
        assert kstest(sample, "uniform").pvalue > 1e-4
        lagged = np.corrcoef(sample[:-1], sample[1:])[0, 1]
        assert abs(lagged) < 0.1


def test_the_race_is_won_in_proportion() -> None:
    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    wins = Counter(race_winner(probs, RequestRandom(seed).race(9, 5)) for seed in range(4000))
    assert wins[1] == 0
    kept = [0, 2, 3, 4]
    assert chisquare([wins[t] for t in kept], 4000 * probs[kept]).pvalue > 1e-4


def test_draft_and_target_agree_as_often_as_their_overlap_allows() -> None:
    """Racing the same noise: Gumbel coupling agrees at least (overlap / (2 - overlap)) of the time."""
    target, draft = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    agree = 0
    for seed in range(3000):
        noise = RequestRandom(seed).race(3, 3)
        agree += race_winner(target, noise) == race_winner(draft, noise)
    overlap = float(np.minimum(target, draft).sum())
    assert overlap / (2 - overlap) - 0.03 < agree / 3000 <= overlap + 0.03

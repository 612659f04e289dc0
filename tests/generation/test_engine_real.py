"""The real target: whatever proposes, greedy and seeded answers are those of plain decoding.

Answers are expected to be the same to the last id; where two bfloat16 argmaxes are a near-tie of logits the
test says so (``near_ties`` in the report's properties) instead of claiming more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.types import GenerationRequest
from tests.generation.fakes import Answer, make_engine, make_request, run
from tests.generation.real_model import (
    assert_same_or_tie,
    corpus_questions,
    load_target,
    prompt_ids,
    shared_questions,
)

NEW_TOKENS = 16
SLOT = 400


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    return load_target()


@pytest.fixture(scope="module")
def prompts(real: tuple[Any, Any]) -> list[tuple[int, ...]]:
    return [prompt_ids(real[1], question, num_tokens=56) for question in corpus_questions(20)]


def engine(
    real: tuple[Any, Any], mode: str = "off", *, draft: bool = False, k: int = 3, **options: Any
) -> Any:
    """``draft``: the target as its own model draft, so that long runs are accepted."""
    link = LocalLink(DraftWorker(real[0], num_slots=8, slot_length=SLOT + 64)) if draft else None
    speculation = {
        "mode": mode,
        "passages": mode == "passages",
        "num_draft_tokens": k,
        **options.pop("speculation", {}),
    }
    batch = options.setdefault("batch", 8)
    return make_engine(
        real[0], real[1], colocated=link, num_tokens=batch * SLOT, speculation=speculation, **options
    )


def greedy(prompts: list[tuple[int, ...]], num_tokens: int = NEW_TOKENS) -> list[GenerationRequest]:
    return [make_request(f"r{i}", prompt, max_tokens=num_tokens) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(real: tuple[Any, Any], prompts: list[tuple[int, ...]]) -> dict[str, Answer]:
    """Plain greedy answers to all twenty, decoded together."""
    return run(engine(real), greedy(prompts))


def compare(
    real: tuple[Any, Any],
    prompts: list[tuple[int, ...]],
    plain: dict[str, Answer],
    got: dict[str, Answer],
    report: Callable[[str, object], None],
) -> None:
    ties = sum(
        assert_same_or_tie(real[0], prompt, plain[f"r{i}"].token_ids, got[f"r{i}"].token_ids)
        for i, prompt in enumerate(prompts)
    )
    report("near_ties", ties)
    print(f"near-ties: {ties} of {len(prompts)} answers")
    assert ties <= max(1, len(prompts) // 10)


def test_speculative_greedy_is_plain_for_twenty_prompts(
    real: tuple[Any, Any],
    prompts: list[tuple[int, ...]],
    plain: dict[str, Answer],
    record_property: Callable[[str, object], None],
) -> None:
    assert len(prompts) == 20
    speculative = engine(real, "passages", k=5)
    got = run(speculative, greedy(prompts))
    compare(real, prompts, plain, got, record_property)
    assert sum(answer.last.stats.num_accepted_tokens for answer in got.values() if answer.last.stats) > 20
    speculative.check_integrity()


def test_a_model_draft_is_plain(
    real: tuple[Any, Any],
    prompts: list[tuple[int, ...]],
    plain: dict[str, Answer],
    record_property: Callable[[str, object], None],
) -> None:
    got = run(engine(real, "colocated", draft=True), greedy(prompts[:4]))
    compare(real, prompts[:4], plain, got, record_property)
    for answer in got.values():
        stats = answer.last.stats
        assert stats is not None
        assert stats.acceptance_rate is not None
        assert stats.acceptance_rate > 0.9


def test_alone_is_in_company(
    real: tuple[Any, Any], prompts: list[tuple[int, ...]], plain: dict[str, Answer]
) -> None:
    """Not within a tie: to the last id. A token's logits do not depend on the batch."""
    for number in (0, 7):
        alone = run(engine(real, batch=1), [greedy(prompts)[number]])
        assert alone[f"r{number}"].token_ids == plain[f"r{number}"].token_ids


SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}


def test_a_seed_is_the_same_text_alone_in_company_and_speculative(
    real: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    request = make_request("s", prompts[1], max_tokens=12, **SAMPLED)
    alone = run(engine(real, batch=1), [request])["s"]
    speculative = engine(real, "colocated", draft=True)
    company = run(speculative, [*greedy(prompts[2:4], 8), request])["s"]
    assert company.token_ids == alone.token_ids
    assert company.text == alone.text
    other = make_request("s", prompts[1], max_tokens=12, temperature=0.8, top_p=0.95, seed=12)
    assert run(engine(real, batch=1), [other])["s"].token_ids != alone.token_ids


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
)

FEATURES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {28: -100.0, 30: -100.0, 260: 2.0}},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 8, "max_tokens": 12},
    "stop": {"stop": (" zz", "s")},
    "stop_token_ids": {"stop_token_ids": (30, 28)},
    "logprobs": {"logprobs": 2, "max_tokens": 8},
    "sampled_logprobs": {"logprobs": 0, "max_tokens": 8, **SAMPLED},
    "top_k_min_p": {"temperature": 1.0, "top_k": 5, "min_p": 0.05, "seed": 3},
    "json": {"json_schema": SCHEMA, "max_tokens": 24},
    "json_sampled": {"json_schema": SCHEMA, "max_tokens": 16, **SAMPLED},
}


@pytest.fixture(scope="module")
def featured(real: tuple[Any, Any]) -> dict[str, tuple[Answer, Answer, Answer]]:
    """Every feature plain, with copies proposed and with a model draft; all features in one batch each."""
    prompts = [prompt_ids(real[1], question, num_tokens=8) for question in corpus_questions(3)]
    requests = [
        make_request(name, prompts[i % 3], **{"max_tokens": 10, **fields})
        for i, (name, fields) in enumerate(FEATURES.items())
    ]
    runs = [
        run(engine(real), requests),
        run(engine(real, "passages", speculation={"passages_min_match": 1}), requests),
        run(engine(real, "colocated", draft=True), requests),
    ]
    return {name: (runs[0][name], runs[1][name], runs[2][name]) for name in FEATURES}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_the_same_speculative_and_plain(
    featured: dict[str, tuple[Answer, Answer, Answer]], feature: str
) -> None:
    plain, copied, drafted = featured[feature]
    for speculative in (copied, drafted):
        assert speculative.token_ids == plain.token_ids
        assert speculative.text == plain.text
        assert speculative.last.finish_reason == plain.last.finish_reason
        left = [entry for chunk in plain.chunks for entry in chunk.logprobs]
        right = [entry for chunk in speculative.chunks for entry in chunk.logprobs]
        assert [e.token_id for e in left] == [e.token_id for e in right]
        assert [e.logprob for e in left] == pytest.approx([e.logprob for e in right], abs=1e-5)
        assert [[t for t, _, _ in e.top] for e in left] == [[t for t, _, _ in e.top] for e in right]
    assert drafted.last.stats is not None
    assert drafted.last.stats.num_accepted_tokens > 0


def test_features_do_something(featured: dict[str, tuple[Answer, Answer, Answer]], real: Any) -> None:
    tokenizer = real[1]
    assert not set(featured["logit_bias"][0].token_ids) & {28, 30}
    assert len(featured["min_tokens"][0].token_ids) >= 8
    assert not any(stop in featured["stop"][0].text for stop in (" zz", "s"))
    assert featured["stop"][0].last.finish_reason == "stop"
    for answer in (featured["json"][0], featured["json_sampled"][0]):
        if answer.last.finish_reason == "stop":
            assert set(json.loads(answer.text)) == {"answer", "sure"}
        else:
            assert answer.text.startswith("{")
    for answer in featured["logprobs"]:
        entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
        assert [entry.token_id for entry in entries] == answer.token_ids
        assert all(len(entry.top) == 2 and entry.top[0][2] >= entry.logprob - 1e-6 for entry in entries)
        assert "".join(entry.token for entry in entries) == answer.text
    assert tokenizer.decode(featured["presence"][0].token_ids, skip_special_tokens=True) == (
        featured["presence"][0].text
    )


def test_the_prefix_cache_changes_nothing(
    real: tuple[Any, Any], prompts: list[tuple[int, ...]], plain: dict[str, Answer]
) -> None:
    cached = engine(real, batch=1)
    run(cached, greedy(prompts[:1], 2))
    again = run(cached, [greedy(prompts)[0], greedy(prompts)[5]])
    for name in ("r0", "r5"):
        assert again[name].token_ids == plain[name].token_ids
        assert again[name].last.num_cached_tokens >= 16


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_speculative_greedy_is_plain_for_fifty_prompts_in_five_domains(
    real: tuple[Any, Any], record_property: Callable[[str, object], None]
) -> None:
    questions = shared_questions(10)
    assert len({question.domain for question in questions}) == 5
    assert len(questions) == 50
    prompts = [prompt_ids(real[1], question, num_tokens=100) for question in questions]
    requests = greedy(prompts, 24)
    plain = run(engine(real), requests)
    copied = run(engine(real, "passages", k=5), requests)
    compare(real, prompts, plain, copied, record_property)
    drafted = run(engine(real, "colocated", draft=True, k=5), requests[:10])  # two of each domain
    compare(real, prompts[:10], plain, drafted, record_property)

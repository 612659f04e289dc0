"""Every field of a chat request is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from generation.types import SamplingParams
from rag_service.errors import ApiError
from rag_service.question import Question, question_of
from rag_service.schemas import REFUSED_FIELDS, ChatRequest
from tests.rag_service.conftest import MODEL, MakeSettings, ask


def _question(make_settings: MakeSettings, **fields: Any) -> Question:
    return question_of(ChatRequest.model_validate(ask(**fields)), make_settings(), "r")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams(seed=1)),
        ({"temperature": 0.7, "top_p": 0.9}, SamplingParams(temperature=0.7, top_p=0.9, seed=1)),
        ({"temperature": 0}, SamplingParams(temperature=0.0, seed=1)),
        ({"top_k": 5, "min_p": 0.1}, SamplingParams(top_k=5, min_p=0.1, seed=1)),
        ({"max_tokens": 7}, SamplingParams(max_tokens=7, seed=1)),
        ({"max_completion_tokens": 8}, SamplingParams(max_tokens=8, seed=1)),
        ({"max_tokens": 9, "min_tokens": 20}, SamplingParams(max_tokens=9, min_tokens=9, seed=1)),
        ({"stop": "END"}, SamplingParams(stop=("END",), seed=1)),
        (
            {"stop": ["a", "b"], "stop_token_ids": [2]},
            SamplingParams(stop=("a", "b"), stop_token_ids=(2,), seed=1),
        ),
        ({"seed": -3}, SamplingParams(seed=-3)),
        (
            {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2},
            SamplingParams(presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.2, seed=1),
        ),
        ({"logit_bias": {"50": -100, "7": 2}}, SamplingParams(logit_bias={50: -100.0, 7: 2.0}, seed=1)),
        ({"logprobs": True}, SamplingParams(logprobs=0, seed=1)),
        ({"logprobs": True, "top_logprobs": 3}, SamplingParams(logprobs=3, seed=1)),
        ({"logprobs": False}, SamplingParams(seed=1)),
        (
            {"response_format": {"type": "json_object"}},
            SamplingParams(json_schema='{"type": "object"}', seed=1),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            },
            SamplingParams(json_schema='{"type": "object"}', seed=1),
        ),
        ({"ignore_eos": True}, SamplingParams(ignore_eos=True, seed=1)),
        ({"tools": [], "tool_choice": "none", "functions": None, "user": "u"}, SamplingParams(seed=1)),
    ],
)
def test_sampling(make_settings: MakeSettings, fields: dict[str, Any], expected: SamplingParams) -> None:
    assert _question(make_settings, **{"seed": 1, **fields}).sampling == expected


def test_a_seed_is_never_made_up(make_settings: MakeSettings) -> None:
    """A seed switches to coupled acceptance, which accepts less: only for those who ask for it."""
    assert _question(make_settings).sampling.seed is None


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError, match=f"The field {name} is not supported") as refused:
        ChatRequest.model_validate({**ask(), name: [{"x": 1}]})
    assert (refused.value.status, refused.value.param) == (400, name)


def test_unknown_by_name_with_the_nearest() -> None:
    with pytest.raises(ApiError, match="There is no field temprature; did you mean temperature"):
        ChatRequest.model_validate(ask(temprature=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "greater than or equal to 1"),
        ({"temperature": 3}, "less than or equal to 2"),
        ({"temperature": "warm"}, "valid number"),
        ({"n": True}, "not true or false"),
        ({"temperature": False}, "not true or false"),
        ({"rag": {"top_k": True}}, "not true or false"),
        ({"top_p": 0}, "greater than 0"),
        ({"stop": ["a"] * 5}, "at most four"),
        ({"stop": [""]}, "at most four"),
        ({"logit_bias": {"x": 1}}, "token ids"),
        ({"logit_bias": {"1": 101}}, "from -100 to 100"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "not both"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
        ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
        ({"response_format": {"type": "xml"}}, "json_object"),
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "user", "content": " "}]}, "question is empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"stop": ["\udfff"]}, "surrogate"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message"),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]}, "of tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "parts of type",
        ),
        ({"rag": {"top_k": 0}}, "greater than or equal to 1"),
        ({"rag": {"filters": {"a": {"b": 1}}}}, "must be a text"),
        ({"modalities": ["audio"]}, "text"),
        ({"store": True}, "False"),
    ],
)
def test_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ChatRequest.model_validate({**ask(), **fields})


def test_conversation_system_and_parts(make_settings: MakeSettings) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "?"}]},
    ]
    question = _question(make_settings, messages=messages)
    assert question.text == "Two?"
    assert [turn["content"] for turn in question.history] == ["One?", "Yes."]
    assert question.system is not None
    assert question.system.endswith("using only the sources.\n\nBe brief.")
    plain = _question(make_settings, messages=messages, rag={"enabled": False})
    assert plain.system == "Be brief."


def test_limits_of_the_service(make_settings: MakeSettings) -> None:
    for fields, param in (
        ({"n": 9}, "n"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"rag": {"domain": "cooking"}}, "rag.domain"),
        ({"model": "gpt-9"}, "model"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}] * 5}, "messages"),
    ):
        with pytest.raises(ApiError) as refused:
            _question(make_settings, **fields)
        assert refused.value.param == param
        assert refused.value.status == (404 if param == "model" else 400)
    assert _question(make_settings, model=MODEL, n=2).num_choices == 2

"""The stock ``openai`` client against the gateway, by socket."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionUserMessageParam

from tests.fakes import ANSWER, Fakes
from tests.rag_service.conftest import MODEL, MakeSettings, serving

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "When does the library open?"}]
CITED = "The library opens at nine on weekdays. [1] Members may borrow six books. [1]"


def _client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


async def _collect(stream: openai.AsyncStream[ChatCompletionChunk], pieces: list[str]) -> None:
    async for chunk in stream:
        pieces.extend(choice.delta.content or "" for choice in chunk.choices)


async def test_plain_answer(address: str) -> None:
    async with _client(address) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"rag": {"domain": "general"}}
        )
    choice = answer.choices[0]
    assert choice.message.content == CITED
    assert choice.finish_reason == "stop"
    assert choice.message.annotations is not None
    spans = [(a.url_citation.start_index, a.url_citation.end_index) for a in choice.message.annotations]
    assert [CITED[start:end] for start, end in spans] == ["[1]", "[1]"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == -(-len(ANSWER) // 4)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    extra = answer.model_extra
    assert extra is not None
    assert extra["sources"][0]["document_id"] == "library"
    assert extra["metrics"]["speculative_decoding"]["acceptance_rate"] == 0.8


async def test_streamed_answer(address: str) -> None:
    async with _client(address) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices == []
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["rag"]["domain_inferred"] is True
    content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert content == CITED
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"
    metrics, usage = chunks[-2:]
    assert metrics.model_extra is not None
    assert metrics.model_extra["metrics"]["timings"]["search_seconds"] == 0.002
    assert usage.usage is not None
    assert usage.usage.completion_tokens == -(-len(ANSWER) // 4)


async def test_models(address: str) -> None:
    async with _client(address) as client:
        models = [model.id async for model in client.models.list()]
        assert models == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")


async def test_errors_are_openais_own(address: str) -> None:
    async with _client(address) as client:
        with pytest.raises(openai.BadRequestError, match="known are finance, medical") as refused:
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, extra_body={"rag": {"domain": "cooking"}}
            )
        assert refused.value.param == "rag.domain"
        assert refused.value.code == "unknown_domain"
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == CITED


async def test_error_in_the_middle_of_a_stream(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.generator.error = RuntimeError("secret detail")
    fakes.generator.error_after = 3
    fakes.generator.delay_seconds = 0.03
    async with serving(make_settings(), fakes) as address, _client(address) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        pieces: list[str] = []
        with pytest.raises(openai.APIError, match="failed to answer") as failed:
            await _collect(stream, pieces)
        assert "".join(pieces) == ANSWER[:12].rstrip()
        assert "secret" not in str(failed.value)
    assert [record.outcome for record in fakes.recorder.records] == ["error"]

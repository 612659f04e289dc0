"""A step that computes prompt pieces alone has no row to choose from: real model, bfloat16."""

from __future__ import annotations

from generation.config import CacheConfig, EngineConfig
from generation.engine import Engine
from generation.types import GenerationRequest, SamplingParams
from tests.generation.real_model import load_target


def answer(prefill_chunk_tokens: int, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    target, tokenizer = load_target()
    config = EngineConfig(
        max_batch_size=1,
        cache=CacheConfig(num_tokens=512, prefix_caching=False),
        prefill_chunk_tokens=prefill_chunk_tokens,
    )
    engine = Engine(target, tokenizer, config)
    request = GenerationRequest("a", prompt_ids, SamplingParams(max_tokens=8))
    chunks = list(engine.generate([request]))
    assert chunks[-1].error is None
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def test_a_prompt_longer_than_a_chunk_is_answered_as_in_one_piece() -> None:
    _, tokenizer = load_target()
    prompt = tuple(
        tokenizer.encode("The revenue of Corvane rose by twelve percent because pumps sold well. " * 10)
    )
    assert len(prompt) > 64
    whole = answer(1024, prompt)
    # Two of these leave a short last piece, which is computed beside decoding rows.
    assert [answer(chunk, prompt) for chunk in (32, 50, 17)] == [whole] * 3

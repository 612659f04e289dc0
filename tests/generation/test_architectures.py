"""Tiny random-weight models of several architectures: the engine says what transformers says.

float32 and unpacked, so that the only differences are the engine's own: slots, masks, chunks, windows, soft
caps. The reference is a plain transformers forward over the whole text, an argmax a token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from generation.config import ModelConfig
from generation.decoder import FusedDecoder
from generation.drafters.link import LocalLink, ThreadLink
from generation.drafters.model import DraftWorker
from generation.loading import load_model
from generation.model_runner import LoadedModel
from tests.generation.fakes import LetterTokenizer, make_engine, make_request, run

V = 128
"""Ids that the tokenizer knows; the models have a few rows of padding beyond them."""
PADDED = 136
WINDOW = 20
"""Shorter than the texts below, so that sliding layers really forget."""
PROMPT_LENGTH = 45
NEW_TOKENS = 24

COMMON: dict[str, Any] = {
    "vocab_size": PADDED,
    "tie_word_embeddings": False,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**{**COMMON, "tie_word_embeddings": True}),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen2-window": lambda: Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 7},
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
    ),
}


def save(config: PretrainedConfig, folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(V)}
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    return model


def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", packed_linear=False))


@torch.inference_mode()
def reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :V].argmax()))
    return ids[len(prompt) :]


class Trio:
    """One architecture: reference model, the same through the engine, and another one as a draft."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = save(CONFIGS[name](), folder / "target", seed=1)
        save(CONFIGS[name](), folder / "draft", seed=2)
        self.target = loaded(folder / "target")
        self.draft = loaded(folder / "draft")
        generator = torch.Generator().manual_seed(3)
        self.prompts = [
            torch.randint(0, V, (PROMPT_LENGTH + 7 * i,), generator=generator).tolist() for i in range(3)
        ]
        self.answers = [reference(self.model, prompt, NEW_TOKENS) for prompt in self.prompts]

    def check(self, engine: Any, **fields: Any) -> Any:
        requests = [
            make_request(f"r{i}", prompt, max_tokens=NEW_TOKENS, **fields)
            for i, prompt in enumerate(self.prompts)
        ]
        got = run(engine, requests)
        engine.check_integrity()
        for i, answer in enumerate(self.answers):
            assert got[f"r{i}"].token_ids == answer
        return got

    def engine(self, **options: Any) -> Any:
        return make_engine(self.target, LetterTokenizer(), num_tokens=8 * 256, **options)

    def worker(self, model: LoadedModel) -> DraftWorker:
        return DraftWorker(model, num_slots=8, slot_length=320)


@pytest.fixture(scope="module", params=CONFIGS)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return Trio(request.param, tmp_path_factory.mktemp(request.param))


def test_texts_depend_on_more_than_the_last_token(trio: Trio) -> None:
    """Otherwise the tests below would prove little."""
    assert len({tuple(answer) for answer in trio.answers}) == len(trio.answers)
    assert all(len(set(answer)) > 3 for answer in trio.answers)


def test_known_architectures_are_fused(trio: Trio) -> None:
    assert isinstance(trio.target.decoder, FusedDecoder) == ("Gemma" not in type(trio.model).__name__)


def test_plain_greedy_is_transformers(trio: Trio) -> None:
    trio.check(trio.engine())


def test_chunked_prefill_is_the_same(trio: Trio) -> None:
    trio.check(trio.engine(prefill_chunk_tokens=16))


def test_prefix_cache_changes_nothing(trio: Trio) -> None:
    engine = trio.engine()
    trio.check(engine)
    again = trio.check(engine)
    for answer in again.values():
        assert answer.last.num_cached_tokens >= 32
    without = trio.engine(cache={"prefix_caching": False})
    assert all(answer.last.num_cached_tokens == 0 for answer in trio.check(without).values())


def test_copying_proposals_change_nothing(trio: Trio) -> None:
    """Prompts that contain their own answers: copies are proposed, and many are accepted."""
    engine = trio.engine(speculation={"mode": "passages", "passages": True, "num_draft_tokens": 4})
    requests = [
        make_request(f"r{i}", prompt, max_tokens=NEW_TOKENS, passage_ids=(tuple(prompt[-4:] + answer),))
        for i, (prompt, answer) in enumerate(zip(trio.prompts, trio.answers, strict=True))
    ]
    got = run(engine, requests)
    for i, answer in enumerate(trio.answers):
        assert got[f"r{i}"].token_ids == answer
        stats = got[f"r{i}"].last.stats
        assert stats is not None
        assert stats.num_accepted_tokens > 0
        assert stats.drafter == "passages"


def test_the_target_as_its_own_draft_changes_nothing(trio: Trio) -> None:
    engine = trio.engine(
        colocated=LocalLink(trio.worker(trio.target)),
        speculation={"mode": "colocated", "num_draft_tokens": 4},
    )
    for answer in trio.check(engine).values():
        stats = answer.last.stats
        assert stats.acceptance_rate == pytest.approx(1.0, abs=0.1)
        assert stats.num_rounds < NEW_TOKENS


def test_another_draft_changes_nothing(trio: Trio) -> None:
    engine = trio.engine(
        colocated=LocalLink(trio.worker(trio.draft)),
        speculation={"mode": "colocated", "num_draft_tokens": 3},
    )
    for answer in trio.check(engine).values():
        assert answer.last.stats.num_draft_tokens > 0


@pytest.mark.parametrize("own", [True, False], ids=["same", "other"])
def test_lookahead_in_a_thread_changes_nothing(trio: Trio, own: bool) -> None:
    link = ThreadLink(trio.worker(trio.target if own else trio.draft))
    try:
        engine = trio.engine(
            remote=link,
            speculation={"mode": "lookahead", "num_draft_tokens": 3, "deadline_multiple": 1000.0},
        )
        answers = trio.check(engine)
        causes = [answer.last.stats.rounds_by_cause for answer in answers.values()]
        missed = sum(by_cause.get("no_proposal_miss", 0) for by_cause in causes)
        # The first round of an answer has no table to look into, the last no room: any other was a miss.
        assert missed == engine.proposer.lookahead_misses
        assert all(by_cause.get("no_proposal_off", 0) <= 2 for by_cause in causes)
        if own:
            # A draft that is the target foresees every outcome it opened a branch for.
            assert engine.proposer.lookahead_hits > 0
    finally:
        link.close()


def test_sampling_with_a_seed_is_the_same_alone_and_speculative(trio: Trio) -> None:
    fields: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "seed": 5}
    plain = run(trio.engine(), [make_request("a", trio.prompts[0], **fields)])["a"]
    engine = trio.engine(
        colocated=LocalLink(trio.worker(trio.target)),
        speculation={"mode": "colocated", "num_draft_tokens": 4},
    )
    company = [make_request(f"c{i}", prompt, max_tokens=20) for i, prompt in enumerate(trio.prompts)]
    speculative = run(engine, [make_request("b", trio.prompts[0], **fields), *company])["b"]
    assert speculative.token_ids == plain.token_ids

"""A tiny random target whose answers a smaller draft can learn, and data made from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from generation.distillation.continuation import Sampling
from generation.distillation.dataset import Example, generate, read_dataset
from generation.distillation.prompts import DistillationPrompt

VOCABULARY = 64
END = 63


def make_target(num_layers: int = 3, seed: int = 0) -> PreTrainedModel:
    """A Llama with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train(False)
    model.requires_grad_(False)
    return model


def make_prompts(count: int, seed: int = 0) -> list[DistillationPrompt]:
    """Random prompts of 5 to 20 ids in two domains."""
    rng = random.Random(seed)
    return [
        DistillationPrompt(
            f"q{number}",
            ("red", "blue")[number % 2],
            f"question number {number}",
            tuple(rng.randrange(VOCABULARY - 1) for _ in range(rng.randint(5, 20))),
        )
        for number in range(count)
    ]


SAMPLING = Sampling(temperatures=(0.0, 0.7), max_new_tokens=12, top_k=16, end_ids=frozenset([END]))


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return make_target()


@pytest.fixture(scope="session")
def target_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    """120 prompts with two answers each."""
    folder = tmp_path_factory.mktemp("data")
    generate(make_target(), make_prompts(120), folder, SAMPLING, prompts_per_shard=8)
    return list(read_dataset(folder))

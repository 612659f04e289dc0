"""The engine's promises on every kind of device: the CPU always, a GPU where there is one (``-m gpu``).

A tiny random-weight model in float32, where texts have no near-ties, so that equal means equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from generation.config import ModelConfig
from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.loading import load_model
from generation.model_runner import LoadedModel
from tests.generation.fakes import make_engine, make_request, run
from tests.generation.test_architectures import COMMON, save

PROMPTS = [list(range(3 + i, 40 + 5 * i)) for i in range(4)]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 17}
GPU = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
    ],
)


@pytest.fixture(scope="module", params=["cpu", GPU])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, LoadedModel]:
    """Target and draft: different weights of one shape."""
    models = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("tiny")
        save(LlamaConfig(**COMMON), folder, seed)
        options = {"device": request.param, "dtype": "float32", "packed_linear": False}
        models.append(load_model(ModelConfig(model=str(folder), **options)))
    return models[0], models[1]


def texts(engine: Any, **fields: Any) -> list[list[int]]:
    requests = [make_request(f"r{i}", p, max_tokens=20, **fields) for i, p in enumerate(PROMPTS)]
    answers = run(engine, requests)
    engine.check_integrity()
    assert engine.scheduler.running == []
    return [answers[f"r{i}"].token_ids for i in range(len(PROMPTS))]


def speculative(pair: tuple[LoadedModel, LoadedModel], draft: LoadedModel) -> Any:
    link = LocalLink(DraftWorker(draft, num_slots=4, slot_length=320))
    return make_engine(pair[0], num_tokens=1024, colocated=link, speculation={"mode": "colocated"})


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("own", [True, False], ids=["the target as draft", "another draft"])
def test_speculative_is_plain(
    pair: tuple[LoadedModel, LoadedModel], fields: dict[str, Any], own: bool
) -> None:
    plain = texts(make_engine(pair[0], num_tokens=1024), **fields)
    assert texts(speculative(pair, pair[0] if own else pair[1]), **fields) == plain
    assert len({tuple(text) for text in plain}) == len(PROMPTS)


def test_alone_is_in_company(pair: tuple[LoadedModel, LoadedModel]) -> None:
    together = texts(make_engine(pair[0], num_tokens=1024), **SAMPLED)
    alone = texts(make_engine(pair[0], num_tokens=256, batch=1), **SAMPLED)
    assert alone == together


def test_weights_and_cache_are_where_they_should_be(pair: tuple[LoadedModel, LoadedModel]) -> None:
    target, _ = pair
    engine = make_engine(target, num_tokens=1024)
    assert {tensor.device for tensor in engine.runner.pool.keys} == {target.device}
    assert {weight.device for weight in target.decoder.parameters()} == {target.device}

"""Ways of holding a model's weights: quantised, compiled; and pairs that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from generation.attention import Segment
from generation.config import ModelConfig
from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.loading import ModelNotUsable, check_pair, load_model
from generation.model_runner import LoadedModel, ModelRunner
from tests.generation.fakes import make_engine, make_request, run
from tests.generation.test_architectures import COMMON, save

IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.2}
    save(LlamaConfig(**{**COMMON, **size}), path, seed=0)
    return path


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), device="cpu", **options))


def logits(model: LoadedModel) -> torch.Tensor:
    return ModelRunner(model, 1, 128).forward([Segment(0, 0, IDS)], range(len(IDS)))


@pytest.mark.parametrize(("kind", "likeness"), [("int8", 0.97), ("int4", 0.6)])
@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_say_nearly_the_same_and_speculation_nothing_else(
    folder: Path, kind: str, likeness: float
) -> None:
    pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    whole = logits(loaded(folder, dtype="float32"))
    model = loaded(folder, dtype="float32", quantization=kind)
    assert not torch.equal(logits(model), whole), "the weights are not quantised at all"
    assert torch.cosine_similarity(logits(model), whole, dim=-1).min() > likeness
    request = make_request("r", IDS, max_tokens=24)
    plain = run(make_engine(model), [request])["r"]
    link = LocalLink(DraftWorker(loaded(folder, dtype="float32"), num_slots=2, slot_length=256))
    drafted = make_engine(model, colocated=link, speculation={"mode": "colocated"})
    speculative = run(drafted, [request])["r"]
    assert speculative.token_ids == plain.token_ids
    assert speculative.last.stats is not None
    assert speculative.last.stats.num_accepted_tokens > 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_says_the_same(folder: Path) -> None:
    """Needs a C++ compiler and a minute."""
    compiled = loaded(folder, dtype="float32", compile=True)
    assert torch.allclose(logits(compiled), logits(loaded(folder, dtype="float32")), atol=1e-4)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match="nowhere"):
        loaded(tmp_path / "nowhere")


class _Vocabulary:
    def __init__(self, **ids: int) -> None:
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_a_pair_of_two_tokenizers_is_refused_by_name() -> None:
    check_pair(_Vocabulary(a=0, b=1), _Vocabulary(b=1, a=0), "big", "small")
    with pytest.raises(ModelNotUsable, match=r"small.*big"):
        check_pair(_Vocabulary(a=0, b=1), _Vocabulary(a=1, b=0), "big", "small")

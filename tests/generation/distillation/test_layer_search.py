"""Layers are scored by what they do, and chosen in the order that the scores say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from generation.distillation.layer_search import LayerScores, choose_layers, score_layers
from tests.generation.distillation.conftest import make_target


def test_a_layer_that_does_nothing_has_no_influence() -> None:
    model = make_target()
    base: Any = model.base_model
    layer = base.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    scores = score_layers(model)
    assert scores[1].influence == pytest.approx(0.0, abs=1e-5)
    assert min(scores[0].influence, scores[2].influence) > 0.01


def test_the_attention_implementation_is_put_back(target: PreTrainedModel) -> None:
    target.set_attn_implementation("sdpa")
    score_layers(target)
    assert target.config._attn_implementation == "sdpa"


def test_copying_layers_go_before_influential_ones() -> None:
    scores = [LayerScores(0.02, 0.1, 0.0) for _ in range(10)]
    scores[0] = LayerScores(0.9, 0.1, 0.0)
    scores[2] = LayerScores(0.1, 0.7, 0.0)
    scores[4] = LayerScores(0.02, 0.8, 0.0)  # a better one, but further up
    scores[6] = LayerScores(0.03, 0.2, 0.9)
    scores[8] = LayerScores(0.5, 0.0, 0.1)
    assert choose_layers(scores, 4) == [0, 2, 6, 9]
    assert choose_layers(scores, 5) == [0, 2, 6, 8, 9]
    assert choose_layers(scores, 1) == [0]
    with pytest.raises(ValueError, match="10 layers"):
        choose_layers(scores, 11)

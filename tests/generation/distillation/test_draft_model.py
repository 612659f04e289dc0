"""Drafts made of the target's layers: what is kept, what is refused, what 8 bits cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from generation.config import ModelConfig
from generation.distillation.draft_model import (
    DraftCard,
    DraftNotUsable,
    create_draft,
    frequent_ids,
    is_draft_folder,
    load_draft,
    quantize_rows,
    read_card,
    save_draft,
    target_fingerprint,
    trim_draft,
)
from generation.loading import load_draft as load_for_engine
from tests.generation.distillation.conftest import VOCABULARY, make_target

IDS = [1, 4, 9, 16, 25, 36, 49, 63]


def _card(folder: Path, quantization: str = "none") -> DraftCard:
    return DraftCard("tiny", target_fingerprint(folder), (0, 2), len(IDS), quantization)


def test_all_layers_and_the_whole_head_are_the_target(target: PreTrainedModel) -> None:
    draft = create_draft(target, [0, 1, 2], None)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(draft.head(draft.hidden(ids)), target(ids).logits)


def test_a_trimmed_head_scores_its_ids_as_the_target_does(target: PreTrainedModel) -> None:
    draft = create_draft(target, [0, 1, 2], IDS)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(draft.head(draft.hidden(ids)), target(ids).logits[..., IDS])
    assert draft.id_map is not None
    assert draft.id_map.tolist() == IDS


def test_the_embedding_is_not_trained_and_not_shipped(
    target: PreTrainedModel, target_folder: Path, tmp_path: Path
) -> None:
    draft = create_draft(target, [0, 2], IDS)
    assert not any("embed" in name for name, _ in draft.trainable())
    save_draft(draft, tmp_path, _card(target_folder))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert not any("embed" in name for name in file.keys())  # noqa: SIM118
    loaded = load_draft(tmp_path, target_folder)
    ids = torch.tensor([[7, 8, 9]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.head(loaded.hidden(ids)), draft.head(draft.hidden(ids)))
    assert is_draft_folder(tmp_path)
    assert read_card(tmp_path).layers == (0, 2)


def test_eight_bits_change_logits_little(
    target: PreTrainedModel, target_folder: Path, tmp_path: Path
) -> None:
    draft = create_draft(target, [0, 2], IDS)
    save_draft(draft, tmp_path, _card(target_folder, "int8"))
    loaded = load_draft(tmp_path, target_folder)
    ids = torch.arange(40)[None] % VOCABULARY
    with torch.inference_mode():
        before, after = draft.head(draft.hidden(ids)), loaded.head(loaded.hidden(ids))
    assert (before - after).abs().mean() < 0.05 * before.std()
    assert (before.argmax(-1) == after.argmax(-1)).float().mean() > 0.9


def test_a_row_is_off_by_at_most_half_a_step() -> None:
    weight = (
        torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6)[:, None]
    )
    quantised, scale = quantize_rows(weight)
    assert ((quantised.float() * scale[:, None] - weight).abs() <= scale[:, None] / 2 + 1e-6).all()


def test_another_target_is_refused(target: PreTrainedModel, target_folder: Path, tmp_path: Path) -> None:
    save_draft(create_draft(target, [0], IDS), tmp_path / "draft", _card(target_folder))
    make_target(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(DraftNotUsable, match="another tiny"):
        load_draft(tmp_path / "draft", tmp_path / "other")


def test_a_broken_card_is_said_in_one_sentence(
    target: PreTrainedModel, target_folder: Path, tmp_path: Path
) -> None:
    save_draft(create_draft(target, [0], IDS), tmp_path, _card(target_folder))
    (tmp_path / "draft.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DraftNotUsable, match=r"draft\.json"):
        load_draft(tmp_path, target_folder)


def test_weights_that_do_not_fit_are_refused(
    target: PreTrainedModel, target_folder: Path, tmp_path: Path
) -> None:
    save_draft(create_draft(target, [0], IDS), tmp_path, _card(target_folder))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DraftNotUsable, match="do not fit"):
        load_draft(tmp_path, target_folder)


def test_layers_the_target_lacks_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(DraftNotUsable, match="among 0 to 2"):
        create_draft(target, [0, 3], None)


def test_the_most_frequent_ids_and_the_end_are_kept() -> None:
    ids = frequent_ids([[5, 5, 5, 2, 2, 9], [2, 7, 5]], size=3, always=[1])
    assert ids == [1, 2, 5]


def test_frequent_ids_of_a_given_set_begin_with_the_end_and_fill_up_with_the_lowest() -> None:
    texts = [[5, 5, 5, 2, 2, 9], [2, 7, 5]]
    assert frequent_ids(texts, size=4, always=[1], among=[1, 3, 4, 7, 9]) == [1, 3, 7, 9]


def test_a_trimmed_draft_scores_the_ids_it_kept_as_before(target: PreTrainedModel) -> None:
    draft = create_draft(target, [0, 1, 2], IDS)
    ids = torch.tensor([[3, 8, 5, 1]])
    whole = trim_draft(draft, [0, 1, 2], IDS[:9])
    assert whole.id_map is not None
    assert whole.id_map.tolist() == IDS[:9]
    assert torch.allclose(whole.head(whole.hidden(ids)), draft.head(draft.hidden(ids))[..., :9])
    fewer = trim_draft(draft, [0, 2], None)
    assert fewer.config.num_hidden_layers == 2
    assert fewer.id_map is not None
    assert fewer.id_map.tolist() == IDS
    same = create_draft(target, [0, 2], IDS)
    assert torch.allclose(fewer.head(fewer.hidden(ids)), same.head(same.hidden(ids)))


def test_a_draft_is_not_trimmed_to_what_it_lacks(target: PreTrainedModel) -> None:
    draft = create_draft(target, [0, 2], [1, 2, 3])
    with pytest.raises(DraftNotUsable, match="layers 0 to 1"):
        trim_draft(draft, [0, 2], None)
    with pytest.raises(DraftNotUsable, match="None of the ids"):
        trim_draft(draft, [0], [60])


def test_the_engine_loads_it_with_its_id_map(
    target: PreTrainedModel, target_folder: Path, tmp_path: Path
) -> None:
    save_draft(create_draft(target, [0, 2], IDS), tmp_path, _card(target_folder, "int8"))
    loaded = load_for_engine(
        ModelConfig(model=str(tmp_path), dtype="float32"), ModelConfig(model=str(target_folder))
    )
    assert loaded.id_map is not None
    assert loaded.id_map.tolist() == IDS
    assert len(loaded.cache_shape.layers) == 2

"""A whole distillation on a tiny target: by the service's verifier, in several processes, in bounded time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from generation.config import EngineConfig, ModelConfig
from generation.distillation.continuation import Sampling
from generation.distillation.draft_model import DraftModel, create_draft, read_card
from generation.distillation.prompts import split_prompts
from generation.distillation.training import TrainingConfig
from rag_service.distillation_plan import DistillationPlan, TooLittleData
from rag_service.distilling import distil, generate_data
from rag_service.draft_verifier import DraftVerifier, spread
from tests.generation.distillation.conftest import END, VOCABULARY, make_prompts, make_target
from tests.rag_service.cli.test_draft import save_tokenizer

PROMPTS = make_prompts(60)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_target().save_pretrained(folder)
    save_tokenizer(folder, "w")
    return folder


def _plan(target: Path, folder: Path, **changes: Any) -> DistillationPlan:
    training = TrainingConfig(
        learning_rate=5e-3, batch_size=4, minutes=None, max_steps=12, eval_steps=6, bf16=False, log_steps=1
    )
    sampling = Sampling((0.0, 0.7), 8, 16, end_ids=frozenset([END]))
    return replace(DistillationPlan(target, "tiny", folder, sampling, training), **changes)


def _verifier(target: Path, folder: Path) -> DraftVerifier:
    model = ModelConfig(model=str(target), dtype="float32")
    return DraftVerifier(model, EngineConfig(), spread(split_prompts(PROMPTS)[1], 4), folder, 12)


def _new_draft() -> DraftModel:
    return create_draft(make_target(), [0, 2], list(range(VOCABULARY)))


@pytest.mark.parametrize("processes", [1, 2])
def test_every_evaluation_has_the_verifiers_figures(target: Path, tmp_path: Path, processes: int) -> None:
    """In one process and, by torchrun's launcher, in two; each is then asked again and goes no step further."""
    plan = _plan(target, tmp_path, processes=processes)
    verify = _verifier(target, tmp_path / "verified")
    result = distil(plan, PROMPTS, _new_draft(), [0, 2], verify)
    measured = [line for line in result.log if "eval_alpha" in line]
    assert [line["step"] for line in measured] == [6, 12]
    for line in measured:
        assert 0.0 < line["eval_verified_alpha"] < 1.0
        assert 0.0 < line["eval_verified_alpha_t0.7"] < 1.0
        assert 0.0 < line["eval_verified_overlap_t0.7"] < 1.0
    assert not (tmp_path / "verified").exists()
    assert read_card(result.draft_folder).layers == (0, 2)
    assert result.after["all/0"].alpha > result.before["all/0"].alpha
    table = verify.table(result.draft_folder)
    assert table["pooled"]["acceptance_rate"] == pytest.approx(measured[-1]["eval_verified_alpha"], abs=0.15)
    num_lines = len((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines())
    again = distil(plan, PROMPTS, _new_draft(), [0, 2])
    assert again.after == result.after
    assert len((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()) == num_lines


def test_a_draft_that_is_the_target_is_verified_as_such(target: Path, tmp_path: Path) -> None:
    found = _verifier(target, tmp_path / "verified")(create_draft(make_target(), [0, 1, 2], None))
    assert found["verified_alpha"] > 0.9  # 8 bits: the target but for near-ties
    assert found["verified_overlap_t0.7"] > 0.9


def test_prompts_to_verify_with_come_from_every_domain() -> None:
    assert [prompt.domain for prompt in spread(PROMPTS[::2] + PROMPTS[1::2], 5)] == [
        "red", "blue", "red", "blue", "red",
    ]  # fmt: skip
    assert spread([], 5) == []


def test_time_for_the_data_ends_its_recording_and_training_uses_what_there_is(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(target, tmp_path, data_minutes=1.0, prompts_per_shard=20)
    now = iter([0.0, 10.0, 50.0, 61.0, 62.0])  # the deadline is set at 0; the third shard comes too late
    monkeypatch.setattr("rag_service.distilling.time", SimpleNamespace(time=lambda: next(now)))
    result = distil(plan, PROMPTS, _new_draft(), [0, 2])
    assert result.num_training + result.num_held_out == 40


def test_no_time_for_any_data_is_said(target: Path, tmp_path: Path) -> None:
    plan = _plan(target, tmp_path, data_minutes=0.0)
    with pytest.raises(TooLittleData, match="0 training and 0 held-out prompts"):
        distil(plan, PROMPTS, _new_draft(), [0, 2])


def test_recorded_data_stay_as_they_are_once_training_has_begun(target: Path, tmp_path: Path) -> None:
    plan = _plan(target, tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-3" / "trainer_state.json").write_text("{}", encoding="utf-8")
    generate_data(plan)
    assert not plan.data_folder.exists()

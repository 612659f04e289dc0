"""A minute of distillation raises held-out α by a clear margin, and a killed run goes on exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from generation.distillation.clock import Clock
from generation.distillation.dataset import Example
from generation.distillation.draft_model import DraftModel, create_draft
from generation.distillation.offline import offline_acceptance
from generation.distillation.prompts import is_held_out
from generation.distillation.training import TrainingConfig, last_checkpoint, train
from tests.generation.distillation.conftest import VOCABULARY

CONFIG = TrainingConfig(
    learning_rate=5e-3,
    batch_size=4,
    minutes=None,
    max_steps=24,
    warmup_steps=4,
    eval_steps=6,
    bf16=False,
    log_steps=1,
)


def _split(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    held = [example for example in examples if is_held_out(example.prompt.id)]
    return [example for example in examples if example not in held], held


def _draft(target: PreTrainedModel) -> DraftModel:
    return create_draft(target, [0, 2], list(range(VOCABULARY)))


def _run(draft: DraftModel, examples: list[Example], folder: Path, config: TrainingConfig) -> list[Any]:
    lines: list[dict[str, Any]] = []
    training, held_out = _split(examples)
    train(draft, training, held_out, folder, config, report=lines.append)
    return lines


def test_held_out_acceptance_rises_by_a_clear_margin(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    draft = _draft(target)
    _, held_out = _split(examples)
    before = offline_acceptance(draft, held_out)
    config = replace(CONFIG, minutes=1.0, max_steps=100, eval_steps=25)
    _run(draft, examples, tmp_path, config)
    after = offline_acceptance(draft, held_out)
    for temperature, margin in ((0.0, 0.1), (0.7, 0.05)):
        assert after["all", temperature].alpha > before["all", temperature].alpha + margin
    assert {domain for domain, _ in after} == {"all", "red", "blue"}


def test_killed_and_resumed_gives_the_same_losses(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    whole_draft = _draft(target)
    whole = _run(whole_draft, examples, tmp_path / "whole", CONFIG)

    class Killed(Exception):
        pass

    def dies(line: dict[str, Any]) -> None:
        if line.get("step") == 20 and "loss" in line:
            raise Killed

    training, held_out = _split(examples)
    with pytest.raises(Killed):
        train(_draft(target), training, held_out, tmp_path / "cut", CONFIG, report=dies)
    resumed_draft = _draft(target)
    resumed = _run(resumed_draft, examples, tmp_path / "cut", CONFIG)
    assert min(losses(resumed)) == 19  # it began at the checkpoint of step 18, not anew
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 18}
    final = [line["eval_alpha"] for line in whole if "eval_alpha" in line][-1]
    assert [line["eval_alpha"] for line in resumed if "eval_alpha" in line][-1] == final


def test_a_training_that_had_ended_is_not_trained_further(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    first, second = _draft(target), _draft(target)
    _run(first, examples, tmp_path, CONFIG)
    assert _run(second, examples, tmp_path, CONFIG) == []
    again = dict(second.named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in first.named_parameters())


def test_the_best_checkpoint_is_what_remains(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    draft = _draft(target)
    lines = _run(draft, examples, tmp_path, CONFIG)
    best = max(line["eval_alpha"] for line in lines if "eval_alpha" in line)
    _, held_out = _split(examples)
    assert offline_acceptance(draft, held_out)["all", 0.0].alpha == pytest.approx(best, abs=1e-4)


def test_the_services_verifier_is_asked_at_every_evaluation(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    seen: list[DraftModel] = []

    def verify(draft: DraftModel) -> dict[str, float]:
        seen.append(draft)
        return {"verified_alpha": 0.25}

    lines: list[dict[str, Any]] = []
    training, held_out = _split(examples)
    config = replace(CONFIG, max_steps=6)
    train(_draft(target), training, held_out, tmp_path, config, verify=verify, report=lines.append)
    assert len(seen) == len([line for line in lines if line.get("eval_verified_alpha") == 0.25]) >= 1


def test_the_rate_warms_up_stays_and_falls(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock.json", None, 100, 10, 0.3)
    assert clock.rate(0) == pytest.approx(0.1)
    assert clock.rate(40) == 1.0
    assert clock.rate(85) == pytest.approx(0.5)
    assert clock.rate(100) == 0.0


def test_time_fixes_the_end_once_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock.json", 1.0, 10_000, 0, 0.25)
    for step in range(1, 46):
        clock.tick(step, 1.0)
    assert (clock.decay_start, clock.end) == (45, 60)
    clock.tick(46, 500.0)
    assert clock.end == 60
    clock.save()
    again = Clock(tmp_path / "clock.json", 1.0, 10_000, 0, 0.25)
    assert (again.decay_start, again.end, again.spent_seconds) == (45, 60, 545.0)
    assert json.loads((tmp_path / "clock.json").read_text())["end"] == 60


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path: Path) -> None:
    for step, files in ((6, ("model.safetensors", "trainer_state.json")), (12, ("model.safetensors",))):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in files:
            (tmp_path / f"checkpoint-{step}" / name).write_text("{}", encoding="utf-8")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert not (tmp_path / "checkpoint-12").exists()


def test_a_short_training_is_evaluated_and_saved_by_its_share_of_the_time(
    target: PreTrainedModel, examples: list[Example], tmp_path: Path
) -> None:
    """The steps between evaluations would never be reached: the clock asks for them."""
    config = replace(CONFIG, minutes=1e-4, eval_steps=1000, eval_share=0.2, max_steps=8, decay_share=0.5)
    lines = _run(_draft(target), examples, tmp_path, config)
    assert len([line for line in lines if "eval_alpha" in line]) >= 2
    assert last_checkpoint(tmp_path) is not None

"""Rounds of training on the draft's own answers, after the first training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from generation.distillation.on_policy import on_policy_examples
from generation.distillation.prompts import read_prompts, split_prompts
from generation.distillation.training import TrainingConfig, train
from rag_service.distillation_plan import DistillationPlan, recorded
from rag_service.distilling import (
    DistillationResult,
    Line,
    Progress,
    continue_from,
    end_ids,
    finish,
    load_target,
)


def on_policy_rounds(
    plan: DistillationPlan,
    result: DistillationResult,
    rounds: int,
    progress: Progress | None = None,
    report: Callable[[Line], None] | None = None,
) -> DistillationResult:
    """Train on the draft's own answers, scored by the target, mixed with the recorded ones; ``rounds`` times.

    A round has a quarter of the first training's time or steps, and its own ``checkpoints-N``.
    """
    training, _ = split_prompts(read_prompts(plan.folder / "prompts.jsonl"))
    train_set, held_set = recorded(plan, training)
    draft, layers = continue_from(result.draft_folder, plan.target_folder)
    target = load_target(plan.target_folder, pack=True)
    sampling = replace(plan.sampling, end_ids=plan.sampling.end_ids or end_ids(target))
    for number in range(1, rounds + 1):

        def tell(done: int, total: int, name: str = f"on-policy answers, round {number}") -> None:
            if progress is not None:
                progress(name, done, total)

        seed = plan.training.seed + number
        own = on_policy_examples(draft.eval(), target, train_set, sampling, seed, tell)
        folder = plan.folder / f"checkpoints-{number}"
        draft = train(draft, [*train_set, *own], held_set, folder, _shorter(plan.training), None, report)
    after, saved = finish(plan, draft, layers, held_set)
    return replace(result, after=after, quantised=saved)


def _shorter(config: TrainingConfig) -> TrainingConfig:
    rate = config.learning_rate / 4
    if config.minutes is not None:
        return replace(config, minutes=config.minutes / 4, learning_rate=rate)
    return replace(config, max_steps=max(1, config.max_steps // 4), learning_rate=rate)

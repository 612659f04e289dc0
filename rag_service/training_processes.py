"""Training in one process or, by torchrun's launcher, in several: one a GPU, or of one thread each on a CPU."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from generation.distillation.dataset import Example
from generation.distillation.draft_model import (
    DraftCard,
    DraftModel,
    load_draft,
    read_card,
    save_draft,
    target_fingerprint,
)
from generation.distillation.prompts import read_prompts, split_prompts
from generation.distillation.training import Verify, train
from rag_service.distillation_plan import DistillationFailed, DistillationPlan, recorded

Line = dict[str, Any]
Examples = tuple[Sequence[Example], Sequence[Example]]
"""To train on, and held out."""


def train_draft(
    plan: DistillationPlan,
    draft: DraftModel,
    layers: Sequence[int],
    examples: Examples,
    verify: Verify | None,
    report: Callable[[Line], None] | None,
) -> DraftModel:
    """Train ``draft`` on the recorded data of the plan's folder, in ``plan.processes`` processes.

    Log lines are appended to ``log.jsonl``. With several processes ``verify`` and ``report`` are handed to them,
    so both must be picklable. Raises ``DistillationFailed`` when one of them fails.
    """
    if plan.processes <= 1:
        return _train_share(plan, draft, examples, verify, report)
    size = int(draft.head.weight.shape[0])
    start = plan.folder / "start"
    print_of_target = target_fingerprint(plan.target_folder)
    save_draft(draft, start, DraftCard(plan.target_name, print_of_target, tuple(layers), size))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, _train_as_one_of_several)(plan, verify, report)
    except Exception as error:
        raise DistillationFailed(
            f"A training process failed, and a new run goes on from its checkpoint: {error}"
        ) from error
    return load_draft(plan.folder / "trained", plan.target_folder)


def _train_as_one_of_several(
    plan: DistillationPlan, verify: Verify | None, report: Callable[[Line], None] | None
) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    draft = trainable(load_draft(plan.folder / "start", plan.target_folder))
    training, _ = split_prompts(read_prompts(plan.folder / "prompts.jsonl"))
    draft = _train_share(plan, draft, recorded(plan, training), verify, report)
    if os.environ.get("RANK", "0") == "0":
        save_draft(draft, plan.folder / "trained", read_card(plan.folder / "start"))


def _train_share(
    plan: DistillationPlan,
    draft: DraftModel,
    examples: Examples,
    verify: Verify | None,
    report: Callable[[Line], None] | None,
) -> DraftModel:
    def record(line: Line) -> None:
        with (plan.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if report is not None:
            report(line)

    return train(draft, *examples, plan.checkpoint_folder, plan.training, verify, record)


def trainable(draft: DraftModel) -> DraftModel:
    """All weights but the target's embedding can change again."""
    for _, weight in draft.named_parameters():
        weight.requires_grad_(True)
    draft.decoder.get_input_embeddings().weight.requires_grad_(False)
    return draft

"""Distillation from prompts to a saved draft: generate, train, quantise, evaluate, report.

Everything lies in one work folder, so that a killed run goes on where it stopped:
``prompts.jsonl``, ``data/`` (the target's outputs), ``checkpoints/``, ``log.jsonl``, ``draft/`` (the result).
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from generation.distillation.dataset import Example, generate
from generation.distillation.draft_model import (
    DraftCard,
    DraftModel,
    DraftNotUsable,
    create_draft,
    frequent_ids,
    load_draft,
    read_card,
    save_draft,
    target_fingerprint,
    trim_draft,
)
from generation.distillation.layer_search import choose_layers, score_layers
from generation.distillation.offline import OfflineAcceptance, offline_acceptance
from generation.distillation.prompts import (
    DistillationPrompt,
    check_no_leak,
    fingerprint,
    read_prompts,
    split_prompts,
    write_prompts,
)
from generation.distillation.training import Verify, last_checkpoint
from generation.packing import pack_linears
from rag_service.distillation_plan import DistillationFailed, DistillationPlan, TooLittleData, recorded
from rag_service.training_processes import train_draft, trainable

Progress = Callable[[str, int, int], None]
Line = dict[str, Any]
Figures = dict[str, OfflineAcceptance]


@dataclass(frozen=True, slots=True)
class DistillationResult:
    """Offline figures of the held-out prompts by ``domain/temperature``, before and after."""

    draft_folder: Path
    before: Figures
    after: Figures
    quantised: Figures
    num_training: int
    num_held_out: int
    num_answer_tokens: int
    data_fingerprint: str
    log: list[Line]


def load_target(folder: Path, *, pack: bool) -> PreTrainedModel:
    """The target as the generator runs it: bfloat16; on a CPU with blocked weights when ``pack``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    if pack and device == "cpu":
        pack_linears(model)
    return model


def new_draft(
    target_folder: Path,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int] | None,
    num_layers: int,
    head_size: int | None,
) -> tuple[DraftModel, list[int]]:
    """A draft to train: given or searched layers, and a head of the ids most frequent in ``texts``.

    Without texts the head takes the lowest ids, which a BPE vocabulary orders by frequency of merging.
    """
    target = load_target(target_folder, pack=False)
    chosen = list(layers) if layers else choose_layers(score_layers(target), num_layers)
    if head_size is None or head_size >= target.config.vocab_size:
        return create_draft(target, chosen, None), chosen
    every = range(target.config.vocab_size)
    return create_draft(target, chosen, frequent_ids(texts, head_size, end_ids(target), every)), chosen


def trimmed(
    folder: Path,
    target_folder: Path,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int] | None,
    head_size: int | None,
) -> tuple[DraftModel, list[int]]:
    """A smaller draft of a trained one: some of its layers (by the target's numbers), fewer of its ids."""
    draft, known = load_draft(folder, target_folder), list(read_card(folder).layers)
    chosen = list(layers) if layers else known
    missing = [layer for layer in chosen if layer not in known]
    if missing:
        raise DraftNotUsable(f"The draft {folder.name} has the target's layers {known}, not {missing}.")
    ids = None
    if head_size is not None and head_size < draft.head.weight.shape[0]:
        have = range(draft.config.vocab_size) if draft.id_map is None else draft.id_map.tolist()
        ends = end_ids(load_target(target_folder, pack=False))
        ids = frequent_ids(texts, head_size, ends.intersection(have), have)
    return trim_draft(draft, [known.index(layer) for layer in chosen], ids), chosen


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer, by the model's generation settings."""
    config = model.generation_config
    found = config.eos_token_id if config is not None else None
    found = model.config.eos_token_id if found is None else found
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list) else frozenset([int(found)])


def generate_data(plan: DistillationPlan, progress: Progress | None = None) -> None:
    """Fill the data folder from ``prompts.jsonl``, with ``workers`` processes.

    Once training has begun its data stays as it is: a resumed training must see the same.
    """
    if last_checkpoint(plan.checkpoint_folder) is not None:
        return
    for left in plan.data_folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    deadline = None if plan.data_minutes is None else time.time() + 60 * plan.data_minutes
    if plan.workers <= 1:
        _generate_share(plan, 0, deadline, progress)
        return
    context = torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_generate_share, args=(plan, index, deadline, None), daemon=True)
        for index in range(plan.workers)
    ]
    for process in started:
        process.start()
    total = -(-len(read_prompts(plan.folder / "prompts.jsonl")) // plan.prompts_per_shard)
    while any(process.is_alive() for process in started):
        for process in started:
            process.join(timeout=1.0)
        if progress is not None:
            progress("shards", len(list(plan.data_folder.glob("shard-*.safetensors"))), total)
    if any(process.exitcode for process in started):
        raise DistillationFailed(
            "A generating process failed; what it finished is kept, and a new run goes on."
        )


def _generate_share(
    plan: DistillationPlan, index: int, deadline: float | None, progress: Progress | None
) -> None:
    if plan.workers > 1:
        torch.set_num_threads(1)
    model = load_target(plan.target_folder, pack=True)
    sampling = replace(plan.sampling, end_ids=plan.sampling.end_ids or end_ids(model))
    parent = multiprocessing.parent_process()

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("shards", done, total)

    def goes_on() -> bool:
        # A parent that was killed takes nobody with it: its workers would compete with those of the next run.
        return (deadline is None or time.time() < deadline) and (parent is None or parent.is_alive())

    generate(
        model,
        read_prompts(plan.folder / "prompts.jsonl"),
        plan.data_folder,
        sampling,
        plan.prompts_per_shard,
        plan.training.seed,
        target_fingerprint(plan.target_folder),
        (index, plan.workers),
        report,
        goes_on,
    )


def distil(
    plan: DistillationPlan,
    prompts: Sequence[DistillationPrompt],
    draft: DraftModel,
    layers: Sequence[int],
    verify: Verify | None = None,
    progress: Progress | None = None,
    report: Callable[[Line], None] | None = None,
) -> DistillationResult:
    """Train ``draft`` on the target's answers to ``prompts`` and save the best of it in ``folder/draft``."""
    training, held_out = split_prompts(prompts)
    check_no_leak(training, held_out)
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_prompts(plan.folder / "prompts.jsonl", [*training, *held_out])
    generate_data(plan, progress)
    train_set, held_set = recorded(plan, training)
    if not held_set or not train_set:
        raise TooLittleData(
            f"{len(train_set)} training and {len(held_set)} held-out prompts have answers: both are needed, so "
            "name more questions or give the data more time."
        )
    before = by_name(offline_acceptance(draft, held_set))
    draft = train_draft(plan, draft, layers, (train_set, held_set), verify, report)
    after, saved = finish(plan, draft, layers, held_set)
    return DistillationResult(
        draft_folder=plan.draft_folder,
        before=before,
        after=after,
        quantised=saved,
        num_training=len(train_set),
        num_held_out=len(held_set),
        num_answer_tokens=sum(len(a.token_ids) for e in train_set for a in e.continuations),
        data_fingerprint=fingerprint(example.prompt for example in [*train_set, *held_set]),
        log=read_log(plan.folder / "log.jsonl"),
    )


def finish(
    plan: DistillationPlan, draft: DraftModel, layers: Sequence[int], held_out: Sequence[Example]
) -> tuple[Figures, Figures]:
    """Save the draft; its figures as trained and as saved."""
    head_size = int(draft.head.weight.shape[0])
    card = DraftCard(
        plan.target_name, target_fingerprint(plan.target_folder), tuple(layers), head_size, plan.quantization
    )
    save_draft(draft, plan.draft_folder, card)
    saved = load_draft(plan.draft_folder, plan.target_folder)
    return by_name(offline_acceptance(draft, held_out)), by_name(offline_acceptance(saved, held_out))


def read_log(path: Path) -> list[Line]:
    """The training's log lines; a resumed run's repeated steps keep their last line."""
    if not path.exists():
        return []
    lines: dict[tuple[int, bool], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines[int(line["step"]), "eval_alpha" in line] = line
    return [lines[key] for key in sorted(lines)]


def by_name(figures: dict[tuple[str, float], OfflineAcceptance]) -> dict[str, OfflineAcceptance]:
    """``{"finance/0.7": …}``, fit for JSON."""
    return {f"{domain}/{temperature:g}": value for (domain, temperature), value in sorted(figures.items())}


def continue_from(folder: Path, target_folder: Path) -> tuple[DraftModel, tuple[int, ...]]:
    """An existing draft, ready to be trained further."""
    return trainable(load_draft(folder, target_folder)), read_card(folder).layers


def install(draft: Path, destination: Path) -> None:
    """Copy a finished draft folder to where it is configured."""
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(draft, partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.replace(destination)

"""Distillation from prompts to a saved draft: generate, train, quantise, evaluate, report.

Everything lies in one work folder, so that a killed run goes on where it stopped:
``prompts.jsonl``, ``data/`` (the target's outputs), ``checkpoints/``, ``log.jsonl``, ``draft/`` (the result).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from generation.distillation.continuation import Sampling
from generation.distillation.dataset import Example, generate, read_dataset
from generation.distillation.draft_model import (
    DraftCard,
    DraftModel,
    create_draft,
    frequent_ids,
    load_draft,
    read_card,
    save_draft,
    target_fingerprint,
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
from generation.distillation.training import TrainingConfig, Verify, train
from generation.packing import pack_linears

Progress = Callable[[str, int, int], None]
Line = dict[str, Any]
Figures = dict[str, OfflineAcceptance]


@dataclass(frozen=True, slots=True)
class DistillationPlan:
    """All that decides a distillation. ``workers``: processes of one thread each that run the target."""

    target_folder: Path
    target_name: str
    folder: Path
    sampling: Sampling = field(default_factory=Sampling)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    prompts_per_shard: int = 16
    workers: int = 1
    processes: int = 1
    """Training processes: one a GPU, or several of one thread each on a CPU."""
    quantization: str = "int8"

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    @property
    def draft_folder(self) -> Path:
        return self.folder / "draft"


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
    ends = end_ids(target)
    if texts:
        ids = frequent_ids(texts, head_size, ends)
        if len(ids) < head_size:
            missing = [token for token in range(target.config.vocab_size) if token not in set(ids)]
            ids = sorted([*ids, *missing[: head_size - len(ids)]])
    else:
        ids = sorted({*range(head_size - len(ends)), *ends})
    return create_draft(target, chosen, ids), chosen


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer, by the model's generation settings."""
    config = model.generation_config
    found = config.eos_token_id if config is not None else None
    found = model.config.eos_token_id if found is None else found
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list) else frozenset([int(found)])


def generate_data(plan: DistillationPlan, progress: Progress | None = None) -> None:
    """Fill the data folder from ``prompts.jsonl``, with ``workers`` processes."""
    if plan.workers <= 1:
        _generate_share(plan, 0, progress)
        return
    context = torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_generate_share, args=(plan, index, None)) for index in range(plan.workers)
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
        raise RuntimeError("A generating process failed; what it finished is kept, and a new run goes on.")


def _generate_share(plan: DistillationPlan, index: int, progress: Progress | None) -> None:
    if plan.workers > 1:
        torch.set_num_threads(1)
    model = load_target(plan.target_folder, pack=True)
    sampling = replace(plan.sampling, end_ids=plan.sampling.end_ids or end_ids(model))

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("shards", done, total)

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
    before = by_name(offline_acceptance(draft, held_set))
    log = plan.folder / "log.jsonl"

    def record(line: Line) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if report is not None:
            report(line)

    draft = train(draft, train_set, held_set, plan.folder / "checkpoints", plan.training, verify, record)
    after, saved = finish(plan, draft, layers, held_set)
    return DistillationResult(
        draft_folder=plan.draft_folder,
        before=before,
        after=after,
        quantised=saved,
        num_training=len(train_set),
        num_held_out=len(held_set),
        num_answer_tokens=sum(len(a.token_ids) for e in train_set for a in e.continuations),
        data_fingerprint=fingerprint(prompts),
        log=read_log(log),
    )


def recorded(
    plan: DistillationPlan, training: Sequence[DistillationPrompt]
) -> tuple[list[Example], list[Example]]:
    """The recorded examples of the training prompts, and those of all others."""
    kept = {prompt.id for prompt in training}
    examples = list(read_dataset(plan.data_folder))
    return (
        [example for example in examples if example.prompt.id in kept],
        [example for example in examples if example.prompt.id not in kept],
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
    draft = load_draft(folder, target_folder)
    for _, weight in draft.named_parameters():
        weight.requires_grad_(True)
    draft.decoder.get_input_embeddings().weight.requires_grad_(False)
    return draft, read_card(folder).layers


def install(draft: Path, destination: Path) -> None:
    """Copy a finished draft folder to where it is configured."""
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(draft, partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.replace(destination)


def settings_of(plan: DistillationPlan) -> dict[str, Any]:
    """The plan as plain values, for the report."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(plan), default=_plain))
    return values


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)

"""Training a draft with the Hugging Face Trainer: bounded in time, resumable, best checkpoint kept.

The Trainer brings checkpoints, exact resume, mixed precision, several devices (torchrun) and schedules; what
is ours is the loss, the packing of examples, the evaluation by acceptance and the clock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from generation.distillation.clock import Clock, ClockCallback
from generation.distillation.dataset import Example
from generation.distillation.draft_model import DraftModel
from generation.distillation.objective import ObjectiveWeights, position_losses
from generation.distillation.offline import offline_acceptance
from generation.distillation.optimizer import make_optimizer
from generation.distillation.packing import HeadIndex, PackingCollator

Verify = Callable[[DraftModel], Mapping[str, float]]
"""Measures the draft with the service's own verifier; figures by name, logged beside the offline ones.

Of several training processes the first alone is asked.
"""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How a draft is trained. ``minutes`` and ``max_steps``: whichever comes first ends the training."""

    learning_rate: float = 2e-3
    batch_size: int = 8
    minutes: float | None = 90.0
    max_steps: int = 20_000
    warmup_steps: int = 30
    decay_share: float = 0.3
    """The last part of the training, in which the learning rate falls to zero."""
    eval_steps: int = 50
    eval_share: float = 0.2
    """With a limit in minutes: evaluate and save after this share of the time too, if it comes first."""
    log_steps: int = 10
    patience: int = 6
    """Evaluations without a better α after which training stops."""
    prompt_positions: int = 256
    weights: ObjectiveWeights = field(default_factory=ObjectiveWeights)
    bf16: bool = True
    """Matrix products in bfloat16; weights and optimizer stay in float32."""
    seed: int = 0


class ExampleSet(Dataset[Example]):
    """A list of examples as torch wants it."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = list(examples)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


class DistillationModel(nn.Module):
    """The draft with its loss, in the shape the Trainer calls."""

    def __init__(self, draft: DraftModel, weights: ObjectiveWeights) -> None:
        super().__init__()
        self.draft = draft
        self._weights = weights

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        flat_positions: Tensor,
        top_rows: Tensor,
        top_logprobs: Tensor,
        is_prompt: Tensor,
    ) -> dict[str, Tensor]:
        """``loss`` (a scalar), and the mean overlap on answers and on prompts, detached."""
        hidden = self.draft.hidden(
            input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        logits = self.draft.head(hidden.flatten(0, 1)[flat_positions])
        losses, overlap = position_losses(logits, top_rows, top_logprobs, self._weights)
        answer, prompt = losses[~is_prompt], losses[is_prompt]
        loss = answer.mean()
        if len(prompt):
            loss = loss + self._weights.prompt * prompt.mean()
        return {"loss": loss, "overlap": overlap[~is_prompt].mean().detach()}


class DistillationTrainer(Trainer):
    """The Trainer with our loss, our optimizer, and evaluation by acceptance."""

    def __init__(
        self, model: DistillationModel, *, clock: Clock, verify: Verify | None, rate: float, **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        self._distilled = model
        self._clock = clock
        self._verify = verify
        self._rate = rate
        self._overlaps: list[float] = []

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self._distilled.named_parameters(), self._rate)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        if self.lr_scheduler is None:
            chosen = optimizer or self.create_optimizer()
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self._clock.rate)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        if model.training:
            self._overlaps.append(float(outputs["overlap"]))
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._overlaps and "loss" in logs:
            logs["overlap"] = round(sum(self._overlaps) / len(self._overlaps), 4)
            self._overlaps.clear()
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Offline acceptance on the held-out examples; ``eval_alpha`` (greedy, pooled) picks the best."""
        self._distilled.eval()
        draft = self._distilled.draft
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            examples: Any = eval_dataset or self.eval_dataset
            figures = offline_acceptance(draft, list(examples))
        metrics = {
            f"{metric_key_prefix}_alpha_{domain}_t{temperature:g}": round(value.alpha, 4)
            for (domain, temperature), value in figures.items()
        }
        coldest = min(temperature for _, temperature in figures)
        metrics[f"{metric_key_prefix}_alpha"] = round(figures["all", coldest].alpha, 4)
        if self._verify is not None and self.is_world_process_zero():
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in self._verify(draft).items()}
        self._distilled.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def train(
    draft: DraftModel,
    training: Sequence[Example],
    held_out: Sequence[Example],
    folder: Path,
    config: TrainingConfig,
    verify: Verify | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> DraftModel:
    """Train ``draft`` in place and return it with the best weights; a killed run in ``folder`` is resumed.

    ``report`` is given each log line (step, minutes, loss, overlap, learning rate, α).
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(
        folder / "clock.json", config.minutes, config.max_steps, config.warmup_steps, config.decay_share
    )
    model = DistillationModel(draft, config.weights)
    trainer = DistillationTrainer(
        model,
        args=_arguments(folder, config),
        train_dataset=ExampleSet(training),
        eval_dataset=ExampleSet(held_out),
        data_collator=PackingCollator(
            HeadIndex.of(draft.id_map, draft.config.vocab_size), config.prompt_positions
        ),
        callbacks=[ClockCallback(clock, config.patience, report, config.eval_share)],
        clock=clock,
        verify=verify,
        rate=config.learning_rate,
    )
    trainer.remove_callback(PrinterCallback)  # it prints to standard output, which is the command's result
    last = last_checkpoint(folder)
    if last is not None and clock.end is not None and step_of(last) >= clock.end:
        load_model(model, best_weights(Path(last)), strict=False)  # it had ended: not a step more
    else:
        trainer.train(resume_from_checkpoint=last)
    return draft.eval()


def step_of(checkpoint: str) -> int:
    """The step after which a checkpoint was written."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def best_weights(last: Path) -> Path:
    """The weights of the best evaluation of the training whose newest checkpoint is ``last``."""
    state = TrainerState.load_from_json(str(last / "trainer_state.json"))
    name = Path(state.best_model_checkpoint or last).name
    return last.parent / name / "model.safetensors"


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint; one that a kill left half-written is removed.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint without it is not whole.
    """
    while folder.is_dir():
        found: str | None = get_last_checkpoint(str(folder))  # type: ignore[no-untyped-call]
        if found is None or (Path(found) / "trainer_state.json").is_file():
            return found
        shutil.rmtree(found)
    return None


def _arguments(folder: Path, config: TrainingConfig) -> TrainingArguments:
    cpu = not torch.cuda.is_available()
    # On a CPU one example at a time wastes no padding, and the gradients add up to the same batch.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = 1 if cpu else max(1, config.batch_size // world)
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=max(1, config.batch_size // at_once // world),
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        max_grad_norm=1.0,
        bf16=config.bf16,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and world > 1 else None,
        ddp_find_unused_parameters=False if world > 1 else None,
        logging_steps=config.log_steps,
        eval_strategy="steps",
        eval_steps=config.eval_steps,
        save_strategy="steps",
        save_steps=config.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="alpha",
        greater_is_better=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=not cpu,
        remove_unused_columns=False,
        label_names=[],
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )

"""What decides a distillation, and the examples that its work folder holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from generation.distillation.continuation import Sampling
from generation.distillation.dataset import Example, read_dataset
from generation.distillation.prompts import DistillationPrompt
from generation.distillation.training import TrainingConfig


class DistillationFailed(RuntimeError):
    """A process of the run failed; ``str()`` says what remains. A new run in the same folder goes on."""

    exit_status = 1
    code = "distillation_failed"


class TooLittleData(DistillationFailed):
    """Nothing to train on or to measure with."""


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
    data_minutes: float | None = None
    """Stop generating after this time and train on what there is; None: answer every prompt."""
    quantization: str = "int8"

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    @property
    def draft_folder(self) -> Path:
        return self.folder / "draft"

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"


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


def settings_of(plan: DistillationPlan) -> dict[str, Any]:
    """The plan as plain values, for the report."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(plan), default=_plain))
    return values


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)

"""When a training's learning rate falls and when it ends: by steps, by the clock, or by patience."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


@dataclass(slots=True)
class Clock:
    """When the learning rate begins to fall, and when training ends, in steps; kept in ``clock.json``.

    With a limit in minutes the fall begins when all but ``decay_share`` of the time is spent; from then on
    the remaining number of steps is fixed, so that a resumed run ends as the killed one would have.
    """

    path: Path
    minutes: float | None
    max_steps: int
    warmup_steps: int
    decay_share: float
    spent_seconds: float = 0.0
    decay_start: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.path.exists():
            known = json.loads(self.path.read_text(encoding="utf-8"))
            self.spent_seconds = known["spent_seconds"]
            self.decay_start, self.end = known["decay_start"], known["end"]
        elif self.minutes is None:
            self.decay_start = int(self.max_steps * (1 - self.decay_share))
            self.end = self.max_steps

    def rate(self, step: int) -> float:
        """Factor on the learning rate at ``step``: warm-up, constant, linear fall to zero."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.decay_start is None or self.end is None or step < self.decay_start:
            return warm
        return warm * max(0.0, (self.end - step) / max(1, self.end - self.decay_start))

    def tick(self, step: int, seconds: float) -> None:
        """Account for one finished step; fixes the end once the time for it has come."""
        self.spent_seconds += _agreed(seconds)
        if self.decay_start is not None or self.minutes is None:
            return
        share = self.spent_seconds / (60 * self.minutes)
        if share >= 1 - self.decay_share or step >= self.max_steps * (1 - self.decay_share):
            self.decay_start = step
            self.end = min(
                self.max_steps, step + max(1, round(step * self.decay_share / (1 - self.decay_share)))
            )

    def save(self) -> None:
        row = {"spent_seconds": self.spent_seconds, "decay_start": self.decay_start, "end": self.end}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(row), encoding="utf-8")
        partial.replace(self.path)


def _agreed(seconds: float) -> float:
    """The first process's time, so that all processes of a run end at the same step."""
    if not torch.distributed.is_initialized():
        return seconds
    shared = torch.tensor([seconds], dtype=torch.float64)
    torch.distributed.broadcast(shared, src=0)
    return float(shared)


class ClockCallback(TrainerCallback):
    """Ends training by the clock, and by patience once α stops rising.

    ``eval_share``: with a limit in minutes, evaluate and save whenever this share of it has passed, so that a
    short training has a curve, and a killed one little to do again.
    """

    def __init__(
        self,
        clock: Clock,
        patience: int,
        report: Callable[[dict[str, Any]], None] | None,
        eval_share: float = 1.0,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._report = report
        self._eval_share = eval_share
        self._evaluated_at = clock.spent_seconds
        self._began = time.monotonic()
        self._best, self._since = -1.0, 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.tick(state.global_step, time.monotonic() - self._began)
        if self._clock.end is not None and state.global_step >= self._clock.end:
            control.should_evaluate = control.should_save = True
            control.should_training_stop = True
        elif self._clock.minutes is not None:
            passed = self._clock.spent_seconds - self._evaluated_at
            if passed >= 60 * self._clock.minutes * self._eval_share:
                control.should_evaluate = control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._clock.save()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._report is not None and state.is_world_process_zero:
            self._report(
                {"step": state.global_step, "minutes": self._clock.spent_seconds / 60, **(logs or {})}
            )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._evaluated_at = self._clock.spent_seconds
        alpha = (metrics or {}).get("eval_alpha", 0.0)
        self._since = 0 if alpha > self._best else self._since + 1
        self._best = max(self._best, alpha)
        # While the rate still falls, α still rises: patience counts before and is cut short by nothing.
        if self._since >= self._patience and self._clock.decay_start is None:
            self._clock.decay_start = state.global_step
            self._clock.end = state.global_step + max(1, round(state.global_step * self._clock.decay_share))

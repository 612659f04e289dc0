"""A draft in training, measured by the service's own decoding loop and verifier."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from generation.config import EngineConfig, ModelConfig
from generation.distillation.draft_model import DraftCard, DraftModel, save_draft, target_fingerprint
from generation.distillation.prompts import DistillationPrompt
from generation.loading import load_draft, load_model, load_tokenizer
from generation.model_runner import LoadedModel
from rag_service.measurement import Pair, RequestOutcome, Setup, acceptance_table, figures


def spread(prompts: Sequence[DistillationPrompt], count: int) -> list[DistillationPrompt]:
    """``count`` of the prompts, taken from the domains in turn."""
    groups: dict[str, list[DistillationPrompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.domain].append(prompt)
    rounds = zip_longest(*groups.values())
    return [prompt for one in rounds for prompt in one if prompt is not None][:count]


@dataclass(slots=True)
class DraftVerifier:
    """Runs the target with the draft, without passages, on a few held-out prompts.

    Called with the draft it gives α̂ and β̂ to log, at temperature 0 (where both are one) and 0.7. The draft is
    measured as it would be saved, at 8 bits. The target is loaded at the first call, so that the verifier can be
    handed to another process before.
    """

    target: ModelConfig
    engine: EngineConfig
    prompts: Sequence[DistillationPrompt]
    folder: Path
    max_tokens: int = 32
    warm: float = 0.7
    _target: LoadedModel | None = field(default=None, init=False)

    def __call__(self, draft: DraftModel) -> dict[str, float]:
        """``verified_alpha`` at temperature 0, ``verified_alpha_t0.7`` and ``verified_overlap_t0.7``, pooled.

        One is missing when nothing was proposed.
        """
        size = int(draft.head.weight.shape[0])
        target_folder = Path(self.target.model)
        card = DraftCard(target_folder.name, target_fingerprint(target_folder), (0,), size, "int8")
        try:
            save_draft(draft, self.folder, card)
            greedy, warm = (figures(one) for one in self._run(self.folder, (0.0, self.warm)))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        measured = {
            "verified_alpha": greedy.acceptance_rate,
            f"verified_alpha_t{self.warm:g}": warm.acceptance_rate,
            f"verified_overlap_t{self.warm:g}": warm.overlap,
        }
        return {name: round(value, 4) for name, value in measured.items() if value is not None}

    def table(self, draft_folder: Path) -> Mapping[str, Any]:
        """The acceptance table of a saved draft at temperature 0, pooled and by domain."""
        return acceptance_table(self._run(draft_folder, (0.0,))[0])

    def _run(self, draft_folder: Path, temperatures: Sequence[float]) -> list[list[RequestOutcome]]:
        if self._target is None:
            self._target = load_model(self.target)
        config = self.target.model_copy(update={"model": str(draft_folder), "revision": None})
        pair = Pair(
            self._target,
            load_tokenizer(self.target.model, self.target.revision),
            load_draft(config, self.target),
            self.engine,
        )
        setup = Setup("colocated", passages=False, max_tokens=self.max_tokens)
        return [pair.run(self.prompts, replace(setup, temperature=one)) for one in temperatures]

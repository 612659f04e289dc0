"""Which draft goes with the configured target, and whether it may be used.

A model draft that has not been gated with this exact target can make decoding slower; without a passing gate
record it stays off (passages remain) and a warning names the command that gates it.

Whoever only asks which draft there is (the process that starts the service) must not pay for importing torch:
what loads models is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from generation.config import ModelConfig
from rag_service.config import Settings
from rag_service.models import resolve

if TYPE_CHECKING:
    from generation.drafters.link import LocalLink
    from generation.model_runner import LoadedModel

DRAFTS_FOLDER = Path(__file__).resolve().parent.parent / "generation" / "drafts"
"""Where packaged drafts lie: ``<target name>-draft``."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft of a target. ``name`` is empty when there is none."""

    name: str = ""
    fingerprint: str = ""
    allowed: bool = False
    colocated: bool = False
    warnings: tuple[str, ...] = ()


def resolved(config: ModelConfig, settings: Settings) -> ModelConfig:
    """The same model with a packaged name replaced by its folder."""
    return config.model_copy(update={"model": str(resolve(config.model, settings.cache_folder))})


def draft_config(settings: Settings) -> ModelConfig | None:
    """The configured draft, or the packaged one of the packaged target, or None."""
    if settings.draft.draft is not None:
        return resolved(settings.draft.draft, settings)
    packaged = DRAFTS_FOLDER / f"{Path(settings.engine.target.model).name}-draft"
    if not packaged.is_dir():
        return None
    target = settings.engine.target
    return ModelConfig(model=str(packaged), dtype=target.dtype, device=target.device)


def choose_draft(settings: Settings, target: LoadedModel) -> DraftChoice:
    """Look at the configuration and the gate records.

    Raises ``ModelNotUsable`` for a draft with another tokenizer: that is wrong, not merely slow.
    """
    config = draft_config(settings)
    if config is None:
        return DraftChoice(warnings=("No draft model fits this target: passages alone propose.",))
    from generation.loading import check_pair, load_tokenizer
    from rag_service.gate_record import model_fingerprint, pair_permission

    target_config = resolved(settings.engine.target, settings)
    if not is_trimmed(config):
        tokenizers = load_tokenizer(target_config.model), load_tokenizer(config.model)
        check_pair(*tokenizers, target.name, Path(config.model).name)
    found = pair_permission(settings.data_folder / "gates", target_config, config, settings.draft.force)
    return DraftChoice(
        name=Path(config.model).name,
        fingerprint=model_fingerprint(config),
        allowed=found.allowed,
        colocated=settings.engine.speculation.mode == "colocated",
        warnings=(found.warning,) if found.warning else (),
    )


def is_trimmed(config: ModelConfig) -> bool:
    """Made by ``rag-service draft create``: it shares the target's embedding and so its tokenizer."""
    return (Path(config.model) / "draft.json").exists()


def load_draft_model(settings: Settings) -> LoadedModel:
    """The draft's weights. Raises ``generation.loading.ModelNotUsable``."""
    from generation.loading import ModelNotUsable, load_draft, load_model

    config = draft_config(settings)
    if config is None:
        raise ModelNotUsable("No draft model is configured and none is packaged for this target.")
    target = resolved(settings.engine.target, settings)
    return load_draft(config, target) if is_trimmed(config) else load_model(config)


def load_colocated(settings: Settings) -> LocalLink:
    """A draft inside the target's own process."""
    from generation.drafters.link import LocalLink
    from generation.drafters.model import DraftWorker

    engine = settings.engine
    worker = DraftWorker(
        load_draft_model(settings),
        num_slots=engine.max_batch_size,
        slot_length=engine.slot_tokens + engine.speculation.scratch_tokens,
        support_size=engine.speculation.support_size,
    )
    return LocalLink(worker)

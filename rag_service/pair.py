"""A target and a draft by name, loaded for measuring in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from generation.config import ModelConfig
from generation.loading import check_pair, load_draft, load_model, load_tokenizer
from generation.model_runner import LoadedModel
from rag_service.config import Settings
from rag_service.draft_choice import draft_config, resolved
from rag_service.gate_record import model_fingerprint
from rag_service.measurement import Pair


class PairError(ValueError):
    """A pair that cannot be measured; ``str()`` is one clear sentence."""

    exit_status = 2
    code = "bad_pair"


@dataclass(frozen=True, slots=True)
class NamedPair:
    """A loaded pair and what it is called in reports and records. No draft: empty name and fingerprint."""

    pair: Pair
    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str


def with_models(settings: Settings, target: str | None, draft: str | None) -> Settings:
    """The settings with another target or draft (packaged name, folder or hub id) put in."""
    if target is not None:
        model = settings.engine.target.model_copy(update={"model": target, "revision": None})
        settings = settings.model_copy(
            update={"engine": settings.engine.model_copy(update={"target": model})}
        )
    if draft is not None:
        base = settings.draft.draft or settings.engine.target
        model = base.model_copy(update={"model": draft, "revision": None})
        settings = settings.model_copy(update={"draft": settings.draft.model_copy(update={"draft": model})})
    return settings


def load_pair(settings: Settings, *, needs_draft: bool = True) -> NamedPair:
    """Load the configured target and its draft.

    Raises ``PairError`` when there is no draft though one is needed, ``ModelNotUsable`` when a model cannot
    be loaded or the tokenizers differ.
    """
    target_config = resolved(settings.engine.target, settings)
    config = draft_config(settings)
    if config is None and needs_draft:
        raise PairError(
            f"No draft goes with the target {settings.engine.target.model}: name one with --draft FOLDER, "
            "or make one with rag-service draft create."
        )
    target = load_model(target_config)
    tokenizer = load_tokenizer(target_config.model, target_config.revision)
    draft = None if config is None else _load_draft(config, target_config, tokenizer)
    return NamedPair(
        pair=Pair(target, tokenizer, draft, settings.engine),
        target=Path(settings.engine.target.model).name,
        target_fingerprint=model_fingerprint(target_config),
        draft=Path(config.model).name if config else "",
        draft_fingerprint=model_fingerprint(config) if config else "",
    )


def _load_draft(config: ModelConfig, target: ModelConfig, tokenizer: object) -> LoadedModel:
    if (Path(config.model) / "draft.json").exists():
        return load_draft(config, target)
    check_pair(tokenizer, load_tokenizer(config.model, config.revision), target.model, config.model)
    return load_model(config)

"""What can be known before Ray starts: whether the models lie where the settings say, and the data can be written.

A replica finds the same out only after half a minute of starting. Nothing is loaded here and nothing written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rag_service.config import ConfigError, Settings
from rag_service.models import PACKAGED, resolve

WEIGHTS = ("*.safetensors", "*.bin")
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Any of these is a tokenizer's file; which of them a model needs is the library's to say."""


def check_start(settings: Settings) -> None:
    """Raise ``ConfigError`` (or ``ModelError`` for a packaged model) with the setting, the path and a remedy.

    For a service on this machine: the folders of a cluster's nodes cannot be seen from here. A draft is not
    looked at, since the service runs without one. An index of another embedder is no fault: it is rebuilt.
    """
    for setting, name, revision in _models(settings):
        check_model(setting, name, revision, settings.cache_folder)
    for setting, folder in _folders(settings):
        check_folder(setting, folder)


def check_model(setting: str, name: str, revision: str | None, cache: Path) -> None:
    """Whether ``name`` (packaged, a folder, a GGUF file or a hub id) can be there. Raises as ``check_start``."""
    path = resolve(name, cache)
    if name in PACKAGED:
        return
    if (cache / "models" / name / "config.json").exists():
        path = cache / "models" / name
    if path.is_dir():
        _check_model_folder(setting, path)
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{setting} names {path}, a file that is no GGUF; name the model's folder.")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{setting} names {path}, which this user may not read; change its mode.")
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"{setting} names {name}, and there is no such folder; correct the path.")
    else:
        _check_hub(setting, name, revision)


def check_folder(setting: str, folder: Path) -> None:
    """Whether ``folder`` can be made and written to. Raises ``ConfigError``."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    remedy = "free that path or choose another folder"
    if not existing.is_dir():
        raise ConfigError(f"{setting} is {folder}, but {existing} is a file; {remedy}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting} is {folder}, but this user may not write to {existing}; "
            "change its owner or mode, or choose another folder."
        )


def _models(settings: Settings) -> Iterator[tuple[str, str, str | None]]:
    target, embedder = settings.engine.target, settings.retrieval.embedder
    yield "engine.target.model", target.model, target.revision
    yield "retrieval.embedder.model", embedder.model, embedder.revision


def _folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield "data_folder (RAG_SERVICE_DATA)", settings.data_folder
    index, log = settings.retrieval.index, settings.telemetry.folder
    if index.url is None and index.folder is not None:
        yield "retrieval.index.folder", index.folder
    if log is not None and "://" not in log:
        yield "telemetry.folder", Path(log)


def _check_model_folder(setting: str, folder: Path) -> None:
    inner = _transformer_folder(folder)
    try:
        config = json.loads((inner / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{setting} names {folder}, which has no config.json; name the folder that holds the model."
        ) from None
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{setting} names {folder}, whose config.json cannot be read; fetch the model again."
        )
    places = (folder, inner)
    for what, patterns in (("weights", WEIGHTS), ("tokenizer", TOKENIZERS)):
        if not any(next(place.glob(one), None) for place in places for one in patterns):
            raise ConfigError(f"{setting} names {folder}, which has no {what}; fetch the model again, whole.")


def _transformer_folder(folder: Path) -> Path:
    """Where a sentence-transformers folder keeps the transformer itself: mostly in itself, in old ones below."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return folder / str(modules[0]["path"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder


def _check_hub(setting: str, name: str, revision: str | None) -> None:
    """A hub id cannot be judged without asking the hub, unless the hub may not be asked: then the cache tells."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not constants.is_offline_mode():
        return
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ConfigError(
            f"{setting} names {name}, which is no folder here and not in the hub's cache, and HF_HUB_OFFLINE "
            "forbids fetching it; unset that, fetch it first, or name a folder."
        )

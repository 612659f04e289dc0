"""What names a model's exact weights, without loading them: whoever asks need not pay for importing torch."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fingerprint(model: str, revision: str | None, variant: str) -> str:
    """Sixteen hex digits that change with any weight, the revision, the dtype or the quantisation."""
    digest = hashlib.blake2b(f"{revision}/{variant}".encode(), digest_size=8)
    path = Path(model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        digest.update(model.encode())
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()

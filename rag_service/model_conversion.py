"""From a GGUF file to a safetensors folder, once: loading then takes a second instead of fifteen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rag_service.models import ModelError


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of ``gguf`` to ``folder`` as bfloat16 safetensors.

    Works in a child process, which gives its memory back and keeps the libraries' own progress bars away.

    Raises:
        ModelError: the conversion failed; OSError(ENOSPC) is named as such.
    """
    command = (sys.executable, "-m", __name__, str(gguf), str(folder))
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=offline
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if "no space left on device" in done.stderr.lower():
        raise ModelError(f"No space is left on the disk while converting into {folder}.", "no_space")
    raise ModelError(f"Converting {gguf.name} failed: {lines[-1].strip()}.", "conversion_failed")


def convert_here(gguf: Path, folder: Path) -> None:
    """``convert_gguf`` in this process.

    transformers dequantises while loading but then refuses ``save_pretrained``, since the configuration still
    says "quantised": so the class is rebuilt from a configuration without that, and given the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    config = source.config
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    model.bfloat16().save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    convert_here(Path(sys.argv[1]), Path(sys.argv[2]))

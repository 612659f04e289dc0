"""A small draft made of some of the target's layers, the target's embedding and a trimmed output head.

The embedding is the target's own, frozen, and is taken from the target when the draft is loaded: a shipped
draft holds its layers and its head alone. The head scores the most frequent ids only; ``id_map`` gives each
row's vocabulary id. Trimming costs nothing in exactness, since any draft distribution is exact (FR-Spec,
2502.14856).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from generation.fingerprint import fingerprint

DRAFT_FILE = "draft.json"
WEIGHTS_FILE = "model.safetensors"
_EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight")


class DraftNotUsable(Exception):
    """A draft folder that does not fit its target or cannot be read; ``str()`` is one clear sentence."""


@dataclass(frozen=True, slots=True)
class DraftCard:
    """``draft.json``: what a draft is made for and of.

    ``target_fingerprint`` changes with any weight of the target. ``layers``: the target's layers it began
    as. ``quantization``: ``int8`` (one scale a row) or ``none``.
    """

    target: str
    target_fingerprint: str
    layers: tuple[int, ...]
    head_size: int
    quantization: str = "none"
    format: int = 1


class DraftModel(nn.Module):
    """Full-vocabulary ids in, logits over the head's ids out.

    ``decoder`` is a transformers base model (ids to ``[batch, length, hidden]``); ``head`` maps hidden states
    to ``[..., n]``; ``id_map`` ``[n]`` holds each row's vocabulary id, None for a full vocabulary.
    """

    id_map: Tensor | None

    def __init__(self, decoder: PreTrainedModel, head: nn.Linear, id_map: Tensor | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.register_buffer("id_map", id_map)

    @property
    def config(self) -> Any:
        return self.decoder.config

    def hidden(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Hidden states ``[batch, length, hidden]``; further arguments are transformers' own."""
        return self.decoder(input_ids=input_ids, **arguments).last_hidden_state  # type: ignore[no-any-return]

    def trainable(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Everything but the target's embedding."""
        return ((name, weight) for name, weight in self.named_parameters() if weight.requires_grad)


def create_draft(
    target: PreTrainedModel, layers: Sequence[int], head_ids: Sequence[int] | None
) -> DraftModel:
    """A float32 draft of the target's ``layers`` (copied) and of the rows ``head_ids`` of its head.

    ``head_ids`` None keeps the whole vocabulary. Raises ``DraftNotUsable`` for layers the target lacks.
    """
    config = AutoConfig.for_model(**target.config.to_dict())
    count = int(config.num_hidden_layers)
    if not layers or not all(0 <= layer < count for layer in layers):
        raise DraftNotUsable(f"Layers must be among 0 to {count - 1}, not {list(layers)}.")
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.dtype = "float32"
    decoder: Any = AutoModel.from_config(config, attn_implementation="sdpa").float()  # type: ignore[no-untyped-call]
    source: Any = target.base_model
    for own, layer in zip(decoder.layers, layers, strict=True):
        own.load_state_dict(source.layers[layer].state_dict())
    decoder.norm.load_state_dict(source.norm.state_dict())
    decoder.embed_tokens.weight = nn.Parameter(
        source.embed_tokens.weight.detach().float(), requires_grad=False
    )
    rows = output_head(target).weight.detach().float()
    id_map = None if head_ids is None else torch.tensor(list(head_ids), dtype=torch.long)
    rows = rows if id_map is None else rows[id_map]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = nn.Parameter(rows.clone())
    return DraftModel(decoder, head, id_map)


def trim_draft(draft: DraftModel, layers: Sequence[int], head_ids: Sequence[int] | None) -> DraftModel:
    """A smaller draft with the same weights: its layers at the places ``layers``, and fewer ids in its head.

    ``head_ids`` None keeps all; ids that the draft does not have are left out. Raises ``DraftNotUsable`` when
    a layer is missing or no id is left.
    """
    source: Any = draft.decoder
    count = len(source.layers)
    if not layers or not all(0 <= layer < count for layer in layers):
        raise DraftNotUsable(f"The draft has the layers 0 to {count - 1}, not {list(layers)}.")
    config = AutoConfig.for_model(**{**draft.config.to_dict(), "num_hidden_layers": len(layers)})
    if getattr(config, "layer_types", None):
        config.layer_types = [draft.config.layer_types[layer] for layer in layers]
    weight = draft.head.weight.detach()
    decoder: Any = AutoModel.from_config(config, attn_implementation="sdpa").to(weight.dtype)  # type: ignore[no-untyped-call]
    for own, layer in zip(decoder.layers, layers, strict=True):
        own.load_state_dict(source.layers[layer].state_dict())
    decoder.norm.load_state_dict(source.norm.state_dict())
    decoder.embed_tokens.weight = source.embed_tokens.weight
    known = torch.arange(len(weight)) if draft.id_map is None else draft.id_map
    kept = (
        torch.ones_like(known, dtype=torch.bool)
        if head_ids is None
        else torch.isin(known, torch.tensor(head_ids))
    )
    if not kept.any():
        raise DraftNotUsable("None of the ids to keep is in the draft's head.")
    head = nn.Linear(weight.shape[1], int(kept.sum()), bias=False, dtype=weight.dtype)
    head.weight = nn.Parameter(weight[kept].clone())
    return DraftModel(decoder, head, known[kept])


def frequent_ids(
    sequences: Iterable[Sequence[int]],
    size: int,
    always: Iterable[int] = (),
    among: Collection[int] | None = None,
) -> list[int]:
    """The ``size`` ids that occur most often, sorted; ``always`` (the end tokens) are in whatever happens.

    ``among``: choose from these alone; those that occur nowhere come last, the lowest first.
    """
    counts = np.zeros(1 if among is None else max(among) + 1, dtype=np.int64)
    for ids in sequences:
        found = np.bincount(np.asarray(ids, dtype=np.int64))
        longest = max(len(found), len(counts))
        counts = np.pad(counts, (0, longest - len(counts))) + np.pad(found, (0, longest - len(found)))
    allowed = set(range(len(counts)) if among is None else among)
    forced = list(dict.fromkeys(always))
    ranked = [int(token) for token in np.argsort(-counts, kind="stable") if int(token) in allowed]
    return sorted(list(dict.fromkeys([*forced, *ranked]))[:size])


def save_draft(draft: DraftModel, folder: Path, card: DraftCard) -> None:
    """Write ``config.json``, ``draft.json`` and the weights without the target's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in draft.trainable():
        if card.quantization == "int8" and weight.dim() == 2:
            tensors[name], tensors[f"{name}.scale"] = quantize_rows(weight.detach())
        else:
            tensors[name] = weight.detach().to(
                torch.bfloat16 if card.quantization == "int8" else weight.dtype
            )
    if draft.id_map is not None:
        tensors["id_map"] = draft.id_map.to(torch.int32)
    partial = folder / "model.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / WEIGHTS_FILE)
    draft.config.to_json_file(folder / "config.json")
    (folder / DRAFT_FILE).write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")


def read_card(folder: Path) -> DraftCard:
    """``draft.json`` of a draft folder."""
    try:
        row = json.loads((folder / DRAFT_FILE).read_text(encoding="utf-8"))
        return DraftCard(**{**row, "layers": tuple(row["layers"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DraftNotUsable(f"{folder} holds no readable {DRAFT_FILE}: {error}.") from error


def is_draft_folder(folder: Path) -> bool:
    """Whether the folder is one of ours, rather than any causal language model."""
    return (folder / DRAFT_FILE).is_file()


def load_draft(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    check: bool = True,
) -> DraftModel:
    """Load a draft for the target in ``target_folder``.

    Raises ``DraftNotUsable`` when the target's weights are not those the draft was made for (``check``), or
    when the files don't fit together.
    """
    card = read_card(folder)
    if check and card.target_fingerprint != target_fingerprint(target_folder):
        raise DraftNotUsable(
            f"The draft {folder.name} was made for another {card.target}: "
            f"the weights in {target_folder} differ. Distil it again for this target."
        )
    config = AutoConfig.from_pretrained(folder)
    stored = load_file(folder / WEIGHTS_FILE)
    id_map = stored.pop("id_map", None)
    scales = {
        name.removesuffix(".scale"): stored.pop(name) for name in list(stored) if name.endswith(".scale")
    }
    weights = {
        name: (weight.float() * scales[name][:, None] if name in scales else weight).to(dtype)
        for name, weight in stored.items()
    }
    decoder: Any = AutoModel.from_config(config, attn_implementation=attention).to(dtype)  # type: ignore[no-untyped-call]
    embedding = target_embedding(target_folder).to(dtype)
    decoder.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
    head = nn.Linear(config.hidden_size, card.head_size, bias=False, dtype=dtype)
    draft = DraftModel(decoder, head, None if id_map is None else id_map.long())
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"decoder.embed_tokens.weight", "id_map"}:
        raise DraftNotUsable(f"The weights in {folder} do not fit its config.json.")
    return draft.eval()


def load_causal_draft(folder: str, dtype: torch.dtype = torch.float32) -> DraftModel:
    """Any causal language model as a draft: the whole vocabulary, no id map."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return DraftModel(model.base_model, output_head(model), None).eval()


def target_fingerprint(target_folder: Path) -> str:
    """Changes with any weight of the target."""
    return fingerprint(str(target_folder), None, "weights")


def target_embedding(target_folder: Path) -> Tensor:
    """The target's input embedding ``[vocabulary, hidden]``, read without the rest of its weights."""
    for file in sorted(target_folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            for name in _EMBEDDING_NAMES:
                if name in names:
                    return stored.get_tensor(name)  # type: ignore[no-any-return]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(target_folder)
    except (OSError, ValueError) as error:
        raise DraftNotUsable(f"No target model could be read from {target_folder}.") from error
    embedding: Tensor = model.get_input_embeddings().weight.detach()
    return embedding


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The model's output head. Raises ``DraftNotUsable`` when it has none."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        raise DraftNotUsable(f"{model.name_or_path or 'The model'} has no linear output head.")
    return head


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit weights and one float32 scale a row: ``weight ~ int8 * scale[:, None]``."""
    scale = weight.float().abs().amax(dim=1).clamp(min=1e-8) / 127.0
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale

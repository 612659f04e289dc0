"""From a name to a model that can run: folder, GGUF file or hub id; dtype, device and quantisation."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from generation.attention import ATTENTION_NAME
from generation.config import ModelConfig
from generation.decoder import FusedDecoder, can_fuse
from generation.errors import ModelNotUsable as ModelNotUsable
from generation.errors import first_line
from generation.fingerprint import fingerprint
from generation.kv_cache import CacheShape
from generation.model_runner import LoadedModel
from generation.packing import PackedLinear, can_pack, pack_linears
from generation.tokenizer import load_tokenizer as load_tokenizer

_INT4_GROUP = 32
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU when there is one."""
    if name in ("auto", "map"):
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelNotUsable(f"The configuration asks for {name}, but this machine shows no CUDA device.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the processor computes in it, float32 elsewhere."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32


def load_model(config: ModelConfig) -> LoadedModel:
    """Load a causal language model with slot attention, packed or quantised as configured.

    Raises ``ModelNotUsable`` naming what is missing or does not fit.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    model = _pretrained(config, dtype)
    text_config = model.config.get_text_config()
    decoder, head = model.base_model, _head(model)
    if head is None:
        raise ModelNotUsable(f"{config.model} has no output head: it is not a causal language model.")
    if config.device != "map":
        model.to(device)  # type: ignore[arg-type]
        if can_fuse(decoder):
            decoder = FusedDecoder(decoder)
    whole = nn.ModuleDict({"decoder": decoder, "head": head})
    _quantize(whole, config.quantization, device)
    # A tied head shares its weight with the embedding; packing gives the head its own copy.
    # The compiler brings kernels of its own, which take plain weights.
    plain = config.quantization == "none" and not config.compile
    if config.packed_linear and device.type == "cpu" and plain:
        pack_linears(whole)
        _leave_file(whole)
    decoder, head = whole["decoder"], whole["head"]
    if config.compile:
        decoder.compile(dynamic=True)
    return LoadedModel(
        decoder=decoder,
        head=head,
        vocab_size=_tokenizer_size(config, text_config.vocab_size),
        context_length=int(getattr(text_config, "max_position_embeddings", 2048)),
        cache_shape=cache_shape(text_config, dtype, device),
        eos_token_ids=_eos_token_ids(model),
        name=Path(config.model).name if Path(config.model).exists() else config.model,
        fingerprint=fingerprint(config.model, config.revision, f"{dtype}/{config.quantization}"),
        logit_softcap=getattr(text_config, "final_logit_softcapping", None),
        logit_scale=_logit_scale(text_config),
    )


def load_draft(config: ModelConfig, target: ModelConfig) -> LoadedModel:
    """A distilled draft: some layers and a trimmed head, with the target's own input embedding.

    The folder is one that ``rag-service draft create`` makes; ``config.model`` names it.
    """
    from generation.distillation.draft_model import load_draft as read_draft

    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    draft = read_draft(Path(config.model), Path(target.model), dtype).to(device)
    text_config = draft.decoder.config.get_text_config()
    draft.decoder.set_attn_implementation(ATTENTION_NAME)
    decoder: nn.Module = FusedDecoder(draft.decoder) if can_fuse(draft.decoder) else draft.decoder
    head: nn.Module = draft.head
    if config.packed_linear and device.type == "cpu":
        pack_linears(decoder)
        head = PackedLinear(draft.head) if can_pack(dtype) else head
    return LoadedModel(
        decoder=decoder,
        head=head,
        vocab_size=_tokenizer_size(target, text_config.vocab_size),
        context_length=int(text_config.max_position_embeddings),
        cache_shape=cache_shape(text_config, dtype, device),
        id_map=draft.id_map,
        name=Path(config.model).name,
        fingerprint=fingerprint(config.model, config.revision, f"{dtype}/{config.quantization}"),
    )


def cache_shape(text_config: Any, dtype: torch.dtype, device: torch.device) -> CacheShape:
    """Keys and values per layer, from a transformers configuration."""
    num_heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads)
    return CacheShape(((kv_heads, head_dim),) * int(text_config.num_hidden_layers), dtype, device)


def _pretrained(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    path = Path(config.model)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if config.device == "map":
        options["device_map"] = "auto"
    try:
        if path.suffix == ".gguf":
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(config.model, revision=config.revision, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotUsable(f"The model {config.model} could not be loaded: {first_line(error)}") from error
    model.train(False).requires_grad_(False)
    return model


def _leave_file(model: nn.Module) -> None:
    """Copy what is left of the weights out of the mapped file, whose pages would otherwise stay in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    with contextlib.suppress(
        OSError, AttributeError
    ):  # glibc keeps what was freed; other libraries have no trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _quantize(model: nn.Module, kind: str, device: torch.device) -> None:
    """Weight-only int8 or int4 through torchao, in place."""
    if kind == "none":
        return
    try:
        from torchao.quantization import (
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            quantize_,
        )
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise ModelNotUsable(
            "Quantisation needs torchao: pip install 'rag-service[quantization]'."
        ) from error
    if kind == "int8":
        chosen: Any = Int8WeightOnlyConfig()
    elif device.type == "cuda":
        chosen = Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")
    else:  # the packed int4 kernels need a GPU; elsewhere the weights are small, not fast
        chosen = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_INT4_GROUP))  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, chosen)


def _tokenizer_size(config: ModelConfig, model_size: int) -> int:
    """Ids that the tokenizer knows; a model's embedding may be padded beyond them."""
    try:
        size = len(load_tokenizer(config.model, config.revision))
    except ModelNotUsable:
        return model_size
    if size < model_size // 2:
        # Without tokenizer files transformers makes up a tokenizer of a few entries.
        raise ModelNotUsable(
            f"The tokenizer of {config.model} has {size} entries and the model {model_size}: "
            "are the tokenizer's files beside the weights?"
        )
    return min(model_size, size)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)


def _logit_scale(text_config: Any) -> float:
    """Cohere multiplies its logits by ``logit_scale``, Granite divides them by ``logits_scaling``."""
    if hasattr(text_config, "logits_scaling"):
        return 1.0 / float(text_config.logits_scaling)
    return float(getattr(text_config, "logit_scale", 1.0))


def check_pair(target_tokenizer: Any, draft_tokenizer: Any, target: str, draft: str) -> None:
    """Refuse a draft whose tokenizer differs from the target's: same id, other text, is never exact.

    Raises ``ModelNotUsable`` naming both. Padded embedding rows are no difference.
    """
    if target_tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        raise ModelNotUsable(
            f"The draft {draft} uses another tokenizer than the target {target}: "
            "their token ids mean different text, so the pair cannot decode speculatively."
        )

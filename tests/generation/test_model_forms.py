"""The same weights in other forms: a GGUF file, a device map."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from generation.config import ModelConfig
from generation.loading import ModelNotUsable, load_model, load_tokenizer
from tests.generation.fakes import make_engine, make_request, run
from tests.generation.test_architectures import COMMON, V, save
from tests.generation.test_loading import IDS, logits

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.2}
ROPE_BASE = 10_000.0
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig(**{**COMMON, **SIZE, "vocab_size": V})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, config: LlamaConfig) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(config, path, seed=0)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, config: LlamaConfig, folder: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    write_gguf(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), config, path)
    return path


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs side by side, as llama.cpp keeps them; transformers has them in halves."""
    rows, columns = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, config: LlamaConfig, path: Path) -> None:
    """A llama.cpp file of the model with a byte-level vocabulary, written by llama.cpp's own library."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or 0}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, config.vocab_size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    for name, weight in model.state_dict().items():
        values = weight.float()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            kind = NAMES[rest.removesuffix(".weight")]
            if kind in heads:
                values = interleaved(values, heads[kind])
            writer.add_tensor(f"blk.{layer}.{kind}.weight", values.numpy())
        else:
            whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            writer.add_tensor(f"{whole[name.removesuffix('.weight')]}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_same_model(folder: Path, gguf_file: Path) -> None:
    of_folder = load_model(ModelConfig(model=str(folder), device="cpu", dtype="float32"))
    of_file = load_model(ModelConfig(model=str(gguf_file), device="cpu", dtype="float32"))
    assert torch.allclose(logits(of_folder), logits(of_file), atol=1e-4)
    request = make_request("r", IDS, max_tokens=16)
    assert run(make_engine(of_file), [request])["r"].token_ids == (
        run(make_engine(of_folder), [request])["r"].token_ids
    )
    assert of_file.name == "tiny-f32.gguf"


def test_a_gguf_file_brings_its_tokenizer_and_its_fingerprint(gguf_file: Path, tmp_path: Path) -> None:
    assert load_tokenizer(str(gguf_file)).convert_tokens_to_ids("t7") == 7
    changed = tmp_path / "changed.gguf"
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    before = load_model(ModelConfig(model=str(gguf_file), device="cpu")).fingerprint
    assert load_model(ModelConfig(model=str(changed), device="cpu")).fingerprint != before


def test_a_broken_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelNotUsable, match=r"broken\.gguf"):
        load_model(ModelConfig(model=str(broken), device="cpu"))


def test_a_device_map_computes_the_same(folder: Path) -> None:
    """Without GPUs transformers' own map puts every layer on the CPU; the unfused path is what it runs."""
    mapped = load_model(ModelConfig(model=str(folder), device="map", dtype="float32"))
    single = load_model(ModelConfig(model=str(folder), device="cpu", dtype="float32"))
    assert torch.allclose(logits(mapped), logits(single), atol=1e-4)

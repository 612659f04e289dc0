"""Typed, frozen settings of generation. Nothing here reads a file or the environment."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["auto", "off", "passages", "colocated", "synchronous", "lookahead"]


class Frozen(BaseModel):
    """Immutable settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Frozen):
    """Where a model comes from and how its weights are held.

    ``model``: a packaged name (``smollm2-135m-instruct``), a local folder, a GGUF file or a hub id.
    """

    model: str = "smollm2-135m-instruct"
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda:n``, or ``map`` to let transformers spread the layers over several GPUs."""
    compile: bool = False
    """Compile the fixed decode shapes (CUDA graphs on a GPU). Costs a minute at start."""
    packed_linear: bool = True
    """On a CPU, keep linear weights in oneDNN's blocked layout: two to three times faster decoding."""
    num_threads: int = Field(default=1, ge=0)
    """Threads for one forward pass on a CPU; 0 leaves torch's own choice."""


class CacheConfig(Frozen):
    """The key-value cache: fixed-size blocks out of one budget."""

    block_size: int = Field(default=16, ge=1, le=512)
    num_tokens: int = Field(default=16384, ge=64)
    """Tokens the slots of running sequences hold together; a sequence gets an equal share."""
    prefix_caching: bool = True
    prefix_tokens: int = Field(default=4096, ge=0)
    """Tokens of the prefix cache, beside the slots."""


class SpeculationConfig(Frozen):
    """How a round's proposal is made and verified."""

    mode: Mode = "auto"
    """``auto`` lets the controller choose among the other five per domain and batch size."""
    num_draft_tokens: int = Field(default=5, ge=1, le=16)
    """The largest K the controller may choose; the fixed K when ``mode`` is fixed."""
    adaptive_length: bool = True
    """End a proposal where the draft has become too unsure for another token to pay."""
    support_size: int = Field(default=32, ge=1, le=1024)
    """m: the draft's tokens per position that it samples from and ships (speculation.md, section 2)."""
    acceptance: Literal["token", "block", "threshold", "typical"] = "token"
    lossy_threshold: float = Field(default=0.3, gt=0.0, le=1.0)
    branch_budget: int = Field(default=8, ge=1, le=64)
    """The largest number of look-ahead branches."""
    passages: bool = True
    """Propose continuations of the longest match in the prompt, the passages and the answer so far."""
    passages_min_match: int = Field(default=2, ge=1)
    history: bool = False
    """Also match past answers of the same tenant and domain."""
    history_tokens: int = Field(default=65536, ge=0)
    deadline_multiple: float = Field(default=3.0, gt=0.0)
    """A draft reply may take this many measured target steps."""
    exploration_rate: float = Field(default=0.02, ge=0.0, le=1.0)

    @property
    def scratch_tokens(self) -> int:
        """Rows of a draft's slot beyond the text: the branches of a full table, and some air."""
        return self.branch_budget * self.num_draft_tokens + 64


class EngineConfig(Frozen):
    """One target replica's engine."""

    target: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    max_batch_size: int = Field(default=8, ge=1)
    max_waiting: int = Field(default=64, ge=0)
    prefill_chunk_tokens: int = Field(default=256, ge=16)
    """Prompt tokens one step may prefill, so that a long prompt doesn't stall running streams."""
    context_length: int | None = None
    """Longest sequence; None: what the model supports, bounded by the cache."""

    @property
    def slot_tokens(self) -> int:
        """A sequence's equal share of the cache."""
        return self.cache.num_tokens // self.max_batch_size


class DraftConfig(Frozen):
    """One draft replica."""

    draft: ModelConfig | None = None
    """None: the packaged draft when one exists for the target, else no model draft."""
    cache: CacheConfig = CacheConfig(num_tokens=32768)
    merge_window_seconds: float = Field(default=0.002, ge=0.0)
    """How long a batch waits for other targets' requests."""
    max_pending: int = Field(default=256, ge=1)
    """Draft requests waiting beyond this are answered ``overloaded`` at once."""
    slot_length: int | None = None
    """Longest text a sequence may have here; None: as long as on the target."""
    force: Literal["no", "yes", "even_slow"] = "no"
    """Serve a pair without a passing gate record (``yes``), even one gated below .6 (``even_slow``, which
    ``serve --allow-slow`` sets)."""

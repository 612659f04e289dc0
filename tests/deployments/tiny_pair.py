"""A tiny random target that is its own draft: α = 1, a step of a millisecond, real code all the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deployments.draft import DraftReplica
from generation.types import DraftProposal, DraftReply, LookaheadTable
from generation.wire import decode_replies, encode_replies
from rag_service.config import Settings

VOCABULARY = 256
FAULTS = (
    "none",
    "late",
    "one in ten",
    "garbage",
    "cut short",
    "wrong round",
    "nan",
    "another's table",
    "raises",
)


def save_tiny_model(folder: Path) -> None:
    """A two-layer Llama with random weights and a word-level tokenizer ``t0 .. t255``."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def tiny_settings(folder: Path, data: Path, **overrides: Any) -> Settings:
    """Look-ahead with the model as its own draft, and nothing copied."""
    model = {"model": str(folder), "dtype": "float32"}
    return Settings.load(
        None,
        {
            "data_folder": str(data),
            "engine.target": model,
            "draft.draft": model,
            "draft.force": "yes",
            "draft.cache.num_tokens": 16384,
            "engine.cache.num_tokens": 4096,
            "engine.max_batch_size": 4,
            "engine.speculation.mode": "lookahead",
            "engine.speculation.passages": False,
            "engine.speculation.num_draft_tokens": 3,
            # A step takes a millisecond here, a message over Serve several: a real step is the longer one.
            "engine.speculation.deadline_multiple": 40.0,
            "deployments.target.num_cpus": 0.1,
            "deployments.draft.num_cpus": 0.1,
            **overrides,
        },
    )


class FaultyDraft(DraftReplica):
    """The real draft, spoilt on request: see ``FAULTS``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._fault = "none"
        self._num_calls = 0

    async def set_fault(self, fault: str) -> None:
        self._fault = fault

    async def tables(self, data: bytes) -> tuple[str, bytes]:
        import asyncio

        replica, answer = await super().tables(data)
        self._num_calls += 1
        if self._fault == "late":
            await asyncio.sleep(1.0)
        if self._fault == "raises" or (self._fault == "one in ten" and self._num_calls % 10):
            raise RuntimeError("a fault on request")
        if self._fault == "garbage":
            return replica, bytes(reversed(answer))
        if self._fault == "cut short":
            return replica, answer[: len(answer) // 2]
        if self._fault in ("wrong round", "nan", "another's table"):
            replies, _ = decode_replies(answer)
            return replica, encode_replies([_spoilt(reply, self._fault) for reply in replies])
        return replica, answer


def _spoilt(reply: DraftReply, fault: str) -> DraftReply:
    import numpy as np

    if not isinstance(reply, LookaheadTable):
        return reply
    branches = dict(reply.branches)
    if fault == "nan":
        bad = {}
        for outcome, proposal in branches.items():
            k = len(proposal)
            ids = np.array(proposal.token_ids, dtype=np.int64).reshape(k, 1)
            bad[outcome] = DraftProposal(proposal.token_ids, ids, np.full((k, 1), np.nan, dtype=np.float32))
        return LookaheadTable(
            reply.request_id, reply.round_id, reply.confirmed_length, bad, reply.draft_seconds
        )
    round_id = reply.round_id + (7 if fault == "wrong round" else 0)
    request_id = "somebody-else" if fault == "another's table" else reply.request_id
    return LookaheadTable(request_id, round_id, reply.confirmed_length, branches, reply.draft_seconds)

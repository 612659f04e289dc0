"""Answers held to a JSON schema, through llguidance: masks before verification, for draft tokens too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
from torch import Tensor

from generation.types import GenerationError


class GrammarCompiler:
    """Compiles schemas for one tokenizer; its vocabulary table is built once, on first use."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._table: llguidance.LLTokenizer | None = None

    def compile(self, json_schema: str) -> Grammar:
        """Raises ``GenerationError`` (``invalid_schema``) saying what is wrong with the schema."""
        if self._table is None:
            self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(json_schema)
            matcher = llguidance.LLMatcher(self._table, source, log_level=0)
        except ValueError as error:
            raise GenerationError(f"The JSON schema cannot be used: {error}", "invalid_schema") from error
        if matcher.is_error():
            raise GenerationError(f"The JSON schema cannot be used: {matcher.get_error()}", "invalid_schema")
        grammar = Grammar(matcher, self._vocab_size)
        # {"$ref": "#"} refers to nothing but itself: no text is of that form, and the answer would be empty.
        # The library finds that out when it looks for the first token, and then stops.
        if not bool(grammar.allowed_along([])[0].any()) or grammar.is_complete:
            raise GenerationError("The JSON schema cannot be used: no JSON fits it.", "invalid_schema")
        return grammar


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        """Nothing more may follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """Take a token of the answer. Raises ``GenerationError`` if the grammar forbids it."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            raise GenerationError(
                f"The answer left its grammar: {self._matcher.get_error() or 'token refused'}",
                "grammar_failed",
            )

    def allowed_along(self, token_ids: Sequence[int]) -> list[Tensor]:
        """Boolean masks ``[vocab]`` before each of ``token_ids`` and after the last allowed one.

        The list ends at the first token that the grammar forbids: its length is one more than the number of
        ids that may stand.
        """
        masks, consumed = [self._mask()], 0
        for token_id in token_ids:
            if self._matcher.is_stopped() or not bool(masks[-1][token_id]):
                break
            if not self._matcher.consume_token(token_id):
                break
            consumed += 1
            masks.append(self._mask())
        if consumed:
            self._matcher.rollback(consumed)
        return masks

    def _mask(self) -> Tensor:
        # Through numpy: llguidance's torch module compiles a function, which loads all of torch's compiler.
        bitmask = llguidance.numpy.allocate_token_bitmask(1, self._vocab_size)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, bitmask, 0)
        bits = np.unpackbits(bitmask[0].view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits.astype(bool))

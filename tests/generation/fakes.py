"""Small stand-ins whose answers can be computed by hand: a Markov model, its tokenizer, and scripted drafts.

The Markov model is a real ``LoadedModel`` (torch modules, run by the real ``ModelRunner``): the next token's
logits are a row of a table chosen by the last token, so the joint distribution of any answer is a product of
table rows. It has no attention, hence no keys; what attention does is tested on real architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from generation.config import CacheConfig, EngineConfig, SpeculationConfig
from generation.drafters.link import Key
from generation.engine import Engine
from generation.kv_cache import CacheShape
from generation.model_runner import LoadedModel
from generation.types import (
    NOW,
    DraftProposal,
    DraftReply,
    DraftRequest,
    GenerationChunk,
    GenerationRequest,
    LookaheadTable,
    SamplingParams,
)

Table = npt.NDArray[np.floating]


class LetterTokenizer:
    """Id 0 is ``a``, id 1 is ``b`` and so on: one character a token, nothing special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class _OneHot(nn.Module):
    """Hidden states of the Markov model: the token itself."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        hot = nn.functional.one_hot(input_ids, self.vocab_size)
        return SimpleNamespace(last_hidden_state=hot.float())


class _Rows(nn.Module):
    """Logits of each hidden state: the table's row for its token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits[hidden.argmax(-1)]


def markov_model(
    probs: Table, *, eos_token_ids: tuple[int, ...] = (), context_length: int = 4096
) -> LoadedModel:
    """A model with ``P(next | last) = probs[last, next]``, ``probs [vocab, vocab]``."""
    logits = torch.log(torch.tensor(np.asarray(probs), dtype=torch.float32))
    vocab_size = logits.shape[0]
    return LoadedModel(
        decoder=_OneHot(vocab_size),
        head=_Rows(logits),
        vocab_size=vocab_size,
        context_length=context_length,
        cache_shape=CacheShape((), torch.float32, torch.device("cpu")),
        eos_token_ids=eos_token_ids,
        name="markov",
    )


def random_table(vocab_size: int, seed: int, sharpness: float = 1.0) -> npt.NDArray[np.float64]:
    """Rows of random distributions; ``sharpness`` above 1 makes them more peaked."""
    weights = np.random.default_rng(seed).exponential(size=(vocab_size, vocab_size)) ** sharpness
    return np.asarray(weights / weights.sum(-1, keepdims=True), dtype=np.float64)


def chain_probability(table: Table, last: int, token_ids: Sequence[int]) -> float:
    """Probability of an answer under a Markov table, after ``last``."""
    probability = 1.0
    for token_id in token_ids:
        probability *= float(table[last, token_id])
        last = token_id
    return probability


@dataclass
class ScriptedLink:
    """A draft link whose proposals come from a function; ``is_open`` can be switched off."""

    script: Callable[[DraftRequest], DraftReply | DraftProposal | None]
    is_remote: bool = False
    is_open: bool = True
    sent: list[DraftRequest] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    _pending: dict[str, DraftRequest] = field(default_factory=dict)

    def send(self, requests: Sequence[DraftRequest]) -> None:
        self.sent.extend(requests)
        self._pending.update({request.request_id: request for request in requests})

    def receive(self, keys: Sequence[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        replies: dict[str, DraftReply] = {}
        for request_id, round_id in keys:
            request = self._pending.get(request_id)
            if request is None or request.round_id != round_id:
                continue
            del self._pending[request_id]
            reply = self.script(request)
            if isinstance(reply, DraftProposal):
                reply = now_table(request, reply)
            if reply is not None:
                replies[request_id] = reply
        return replies

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten.extend(request_ids)


def now_table(request: DraftRequest, proposal: DraftProposal) -> LookaheadTable:
    """The reply to a synchronous request."""
    return LookaheadTable(request.request_id, request.round_id, request.confirmed_length, {NOW: proposal})


def make_request(request_id: str, prompt_ids: Iterable[int], **sampling: Any) -> GenerationRequest:
    """A request with the given sampling fields; ``mode``, ``acceptance``, ... are taken out of them."""
    own = {
        name: sampling.pop(name)
        for name in ("mode", "acceptance", "tenant", "domain", "deadline_seconds", "passage_ids")
        if name in sampling
    }
    return GenerationRequest(request_id, tuple(prompt_ids), SamplingParams(**sampling), **own)


def make_engine(
    target: LoadedModel,
    tokenizer: Any = None,
    *,
    colocated: Any = None,
    remote: Any = None,
    batch: int = 8,
    num_tokens: int = 4096,
    cache: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
    **config: Any,
) -> Engine:
    """An engine with small budgets, whose draft deadlines never expire unless the test says so."""
    spec = {"mode": "off", "passages": False, "deadline_multiple": 1000.0, **(speculation or {})}
    return Engine(
        target,
        tokenizer or LetterTokenizer(),
        EngineConfig(
            cache=CacheConfig(num_tokens=num_tokens, prefix_tokens=1024, **(cache or {})),
            speculation=SpeculationConfig(**spec),
            max_batch_size=batch,
            **config,
        ),
        colocated=colocated,
        remote=remote,
    )


@dataclass
class Answer:
    """Everything one request gave out."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chunks: list[GenerationChunk] = field(default_factory=list)

    @property
    def last(self) -> GenerationChunk:
        return self.chunks[-1]


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, Answer]:
    """Generate to the end; by request id."""
    return collect(engine.generate(list(requests)))


def collect(chunks: Iterable[GenerationChunk] | Iterator[GenerationChunk]) -> dict[str, Answer]:
    """Put the chunks of each request together."""
    answers: dict[str, Answer] = {}
    for chunk in chunks:
        answer = answers.setdefault(chunk.request_id, Answer())
        answer.token_ids.extend(chunk.token_ids)
        answer.text += chunk.text
        answer.chunks.append(chunk)
    return answers

"""The one prompt of the service: passages, question and earlier turns as token ids.

The wording is fixed because the draft is distilled on it. Document text cannot leave its place:
it is encoded as plain text, so markup such as ``<|im_end|>`` in it never becomes a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_service.config import DEFAULT_SYSTEM, PromptConfig
from rag_service.sentences import split_sentences
from rag_service.tokenizer import ChatTokenizer, Message, encode_chat, encode_text
from retrieval.types import Passage, ScoredPassage

QUESTION_LABEL = "Question:"
NEXT_QUESTION = f"\n\n{QUESTION_LABEL}"
"""What stands before a question; in an answer it is the model making up the next one."""

NO_SOURCES = "Sources: none was found. Say that the documents do not answer the question."


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """Bounds in passages and in tokens."""

    top_k: int = 3
    passage_tokens: int = 700
    history_tokens: int = 1024

    @classmethod
    def of(cls, config: PromptConfig, top_k: int | None = None) -> PromptBudget:
        return cls(top_k or config.top_k, config.passage_tokens, config.history_tokens)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A passage in the prompt under the number ``index``, from 1. ``text`` is what the prompt has of it:
    the passage, or its first sentences when the budget ended there."""

    index: int
    passage: Passage
    score: float
    text: str

    @property
    def title(self) -> str:
        return " ".join(str(self.passage.metadata.get("title") or "").split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids ready for the target, and the sources by number. ``num_dropped_turns``: history left out."""

    token_ids: tuple[int, ...]
    sources: tuple[PromptSource, ...]
    num_passage_tokens: int
    num_dropped_turns: int = 0


def build_prompt(
    tokenizer: ChatTokenizer,
    question: str,
    passages: Sequence[ScoredPassage],
    history: Sequence[Message] = (),
    system: str | None = None,
    budget: PromptBudget | None = None,
) -> Prompt:
    """The prompt for ``question`` from ``passages`` (best first).

    ``history``: earlier user and assistant messages, oldest first; the oldest are dropped beyond the budget.
    ``system`` None is the fixed text. Passages are taken by rank and cut only between sentences.
    """
    budget = budget or PromptBudget()
    sources, num_passage_tokens = select_sources(tokenizer, passages, budget)
    kept = _recent(tokenizer, history, budget.history_tokens)
    messages = [
        {"role": "system", "content": DEFAULT_SYSTEM if system is None else system},
        *kept,
        {"role": "user", "content": user_message(question, sources)},
    ]
    return Prompt(encode_chat(tokenizer, messages), sources, num_passage_tokens, len(history) - len(kept))


def build_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> Prompt:
    """The prompt of a conversation without retrieval, as it stands."""
    return Prompt(encode_chat(tokenizer, messages), (), 0)


def user_message(question: str, sources: Sequence[PromptSource]) -> str:
    """The text of the last message. Where nothing was found the model is told, or it takes its own for a source."""
    if not sources:
        return f"{NO_SOURCES}{NEXT_QUESTION} {question}"
    blocks = "\n\n".join(_block(source.index, source.title, source.text) for source in sources)
    return f"Sources:\n{blocks}{NEXT_QUESTION} {question}"


def select_sources(
    tokenizer: ChatTokenizer, passages: Sequence[ScoredPassage], budget: PromptBudget
) -> tuple[tuple[PromptSource, ...], int]:
    """The passages that fit, numbered from 1 by rank, and the tokens they take with their headings."""
    sources: list[PromptSource] = []
    used = 0
    for scored in passages[: budget.top_k]:
        index = len(sources) + 1
        fitted = _fitted(tokenizer, index, scored.passage, budget.passage_tokens - used)
        if fitted is None:
            continue
        text, num_tokens = fitted
        sources.append(PromptSource(index, scored.passage, scored.score, text))
        used += num_tokens
    return tuple(sources), used


def _fitted(tokenizer: ChatTokenizer, index: int, passage: Passage, room: int) -> tuple[str, int] | None:
    """The passage, or its first sentences, within ``room`` tokens; None when not even one sentence fits."""
    title = " ".join(str(passage.metadata.get("title") or "").split())
    whole = passage.text.strip()
    if not whole or room <= 0:
        return None
    num_tokens = len(encode_text(tokenizer, _block(index, title, whole)))
    if num_tokens <= room:
        return whole, num_tokens
    text, text_tokens = "", 0
    for sentence in split_sentences(whole):
        longer = text + sentence
        longer_tokens = len(encode_text(tokenizer, _block(index, title, longer)))
        if longer_tokens > room:
            break
        text, text_tokens = longer, longer_tokens
    return (text, text_tokens) if text else None


def _block(index: int, title: str, text: str) -> str:
    return f"[{index}] {title}\n{text}" if title else f"[{index}] {text}"


def _recent(tokenizer: ChatTokenizer, history: Sequence[Message], num_tokens: int) -> list[dict[str, str]]:
    kept: list[dict[str, str]] = []
    for message in reversed(history):
        num_tokens -= len(encode_text(tokenizer, message["content"]))
        if num_tokens < 0:
            break
        kept.append({"role": message["role"], "content": message["content"]})
    while kept and kept[-1]["role"] != "user":  # never begin with half an exchange
        kept.pop()
    return kept[::-1]

"""The packaged target and prompts of the service's form, for tests on real parts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from generation.attention import Segment
from generation.config import ModelConfig
from generation.loading import load_model, load_tokenizer
from generation.model_runner import LoadedModel, ModelRunner

ROOT = Path(__file__).resolve().parents[2]
NEAR_TIE = 0.13
"""Logit gap of two bfloat16 steps at the size of these logits (16 to 32): below it an argmax is a coin toss."""
_SYSTEM = "Answer the question in one or two sentences, using only the sources."


def model_folder() -> Path:
    """The cached model; skips the test where it has not been fetched."""
    cache = os.environ.get("RAG_SERVICE_CACHE") or Path.home() / ".cache" / "rag-service"
    folder = Path(cache) / "models" / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").exists():
        pytest.skip(
            f"the packaged target is not in the model cache ({folder}): run `rag-service models fetch`"
        )
    return folder


@lru_cache(maxsize=1)
def _load(folder: Path) -> tuple[LoadedModel, Any]:
    return load_model(ModelConfig(model=str(folder), device="cpu")), load_tokenizer(str(folder))


def load_target() -> tuple[LoadedModel, Any]:
    """``(model, tokenizer)``, loaded once a session."""
    return _load(model_folder())


@dataclass(frozen=True)
class Question:
    """One question with the document that answers it."""

    domain: str
    question: str
    title: str
    text: str


def corpus_questions(limit: int) -> list[Question]:
    """Questions of our own corpus, domains in turn."""
    folder = ROOT / "examples" / "corpus"
    by_domain: dict[str, list[Question]] = {}
    for line in (folder / "questions.jsonl").read_text().splitlines():
        item = json.loads(line)
        path = folder / item["domain"] / item["relevant_documents"][0]
        if path.suffix in (".md", ".txt"):
            question = Question(item["domain"], item["question"], path.stem, path.read_text())
            by_domain.setdefault(item["domain"], []).append(question)
    return _in_turn(by_domain)[:limit]


def shared_questions(a_domain: int) -> list[Question]:
    """Real questions of five domains; skips the test where the data set is absent."""
    folder = Path(os.environ.get("RAG_SHARED_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("the shared questions (../shared/data) are not on this machine")
    by_domain: dict[str, list[Question]] = {}
    for domain in sorted(path for path in folder.iterdir() if (path / "questions.jsonl").exists()):
        documents = {}
        for line in (domain / "documents.jsonl").read_text().splitlines():
            item = json.loads(line)
            documents[item["id"]] = item
        for line in (domain / "questions.jsonl").read_text().splitlines():
            item = json.loads(line)
            known = [documents[name] for name in item["relevant_documents"] if name in documents]
            if known and len(by_domain.setdefault(domain.name, [])) < a_domain:
                by_domain[domain.name].append(
                    Question(domain.name, item["question"], known[0]["title"], known[0]["text"])
                )
    return _in_turn(by_domain)


def _in_turn(groups: dict[str, list[Question]]) -> list[Question]:
    rounds = zip_longest(*groups.values())
    return [question for group in rounds for question in group if question is not None]


def prompt_ids(tokenizer: Any, question: Question, num_tokens: int = 160) -> tuple[int, ...]:
    """The service's prompt with one passage of at most about ``num_tokens``."""
    text = tokenizer.decode(tokenizer.encode(question.text, add_special_tokens=False)[:num_tokens])
    title = f"{question.title}\n" if question.title else ""
    user = f"Sources:\n[1] {title}{text}\n\nQuestion: {question.question}"
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(rendered, add_special_tokens=False))


def logit_gap(model: LoadedModel, prefix: tuple[int, ...], left: int, right: int) -> float:
    """How far apart two candidates are after a text."""
    runner = ModelRunner(model, 1, len(prefix) + 1)
    logits = runner.forward([Segment(0, 0, list(prefix))], [len(prefix) - 1])[0]
    return float(abs(logits[left] - logits[right]))


def first_difference(left: list[int], right: list[int]) -> int | None:
    for place, pair in enumerate(zip_longest(left, right, fillvalue=-1)):
        if pair[0] != pair[1]:
            return place
    return None


def assert_same_or_tie(
    model: LoadedModel, prompt: tuple[int, ...], left: list[int], right: list[int]
) -> bool:
    """True when two greedy answers part at a near-tie of logits; fails when they part elsewhere."""
    place = first_difference(left, right)
    if place is None:
        return False
    assert place < min(len(left), len(right)), "one answer is a beginning of the other"
    gap = logit_gap(model, (*prompt, *left[:place]), left[place], right[place])
    assert gap < NEAR_TIE, f"answers part at token {place} with a logit gap of {gap:.3f}: no tie"
    return True

"""Questions and documents from JSON Lines, and the prompts that the service makes of them.

``questions.jsonl`` rows have ``id``, ``domain`` and ``question``; ``documents.jsonl`` rows ``id``, ``domain``,
``title`` and ``text``; further fields are ignored here.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from generation.distillation.prompts import DistillationPrompt, is_held_out, variant_id
from rag_service.config import Settings
from rag_service.models import resolve
from rag_service.prompt import PromptBudget, build_prompt
from rag_service.prompt_variety import Variety, other_choices, questions_about, training_id
from rag_service.tokenizer import load_tokenizer
from retrieval.reranker import load_reranker
from retrieval.service import RetrievalService
from retrieval.types import Document, Reranker, ScoredPassage, SearchRequest

Progress = Callable[[str, int, int], None]
"""Called with (what, done, all)."""


class QuestionSetError(ValueError):
    """A file that cannot be used; ``str()`` names file, line and field."""

    exit_status = 2
    code = "bad_questions"


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question to measure with. ``id`` decides on which side of the training split it falls."""

    id: str
    domain: str
    question: str


def load_questions(paths: Sequence[Path], limit: int | None = None, seed: int = 0) -> list[AskedQuestion]:
    """All questions of the files, at most ``limit`` a domain, drawn by ``seed`` and kept in file order."""
    questions = [
        AskedQuestion(_text(row, "id", where), _text(row, "domain", where), _text(row, "question", where))
        for row, where in _rows(paths)
    ]
    if not questions:
        raise QuestionSetError("There is no question in " + ", ".join(map(str, paths)) + ".")
    return limited(questions, limit, seed)


def limited(questions: Sequence[AskedQuestion], limit: int | None, seed: int = 0) -> list[AskedQuestion]:
    """At most ``limit`` questions of each domain."""
    if limit is None:
        return list(questions)
    by_domain: dict[str, list[AskedQuestion]] = defaultdict(list)
    for question in questions:
        by_domain[question.domain].append(question)
    kept: set[tuple[str, str]] = set()
    for domain, group in sorted(by_domain.items()):
        chosen = random.Random(f"{seed}/{domain}").sample(group, min(limit, len(group)))
        kept.update((question.id, question.domain) for question in chosen)
    return [question for question in questions if (question.id, question.domain) in kept]


def load_documents(paths: Sequence[Path]) -> list[Document]:
    """All documents of the files."""
    return [
        Document(
            _text(row, "id", where),
            _text(row, "domain", where),
            str(row.get("title") or ""),
            _text(row, "text", where),
        )
        for row, where in _rows(paths)
    ]


def service_prompts(
    settings: Settings,
    questions: Sequence[AskedQuestion],
    documents: Sequence[Document] = (),
    progress: Progress | None = None,
    variety: Variety | None = None,
) -> list[DistillationPrompt]:
    """The prompts the service would make: each question through retrieval, reranking and the template.

    With ``documents`` they are indexed in a temporary index of the configured kind; without, the configured
    index is searched. Searches stay inside the question's domain. ``variety`` adds prompts to train on.
    """
    with _maker(settings, documents, progress) as maker:
        prompts = []
        pools: dict[str, list[ScoredPassage]] = defaultdict(list)
        for number, question in enumerate(questions, 1):
            passages = maker.search(question)
            prompts.append(maker.prompt(question, passages))
            if variety is not None and not is_held_out(question.id):
                prompts += _variants(maker, question, passages, variety)
                pools[question.domain] += passages[: settings.prompt.top_k]
            if progress is not None:
                progress("prompts", number, len(questions))
        if variety is not None and variety.questions_from_passages:
            prompts += _from_passages(maker, pools, variety, progress)
        return prompts


def _variants(
    maker: _Maker, question: AskedQuestion, passages: Sequence[ScoredPassage], variety: Variety
) -> Iterator[DistillationPrompt]:
    count = variety.prompts_per_question - 1
    choices = other_choices(passages, maker.settings.prompt.top_k, count, f"{variety.seed}/{question.id}")
    for number, chosen in enumerate(choices, 1):
        yield maker.prompt(replace(question, id=variant_id(question.id, number)), chosen)


def _from_passages(
    maker: _Maker, pools: dict[str, list[ScoredPassage]], variety: Variety, progress: Progress | None
) -> Iterator[DistillationPrompt]:
    asked = [
        AskedQuestion(training_id(domain, text), domain, text)
        for domain, pool in sorted(pools.items())
        for text in questions_about(
            [one.passage.text for one in pool], variety.questions_from_passages, f"{variety.seed}/{domain}"
        )
    ]
    for number, question in enumerate(asked, 1):
        yield maker.prompt(question, maker.search(question))
        if progress is not None:
            progress("questions from passages", number, len(asked))


@dataclass(frozen=True, slots=True)
class _Maker:
    """Retrieval, reranking and the template, as the pipeline has them."""

    settings: Settings
    service: RetrievalService
    reranker: Reranker | None
    tokenizer: Any

    def search(self, question: AskedQuestion) -> list[ScoredPassage]:
        """Candidates of the question's domain, in the reranker's order."""
        config = self.settings.prompt
        count = max(config.candidates, config.top_k)
        request = SearchRequest(question.question, domain=question.domain, top_k=count)
        found = self.service.search(request).passages
        if self.reranker is None or not found:
            return list(found)
        passages = [scored.passage for scored in found]
        scores = self.reranker.score(question.question, passages)
        ranked = [ScoredPassage(*pair) for pair in zip(passages, scores, strict=True)]
        return sorted(ranked, key=lambda scored: -scored.score)

    def prompt(self, question: AskedQuestion, passages: Sequence[ScoredPassage]) -> DistillationPrompt:
        config = self.settings.prompt
        made = build_prompt(
            self.tokenizer, question.question, passages, system=config.system, budget=PromptBudget.of(config)
        )
        return DistillationPrompt(question.id, question.domain, question.question, made.token_ids)


@contextmanager
def _maker(settings: Settings, documents: Sequence[Document], progress: Progress | None) -> Iterator[_Maker]:
    tokenizer = load_tokenizer(str(resolve(settings.engine.target.model, settings.cache_folder)))
    with tempfile.TemporaryDirectory(prefix="rag-service-index-") as folder:
        data = Path(folder) if documents else settings.data_folder
        service = RetrievalService(settings.retrieval, settings.cache_folder, data)
        try:
            if documents:
                _ingest(service, documents, progress)
            rerank = settings.prompt.rerank
            reranker = load_reranker(settings.retrieval, settings.cache_folder) if rerank else None
            yield _Maker(settings, service, reranker, tokenizer)
        finally:
            service.close()


def _ingest(service: RetrievalService, documents: Sequence[Document], progress: Progress | None) -> None:
    for start in range(0, len(documents), 64):
        status = service.wait(service.ingest(documents[start : start + 64]).id)
        if status.state != "succeeded":
            reason = status.error or (status.failures[0][1] if status.failures else status.state)
            raise QuestionSetError(f"The documents could not be indexed: {reason}")
        if progress is not None:
            progress("documents", min(start + 64, len(documents)), len(documents))


def _rows(paths: Iterable[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    where = f"{path}, line {number}"
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise QuestionSetError(f"{where}: not a JSON object.")
                    yield row, where
        except OSError as error:
            raise QuestionSetError(f"{path} cannot be read: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise QuestionSetError(f"{path} is not UTF-8 text.") from None
        except json.JSONDecodeError as error:
            raise QuestionSetError(f"{path} holds a line that is not JSON: {error.msg}.") from None


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise QuestionSetError(f"{where}: the field {name} is missing or empty.")
    return value

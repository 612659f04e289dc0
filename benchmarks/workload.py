"""The prompts, target and draft that the generation benchmarks run with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from harness import DOMAINS, say

from generation.config import ModelConfig
from generation.distillation.prompts import DistillationPrompt, is_held_out
from generation.loading import load_model, load_tokenizer
from rag_service.config import Settings
from rag_service.draft_choice import load_draft_model, resolved
from rag_service.measurement import Pair
from rag_service.question_set import AskedQuestion, limited, load_documents, load_questions, service_prompts

NUM_OTHERS = 3


def default_pair(settings: Settings, *, with_draft: bool = True) -> Pair:
    """The configured target with its draft, one thread each."""
    torch.set_num_threads(1)
    target: ModelConfig = resolved(settings.engine.target, settings)
    tokenizer = load_tokenizer(target.model)
    draft = load_draft_model(settings) if with_draft else None
    return Pair(load_model(target), tokenizer, draft, settings.engine)


def held_out_prompts(settings: Settings, data: Path, per_domain: int) -> list[DistillationPrompt]:
    """Prompts of questions the draft never saw, ``per_domain`` of each domain, through the service's retrieval.

    Indexed are the documents that these questions are about and a few others of their domain: enough for prompts
    of the service's form, without embedding the whole collection for minutes.
    """
    folders = [data / domain for domain in DOMAINS if (data / domain / "questions.jsonl").exists()]
    if not folders:
        raise SystemExit(f"There are no questions in {data}; name a folder with --data.")
    questions = [q for q in load_questions([f / "questions.jsonl" for f in folders]) if is_held_out(q.id)]
    chosen: list[AskedQuestion] = limited(questions, per_domain)
    wanted = _relevant(folders, {question.id for question in chosen})
    documents = []
    for folder in folders:
        every = load_documents([folder / "documents.jsonl"])
        documents += [d for number, d in enumerate(every) if d.id in wanted or number < NUM_OTHERS]
    say(f"indexing {len(documents)} documents for {len(chosen)} questions")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return service_prompts(settings, chosen, documents)


def _relevant(folders: list[Path], question_ids: set[str]) -> set[str]:
    """Ids of the documents that answer the questions."""
    found: set[str] = set()
    for folder in folders:
        for line in (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["id"] in question_ids:
                found.update(row["relevant_documents"])
    return found

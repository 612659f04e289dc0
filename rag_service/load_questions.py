"""Questions for a load, from JSON Lines with ``question`` and, where known, ``domain``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rag_service.load import Question


class QuestionsError(ValueError):
    """A questions file that cannot be used; ``str()`` is one clear sentence."""


def read_questions(paths: Iterable[Path]) -> list[Question]:
    """All questions of the files, in order. Raises ``QuestionsError`` naming file and line."""
    found = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no UTF-8 text"
            raise QuestionsError(f"The questions {path} cannot be read: {reason}.") from None
        found += [_question(line, path, n) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise QuestionsError("There are no questions in the files named.")
    return found


def mixed(
    questions: Sequence[Question], domains: Sequence[str], limit: int | None, seed: int
) -> list[Question]:
    """Questions in random order, domain after domain in turn, so that any beginning is an even mix.

    ``domains``: keep these alone, all when empty; ``limit``: so many of each domain at most. Raises
    ``QuestionsError`` when a domain has none.
    """
    rng = np.random.default_rng(seed)
    by_domain: dict[str, list[Question]] = {}
    for index in rng.permutation(len(questions)):
        question = questions[int(index)]
        by_domain.setdefault(question.domain or "", []).append(question)
    for domain in domains:
        if domain not in by_domain:
            raise QuestionsError(f"There are no questions of the domain {domain}.")
    kept = [by_domain[name][:limit] for name in sorted(by_domain) if not domains or name in domains]
    longest = max(len(part) for part in kept)
    return [part[turn] for turn in range(longest) for part in kept if turn < len(part)]


def _question(line: str, path: Path, number: int) -> Question:
    try:
        value = json.loads(line)
        text, domain = value["question"], value.get("domain")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = domain = None
    if not isinstance(text, str) or not text.strip() or not isinstance(domain, str | None):
        raise QuestionsError(f"{path}, line {number}, is no object with a question.")
    return Question(text, domain)

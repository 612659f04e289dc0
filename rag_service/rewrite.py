"""A search query of its own from the last turn of a conversation.

Deterministic and without a model: a turn that leans on what was said ("and its fees?") is extended by the
salient words of the turns before it; a turn that stands alone is left as it is, since old topics only harm it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_service.tokenizer import Message
from rag_service.wording import content_words, words

_REFERRING = (
    "it its they them their theirs he him his she her hers this that these those there same former latter "
    "one ones else also too then both such another other"
)
_LEANING = frozenset(_REFERRING.split())
_OPENING = re.compile(
    r"^\W*(and|or|but|so|what about|how about|why|why not|how so|since when|what else)\b", re.I
)
_MIN_CONTENT_WORDS = 3


def rewrite_query(question: str, history: Sequence[Message], max_terms: int = 12) -> str:
    """``question``, and at most ``max_terms`` words of ``history`` (oldest first) when it leans on them.

    The newest turns give first; of the assistant's answers only names and numbers count, since their other
    words are the sources' and would pull the search to passages already seen.
    """
    question = question.strip()
    if not history or not needs_context(question):
        return question
    known = set(content_words(question))
    terms: list[str] = []
    for message in reversed(history):
        salient = (
            content_words(message["content"]) if message["role"] == "user" else _names(message["content"])
        )
        for term in salient:
            if term.lower() not in known and len(terms) < max_terms:
                known.add(term.lower())
                terms.append(term)
    return f"{question} {' '.join(terms)}" if terms else question


def needs_context(question: str) -> bool:
    """Does the turn refer to what was said before it?"""
    few = len(content_words(question)) < _MIN_CONTENT_WORDS
    return few or bool(_OPENING.match(question)) or any(word in _LEANING for word in words(question))


def _names(text: str) -> list[str]:
    """Capitalised words inside sentences, and numbers."""
    return re.findall(r"(?<=[a-z,;:] )[A-Z][\w-]+|\b\d[\d.,%]*\b", text)

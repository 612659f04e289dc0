"""Cutting documents into chunks by tokens, along their structure."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

from retrieval.config import ChunkingConfig
from retrieval.structure import Outline
from retrieval.types import Document

_NAMESPACE = uuid.UUID("6f1c6b0e-6c1b-5d0e-9a55-3f3f6f0d8a11")
_BLOCK_CHARACTERS = 200_000
"""Texts beyond this are cut at an empty line first: splitting time grows faster than length."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document: ``document.text[start:end] == text``.

    ``context`` is what is embedded and indexed before the text (title, section, enclosing lines) but never
    shown: a chunk that says "it" is found by what "it" is.
    """

    id: str
    index: int
    text: str
    start: int
    end: int
    section: str = ""
    context: str = ""

    @property
    def indexed_text(self) -> str:
        return f"{self.context}\n{self.text}" if self.context else self.text


class Chunker:
    """Cuts along headings, paragraphs, lines, sentences and words, in this order of preference."""

    def __init__(self, config: ChunkingConfig, tokenizer: Tokenizer) -> None:
        """``tokenizer``: the embedder's; truncation and padding are switched off in a copy of it."""
        self._config = config
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        capacity = (max(1, int(config.max_tokens * config.min_fill)), config.max_tokens)
        if capacity[0] <= config.overlap_tokens:
            capacity = (config.max_tokens, config.max_tokens)
        self._splitter = TextSplitter.from_huggingface_tokenizer(
            self._tokenizer, capacity, overlap=config.overlap_tokens
        )

    def chunk(self, document: Document) -> list[Chunk]:
        """Chunks in order of their start; none for a text without words."""
        outline, version = Outline(document.text), document_version(document)
        chunks: list[Chunk] = []
        for base, block in _blocks(document.text):
            for offset, text in self._splitter.chunk_indices(block):
                if not any(character.isalnum() for character in text):
                    continue
                chunks.append(self._make(document, version, outline, len(chunks), base + offset, text))
        return chunks

    def _make(
        self, document: Document, version: str, outline: Outline, index: int, start: int, text: str
    ) -> Chunk:
        sections = outline.sections(start)
        lines = [document.title, *sections, *outline.enclosing(start)]
        context = self._cut(" | ".join(dict.fromkeys(line.strip() for line in lines if line.strip())))
        return Chunk(
            id=chunk_id(document.tenant, document.id, version, index),
            index=index,
            text=text,
            start=start,
            end=start + len(text),
            section=" > ".join(sections),
            context=context,
        )

    def _cut(self, context: str) -> str:
        """The first ``context_tokens`` tokens of ``context``."""
        if not self._config.context_tokens or not context:
            return ""
        encoding = self._tokenizer.encode(context, add_special_tokens=False)
        if len(encoding.ids) <= self._config.context_tokens:
            return context
        return context[: encoding.offsets[self._config.context_tokens - 1][1]]


def chunk_id(tenant: str, document_id: str, version: str, index: int) -> str:
    """uuid5 of owner, document, content and place: equal input gives the equal id on any machine.

    The content is the whole document's (``version``): two versions share no id, so that the new one can be
    written in full while readers still see the old one.
    """
    return str(uuid.uuid5(_NAMESPACE, json.dumps([tenant, document_id, version, index])))


def document_version(document: Document) -> str:
    """A digest of everything of a document that the index holds; equal digests mean nothing to do."""
    content = [document.domain, document.title, document.text, dict(document.metadata)]
    encoded = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(encoded.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """(offset, text) of pieces of at most about ``_BLOCK_CHARACTERS``, cut at empty lines where possible."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _BLOCK_CHARACTERS)
        if end < len(text):
            for separator in ("\n\n", "\n", " "):
                cut = text.rfind(separator, start + _BLOCK_CHARACTERS // 2, end)
                if cut > 0:
                    end = cut + len(separator)
                    break
        yield start, text[start:end]
        start = end

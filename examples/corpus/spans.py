"""Makes questions.jsonl from questions.yaml: finds each quoted sentence in the text ingestion extracts."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from retrieval.config import IngestionConfig
from retrieval.loaders import Loader, expand_paths
from retrieval.types import Document

CORPUS = Path(__file__).resolve().parent
DOMAINS = ("finance", "medical", "legal", "software")


class QuoteError(Exception):
    """A quote that its document doesn't contain exactly once, or a document that isn't there."""


def load_documents(domain: str) -> dict[str, Document]:
    """Documents of one domain by file name, as ``rag-service ingest examples/corpus/DOMAIN`` reads them.

    Raises QuoteError for a file that cannot be loaded.
    """
    documents: dict[str, Document] = {}
    for loaded in Loader(IngestionConfig(), domain).load_paths(expand_paths([str(CORPUS / domain)])):
        if not isinstance(loaded, Document):
            raise QuoteError(f"{loaded.name}: {loaded.reason}")
        documents[str(loaded.metadata["source"])] = loaded
    return documents


def find_quote(text: str, quote: str) -> tuple[int, int]:
    """Start and end of ``quote`` in ``text``, in characters, end excluded.

    White space is compared loosely, since extraction may wrap lines; everything else must be the same.
    Raises QuoteError unless the quote stands there exactly once.
    """
    pattern = r"\s+".join(re.escape(word) for word in quote.split())
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        raise QuoteError(f"found {len(matches)} times instead of once: {quote!r}")
    return matches[0].start(), matches[0].end()


def build_question(document: Document, entry: dict[str, Any]) -> dict[str, Any]:
    """One question in the shape of questions.jsonl. Raises QuoteError for a quote that isn't found."""
    spans = []
    for quote in entry["quotes"]:
        try:
            spans.append([document.id, *find_quote(document.text, quote)])
        except QuoteError as error:
            raise QuoteError(f"{entry['id']}, {entry['document']}: {error}") from error
    return {
        "id": entry["id"],
        "domain": document.domain,
        "question": entry["question"],
        "relevant_documents": [document.id],
        "relevant_spans": spans,
        "answers": entry["answers"],
    }


def build_lines() -> str:
    """The whole of questions.jsonl, domain by domain."""
    source = yaml.safe_load((CORPUS / "questions.yaml").read_text(encoding="utf-8"))
    lines = []
    for domain in DOMAINS:
        documents = load_documents(domain)
        for entry in source[domain]:
            if entry["document"] not in documents:
                raise QuoteError(f"{entry['id']}: there is no document {entry['document']!r} in {domain}/")
            question = build_question(documents[entry["document"]], entry)
            lines.append(json.dumps(question, ensure_ascii=False) + "\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    arguments = parser.parse_args()
    target = CORPUS / "questions.jsonl"
    try:
        lines = build_lines()
    except QuoteError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.check:
        if target.is_file() and target.read_text(encoding="utf-8") == lines:
            return 0
        print("questions.jsonl is out of date: run examples/corpus/spans.py", file=sys.stderr)
        return 1
    target.write_text(lines, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

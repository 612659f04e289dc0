"""The sample corpus: its size and shape, where its answers stand in the extracted text, and whose it is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrieval.types import Document

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "examples" / "corpus"
DOMAINS = ("finance", "medical", "legal", "software")
SHARED = Path(os.environ.get("RAG_SHARED_DATA", ROOT.parent / "shared" / "data"))
_SHINGLE_WORDS = 8

Question = dict[str, Any]


@cache
def spans_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus_spans", CORPUS / "spans.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def documents() -> dict[str, Document]:
    """Every document by id, read by the loader that ingestion uses."""
    loaded = [item for domain in DOMAINS for item in spans_script().load_documents(domain).values()]
    assert all(isinstance(item, Document) for item in loaded)
    return {item.id: item for item in loaded}


@cache
def questions() -> list[Question]:
    lines = (CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_domain_has_twelve_documents_in_three_formats(domain: str) -> None:
    formats = Counter(path.suffix for path in (CORPUS / domain).iterdir())
    assert formats == {".md": 5, ".txt": 4, ".html": 3}


def test_ids_are_unique_across_domains() -> None:
    files = [path for domain in DOMAINS for path in (CORPUS / domain).iterdir()]
    assert len(documents()) == len(files) == 48


def test_documents_are_short_and_differ() -> None:
    lengths = {key: len(document.text.split()) for key, document in documents().items()}
    assert {key: length for key, length in lengths.items() if not 150 <= length <= 350} == {}
    assert len({document.text for document in documents().values()}) == 48


def test_html_leaves_no_markup_or_navigation_in_the_text() -> None:
    pages = {key: document for key, document in documents().items() if key.endswith(".html")}
    assert len(pages) == 12
    for key, page in pages.items():
        assert page.title, key
        assert not re.search(r"</?[a-z]+>|&[a-z]+;|Sign in|border-collapse|className", page.text), key


def test_every_leaflet_says_that_it_is_a_sample() -> None:
    for document in documents().values():
        if document.domain == "medical":
            assert "It is not medical advice." in document.text, document.id


def test_sixty_questions_in_the_documented_shape() -> None:
    assert Counter(question["domain"] for question in questions()) == dict.fromkeys(DOMAINS, 15)
    fields = ["id", "domain", "question", "relevant_documents", "relevant_spans", "answers"]
    for question in questions():
        assert list(question) == fields
        assert question["question"].endswith("?")
        assert question["answers"]
        assert {span[0] for span in question["relevant_spans"]} == set(question["relevant_documents"])
        assert {documents()[key].domain for key in question["relevant_documents"]} == {question["domain"]}


def test_questions_are_unique_and_ask_about_every_document() -> None:
    assert len({question["id"] for question in questions()}) == 60
    assert len({one_line(question["question"]).lower() for question in questions()}) == 60
    assert {key for question in questions() for key in question["relevant_documents"]} == set(documents())


@pytest.mark.parametrize("number", range(60))
def test_answers_stand_word_for_word_in_their_spans(number: int) -> None:
    question = questions()[number]
    texts = []
    for key, start, end in question["relevant_spans"]:
        text = documents()[key].text
        assert 0 <= start < end <= len(text)
        assert text[start:end] == text[start:end].strip()
        texts.append(one_line(text[start:end]))
    for answer in question["answers"]:
        assert any(answer in text for text in texts), answer


def test_questions_file_is_what_its_source_gives() -> None:
    assert spans_script().build_lines() == (CORPUS / "questions.jsonl").read_text(encoding="utf-8")


def test_quote_is_found_across_a_line_break_but_not_when_absent_or_repeated() -> None:
    script = spans_script()
    assert script.find_quote("One two\n  three. Four.", "two three.") == (4, 16)
    with pytest.raises(script.QuoteError, match="found 0 times"):
        script.find_quote("One two three.", "two 3")
    with pytest.raises(script.QuoteError, match="found 2 times"):
        script.find_quote("Again and again, and again.", "again")


def run_script(corpus: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(corpus / "spans.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_check_notices_an_edited_document_and_a_rerun_mends_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(CORPUS, corpus, ignore=shutil.ignore_patterns("__pycache__"))
    assert run_script(corpus, "--check").returncode == 0
    edited = corpus / "medical" / "better-sleep.txt"
    edited.write_text("One line more.\n" + edited.read_text(encoding="utf-8"), encoding="utf-8")
    stale = run_script(corpus, "--check")
    assert (stale.returncode, stale.stdout) == (1, "")
    assert "out of date" in stale.stderr
    assert run_script(corpus).returncode == 0
    assert run_script(corpus, "--check").returncode == 0
    edited.write_text("The quoted sentence is gone.\n", encoding="utf-8")
    broken = run_script(corpus)
    assert broken.returncode == 1
    assert "medical-06, better-sleep.txt: found 0 times" in broken.stderr
    assert "Traceback" not in broken.stderr


def shingles(text: str) -> set[str]:
    found = words(text)
    return {" ".join(found[i : i + _SHINGLE_WORDS]) for i in range(len(found) - _SHINGLE_WORDS + 1)}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared evaluation data is not on this machine")
def test_nothing_is_shared_with_the_evaluation_data() -> None:
    """No run of eight words, no question and no id: it may be trained on without touching the tests."""
    ours = set().union(*(shingles(document.text) for document in documents().values()))
    our_questions = {" ".join(words(question["question"])) for question in questions()}
    our_ids = set(documents()) | {question["id"] for question in questions()}
    files = sorted(SHARED.glob("*/*.jsonl"))
    assert files
    for path in files:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                assert record["id"] not in our_ids
                text = record.get("text") or record["question"]
                assert ours.isdisjoint(shingles(text)), record["id"]
                assert " ".join(words(record.get("question", ""))) not in our_questions

"""``draft``, ``gate`` and ``tune`` from the command line, on a tiny target in a folder.

Retrieval is left out (prompts are given): its own tests hold it, and the packaged embedder is not always there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from generation.distillation.prompts import DistillationPrompt, is_held_out, write_prompts
from rag_service import question_set
from rag_service.cli import app
from rag_service.config import Settings
from rag_service.recorder import Recorder
from tests.generation.distillation.conftest import VOCABULARY, make_prompts, make_target
from tests.rag_service.records import simulated

runner = CliRunner()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target with a tokenizer, and a data folder of its own."""
    monkeypatch.setenv("RAG_SERVICE_DATA", str(tmp_path / "service"))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "tiny"
    make_target().save_pretrained(folder)
    save_tokenizer(folder, "w")
    return folder


def save_tokenizer(folder: Path, letter: str) -> None:
    words = {f"{letter}{number}": number for number in range(VOCABULARY)}
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=f"{letter}0"))
    )
    tokenizer.save_pretrained(folder)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A question file whose prompts are made without retrieval."""
    prompts = {prompt.id: prompt for prompt in make_prompts(60)}

    def made(settings: Any, asked: Sequence[Any], *others: Any) -> list[DistillationPrompt]:
        return [prompts[question.id] for question in asked]

    monkeypatch.setattr(question_set, "service_prompts", made)
    path = tmp_path / "questions.jsonl"
    rows = [{"id": p.id, "domain": p.domain, "question": p.question} for p in prompts.values()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*arguments: object, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``; its one object."""
    result = runner.invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == status, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def _created(target: Path, folder: Path, *more: object) -> Path:
    run("draft", "create", "--target", target, "--output", folder, *more)
    return folder


def test_a_created_draft_has_the_layers_and_ids_asked_for(target: Path, tmp_path: Path) -> None:
    found = run(
        "draft",
        "create",
        "--target",
        target,
        "--output",
        tmp_path / "d",
        "--layers",
        "0,2",
        "--head-size",
        20,
    )
    assert found["layers"] == [0, 2]
    assert found["head_size"] == 20
    assert json.loads((tmp_path / "d/draft.json").read_text(encoding="utf-8"))["layers"] == [0, 2]


def test_a_causal_model_with_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_target(1).save_pretrained(other)
    save_tokenizer(other, "x")
    found = run("draft", "create", "--target", target, "--from", other, "--output", tmp_path / "d", status=1)
    assert "another tokenizer" in found["error"]["message"]
    assert not (tmp_path / "d").exists()


def test_distillation_makes_a_draft_a_report_and_goes_on_when_run_again(target: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    write_prompts(work / "prompts.jsonl", make_prompts(60))
    arguments = (
        "draft", "distill", "--target", target, "--work", work, "--num-layers", 2, "--head-size", 0,
        "--steps", 6, "--workers", 1, "--max-tokens", 8, "--temperatures", "0,0.7",
    )  # fmt: skip
    found = run(*arguments)
    assert found["num_held_out_prompts"] == sum(is_held_out(p.id) for p in make_prompts(60))
    assert set(found["after"]) >= {"all/0", "all/0.7", "red/0"}
    assert (work / "draft/model.safetensors").exists()
    assert found["verified"]["pooled"]["num_requests"] == min(8, found["num_held_out_prompts"])
    page = (work / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "Acceptance by the service" in page
    assert "training.learning_rate" in page
    assert found["data_fingerprint"] in page
    again = run(*arguments)
    assert again["after"] == found["after"]


def test_a_leaked_question_ends_the_run_before_any_training(target: Path, tmp_path: Path) -> None:
    """The same prompt under two ids, one of them held out: dropping the question is not enough."""
    prompts = make_prompts(60)
    held = next(prompt for prompt in prompts if is_held_out(prompt.id))
    other = next(prompt for prompt in prompts if not is_held_out(prompt.id))
    leak = DistillationPrompt(other.id, other.domain, other.question, held.token_ids)
    work = tmp_path / "work"
    work.mkdir()
    write_prompts(work / "prompts.jsonl", [leak if p is other else p for p in prompts])
    found = run(
        "draft", "distill", "--target", target, "--work", work, "--steps", 2, "--num-layers", 2, status=1
    )
    assert held.id in found["error"]["message"]
    assert not (work / "checkpoints").exists()


def test_evaluation_has_the_keys_others_read_and_compares(
    target: Path, questions: Path, tmp_path: Path
) -> None:
    one = _created(target, tmp_path / "one", "--layers", "0,1,2", "--head-size", 0)
    two = _created(target, tmp_path / "two", "--layers", "0", "--head-size", 0)
    found = run(
        "draft", "evaluate", "--target", target, "--draft", one, "--questions", questions, "--limit", 4,
        "--temperature", "0,0.7", "--max-tokens", 12, "--model-alone", "--against", two,
    )  # fmt: skip
    assert set(found["domains"]) == {"red", "blue"}
    for figures in (found["pooled"], *found["domains"].values(), found["temperatures"]["0.7"]["pooled"]):
        assert {"acceptance_rate", "interval", "mean_acceptance_length", "num_requests"} <= set(figures)
    assert found["pooled"]["acceptance_rate"] > 0.85  # all layers at 8 bits: the target but for near-ties
    assert found["pooled"]["num_requests"] == 8
    pooled = found["comparison"]["0"][0]
    assert pooled["beyond_noise"]
    assert "fell" in pooled["sentence"]


def test_the_gate_blocks_with_status_one_and_leaves_its_record(
    target: Path, questions: Path, tmp_path: Path
) -> None:
    draft = _created(target, tmp_path / "weak", "--layers", "0", "--head-size", 0)
    found = run(
        "gate", "--target", target, "--draft", draft, "--questions", questions, "--limit", 4,
        "--max-tokens", 10, "--min-alpha", 0.9, "--signed-off-by", "me", "--output", tmp_path / "out", status=1,
    )  # fmt: skip
    assert found["passed"] is False
    assert any("below 0.9" in reason or "ask more" in reason for reason in found["failures"])
    assert found["signed_off_by"] == "me"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"gate.json", "gate.md", "gate.xml"}
    records = list((tmp_path / "service/gates").glob("gate-*.json"))
    assert len(records) == 1
    assert json.loads(records[0].read_text(encoding="utf-8"))["digest"] == found["digest"]


def test_tune_recommends_and_writes_beside_what_is_there(
    target: Path, questions: Path, tmp_path: Path
) -> None:
    draft = _created(target, tmp_path / "same", "--layers", "0,1,2", "--head-size", 0)
    file = tmp_path / "service.yaml"
    file.write_text("service:\n  port: 8123\n", encoding="utf-8")
    found = run(
        "tune", "--target", target, "--draft", draft, "--questions", questions, "--limit", 2, "--tokens", "2",
        "--modes", "passages,colocated", "--max-tokens", 10, "--write", file, "--report", tmp_path / "t.html",
    )  # fmt: skip
    assert [row["mode"] for row in found["results"]] == ["passages", "colocated", "off"]
    assert all(row["predicted_speed_up"] is not None for row in found["results"])
    assert found["recommended"]["speed_up"] == max(row["speed_up"] for row in found["results"])
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert written["service"] == {"port": 8123}
    assert written["engine"]["speculation"]["mode"] == found["recommended"]["mode"]
    assert "<svg" in (tmp_path / "t.html").read_text(encoding="utf-8")


def test_two_candidate_drafts_whose_folders_share_a_name_are_both_tuned(
    target: Path, questions: Path, tmp_path: Path
) -> None:
    drafts = [_created(target, tmp_path / one / "draft", "--layers", "0", "--head-size", 0) for one in "ab"]
    found = run(
        "tune", "--target", target, "--draft", drafts[0], "--draft", drafts[1], "--questions", questions,
        "--limit", 1, "--tokens", "2", "--modes", "colocated", "--max-tokens", 6,
    )  # fmt: skip
    assert [row["draft"] for row in found["results"]] == [str(drafts[0]), str(drafts[1]), ""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate",), "--questions"),
        (("gate", "--questions", "missing.jsonl"), "cannot be read"),
        (("tune", "--modes", "fast"), "--modes takes"),
        (("draft", "evaluate", "--temperature", "warm"), "--temperature takes numbers"),
        (("draft", "create", "--output", "x", "--layers", "one"), "--layers takes"),
    ],
)
def test_wrong_usage_is_one_sentence_and_status_two(
    target: Path, arguments: tuple[str, ...], message: str
) -> None:
    found = run(*arguments, "--target", target, status=2)
    assert message in found["error"]["message"]


def test_bad_lines_are_named(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "a", "domain": "red", "question": "x?"}\n{"id": "b", "domain": "red"}\n')
    found = run("gate", "--target", target, "--questions", path, status=2)
    assert "line 2: the field question is missing" in found["error"]["message"]


def test_improvement_without_text_says_what_to_set(target: Path, tmp_path: Path) -> None:
    found = run("draft", "improve", "--work", tmp_path / "w", "--domain", "legal", status=1)
    assert "telemetry.keep_text" in found["error"]["message"]


def test_improvement_goes_from_the_log_to_the_proposal(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red's α fell in the log: its questions and some of blue's are distilled on, gated, and no further."""

    def made(settings: Any, asked: Sequence[Any], *others: Any) -> list[DistillationPrompt]:
        rows = zip(asked, make_prompts(len(asked)), strict=True)
        return [DistillationPrompt(q.id, q.domain, q.question, p.token_ids) for q, p in rows]

    monkeypatch.setattr(question_set, "service_prompts", made)
    draft = _created(target, tmp_path / "old", "--layers", "0,2", "--head-size", 0)
    config = tmp_path / "service.yaml"
    values = {
        "service": {"domains": ["red", "blue"]},
        "telemetry": {"keep_text": True, "retention_days": 30},
        "engine": {"target": {"model": str(target)}},
        "draft": {"draft": {"model": str(draft)}},
    }
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    recorder = Recorder(Settings.load(config))
    for domain, rates in (("red", (0.8, 0.4)), ("blue", (0.7, 0.7))):
        for part, rate in enumerate(rates):
            start = time.time() - 7200 + 3600 * part
            for number, one in enumerate(simulated(np.random.default_rng(part), 100, rate, start=start)):
                text = f"What about {domain} thing {number % 50}?"
                recorder.record(
                    replace(one, domain=domain, question=text, request_id=f"{domain}{part}-{number}")
                )
    recorder.close()
    work = tmp_path / "work"
    found = run(
        "draft", "improve", "--work", work, "--since", "1d", "--config", config, "--minutes", 0.1,
        "--data-minutes", 1, "--workers", 1, "--min-alpha", 0.99,
    )  # fmt: skip
    assert found["domains"] == ["red"]
    assert {row["domain"] for row in found["comparison"]} == {"all", "red", "blue"}
    assert found["gate"]["passed"] is False
    assert found["gate"]["checks"][0]["name"] == "alpha/red"
    text = (work / "proposal.md").read_text(encoding="utf-8")
    assert "keep the present draft" in text
    assert "α in red is" in text

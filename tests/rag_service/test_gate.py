"""The gate on pairs of known α, its record, and what the record permits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from generation.config import ModelConfig
from rag_service.gate import Equality, GateRequest, compare, is_tie, judge, run_gate, summary
from rag_service.gate_record import (
    GateRecord,
    GateRecordError,
    find_record,
    model_fingerprint,
    pair_permission,
    permission,
    record_from,
    write_record,
)
from rag_service.gate_report import junit, markdown, write_reports
from rag_service.measurement import RequestOutcome, Setup
from tests.generation.fakes import markov_model
from tests.rag_service.pairs import known_pair, letter_prompts, outcome, paced

EQUAL = Equality(10, 0, 0)


def _request(**changes: object) -> GateRequest:
    base = GateRequest("tiny", "t1", "tiny-draft", "d1", signed_off_by="tests")
    return replace(base, **changes)  # type: ignore[arg-type]


def _measured(count: int, domains: tuple[str, ...] = ("red",)) -> dict[str, list[RequestOutcome]]:
    """Real runs of a pair with α = .7 (at temperature 1), timed as if a round and a step cost the same."""
    pair, prompts = known_pair(), letter_prompts(count, domains)
    sampled = Setup("colocated", 3, 1.0, passages=False, max_tokens=60)
    model = paced(pair.run(prompts, sampled), 1.0)
    plain = paced(pair.run(prompts, replace(sampled, mode="off")), 1.0)
    return {"plain": plain, "model": model, "served": model, "served_greedy": model}


def _judged(
    outcomes: dict[str, list[RequestOutcome]], equality: Equality = EQUAL, **changes: object
) -> GateRecord:
    return judge(_request(**changes), outcomes, equality, "data")


@pytest.fixture(scope="module")
def many() -> dict[str, list[RequestOutcome]]:
    return _measured(60, ("red", "blue"))


def test_a_pair_well_above_the_bar_passes(many: dict[str, list[RequestOutcome]]) -> None:
    record = _judged(many, min_alpha=0.6)
    assert record.passed
    assert [check.name for check in record.checks] == [
        "alpha/red",
        "alpha/blue",
        "not_slow",
        "speed_up",
        "greedy_equality",
    ]
    speed = record.checks[3]
    # One second a round on both sides: the speed-up is tokens a round, (1 - .7^4) / (1 - .7) = 2.53.
    assert speed.value == pytest.approx(2.53, abs=0.15)


def test_a_pair_below_the_bar_fails_and_says_where(many: dict[str, list[RequestOutcome]]) -> None:
    record = _judged(many, min_alpha=0.8)
    assert not record.passed
    assert record.failures[0].startswith("α in red is 0.")
    assert record.failures[0].endswith("below 0.8")


def test_exactly_at_the_bar_with_few_samples_fails_for_uncertainty() -> None:
    few = [outcome(number, accepted, 10 - accepted) for number, accepted in enumerate((6, 7, 8, 7))]
    record = _judged(
        {"plain": few, "model": few, "served": few, "served_greedy": paced(few, 0.1)}, min_alpha=0.7
    )
    check = record.checks[0]
    assert check.value == pytest.approx(0.7)
    assert not check.passed
    assert "ask more questions" in check.reason


def test_two_requests_that_happen_to_agree_above_the_bar_are_no_proof() -> None:
    """Resampled, .71 and .72 give the interval .71 to .72; two requests cannot say that."""
    two = [outcome(number, accepted, 100 - accepted) for number, accepted in enumerate((71, 72))]
    outcomes = {"plain": two, "model": two, "served": two, "served_greedy": paced(two, 0.001)}
    assert not _judged(outcomes, min_alpha=0.7).checks[0].passed
    many = [outcome(number, accepted, 100 - accepted) for number, accepted in enumerate((71, 72, 73, 74) * 5)]
    outcomes = {"plain": many, "model": many, "served": many, "served_greedy": paced(many, 0.001)}
    assert _judged(outcomes, min_alpha=0.7).checks[0].passed


def test_one_request_is_too_few() -> None:
    one = [outcome(0, 10, 0)]
    record = _judged({"plain": one, "model": one, "served": one, "served_greedy": one}, min_alpha=0.1)
    assert "too few" in record.failures[0]


def test_a_low_bar_lets_no_slow_pair_through_unless_asked_to() -> None:
    slow = [outcome(number, 5, 5) for number in range(8)]
    outcomes = {"plain": slow, "model": slow, "served": slow, "served_greedy": paced(slow, 0.01)}
    refused = _judged(outcomes, min_alpha=0.3)
    assert [check.name for check in refused.checks if not check.passed] == ["not_slow"]
    assert "--allow-slow" in refused.failures[0]
    allowed = _judged(outcomes, min_alpha=0.3, allow_slow=True)
    assert allowed.passed
    assert "allowed to be slow: α of all domains together is 0.500" in {one.reason for one in allowed.checks}


def test_a_named_domain_without_questions_fails(many: dict[str, list[RequestOutcome]]) -> None:
    record = _judged(many, min_alpha=0.5, domains=("red", "green"))
    assert record.failures == ("no question of the domain green was asked",)


def test_a_pair_that_is_no_faster_fails(many: dict[str, list[RequestOutcome]]) -> None:
    slow = {**many, "served_greedy": [replace(one, seconds=one.seconds * 3) for one in many["model"]]}
    record = _judged(slow, min_alpha=0.5)
    assert [check.name for check in record.checks if not check.passed] == ["speed_up"]


def test_a_different_greedy_answer_fails_and_a_tie_does_not(many: dict[str, list[RequestOutcome]]) -> None:
    assert _judged(many, Equality(9, 1, 0), min_alpha=0.5).passed
    assert not _judged(many, Equality(9, 0, 1), min_alpha=0.5).passed


def test_ties_are_told_from_differences() -> None:
    """After token 0 the tokens 0 and 1 are as likely to a thousandth; after token 1 they are far apart."""
    table = np.array([[0.4999, 0.5001, 0.0], [0.9, 0.1, 0.0], [0.3, 0.3, 0.4]]) + 1e-9
    target = markov_model(table)
    assert is_tie(target, [0], [0, 0], [1, 0])
    assert not is_tie(target, [1], [0, 0], [1, 0])
    assert not is_tie(target, [0], [0], [0, 1])  # one simply stopped: that is no tie
    prompts = letter_prompts(2)
    left = [outcome(0, 1, 1, token_ids=(0, 0)), outcome(1, 1, 1, token_ids=(0, 0))]
    right = [outcome(0, 1, 1, token_ids=(1, 0)), outcome(1, 1, 1, token_ids=(1, 0))]
    assert compare(target, prompts, left, right) == Equality(0, 1, 1)


def test_a_whole_gate_runs_on_real_parts() -> None:
    seen: list[str] = []
    prompts = letter_prompts(12, ("red", "blue"))
    request = _request(min_alpha=0.5, setup=Setup("colocated", 2, 1.0, max_tokens=30))
    record = run_gate(known_pair(), prompts, request, lambda what, done, total: seen.append(what))
    assert set(seen) == {"plain decoding", "as served", "draft alone", "as served, sampled"}
    assert record.data_fingerprint
    by_name = {check.name: check for check in record.checks}
    assert by_name["greedy_equality"].passed
    assert by_name["alpha/red"].value == pytest.approx(0.7, abs=0.12)
    shown = summary(record)
    assert set(shown["domains"]) == {"red", "blue"}
    assert shown["all"]["num_requests"] == 12
    assert set(record.figures["speed_up"]) == {"red", "blue"}
    assert "Speed-up by domain (not judged" in markdown(record)


def test_a_record_is_found_for_its_pair_alone(many: dict[str, list[RequestOutcome]], tmp_path: Path) -> None:
    record = _judged(many, min_alpha=0.6)
    write_record(record, tmp_path / "gates")
    folders = [tmp_path / "none", tmp_path / "gates"]
    assert find_record(folders, "t1", "d1") == record_from(record.as_dict())
    assert find_record(folders, "t2", "d1") is None
    assert find_record(folders, "t1", "d2") is None


def test_an_edited_record_is_not_trusted(many: dict[str, list[RequestOutcome]], tmp_path: Path) -> None:
    path = write_record(_judged(many, min_alpha=0.9), tmp_path)
    values = json.loads(path.read_text(encoding="utf-8"))
    values["passed"] = True
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(GateRecordError, match="changed after it was written"):
        find_record([tmp_path], "t1", "d1")


def test_a_changed_target_file_invalidates_the_record(
    many: dict[str, list[RequestOutcome]], tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "target")
    shutil.copytree(tmp_path / "target", tmp_path / "draft")
    target, draft = (ModelConfig(model=str(tmp_path / name)) for name in ("target", "draft"))
    prints: dict[str, Any] = {
        "target_fingerprint": model_fingerprint(target),
        "draft_fingerprint": model_fingerprint(draft),
    }
    write_record(_judged(many, min_alpha=0.6, **prints), tmp_path / "gates")
    assert find_record([tmp_path / "gates"], *prints.values()) is not None
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 0.01
    model.save_pretrained(tmp_path / "target")
    assert find_record([tmp_path / "gates"], model_fingerprint(target), model_fingerprint(draft)) is None


def test_a_pair_is_looked_up_in_the_services_folder_and_beside_the_draft(
    many: dict[str, list[RequestOutcome]], tmp_path: Path
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    target, draft = (ModelConfig(model=str(tmp_path / name)) for name in ("target", "draft"))
    gates = tmp_path / "gates"
    missing = pair_permission(gates, target, draft, "no")
    assert not missing.allowed
    assert "has no gate record" in missing.warning
    prints: dict[str, Any] = {
        "target_fingerprint": model_fingerprint(target),
        "draft_fingerprint": model_fingerprint(draft),
    }
    path = write_record(_judged(many, min_alpha=0.6, **prints), tmp_path / "draft")
    assert pair_permission(gates, target, draft, "no").allowed
    path.write_text(path.read_text(encoding="utf-8").replace('"passed": true', '"passed": false', 1))
    edited = pair_permission(gates, target, draft, "no")
    assert not edited.allowed
    assert "changed after it was written" in edited.warning
    write_record(_judged(many, min_alpha=0.6, **prints), gates)  # the service's own record goes first
    assert pair_permission(gates, target, draft, "no").allowed


def test_the_fingerprint_ignores_the_dtype_and_heeds_the_quantisation(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    plain = ModelConfig(model=str(tmp_path))
    assert model_fingerprint(plain) == model_fingerprint(plain.model_copy(update={"dtype": "float32"}))
    assert model_fingerprint(plain) != model_fingerprint(plain.model_copy(update={"quantization": "int8"}))


@pytest.mark.parametrize(
    ("alpha", "passed", "force", "allowed"),
    [
        (None, None, "no", False),
        (None, None, "yes", True),
        (0.9, True, "no", True),
        (0.65, False, "no", False),
        (0.65, False, "yes", True),
        (0.55, False, "yes", False),
        (0.55, False, "even_slow", True),
    ],
)
def test_what_a_record_permits(
    many: dict[str, list[RequestOutcome]], alpha: float | None, passed: bool | None, force: str, allowed: bool
) -> None:
    record = None
    if alpha is not None and passed is not None:
        record = replace(_judged(many, min_alpha=0.9), passed=passed, acceptance_rate=alpha)
    found = permission(record, force, "tiny", "tiny-draft")  # type: ignore[arg-type]
    assert found.allowed is allowed
    if not allowed:
        assert "rag-service gate --target tiny --draft tiny-draft" in found.warning


def test_reports_for_people_and_pipelines(many: dict[str, list[RequestOutcome]], tmp_path: Path) -> None:
    record = _judged(many, min_alpha=0.8)
    suite = ElementTree.fromstring(junit(record))
    assert suite.get("tests") == "5"
    assert suite.get("failures") == "2"
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["alpha/red", "alpha/blue"]
    page = markdown(record)
    assert page.startswith("# Gate failed: tiny-draft for tiny")
    assert record.digest in page
    assert "α in blue" in page
    paths = write_reports(record, tmp_path)
    assert paths["junit"].read_text(encoding="utf-8") == junit(record)

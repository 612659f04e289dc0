"""The steps of ``draft improve``: find drift, gather questions, distil, compare, gate, propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rag_service.cli.asked import Watch, asked_prompts, bars
from rag_service.cli.output import note
from rag_service.config import Settings


def improve(
    work: Path,
    since: str,
    domains: Sequence[str],
    questions: Sequence[Path] | None,
    documents: Sequence[Path] | None,
    minutes: float,
    workers: int,
    min_alpha: float,
    config: Path | None,
    data_minutes: float | None = None,
) -> tuple[dict[str, Any], str]:
    """Everything up to the proposal; the result and the proposal's text.

    Raises ``ImprovementError`` when no domain drifted and none is named, or the log has no questions.
    """
    from rag_service.comparison import compare_acceptance
    from rag_service.gate import GateRequest, run_gate
    from rag_service.gate_record import write_record
    from rag_service.improvement import proposal
    from rag_service.measurement import Setup
    from rag_service.pair import load_pair, with_models

    settings = Settings.load(config)
    work.mkdir(parents=True, exist_ok=True)
    with bars() as watch:
        chosen = _domains(settings, since, domains)
        prompts = _prompts(settings, work, since, chosen, questions, documents, watch)
        held_out = _held_out(prompts)
        current = load_pair(settings)
        new_folder = _distil(settings, work, prompts, (minutes, data_minutes), workers, watch)
        renewed = load_pair(with_models(settings, None, str(new_folder)))
        alone = Setup("colocated", passages=False, max_tokens=64)
        before, after = current.pair.run(held_out, alone), renewed.pair.run(held_out, alone)
        request = GateRequest(
            renewed.target,
            renewed.target_fingerprint,
            renewed.draft,
            renewed.draft_fingerprint,
            min_alpha,
            tuple(chosen),
            setup=replace(alone, passages=True),
        )
        record = run_gate(renewed.pair, held_out, request, watch)
    write_record(record, settings.data_folder / "gates")
    differences = compare_acceptance(before, after)
    text = proposal(current.draft, str(new_folder), record, [row.sentence for row in differences])
    (work / "proposal.md").write_text(text, encoding="utf-8")
    result = {
        "domains": chosen,
        "draft": str(new_folder),
        "comparison": [row.as_dict() for row in differences],
        "gate": record.as_dict(),
        "proposal": str(work / "proposal.md"),
    }
    return result, text


def _domains(settings: Settings, since: str, named: Sequence[str]) -> list[str]:
    from rag_service.baseline import baselines_of
    from rag_service.improvement import ImprovementError, drifted_domains

    if named:
        return list(named)
    found = drifted_domains(settings, since, baselines_of(settings))
    for one in found:
        note(f"{one.domain}: α fell from {one.rate_before:.3f} to {one.rate_after:.3f}.")
    if not found:
        raise ImprovementError(f"No domain's α fell beyond noise in the last {since}: nothing to improve.")
    return [one.domain for one in found]


def _prompts(
    settings: Settings,
    work: Path,
    since: str,
    domains: Sequence[str],
    questions: Sequence[Path] | None,
    documents: Sequence[Path] | None,
    watch: Watch,
) -> list[Any]:
    from generation.distillation.prompts import read_prompts
    from rag_service.improvement import logged_questions, rehearsed_questions
    from rag_service.question_set import load_documents, service_prompts

    made = work / "prompts.jsonl"
    if made.exists():
        return list(read_prompts(made))
    if questions:
        every = asked_prompts(settings, questions, documents, limit=None, held_out=False, watch=watch)
        return [prompt for prompt in every if prompt.domain in domains]
    asked = [*logged_questions(settings, since, domains), *rehearsed_questions(settings, since, domains)]
    return service_prompts(settings, asked, load_documents(list(documents or ())), watch)


def _distil(
    settings: Settings,
    work: Path,
    prompts: Sequence[Any],
    times: tuple[float, float | None],
    workers: int,
    watch: Watch,
) -> Path:
    """``times``: minutes to train, and to record the target's answers."""
    from generation.distillation.draft_model import is_draft_folder
    from generation.distillation.training import TrainingConfig
    from rag_service.cli.distillation import tell
    from rag_service.distillation_plan import DistillationPlan, settings_of
    from rag_service.distilling import continue_from, distil
    from rag_service.draft_choice import draft_config, resolved
    from rag_service.improvement import ImprovementError
    from rag_service.training_report import training_page

    config = draft_config(settings)
    if config is None or not is_draft_folder(Path(config.model)):
        raise ImprovementError("Only a draft made by rag-service draft create can be trained further.")
    target = Path(resolved(settings.engine.target, settings).model)
    # A trained draft needs gentler steps than a new one, or it forgets before it learns.
    training = TrainingConfig(learning_rate=5e-4, minutes=times[0])
    name = Path(settings.engine.target.model).name
    plan = DistillationPlan(target, name, work, training=training, workers=workers, data_minutes=times[1])
    draft, layers = continue_from(Path(config.model), target)
    result = distil(plan, prompts, draft, layers, progress=watch, report=tell)
    (work / "report.html").write_text(training_page(result, settings_of(plan)), encoding="utf-8")
    return result.draft_folder


def _held_out(prompts: Sequence[Any]) -> list[Any]:
    from generation.distillation.prompts import split_prompts
    from rag_service.improvement import ImprovementError

    held_out = split_prompts(prompts)[1]
    if not held_out:
        raise ImprovementError(f"None of the {len(prompts)} questions is a held-out one: more are needed.")
    return held_out

"""``rag-service draft distill``: train a draft on the target's own answers to the service's prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DataMinutesOption,
    DocumentsOption,
    HeadOption,
    LayersOption,
    LimitOption,
    MinutesOption,
    NumLayersOption,
    QuestionsOption,
    TargetOption,
    WorkersOption,
    asked_prompts,
    bars,
    chosen_layers,
    numbers,
    target_folder,
)
from rag_service.cli.output import JsonFlag, emit, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from generation.distillation.prompts import DistillationPrompt
    from rag_service.config import Settings
    from rag_service.distillation_plan import DistillationPlan
    from rag_service.distilling import DistillationResult
    from rag_service.draft_verifier import DraftVerifier


def distill(
    work: Annotated[Path, typer.Option("--work", help="Work folder; a killed run in it goes on.")],
    target: TargetOption = None,
    start: Annotated[
        Path | None, typer.Option("--draft", help="Draft folder to train further; default: a new draft.")
    ] = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = None,
    prompts_per_question: Annotated[
        int,
        typer.Option(min=1, help="Prompts to train on a question: the service's own, others of passages."),
    ] = 1,
    questions_from_passages: Annotated[
        int, typer.Option(min=0, help="Questions a domain to make up from names in the passages found.")
    ] = 0,
    layers: LayersOption = None,
    num_layers: NumLayersOption = 4,
    head_size: HeadOption = 12288,
    minutes: MinutesOption = 90.0,
    data_minutes: DataMinutesOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps, not by time.")] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 2e-3,
    workers: WorkersOption = 2,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that train; default: one a GPU, one on a CPU.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="One answer of the target for each.")] = "0,0.7,0.7,1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    verify_prompts: Annotated[
        int,
        typer.Option(min=0, help="Held-out prompts that the service's verifier runs at every evaluation."),
    ] = 8,
    on_policy: Annotated[
        int, typer.Option(min=0, help="Rounds on the draft's own answers, after the first training.")
    ] = 0,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a draft on the target's own answers to the service's prompts; one prompt in ten is held out."""
    from rag_service.config import Settings
    from rag_service.pair import with_models
    from rag_service.prompt_variety import Variety

    settings = with_models(Settings.load(config), target, None)
    plan = _plan(
        settings, work, (minutes, steps, learning_rate), data_minutes, workers, processes,
        numbers(temperatures, "--temperatures"), max_tokens,
    )  # fmt: skip
    with bars() as watch:
        variety = Variety(prompts_per_question, questions_from_passages)
        prompts = _prompts(settings, work, questions, documents, limit, variety, watch)
        verify = _verifier(settings, plan, prompts, verify_prompts)
        beginning = start, chosen_layers(layers), num_layers, head_size
        result = _distil(plan, prompts, beginning, on_policy, verify, watch)
        verified = verify.table(result.draft_folder) if verify is not None else None
    _write_report(plan, result, verified)
    emit(_distilled(result, work, verified), _tables(result, verified), as_json=as_json)


def _plan(
    settings: Settings,
    work: Path,
    course: tuple[float, int | None, float],
    data_minutes: float | None,
    workers: int,
    processes: int | None,
    temperatures: Sequence[float],
    max_tokens: int,
) -> DistillationPlan:
    """``course``: minutes, steps (which win when given) and learning rate."""
    import torch

    from generation.distillation.continuation import Sampling
    from generation.distillation.training import TrainingConfig
    from rag_service.distillation_plan import DistillationPlan

    minutes, steps, learning_rate = course
    if steps is None:
        training = TrainingConfig(learning_rate=learning_rate, minutes=minutes)
    else:
        training = TrainingConfig(learning_rate=learning_rate, minutes=None, max_steps=steps)
    return DistillationPlan(
        target_folder=target_folder(settings),
        target_name=Path(settings.engine.target.model).name,
        folder=work,
        sampling=Sampling(tuple(temperatures), max_tokens),
        training=training,
        workers=workers,
        processes=processes or max(1, torch.cuda.device_count()),
        data_minutes=data_minutes,
    )


def _prompts(
    settings: Settings,
    work: Path,
    questions: list[Path] | None,
    documents: list[Path] | None,
    limit: int | None,
    variety: Any,
    watch: Any,
) -> list[DistillationPrompt]:
    from generation.distillation.prompts import read_prompts

    made = work / "prompts.jsonl"
    if made.exists():
        prompts = read_prompts(made)
        note(
            f"Going on with the {len(prompts)} prompts of {made}; questions and documents are not read again."
        )
        return prompts
    return asked_prompts(
        settings, questions, documents, limit=limit, held_out=False, watch=watch, variety=variety
    )


def _verifier(
    settings: Settings, plan: DistillationPlan, prompts: Sequence[DistillationPrompt], count: int
) -> DraftVerifier | None:
    from generation.distillation.prompts import split_prompts
    from rag_service.draft_choice import resolved
    from rag_service.draft_verifier import DraftVerifier, spread

    chosen = spread(split_prompts(prompts)[1], count)
    if not chosen:
        return None
    target = resolved(settings.engine.target, settings)
    return DraftVerifier(target, settings.engine, chosen, plan.folder / "verified")


def _distil(
    plan: DistillationPlan,
    prompts: Sequence[DistillationPrompt],
    beginning: tuple[Path | None, list[int] | None, int, int],
    on_policy: int,
    verify: DraftVerifier | None,
    watch: Any,
) -> DistillationResult:
    """``beginning``: a draft to go on from, or the layers, their number and the head's size of a new one."""
    from generation.distillation.prompts import split_prompts
    from rag_service.distilling import continue_from, distil, new_draft
    from rag_service.on_policy_rounds import on_policy_rounds

    start, layers, num_layers, head_size = beginning
    if start is not None:
        model, kept = continue_from(start, plan.target_folder)
        used = list(kept)
    else:
        texts = [prompt.token_ids for prompt in split_prompts(prompts)[0]]
        model, used = new_draft(plan.target_folder, texts, layers, num_layers, head_size or None)
    result = distil(plan, prompts, model, used, verify, watch, tell)
    return on_policy_rounds(plan, result, on_policy, watch, tell) if on_policy else result


def tell(line: dict[str, Any]) -> None:
    """One line of the training's course, with α when it was measured."""
    from rag_service.training_report import verified_name

    where = f"step {line['step']}, {line['minutes']:.1f} min"
    if "eval_alpha" in line:
        found = f"{where}: held-out α {line['eval_alpha']:.3f} with the target's answers given"
        verified = [(name, value) for name, value in line.items() if name.startswith("eval_verified_")]
        found += "".join(f"; {verified_name(name)} {value:.3f}" for name, value in verified)
        note(found)
    elif "loss" in line:
        note(f"{where}: loss {line['loss']:.3f}")


def _write_report(plan: DistillationPlan, result: DistillationResult, verified: Any) -> None:
    from rag_service.distillation_plan import settings_of
    from rag_service.training_report import training_page

    page = training_page(result, settings_of(plan), verified)
    (plan.folder / "report.html").write_text(page, encoding="utf-8")


def _distilled(result: DistillationResult, work: Path, verified: Any) -> dict[str, Any]:
    def rates(figures: Any) -> dict[str, float]:
        return {name: round(value.alpha, 4) for name, value in figures.items()}

    return {
        "draft": str(result.draft_folder),
        "report": str(work / "report.html"),
        "before": rates(result.before),
        "after": rates(result.after),
        "quantised": rates(result.quantised),
        "verified": verified,
        "num_training_prompts": result.num_training,
        "num_held_out_prompts": result.num_held_out,
        "num_answer_tokens": result.num_answer_tokens,
        "data_fingerprint": result.data_fingerprint,
    }


def _tables(result: DistillationResult, verified: Any) -> Any:
    from rich.console import Group

    from rag_service.report_rendering import rich_of
    from rag_service.training_report import before_and_after, verified_table

    offline = replace(before_and_after(result), title="Held-out acceptance, the target's own answers given")
    shown = [rich_of(offline)]
    if verified is not None:
        found = replace(verified_table(verified), title="By the service's verifier, without passages")
        shown.append(rich_of(found))
    return Group(
        *shown, f"The draft: {result.draft_folder}. Next: rag-service gate --draft {result.draft_folder}"
    )

"""``rag-service draft create|distill|evaluate|improve``: a draft model from its beginning to its replacement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DocumentsOption,
    LimitOption,
    QuestionsOption,
    TargetOption,
    asked_prompts,
    bars,
)
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note

if TYPE_CHECKING:
    from rag_service.config import Settings
    from rag_service.distilling import DistillationPlan, DistillationResult

draft = typer.Typer(no_args_is_help=True, help="Make, train and judge draft models.")

LayersOption = Annotated[
    str | None, typer.Option(help="The target's layers to begin with, with commas; default: searched.")
]
NumLayersOption = Annotated[int, typer.Option(min=1, help="How many layers to search for.")]
HeadOption = Annotated[int, typer.Option("--head-size", min=0, help="Ids the head scores; 0: all.")]
MinutesOption = Annotated[float, typer.Option(min=0.1, help="Time to train, data generation excluded.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes that run the target.")]


def register(app: typer.Typer) -> None:
    """Add ``draft`` to the command line."""
    from rag_service.cli.draft_evaluation import evaluate

    draft.command()(evaluate)
    app.add_typer(draft, name="draft")


@draft.command()
def create(
    output: Annotated[Path, typer.Option(help="Folder of the new draft.")],
    target: TargetOption = None,
    source: Annotated[
        str | None, typer.Option("--from", help="A causal LM with the same tokenizer, instead of layers.")
    ] = None,
    layers: LayersOption = None,
    num_layers: NumLayersOption = 4,
    head_size: HeadOption = 12288,
    texts: Annotated[
        list[Path] | None, typer.Option("--documents", help="JSON Lines whose texts rank the ids.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an untrained draft from some of the target's layers, or take over a causal LM."""
    from generation.distillation.draft_model import DraftCard, save_draft, target_fingerprint
    from rag_service.config import Settings
    from rag_service.distilling import new_draft
    from rag_service.pair import with_models

    settings = with_models(Settings.load(config), target, None)
    folder = _target_folder(settings)
    if source is not None:
        _take_over(source, folder, output)
        emit({"draft": str(output), "from": source}, f"{output}: a copy of {source}", as_json=as_json)
        return
    model, chosen = new_draft(folder, _texts(settings, texts), _layers(layers), num_layers, head_size or None)
    size = int(model.head.weight.shape[0])
    card = DraftCard(_target_name(settings), target_fingerprint(folder), tuple(chosen), size, "int8")
    save_draft(model, output, card)
    num_bytes = sum(file.stat().st_size for file in output.iterdir())
    result = {"draft": str(output), "layers": chosen, "head_size": size, "num_bytes": num_bytes}
    shown = f"{output}: layers {chosen}, {size} ids, {num_bytes / 1e6:.1f} MB. Train it: draft distill"
    emit(result, shown, as_json=as_json)


@draft.command()
def distill(
    work: Annotated[Path, typer.Option("--work", help="Work folder; a killed run in it goes on.")],
    target: TargetOption = None,
    start: Annotated[
        Path | None, typer.Option("--draft", help="Draft folder to train further; default: a new draft.")
    ] = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = None,
    layers: LayersOption = None,
    num_layers: NumLayersOption = 4,
    head_size: HeadOption = 12288,
    minutes: MinutesOption = 90.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps, not by time.")] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 2e-3,
    workers: WorkersOption = 2,
    temperatures: Annotated[str, typer.Option(help="One answer of the target for each.")] = "0,0.7,0.7,1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    on_policy: Annotated[
        int, typer.Option(min=0, help="Rounds on the draft's own answers, after the first training.")
    ] = 0,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a draft on the target's own answers to the service's prompts; one prompt in ten is held out."""
    from generation.distillation.prompts import read_prompts
    from rag_service.config import Settings
    from rag_service.pair import with_models

    settings = with_models(Settings.load(config), target, None)
    plan = _plan(settings, work, minutes, steps, learning_rate, workers, temperatures, max_tokens)
    with bars() as watch:
        made = work / "prompts.jsonl"
        prompts = (
            read_prompts(made)
            if made.exists()
            else asked_prompts(settings, questions, documents, limit=limit, held_out=False, watch=watch)
        )
        result = _distil(plan, prompts, start, _layers(layers), num_layers, head_size, on_policy, watch)
    _write_report(plan, result, work)
    emit(_distilled(result, work), _distilled_table(result), as_json=as_json)


@draft.command()
def improve(
    work: Annotated[Path, typer.Option("--work", help="Work folder; a killed run in it goes on.")],
    since: Annotated[str, typer.Option(help="Window of the request log that ends now: 24h, 7d.")] = "7d",
    domain: Annotated[list[str] | None, typer.Option(help="Improve these domains, drifted or not.")] = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    minutes: MinutesOption = 30.0,
    workers: WorkersOption = 2,
    min_alpha: Annotated[float, typer.Option(help="Bar of the gate.")] = 0.7,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Drift to proposal in one go: the log's questions, distillation from the current draft, gate, proposal.

    It stops at the proposal: nothing is rolled out.
    """
    from rag_service.cli.improving import improve as run

    result, shown = run(work, since, domain or [], questions, documents, minutes, workers, min_alpha, config)
    emit(result, shown, as_json=as_json)


def _target_folder(settings: Settings) -> Path:
    from rag_service.draft_choice import resolved

    folder = Path(resolved(settings.engine.target, settings).model)
    if not folder.is_dir():
        raise CommandError(
            f"The target {settings.engine.target.model} must lie in a folder to make a draft of it: "
            "fetch or download it first.",
            EXIT_USAGE,
            "bad_target",
        )
    return folder


def _target_name(settings: Settings) -> str:
    return Path(settings.engine.target.model).name


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise CommandError("--layers takes whole numbers with commas.", EXIT_USAGE, "usage") from None


def _texts(settings: Settings, paths: list[Path] | None) -> list[list[int]]:
    from generation.loading import load_tokenizer
    from rag_service.question_set import load_documents
    from rag_service.tokenizer import encode_text

    if not paths:
        return []
    tokenizer = load_tokenizer(str(_target_folder(settings)))
    return [encode_text(tokenizer, document.text) for document in load_documents(paths)]


def _take_over(source: str, target: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM

    from generation.loading import check_pair, load_tokenizer

    tokenizer = load_tokenizer(source)
    check_pair(load_tokenizer(str(target)), tokenizer, target.name, source)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(output)
    tokenizer.save_pretrained(output)


def _plan(
    settings: Settings,
    work: Path,
    minutes: float,
    steps: int | None,
    learning_rate: float,
    workers: int,
    temperatures: str,
    max_tokens: int,
) -> DistillationPlan:
    from generation.distillation.continuation import Sampling
    from generation.distillation.training import TrainingConfig
    from rag_service.distilling import DistillationPlan

    if steps is None:
        training = TrainingConfig(learning_rate=learning_rate, minutes=minutes)
    else:
        training = TrainingConfig(learning_rate=learning_rate, minutes=None, max_steps=steps)
    answers = tuple(float(part) for part in temperatures.split(",") if part.strip())
    return DistillationPlan(
        target_folder=_target_folder(settings),
        target_name=_target_name(settings),
        folder=work,
        sampling=Sampling(answers, max_tokens),
        training=training,
        workers=workers,
    )


def _distil(
    plan: DistillationPlan,
    prompts: Any,
    start: Path | None,
    layers: list[int] | None,
    num_layers: int,
    head_size: int,
    on_policy: int,
    watch: Any,
) -> DistillationResult:
    from generation.distillation.prompts import split_prompts
    from rag_service.distilling import continue_from, distil, new_draft
    from rag_service.on_policy_rounds import on_policy_rounds

    if start is not None:
        model, kept = continue_from(start, plan.target_folder)
        used = list(kept)
    else:
        training, _ = split_prompts(prompts)
        texts = [prompt.token_ids for prompt in training]
        model, used = new_draft(plan.target_folder, texts, layers, num_layers, head_size or None)
    result = distil(plan, prompts, model, used, progress=watch, report=_tell)
    return on_policy_rounds(plan, result, on_policy, watch, _tell) if on_policy else result


def _tell(line: dict[str, Any]) -> None:
    """One line of the training's course, with α when it was measured."""
    if "eval_alpha" in line:
        note(f"step {line['step']}, {line['minutes']:.1f} min: held-out α {line['eval_alpha']:.3f}")
    elif "loss" in line:
        note(f"step {line['step']}, {line['minutes']:.1f} min: loss {line['loss']:.3f}")


def _write_report(plan: DistillationPlan, result: DistillationResult, work: Path) -> None:
    from rag_service.distilling import settings_of
    from rag_service.training_report import training_page

    (work / "report.html").write_text(training_page(result, settings_of(plan)), encoding="utf-8")


def _distilled(result: DistillationResult, work: Path) -> dict[str, Any]:
    def rates(figures: Any) -> dict[str, float]:
        return {name: round(value.alpha, 4) for name, value in figures.items()}

    return {
        "draft": str(result.draft_folder),
        "report": str(work / "report.html"),
        "before": rates(result.before),
        "after": rates(result.after),
        "quantised": rates(result.quantised),
        "num_training_prompts": result.num_training,
        "num_held_out_prompts": result.num_held_out,
        "num_answer_tokens": result.num_answer_tokens,
        "data_fingerprint": result.data_fingerprint,
    }


def _distilled_table(result: DistillationResult) -> Any:
    from rich.table import Table

    from rag_service.training_report import before_and_after

    found = before_and_after(result)
    table = Table(*found.header, title="Held-out acceptance, the target's own answers given")
    for row in found.rows:
        table.add_row(*row)
    return table

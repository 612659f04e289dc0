"""``rag-service draft create|distill|evaluate|improve``: a draft model from its beginning to its replacement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DataMinutesOption,
    DocumentsOption,
    HeadOption,
    LayersOption,
    MinAlphaOption,
    MinutesOption,
    NumLayersOption,
    QuestionsOption,
    TargetOption,
    WorkersOption,
    chosen_layers,
    quiet_libraries,
    target_folder,
)
from rag_service.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from generation.distillation.draft_model import DraftModel

draft = typer.Typer(no_args_is_help=True, help="Make, train and judge draft models.")


def register(app: typer.Typer) -> None:
    """Add ``draft`` to the command line."""
    from rag_service.cli.distillation import distill
    from rag_service.cli.draft_evaluation import evaluate

    draft.command()(distill)
    draft.command()(evaluate)
    app.add_typer(draft, name="draft")


@draft.command()
def create(
    output: Annotated[Path, typer.Option(help="Folder of the new draft.")],
    target: TargetOption = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="A causal LM with the same tokenizer, or a draft to trim, instead of layers."
        ),
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
    """Make an untrained draft of some of the target's layers, trim a draft, or take over a causal LM."""
    from generation.distillation.draft_model import is_draft_folder, read_card
    from rag_service.config import Settings
    from rag_service.distilling import new_draft, trimmed
    from rag_service.pair import with_models

    quiet_libraries()
    settings = with_models(Settings.load(config), target, None)
    folder = target_folder(settings)
    ranked = _texts(folder, texts)
    if source is None:
        model, used = new_draft(folder, ranked, chosen_layers(layers), num_layers, head_size or None)
        name, hint = Path(settings.engine.target.model).name, "Train it: rag-service draft distill --draft"
    elif is_draft_folder(Path(source)):
        model, used = trimmed(Path(source), folder, ranked, chosen_layers(layers), head_size or None)
        name, hint = read_card(Path(source)).target, "Measure it: rag-service tune --model-alone --draft"
    else:
        _take_over(source, folder, output)
        emit({"draft": str(output), "from": source}, f"{output}: a copy of {source}", as_json=as_json)
        return
    result = _saved(model, used, output, name, folder)
    shown = "{draft}: layers {layers}, {head_size} ids, {megabytes:.1f} MB. ".format(
        **result, megabytes=result["num_bytes"] / 1e6
    )
    emit(result, f"{shown}{hint} {output}", as_json=as_json)


def _saved(model: DraftModel, layers: list[int], output: Path, target: str, folder: Path) -> dict[str, Any]:
    from generation.distillation.draft_model import DraftCard, save_draft, target_fingerprint

    size = int(model.head.weight.shape[0])
    save_draft(model, output, DraftCard(target, target_fingerprint(folder), tuple(layers), size, "int8"))
    num_bytes = sum(file.stat().st_size for file in output.iterdir())
    return {"draft": str(output), "layers": layers, "head_size": size, "num_bytes": num_bytes}


@draft.command()
def improve(
    work: Annotated[Path, typer.Option("--work", help="Work folder; a killed run in it goes on.")],
    since: Annotated[str, typer.Option(help="Window of the request log that ends now: 24h, 7d.")] = "7d",
    domain: Annotated[list[str] | None, typer.Option(help="Improve these domains, drifted or not.")] = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    minutes: MinutesOption = 30.0,
    data_minutes: DataMinutesOption = None,
    workers: WorkersOption = 2,
    min_alpha: MinAlphaOption = 0.7,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Drift to proposal in one go: the log's questions, distillation from the current draft, gate, proposal.

    It stops at the proposal: nothing is rolled out.
    """
    from rag_service.cli.improving import improve as run

    result, shown = run(
        work, since, domain or [], questions, documents, minutes, workers, min_alpha, config, data_minutes
    )
    emit(result, shown, as_json=as_json)


def _texts(target: Path, paths: list[Path] | None) -> list[list[int]]:
    from generation.loading import load_tokenizer
    from rag_service.question_set import load_documents
    from rag_service.tokenizer import encode_text

    if not paths:
        return []
    tokenizer = load_tokenizer(str(target))
    return [encode_text(tokenizer, document.text) for document in load_documents(paths)]


def _take_over(source: str, target: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM

    from generation.loading import check_pair, load_tokenizer

    tokenizer = load_tokenizer(source)
    check_pair(load_tokenizer(str(target)), tokenizer, target.name, source)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(output)
    tokenizer.save_pretrained(output)

"""``rag-service draft evaluate``: the α table of a pair, and whether another differs beyond noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DocumentsOption,
    DraftOption,
    HeldOutOption,
    LimitOption,
    MaxTokensOption,
    ModelAloneOption,
    QuestionsOption,
    TargetOption,
    TokensOption,
    Watch,
    asked_prompts,
    bars,
    numbers,
)
from rag_service.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from generation.distillation.prompts import DistillationPrompt
    from rag_service.measurement import RequestOutcome, Setup
    from rag_service.pair import NamedPair

    Outcomes = dict[float, list[RequestOutcome]]


def evaluate(
    target: TargetOption = None,
    model: DraftOption = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = 4,
    held_out: HeldOutOption = False,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.7",
    num_draft_tokens: TokensOption = 4,
    max_tokens: MaxTokensOption = 64,
    model_alone: ModelAloneOption = False,
    against: Annotated[
        str | None, typer.Option(help="Another draft to compare with, as if it replaced this one.")
    ] = None,
    against_target: Annotated[
        str | None, typer.Option(help="Another target to compare with, as if it replaced this one.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """The α table of one pair; with --against, whether another draft or target differs beyond noise."""
    from rag_service.config import Settings
    from rag_service.measurement import Setup
    from rag_service.pair import load_pair, with_models

    settings = with_models(Settings.load(config), target, model)
    setups = {
        one: Setup("colocated", num_draft_tokens, one, passages=not model_alone, max_tokens=max_tokens)
        for one in dict.fromkeys(numbers(temperature, "--temperature"))
    }
    others: Outcomes = {}
    with bars() as watch:
        prompts = asked_prompts(settings, questions, documents, limit=limit, held_out=held_out, watch=watch)
        named = load_pair(settings)
        outcomes = _measured(named, prompts, setups, watch, "")
        if against is not None or against_target is not None:
            other = load_pair(with_models(settings, against_target, against))
            others = _measured(other, prompts, setups, watch, "other, ")
    result = _result(named, setups, outcomes, others)
    emit(result, _readable(result), as_json=as_json)


def _measured(
    named: NamedPair,
    prompts: Sequence[DistillationPrompt],
    setups: Mapping[float, Setup],
    watch: Watch,
    prefix: str,
) -> Outcomes:
    def counting(what: str) -> Callable[[int], None]:
        return lambda done: watch(what, done, len(prompts))

    return {
        one: named.pair.run(prompts, setup, counting(f"{prefix}T={one:g}")) for one, setup in setups.items()
    }


def _result(
    named: NamedPair, setups: Mapping[float, Setup], outcomes: Outcomes, others: Outcomes
) -> dict[str, Any]:
    from rag_service.comparison import compare_acceptance
    from rag_service.measurement import acceptance_table

    tables = {f"{one:g}": acceptance_table(found) for one, found in outcomes.items()}
    first = next(iter(setups))
    result: dict[str, Any] = {
        "target": named.target,
        "draft": named.draft,
        "drafters": setups[first].drafters,
        **tables[f"{first:g}"],
        "temperatures": tables,
    }
    if others:
        result["comparison"] = {
            f"{one:g}": [row.as_dict() for row in compare_acceptance(outcomes[one], others[one])]
            for one in setups
        }
    return result


def _readable(result: dict[str, Any]) -> Any:
    from rich.console import Group

    from rag_service.report_rendering import rich_of
    from rag_service.training_report import verified_table

    shown: list[Any] = []
    for temperature, figures in result["temperatures"].items():
        title = f"{result['draft']} for {result['target']}, {result['drafters']}, temperature {temperature}"
        shown.append(rich_of(replace(verified_table(figures), title=title)))
    for temperature, rows in result.get("comparison", {}).items():
        shown += [f"Temperature {temperature}: {row['sentence']}" for row in rows]
    return Group(*shown)

"""``rag-service tune``: find the fastest way of speculating on one's own questions.

A group, so that other sweeps can stand beside it: ``tune retrieval``. Without one of them it is its own command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DocumentsOption,
    HeldOutOption,
    LimitOption,
    MaxTokensOption,
    ModelAloneOption,
    QuestionsOption,
    TargetOption,
    asked_prompts,
    bars,
    numbers,
    whole_numbers,
)
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note

_ALWAYS = ("mode", "draft", "K", "α", "τ", "speed-up")
sweeps = typer.Typer(invoke_without_command=True)
"""Other modules add their sweeps here."""


def register(app: typer.Typer) -> None:
    """Add ``tune`` to the command line."""
    app.add_typer(sweeps, name="tune")


@sweeps.callback()
def tune(
    context: typer.Context,
    target: TargetOption = None,
    draft: Annotated[
        list[str] | None, typer.Option("--draft", help="Candidate drafts; may be repeated.")
    ] = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    limit: LimitOption = 4,
    held_out: HeldOutOption = False,
    tokens: Annotated[str, typer.Option(help="Values of K, with commas.")] = "2,3,4,5",
    modes: Annotated[
        str, typer.Option(help="Of passages, colocated, synchronous, lookahead, auto; with commas.")
    ] = "passages,colocated,lookahead",
    branches: Annotated[str, typer.Option(help="Branch budgets of look-ahead, with commas.")] = "8",
    temperatures: Annotated[str, typer.Option("--temperature", help="Temperatures, with commas.")] = "0",
    acceptance: Annotated[
        str, typer.Option(help="token, block, threshold, typical; with commas. The last two are lossy.")
    ] = "token",
    model_alone: ModelAloneOption = False,
    max_tokens: MaxTokensOption = 64,
    write: Annotated[Path | None, typer.Option(help="Write the recommended configuration here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the HTML report here.")] = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Sweep K, mode, branches, temperature, acceptance and drafts; recommend by the clock."""
    if context.invoked_subcommand is not None:
        return
    from rag_service.config import Settings
    from rag_service.pair import load_pair, with_models
    from rag_service.tuning import as_configuration, recommend, sweep
    from rag_service.tuning_report import render

    plan = _plan(tokens, modes, branches, temperatures, acceptance, model_alone, max_tokens)
    base = with_models(Settings.load(config), target, None)
    drafts: list[str | None] = [*(draft or ())] or [None]
    with bars() as watch:
        prompts = asked_prompts(base, questions, documents, limit=limit, held_out=held_out, watch=watch)
        named = [load_pair(with_models(base, None, one), needs_draft=False) for one in drafts]
        names = _names([one.draft for one in named], drafts)
        models = dict(zip(names, drafts, strict=True))
        results, costs = sweep(
            {name: one.pair for name, one in zip(names, named, strict=True)}, prompts, plan, watch
        )
    best = recommend(results)
    values = as_configuration(best, models.get(best.draft))
    if write is not None:
        _write_configuration(write, values)
        note(f"The recommended configuration is {write}.")
    if report is not None:
        about = f"{len(prompts)} questions, target {named[0].target}, answers of at most {max_tokens} tokens."
        report.write_text(render(results, best, costs, about), encoding="utf-8")
        note(f"The report is {report}.")
    result = {
        "results": [one.as_dict() for one in results],
        "recommended": best.as_dict(),
        "configuration": values,
        "costs": {
            name: {
                "verify_seconds": dict(cost.verify_seconds),
                "draft_seconds": cost.draft_seconds,
                "context": cost.context,
            }
            for name, cost in costs.items()
        },
    }
    emit(result, _shown(results, best, costs), as_json=as_json)


def _names(names: list[str], paths: list[str | None]) -> list[str]:
    """What to call each draft: its folder's name, or the whole path where two folders share one."""
    return [
        name if names.count(name) == 1 or path is None else path
        for name, path in zip(names, paths, strict=True)
    ]


def _plan(
    tokens: str,
    modes: str,
    branches: str,
    temperatures: str,
    acceptance: str,
    model_alone: bool,
    max_tokens: int,
) -> Any:
    from generation.config import Mode
    from generation.types import AcceptanceMethod
    from rag_service.tuning import Sweep

    known_modes = [mode for mode in get_args(Mode) if mode != "off"]
    return Sweep(
        modes=tuple(_chosen(modes, known_modes, "--modes")),
        num_draft_tokens=tuple(whole_numbers(tokens, "--tokens")),
        branch_budgets=tuple(whole_numbers(branches, "--branches")),
        temperatures=tuple(numbers(temperatures, "--temperature")),
        acceptances=tuple(_chosen(acceptance, list(get_args(AcceptanceMethod)), "--acceptance")),
        passages=(True, False) if model_alone else (True,),
        max_tokens=max_tokens,
    )


def _chosen(text: str, known: list[str], option: str) -> list[Any]:
    values = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        shown = unknown[0] if unknown else "nothing"
        raise CommandError(f"{option} takes {', '.join(known)}, not {shown}.", EXIT_USAGE, "usage")
    return values


def _write_configuration(path: Path, values: dict[str, Any]) -> None:
    """Put the recommendation into a new or an existing configuration file, leaving its other settings."""
    import yaml

    known = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    merged = _merged(known if isinstance(known, dict) else {}, values)
    partial = path.with_suffix(".partial")
    partial.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")
    partial.replace(path)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _shown(results: list[Any], best: Any, costs: Any) -> Any:
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table

    from rag_service.tuning_report import HEAD, cells, costs_text, title_of

    rows = {id(one): cells(one) for one in results}
    # A terminal is narrow: what is the same in every row, and what the report has beside it, is left out.
    shown = [
        number
        for number, name in enumerate(HEAD)
        if name != "tokens/s" and (name in _ALWAYS or len({row[number] for row in rows.values()} - {""}) > 1)
    ]
    table = Table(title="Speculative decoding, by the clock", title_justify="left", box=SIMPLE)
    for number in shown:
        table.add_column(HEAD[number], overflow="fold")
    for one in sorted(results, key=lambda result: -(result.speed_up or 0.0)):
        style = "bold green" if one is best else None
        table.add_row(*(rows[id(one)][number] for number in shown), style=style)
    return Group(table, costs_text(costs), f"Recommended: {title_of(best)}.")

"""``rag-service gate``: may this draft serve this target? Exit status 1 when not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rag_service.cli.asked import (
    ConfigOption,
    DocumentsOption,
    DraftOption,
    HeldOutOption,
    LimitOption,
    MaxTokensOption,
    MinAlphaOption,
    QuestionsOption,
    TargetOption,
    TokensOption,
    asked_prompts,
    bars,
)
from rag_service.cli.output import EXIT_FAILED, EXIT_USAGE, CommandError, JsonFlag, emit, note


def register(app: typer.Typer) -> None:
    """Add ``gate`` to the command line."""
    app.command("gate")(gate)


def gate(
    target: TargetOption = None,
    draft: DraftOption = None,
    questions: QuestionsOption = None,
    documents: DocumentsOption = None,
    min_alpha: MinAlphaOption = 0.7,
    domain: Annotated[
        list[str] | None, typer.Option(help="Domains that must pass; default: all that occur.")
    ] = None,
    drafters: Annotated[
        str, typer.Option(help="Lay the bar on the draft model alone (model) or on all as served (served).")
    ] = "model",
    limit: LimitOption = None,
    held_out: HeldOutOption = False,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    num_draft_tokens: TokensOption = 4,
    max_tokens: MaxTokensOption = 64,
    signed_off_by: Annotated[str, typer.Option(help="Who answers for it; default: the user's name.")] = "",
    allow_slow: Annotated[
        bool, typer.Option("--allow-slow", help="Let a pair pass whose α is below .6 over all domains.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Also write gate.json, gate.md and gate.xml (JUnit) into this folder.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a target and a draft, and record whether the draft may be used.

    The service looks the record up when it starts: without a passing one for exactly these weights the draft
    model stays off.
    """
    from rag_service.config import Settings
    from rag_service.gate import GateRequest, run_gate, summary
    from rag_service.gate_record import write_record
    from rag_service.gate_report import markdown, write_reports
    from rag_service.measurement import Setup
    from rag_service.pair import load_pair, with_models

    if drafters not in ("model", "served"):
        raise CommandError("--drafters is model or served.", EXIT_USAGE, "usage")
    settings = with_models(Settings.load(config), target, draft)
    with bars() as watch:
        prompts = asked_prompts(settings, questions, documents, limit=limit, held_out=held_out, watch=watch)
        named = load_pair(settings)
        request = GateRequest(
            named.target,
            named.target_fingerprint,
            named.draft,
            named.draft_fingerprint,
            min_alpha,
            tuple(domain or ()),
            "model" if drafters == "model" else "served",
            Setup("colocated", num_draft_tokens, temperature, max_tokens=max_tokens),
            signed_off_by,
            allow_slow,
        )
        record = run_gate(named.pair, prompts, request, watch)
    path = write_record(record, settings.data_folder / "gates")
    note(f"The record is {path}.")
    if output is not None:
        write_reports(record, output)
        write_record(record, output).replace(output / "gate.json")
    emit(summary(record), markdown(record), as_json=as_json)
    if not record.passed:
        raise typer.Exit(EXIT_FAILED)

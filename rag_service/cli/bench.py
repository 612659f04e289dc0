"""``rag-service bench``: load on a running service, speculation on and off compared on the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.client import KeyOption, UrlOption
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note

if TYPE_CHECKING:
    from rag_service.load import LoadPlan, LoadResult

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MODES = ("auto", "off", "passages", "colocated", "synchronous", "lookahead")
DEFAULT_QUESTIONS = Path("examples/corpus/questions.jsonl")


def bench(
    questions: Annotated[
        list[Path] | None,
        typer.Option("--questions", help="JSON Lines with question and domain; may be repeated."),
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", "-d", help="Ask of this domain alone; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions a domain at most.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Questions in all; more than there are begins anew.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 4,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: so many requests a second, arriving at random.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option("--mode", help=f"Modes to compare ({', '.join(MODES)}); default: auto and off."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    max_seconds: Annotated[float, typer.Option(min=1.0, help="Stop after so long.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots here.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    remote: Annotated[bool, typer.Option("--remote", help="Allow a service on another machine.")] = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Load a running service and compare its decoding modes.

    P50, P95 and P99 with intervals by stage, tokens a second, acceptance by domain and errors.
    """
    from rich.console import Group

    from rag_service.load_html import load_html_of, load_tabulars
    from rag_service.load_report import load_report
    from rag_service.report_rendering import rich_of

    try:
        plan = _plan(
            _questions(questions, domain or [], limit, seed), _modes(mode), count, url, api_key, remote,
            concurrency=concurrency, rate=rate, max_tokens=max_tokens, temperature=temperature,
            max_seconds=max_seconds, seed=seed,
        )  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE, "invalid_value") from None
    report = load_report(_run(plan))
    if html is not None:
        html.write_text(load_html_of(report), encoding="utf-8")
        note(f"Wrote {html}.")
    if output is not None:
        _write_json(output, report)
    emit(report, Group(*(rich_of(table) for table in load_tabulars(report))), as_json=as_json)
    if report["num_requests"] == 0 or report["num_errors"] == report["num_requests"]:
        raise CommandError("No request was answered.")


def register(app: typer.Typer) -> None:
    """Add the ``bench`` command."""
    app.command("bench")(bench)


def _questions(paths: list[Path] | None, domains: list[str], limit: int | None, seed: int) -> Any:
    from rag_service.load_questions import QuestionsError, mixed, read_questions

    if not paths and not DEFAULT_QUESTIONS.exists():
        raise QuestionsError("Name a file of questions with --questions.")
    return mixed(read_questions(paths or [DEFAULT_QUESTIONS]), domains, limit, seed)


def _modes(modes: list[str] | None) -> dict[str, dict[str, Any]]:
    chosen = modes or ["auto", "off"]
    for mode in chosen:
        if mode not in MODES:
            raise ValueError(f"There is no mode {mode}; there are {', '.join(MODES)}.")
    return {mode: {"speculation": {"mode": mode}} for mode in chosen}


def _plan(
    questions: Any,
    arms: dict[str, dict[str, Any]],
    count: int | None,
    url: str | None,
    api_key: str | None,
    remote: bool,
    **values: Any,
) -> LoadPlan:
    import httpx

    from rag_service.cli.ask import served_model
    from rag_service.cli.client import Client
    from rag_service.load import LoadPlan

    with Client(url, api_key) as client:
        if httpx.URL(client.url).host not in LOOPBACK and not remote:
            raise ValueError(f"{client.url} is another machine; --remote allows load on it.")
        model = served_model(client)
        return LoadPlan(
            client.url, model, tuple(questions), count or len(questions), arms, api_key=api_key, **values
        )


def _run(plan: LoadPlan) -> LoadResult:
    import asyncio

    from rag_service.cli.output import progress
    from rag_service.load import Sample, run_load

    with progress() as bar:
        task = bar.add_task("asking", total=plan.num_requests)
        errors = 0

        def seen(sample: Sample) -> None:
            nonlocal errors
            errors += sample.error is not None
            bar.update(task, advance=1, description=f"asking, {errors} errors" if errors else "asking")

        return asyncio.run(run_load(plan, seen))


def _write_json(path: Path, report: dict[str, Any]) -> None:
    import json

    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    note(f"Wrote {path}.")

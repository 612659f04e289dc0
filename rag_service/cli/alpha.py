"""``rag-service alpha report``: the acceptance rate of each domain, and how fast answers came."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.client import KeyOption
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note

if TYPE_CHECKING:
    from rag_service.config import Settings


class Format(StrEnum):
    """How the report is written."""

    table = "table"
    json = "json"
    csv = "csv"
    md = "md"
    html = "html"
    parquet = "parquet"


alpha = typer.Typer(no_args_is_help=True, help="Acceptance rate of draft tokens, by domain.")


def register(app: typer.Typer) -> None:
    """Add ``alpha`` to the command line."""
    app.add_typer(alpha, name="alpha")


@alpha.callback()
def root() -> None:
    """Acceptance rate of draft tokens, by domain."""


@alpha.command()
def report(
    since: Annotated[str, typer.Option(help="Window that ends now: 30m, 24h, 7d, 2w.")] = "7d",
    by: Annotated[
        str, typer.Option(help="Groups, with commas: domain, draft, target, drafter, temperature, mode.")
    ] = "domain",
    domain: Annotated[str | None, typer.Option(help="One domain alone.")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.table,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask a running service, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: KeyOption = None,
    log: Annotated[str | None, typer.Option(help="Read this log folder or fsspec URL.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file that names the log.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Acceptance rate with its interval, mean acceptance length and latencies of each domain.

    Read from the configured request log, or with --url from a running service.
    """
    from rag_service.report_query import ReportQueryError

    if url is not None and log is not None:
        raise CommandError("Give --url or --log, not both.", EXIT_USAGE, "usage")
    values = {"window": since, "domain": domain, "group_by": by}
    if output_format is Format.html:
        values["bucket"] = "auto"
    try:
        found = _from_service(url, api_key, values) if url else _from_log(log, config, values)
    except ReportQueryError as error:
        raise CommandError(str(error), EXIT_USAGE, "invalid_value") from None
    _write(found, Format.json if as_json else output_format, output, as_json=as_json)


def _from_log(log: str | None, config: Path | None, values: dict[str, Any]) -> dict[str, Any]:
    from rag_service.acceptance_report import acceptance_report
    from rag_service.config import OTHER_DOMAIN, Settings
    from rag_service.recorder import request_log_of
    from rag_service.report_query import ReportQuery
    from rag_service.request_columns import COLUMN_NAMES

    settings = Settings.load(config, {"telemetry.folder": log} if log else None)
    domains = (*settings.service.domains, OTHER_DOMAIN)
    query = ReportQuery.of({k: v for k, v in values.items() if v}, time.time(), domains)
    with request_log_of(settings).reading(query.since, query.until, COLUMN_NAMES) as connection:
        return acceptance_report(connection, query, domains, _baselines(settings))


def _baselines(settings: Settings) -> dict[str, float]:
    from rag_service.baseline import BaselineError, baselines_of

    try:
        return baselines_of(settings)
    except BaselineError as error:
        note(f"{error} Drift is judged against earlier requests alone.")
        return {}


def _from_service(url: str, api_key: str | None, values: dict[str, Any]) -> dict[str, Any]:
    from rag_service.cli.client import Client

    with Client(url, api_key) as client:
        parameters = {name: value for name, value in values.items() if value}
        body = client.call("GET", "/v1/acceptance", params=parameters)
    if not isinstance(body, dict) or "domains" not in body:
        raise CommandError(f"What answers at {url} is not rag-service.")
    return body


def _write(found: dict[str, Any], output_format: Format, output: Path | None, *, as_json: bool) -> None:
    if output is None and output_format is Format.parquet:
        raise CommandError("Parquet is no text: name a file with --output.", EXIT_USAGE, "usage")
    if output is None:
        emit(found, _readable(found, output_format), as_json=as_json)
        return
    content = _content(found, output_format)
    output.write_bytes(content)
    note(f"Wrote {output} ({len(content)} bytes).")
    if as_json:
        emit(found, as_json=True)


def _readable(found: dict[str, Any], output_format: Format) -> Any:
    from rich.console import Group

    from rag_service.report_rendering import tables_of

    if output_format is Format.table:
        return Group(*tables_of(found))
    return None if output_format is Format.json else _content(found, output_format).decode()


def _content(found: dict[str, Any], output_format: Format) -> bytes:
    import json

    from rag_service import report_rendering as rendering

    match output_format:
        case Format.csv:
            return rendering.csv_of(found).encode()
        case Format.md:
            return rendering.markdown_of(found).encode()
        case Format.parquet:
            return rendering.parquet_of(found)
        case Format.html:
            from rag_service.report_html import html_of

            return html_of(found).encode()
        case Format.json:
            return json.dumps(found, indent=2).encode() + b"\n"
        case Format.table:
            return rendering.markdown_of(found).encode()

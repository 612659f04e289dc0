"""``rag-service config show|build``: the settings in force, and a Serve config made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rag_service.cli.output import JsonFlag, emit, note

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="Settings (YAML) or a Serve config file.")
]

config = typer.Typer(help="Show the settings, or build a Serve config.", no_args_is_help=True)


@config.command("show")
def show(config_file: ConfigOption = None, as_json: JsonFlag = False) -> None:
    """Show every setting in force: defaults, the file and the environment together. Secrets are masked."""
    import yaml

    from rag_service.serve_config import load_settings

    values = load_settings(config_file).as_values()
    emit(values, yaml.safe_dump(values, sort_keys=False, allow_unicode=True), as_json=as_json)


@config.command("build")
def build(
    config_file: ConfigOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, 0.0.0.0 in a cluster.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Build a Serve config that 'serve deploy' and 'rag-service serve --config' take."""
    import yaml

    from deployments.options import DEPLOYMENT_NAMES, check_scaling, deployment_options, has_draft
    from rag_service.serve_config import build_serve_config, has_secrets, load_settings

    settings = load_settings(config_file, {"service.host": host} if host else {})
    check_scaling(settings)
    names = [name for name in DEPLOYMENT_NAMES if name != "Draft" or has_draft(settings)]
    document = build_serve_config(settings, [deployment_options(settings, name) for name in names])
    if has_secrets(settings):
        note("Secrets are left out: give them to the cluster's processes as RAG_SERVICE_ variables.")
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if output is None:
        emit(document, text, as_json=as_json)
        return
    _write_whole(output, text)
    emit({"written": str(output)}, f"Written to {output}.", as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the ``config`` commands."""
    app.add_typer(config, name="config")


def _write_whole(path: Path, text: str) -> None:
    """By rename, so that a full disk leaves the old file as it was."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

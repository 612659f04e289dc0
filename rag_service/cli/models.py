"""``rag-service models fetch|list``: the packaged models in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit, note, progress
from rag_service.models import PACKAGED, PackagedModel, model_folder, state

CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Cache folder; default: the configured one (RAG_SERVICE_CACHE)."),
]

models = typer.Typer(help="Fetch and list the packaged models.", no_args_is_help=True)


@models.command("fetch")
def fetch_models(
    names: Annotated[list[str] | None, typer.Argument(help="Models to fetch; default: all.")] = None,
    cache: CacheOption = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there already.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch packaged models into the cache, checking each against its pinned SHA-256."""
    from rag_service.model_fetch import fetch

    folder = cache or _configured_cache()
    wanted = [_known(name) for name in names or PACKAGED]
    results: list[dict[str, Any]] = []
    with progress(transfer=True) as bars:
        for model in wanted:
            fetched = fetch(model, folder, watch=_Bar(bars, model), force=force)
            results.append(
                {"name": model.name, "fetched": fetched, "folder": str(model_folder(model, folder))}
            )
    lines = [
        f"{row['name']}: {'fetched into' if row['fetched'] else 'already in'} {row['folder']}"
        for row in results
    ]
    emit({"models": results}, "\n".join(lines), as_json=as_json)


@models.command("list")
def list_models(cache: CacheOption = None, as_json: JsonFlag = False) -> None:
    """List the packaged models and whether each is ready in the cache."""
    folder = cache or _configured_cache()
    rows = [
        {
            "name": model.name,
            "state": state(model, folder),
            "package": model.requirement,
            "sha256": model.sha256,
            "licence": model.licence,
            "purpose": model.purpose,
            "folder": str(model_folder(model, folder)),
        }
        for model in PACKAGED.values()
    ]
    table = Table(box=None)
    for heading in ("name", "state", "package", "licence", "purpose"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["state"], row["package"], row["licence"], row["purpose"])
    emit({"cache": str(folder), "models": rows}, table, as_json=as_json)
    if not as_json and any(row["state"] != "ready" for row in rows):
        note("Some models are not ready; 'rag-service models fetch' brings them.")


def register(app: typer.Typer) -> None:
    """Add the ``models`` commands."""
    app.add_typer(models, name="models")


def _configured_cache() -> Path:
    from rag_service.models import default_cache

    return default_cache()


def _known(name: str) -> PackagedModel:
    if name not in PACKAGED:
        raise CommandError(
            f"There is no packaged model {name}; there are {', '.join(PACKAGED)}.",
            EXIT_USAGE,
            "unknown_model",
        )
    return PACKAGED[name]


class _Bar:
    """Shows one model's fetch: bytes while downloading, then the step's name."""

    def __init__(self, bars: Progress, model: PackagedModel) -> None:
        self._bars = bars
        self._name = model.name
        self._task = bars.add_task(f"{model.name}: ready", total=model.wheel_bytes, visible=False)

    def __call__(self, step: str, done: int, total: int) -> None:
        self._bars.update(
            self._task, description=f"{self._name}: {step}", completed=done, total=total, visible=True
        )

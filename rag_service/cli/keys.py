"""``rag-service keys create|list|revoke``: API keys of the HTTP face."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rag_service.auth import SCOPES, KeyRecord, KeyStore, Scope
from rag_service.cli.config import ConfigOption
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit

FileOption = Annotated[
    Path | None, typer.Option("--file", help="Key file; default: the configured one, in the data folder.")
]

keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)


@keys.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Whose documents and figures the key opens.")] = "default",
    scope: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(SCOPES)}. Default: chat, search.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    days: Annotated[float | None, typer.Option(help="Days until the key ends; default: never.")] = None,
    description: Annotated[str, typer.Option("--note", help="What the key is for.")] = "",
    file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key and show it. It is shown this once: only its hash is kept."""
    key, record = _store(file, config).create(
        tenant, _scopes(scope), requests_per_minute, tokens_per_minute, days, description
    )
    scopes = ", ".join(record.scopes)
    text = f"{key}\n\nKey {record.id}, tenant {tenant}, scopes {scopes}. It is shown this once: keep it."
    emit({"key": key, **_shown(record)}, text, as_json=as_json)


@keys.command("list")
def list_keys(file: FileOption = None, config: ConfigOption = None, as_json: JsonFlag = False) -> None:
    """List the keys: what they may do, never the keys themselves."""
    rows = [_shown(record) for record in _store(file, config).records()]
    table = Table("id", "tenant", "scopes", "requests/min", "tokens/min", "created", "expires", "note")
    for row in rows:
        limits = [_or_dash(row["requests_per_minute"]), _or_dash(row["tokens_per_minute"])]
        times = [_or_dash(row["created_at"]), _or_dash(row["expires_at"])]
        table.add_row(row["id"], row["tenant"], " ".join(row["scopes"]), *limits, *times, row["note"])
    emit({"keys": rows}, table if rows else "There are no API keys.", as_json=as_json)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id that `keys list` shows.")],
    file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Refuse a key from now on, also in services that run already."""
    if not _store(file, config).revoke(key_id):
        raise CommandError(
            f"There is no key {key_id!r}; `rag-service keys list` shows them.", code="key_not_found"
        )
    emit({"id": key_id, "revoked": True}, f"Key {key_id} is revoked.", as_json=as_json)


def _store(file: Path | None, config: Path | None) -> KeyStore:
    from rag_service.serve_config import load_settings

    return KeyStore(file or load_settings(config).keys_file)


def _scopes(names: list[str] | None) -> tuple[Scope, ...]:
    given = [part for name in names or ("chat", "search") for part in name.replace(",", " ").split()]
    for name in given:
        if name not in SCOPES:
            raise CommandError(
                f"There is no scope {name!r}; there are {', '.join(SCOPES)}.", EXIT_USAGE, "usage"
            )
    return tuple(scope for scope in SCOPES if scope in given)


def _shown(record: KeyRecord) -> dict[str, Any]:
    values = record.model_dump(mode="json", exclude={"sha256"})
    values["created_at"] = _date(record.created_at)
    values["expires_at"] = None if record.expires_at is None else _date(record.expires_at)
    values["expired"] = record.expires_at is not None and record.expires_at <= time.time()
    return values


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def register(app: typer.Typer) -> None:
    """Add the ``keys`` commands."""
    app.add_typer(keys, name="keys")

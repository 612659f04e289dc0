"""``rag-service ingest``, ``documents``, ``evaluate``, ``reranker`` and ``tune retrieval``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_service.cli.asked import ConfigOption
from rag_service.cli.client import Client, KeyOption, UrlOption
from rag_service.cli.evaluation import evaluate_answers, evaluate_retrieval
from rag_service.cli.index import load_settings, opened
from rag_service.cli.output import EXIT_FAILED, EXIT_USAGE, CommandError, JsonFlag, emit, progress
from rag_service.cli.retrieval_training import train, tune_retrieval
from rag_service.cli.tune import sweeps

if TYPE_CHECKING:
    from retrieval.service import RetrievalService
    from retrieval.types import Document

documents = typer.Typer(no_args_is_help=True, help="What the index holds.")
evaluate = typer.Typer(no_args_is_help=True, help="Quality on questions whose answers are known.")
reranker = typer.Typer(no_args_is_help=True, help="The learned reranker.")

TenantOption = Annotated[str, typer.Option(help="Whose documents.")]


def register(app: typer.Typer) -> None:
    """Add the commands around retrieval to the command line."""
    app.command("ingest")(ingest)
    app.add_typer(documents, name="documents")
    app.add_typer(evaluate, name="evaluate")
    app.add_typer(reranker, name="reranker")
    sweeps.command("retrieval")(tune_retrieval)
    app.command("tune-retrieval", hidden=True)(tune_retrieval)  # its former name
    evaluate.command("retrieval")(evaluate_retrieval)
    evaluate.command("answers")(evaluate_answers)
    reranker.command("train")(train)


@documents.callback()
def _documents() -> None:
    """What the index holds."""


@evaluate.callback()
def _evaluate() -> None:
    """Quality on questions whose answers are known."""


@reranker.callback()
def _reranker() -> None:
    """The learned reranker."""


def ingest(
    paths: Annotated[list[str], typer.Argument(help="Files, folders, globs and zip files.")],
    domain: Annotated[
        str | None, typer.Option(help="The documents' domain; JSON Lines may name their own.")
    ] = None,
    tenant: TenantOption = "default",
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Index documents. The same ones again change nothing; changed ones are replaced; a run that was cut off
    is resumed by running it again. Exit status 1 when a file failed."""
    from retrieval.loaders import Loader, expand_paths

    settings = load_settings(config)
    if domain is not None and domain not in settings.service.domains:
        known = ", ".join(settings.service.domains)
        raise CommandError(f"There is no domain {domain!r}; known are {known}.", EXIT_USAGE, "unknown_domain")
    files = expand_paths(paths)
    with opened(settings) as service:
        loader = Loader(settings.retrieval.ingestion, domain, tenant)
        with progress() as bar:
            task = bar.add_task("documents", total=None)
            done = service.ingestion.run(
                loader.load_paths(files), lambda now: bar.update(task, completed=now.num_documents)
            )
    result = {
        "num_documents": done.num_documents,
        "num_done": done.num_done,
        "num_unchanged": done.num_unchanged,
        "num_chunks": done.num_chunks,
        "num_failed": done.num_failed,
        "failures": [{"name": name, "reason": reason} for name, reason in done.failures],
    }
    lines = [f"{done.num_done} documents ({done.num_unchanged} unchanged), {done.num_chunks} new chunks."]
    lines += [f"Failed: {name}: {reason}" for name, reason in done.failures]
    emit(result, "\n".join(lines), as_json=as_json)
    if done.num_failed:
        raise typer.Exit(EXIT_FAILED)


@documents.command("list")
def list_documents(
    domain: Annotated[str | None, typer.Option(help="One domain alone.")] = None,
    tenant: TenantOption = "default",
    url: UrlOption = None,
    api_key: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List documents: of a running service with --url, else of the index itself."""
    if url is not None:
        found = list(_served_documents(url, api_key, domain))
    else:
        with opened(load_settings(config)) as service:
            found = [asdict(info) for info in _all_documents(service, tenant, domain)]
    lines = [
        f"{item['id']}  {item['domain']}  {item['num_chunks']} chunks  {item['title']}" for item in found
    ]
    emit({"documents": found}, "\n".join(lines) or "No documents.", as_json=as_json)


@documents.command("delete")
def delete_document(
    document_id: Annotated[str, typer.Argument(help="The document's id.")],
    tenant: TenantOption = "default",
    url: UrlOption = None,
    api_key: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete a document with everything of it. Exit status 1 when there is none."""
    from urllib.parse import quote

    if url is not None:
        with Client(url, api_key) as client:
            client.call("DELETE", f"/v1/documents/{quote(document_id, safe='')}")
        deleted = True
    else:
        with opened(load_settings(config)) as service:
            deleted = service.delete(document_id, tenant)
    emit(
        {"id": document_id, "deleted": deleted},
        "Deleted." if deleted else "No such document.",
        as_json=as_json,
    )
    if not deleted:
        raise typer.Exit(EXIT_FAILED)


@documents.command("backup")
def backup(
    output: Annotated[Path, typer.Argument(help="File to write, such as documents.jsonl.gz.")],
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write every tenant's documents to one compressed file of JSON Lines."""
    from retrieval.collection import stored_documents

    staged = output.with_name(f".{output.name}.part")
    count = 0
    with opened(load_settings(config)) as service, gzip.open(staged, "wt", encoding="utf-8") as file:
        for document in stored_documents(service.index):
            file.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
            count += 1
    staged.replace(output)
    emit({"file": str(output), "num_documents": count}, f"{count} documents in {output}.", as_json=as_json)


@documents.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(help="A file that backup wrote.")],
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Index the documents of a backup again; those that stand there unchanged cost nothing."""
    if not file.exists():
        raise CommandError(f"There is no file {file}.", EXIT_USAGE, "file_not_found")
    with opened(load_settings(config)) as service, progress() as bar:
        task = bar.add_task("documents", total=None)
        done = service.ingestion.run(
            _backed_up(file), lambda now: bar.update(task, completed=now.num_documents)
        )
    emit(
        {"num_done": done.num_done, "num_unchanged": done.num_unchanged, "num_failed": done.num_failed},
        f"{done.num_done} documents ({done.num_unchanged} unchanged), {done.num_failed} failed.",
        as_json=as_json,
    )
    if done.num_failed:
        raise typer.Exit(EXIT_FAILED)


def _all_documents(service: RetrievalService, tenant: str, domain: str | None) -> Iterator[Any]:
    offset: str | None = None
    while True:
        page, offset = service.documents(tenant, domain, 500, offset)
        yield from page
        if offset is None:
            return


def _served_documents(url: str, api_key: str | None, domain: str | None) -> Iterator[dict[str, Any]]:
    after: str | None = None
    with Client(url, api_key) as client:
        while True:
            wanted = {"limit": 100, "domain": domain, "after": after}
            page = client.call(
                "GET", "/v1/documents", params={k: v for k, v in wanted.items() if v is not None}
            )
            yield from page["data"]
            after = page["next"]
            if not after:
                return


def _backed_up(file: Path) -> Iterator[Document]:
    from retrieval.types import Document

    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield Document(**json.loads(line))

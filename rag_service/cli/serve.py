"""``rag-service serve``: the whole service on this machine, until Ctrl-C."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from rag_service.cli.answer import answer_text, describe, print_stream, question_body
from rag_service.cli.ask import served_model
from rag_service.cli.client import Client
from rag_service.cli.config import ConfigOption
from rag_service.cli.corpus import ingest_corpus
from rag_service.cli.output import CommandError, JsonFlag, console, emit, note, progress
from rag_service.config import Settings

DEMO_QUESTION = "What are the early signs of dehydration in adults?"
DEMO_DOMAIN = "medical"


def serve(
    config_file: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: service.host.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of documents to index first, one subfolder a domain.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Ask one question when ready.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Stop after the start and the demonstration.")] = False,
    allow_slow: Annotated[
        bool,
        typer.Option(
            "--allow-slow",
            help="Use the draft model without a passing gate, even with α below .6 (draft.force).",
        ),
    ] = False,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="RAG_SERVICE_API_KEY")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start the service on this machine and keep it up until Ctrl-C."""
    from rag_service.serve_config import load_settings

    force = "even_slow" if allow_slow else None
    overrides = {"service.host": host, "service.port": port, "draft.force": force}
    settings = load_settings(
        config_file, {name: value for name, value in overrides.items() if value is not None}
    )
    check_models(settings)
    with _terminating(), _running(settings) as (url, ready_seconds):
        try:
            with _terminating():  # once more, since Ray takes the signal for itself
                _work(url, ready_seconds, corpus, demo, once, api_key, as_json)
        except KeyboardInterrupt:
            note("Stopping.")
    note("Stopped.")


REFUSED = ("missing_api_key", "invalid_api_key", "insufficient_scope")


def _work(
    url: str,
    ready_seconds: float,
    corpus: Path | None,
    demo: bool,
    once: bool,
    api_key: str | None,
    as_json: bool,
) -> None:
    """What is done with the running service; returns only with ``once``."""
    result: dict[str, Any] = {"url": url, "ready_seconds": round(ready_seconds, 2)}
    note(f"Ready on {url} after {ready_seconds:.1f} s (chat page {url}/, API {url}/docs).")
    with Client(url, api_key) as client:
        try:
            if corpus is not None:
                result["corpus"] = _ingest(client, corpus)
            if demo:
                result["answer"] = _demonstrate(client, as_json=as_json)
        except CommandError as error:
            # Since keys exist the service asks for one. It runs, and is not to be ended for its own first question.
            if once or error.code not in REFUSED:
                raise
            note(
                f"{error} So no corpus was sent and no question asked; to have both, set RAG_SERVICE_API_KEY (or "
                "--api-key) to a key with the scopes chat and ingest."
            )
    if as_json:
        emit(result, as_json=True)
    if once:
        return
    note("Press Ctrl-C to stop.")
    while True:
        time.sleep(3600)


def register(app: typer.Typer) -> None:
    """Add the ``serve`` command."""
    app.command("serve")(serve)


def check_models(settings: Settings) -> None:
    """Say before anything starts which models and folders cannot be used. Raises as ``check_start``.

    On another Ray the replicas have folders of their own, which cannot be seen from here.
    """
    from deployments.cluster import starts_own_ray
    from rag_service.start_checks import check_start

    if starts_own_ray():
        check_start(settings)


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM counts as Ctrl-C, so that a stop by a supervisor is a clean one too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _running(settings: Settings) -> Iterator[tuple[str, float]]:
    """The running service's address and the seconds until it was ready; stopped on leaving."""
    from deployments.app import run

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    started = time.monotonic()
    with console().status("Starting Ray and loading the models"):
        service = run(settings)
    try:
        yield service.url, time.monotonic() - started
    finally:
        service.stop()


def _ingest(client: Client, corpus: Path) -> dict[str, Any]:
    with progress() as bars:
        task = bars.add_task("indexing documents", total=None)
        done = ingest_corpus(client, corpus, lambda now, total: bars.update(task, completed=now, total=total))
    for name, reason in done.failures:
        note(f"Not indexed: {name}: {reason}")
    note(f"Corpus: {done.num_documents} documents, {done.num_unchanged} of them indexed already.")
    return {"num_documents": done.num_documents, "num_unchanged": done.num_unchanged}


def _demonstrate(client: Client, *, as_json: bool) -> dict[str, Any]:
    """Ask the demonstration's question over HTTP, as any client would."""
    domains = [item["id"] if isinstance(item, dict) else item for item in _domains(client)]
    domain = DEMO_DOMAIN if DEMO_DOMAIN in domains else None
    body = question_body(DEMO_QUESTION, domain, served_model(client), {"max_tokens": 96})
    if as_json:
        response: dict[str, Any] = client.call("POST", "/v1/chat/completions", json=body)
        return {**response, "text": answer_text(response)}
    typer.echo(f"\nQuestion ({domain or 'all domains'}): {DEMO_QUESTION}\nAnswer: ", nl=False)
    figures = print_stream(client.stream("/v1/chat/completions", {**body, "stream": True}))
    typer.echo(describe(figures) + "\n")
    return figures


def _domains(client: Client) -> list[Any]:
    body = client.call("GET", "/v1/domains")
    if not isinstance(body, dict):
        raise CommandError(f"The service at {client.url} gives no list of domains.")
    return list(body.get("data") or body.get("domains") or [])

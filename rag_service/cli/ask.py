"""``rag-service ask``: one question to a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_service.cli.answer import describe, print_stream, question_body
from rag_service.cli.client import Client, KeyOption, UrlOption
from rag_service.cli.output import EXIT_USAGE, CommandError, JsonFlag, emit


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    domain: Annotated[
        str | None, typer.Option("--domain", "-d", help="Domain to search; default: all of them.")
    ] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    as_json: JsonFlag = False,
) -> None:
    """Ask one question: the cited answer as it comes, its sources, timings and acceptance rate."""
    if not question.strip():
        raise CommandError("The question is empty.", EXIT_USAGE, "empty_question")
    options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    with Client(url, api_key) as client:
        body = question_body(question, domain, served_model(client), options)
        if as_json:
            emit(client.call("POST", "/v1/chat/completions", json=body), as_json=True)
            return
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        figures = print_stream(client.stream("/v1/chat/completions", streamed))
        typer.echo(describe(figures))


def served_model(client: Client) -> str:
    """The id of the model that the service answers with."""
    models = client.call("GET", "/v1/models").get("data") or []
    if not models:
        raise CommandError(f"The service at {client.url} lists no model.")
    return str(models[0]["id"])


def register(app: typer.Typer) -> None:
    """Add the ``ask`` command."""
    app.command("ask")(ask)

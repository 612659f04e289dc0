"""Speaking to a running service over HTTP, with its errors as one sentence each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Annotated, Any

import httpx
import typer

from rag_service.cli.output import CommandError

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the service; default: the configured host and port.")
]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="RAG_SERVICE_API_KEY", help="API key, where one is needed.")
]

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 300.0


class Client:
    """A client of one service. Every failure is a ``CommandError``."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self.url = (url or configured_url()).rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        local = httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")
        # A proxy of the environment has no business between two processes of one machine.
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=not local)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, *, accept: tuple[int, ...] = (), **options: Any) -> Any:
        """The JSON body of a response; statuses in ``accept`` count as good ones."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success and response.status_code not in accept:
            raise refusal(response.status_code, response.text)
        return _json(response.text)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a server-sent event stream; an error event is raised."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if not response.is_success:
                    raise refusal(response.status_code, response.read().decode("utf-8", "replace"))
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = _json(data)
                    if "error" in event:
                        raise CommandError(_message(event["error"], "the stream ended with an error"))
                    yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise CommandError("The answer broke off: the service closed the stream before its end.")

    def _unreachable(self, error: httpx.HTTPError) -> CommandError:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return CommandError(f"The service at {self.url} did not answer in time.", code="timeout")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return CommandError(
                f"No service answers at {self.url}; start one with 'rag-service serve'.", code="unreachable"
            )
        return CommandError(f"The connection to {self.url} failed: {error}.", code="unreachable")


def configured_url() -> str:
    """Where ``rag-service serve`` listens with the present configuration."""
    from rag_service.config import Settings

    service = Settings.load().service
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(service.host, service.host)
    return f"http://[{shown}]:{service.port}" if ":" in shown else f"http://{shown}:{service.port}"


def refusal(status: int, body: str) -> CommandError:
    """The service's own sentence of an error response."""
    try:
        error = json.loads(body).get("error", {})
    except (ValueError, AttributeError):
        error = {}
    message = _message(error, f"the service answered with status {status}")
    return CommandError(message, code=str(error.get("code") or f"http_{status}"))


def _message(error: Any, otherwise: str) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or otherwise)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CommandError("What answers there is not rag-service: its reply is no JSON.") from None

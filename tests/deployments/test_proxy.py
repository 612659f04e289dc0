"""What a client sees when its gateway dies: ``deployments.proxy`` alone, and inside Serve's proxy on real Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from deployments import proxy
from deployments.proxy import NUM_ATTEMPTS, LostGateway

CHAT = "/v1/chat/completions"


class Dying:
    """An application that reads the question and then, ``num_deaths`` times, returns as Serve's proxy does when its
    gateway is lost: after ``num_passed_on`` messages of an answer."""

    def __init__(self, num_deaths: int, kind: str = "application/json", num_passed_on: int = 0) -> None:
        self.num_deaths = num_deaths
        self.num_passed_on = num_passed_on
        self.headers = [(b"content-type", kind.encode())]
        self.read: list[bytes] = []
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.read.append(body)
        self.paths.append(scope["path"])
        scope["path"] = "/elsewhere"  # as Serve's proxy does with an application's prefix
        answer: list[Message] = [
            {"type": "http.response.start", "status": 200, "headers": self.headers},
            {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
            {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False},
        ]
        dies = len(self.read) <= self.num_deaths
        for message in answer[: self.num_passed_on] if dies else answer:
            await send(message)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "WAIT_SECONDS", 0.0)


async def ask(
    app: Any, method: str, path: str, content: bytes | None = None, repeat: bool = True
) -> httpx.Response:
    transport = httpx.ASGITransport(LostGateway(app, repeat))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        return await client.request(method, path, content=content)


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("POST", "/v1/search"), ("GET", "/v1/models")])
async def test_a_request_that_got_no_answer_yet_is_asked_again_whole(method: str, path: str) -> None:
    app = Dying(NUM_ATTEMPTS - 1)
    answer = await ask(app, method, path, b"question")
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    assert app.read == [b"question"] * NUM_ATTEMPTS
    assert app.paths == [path] * NUM_ATTEMPTS


def assert_lost(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert answer.headers["retry-after"] == "1"


async def test_it_is_not_asked_for_ever() -> None:
    app = Dying(100)
    assert_lost(await ask(app, "POST", CHAT, b"question"))
    assert len(app.read) == NUM_ATTEMPTS


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/documents"), ("DELETE", "/v1/documents/a")])
async def test_what_changes_something_is_never_repeated(method: str, path: str) -> None:
    app = Dying(1)
    assert_lost(await ask(app, method, path, b"document"))
    assert len(app.read) == 1


async def test_with_retry_unstarted_off_no_question_is_repeated() -> None:
    app = Dying(1)
    assert_lost(await ask(app, "POST", CHAT, b"question", repeat=False))
    assert len(app.read) == 1


async def test_a_body_too_large_to_keep_is_passed_on_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "MAX_KEPT_BYTES", 10)
    app = Dying(1)
    assert_lost(await ask(app, "POST", CHAT, b"x" * 11))
    assert app.read == [b"x" * 11]


async def test_a_stream_that_is_cut_ends_with_the_error() -> None:
    app = Dying(1, kind="text/event-stream; charset=utf-8", num_passed_on=2)
    answer = await ask(app, "POST", CHAT, b"question")
    first, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(app.read) == 1


async def test_a_client_that_went_is_not_asked_for_again() -> None:
    num_runs = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_runs
        num_runs += 1
        while (await receive())["type"] != "http.disconnect":
            pass

    messages: list[Message] = [{"type": "http.request", "body": b"q"}, {"type": "http.disconnect"}]
    sent: list[Message] = []
    scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await LostGateway(app)(scope, receive, send)
    assert num_runs == 1
    assert sent == []


def refusing(status: int, headers: dict[str, str]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    return Response("Request dropped.", status, headers, media_type="text/plain")


async def test_the_proxys_own_refusals_have_the_apis_shape() -> None:
    answer = await ask(refusing(429, {}), "POST", CHAT)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.headers["retry-after"] == "1"
    answer = await ask(refusing(503, {"retry-after": "7"}), "POST", CHAT)
    assert answer.json()["error"]["code"] == "unavailable"
    assert answer.headers["retry-after"] == "7"
    assert (await ask(refusing(408, {}), "POST", CHAT)).json()["error"]["code"] == "deadline_exceeded"


async def test_probes_of_the_proxy_itself_stay_as_they_are() -> None:
    assert (await ask(refusing(503, {}), "GET", "/-/healthz")).text == "Request dropped."


class DyingGateway:
    """Dies of the first question, or in mid-stream, and then no more: a file remembers."""

    def __init__(self, folder: str) -> None:
        self._dead = Path(folder) / "dead"

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        how = (await request.json())["how"]
        if how == "slow":
            await asyncio.sleep(2.0)
        if how == "before" and not self._dead.exists():
            self._die()
        if how == "stream":
            return StreamingResponse(self._cut(), media_type="text/event-stream")
        return JSONResponse({"how": how})

    async def _cut(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.5)
        self._die()

    def _die(self) -> None:
        self._dead.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def address(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gateway")
    options: Any = {"num_replicas": 2, "max_ongoing_requests": 1, "max_queued_requests": 1}
    # As deployments/options.py asks for: Serve's own default is 503.
    options["backpressure_config"] = {"status_code": 429, "retry_after_s": 1.0}
    replica = serve.deployment(ray_actor_options={"num_cpus": 0}, **options)(serve.ingress()(DyingGateway))
    serve.run(replica.bind(str(folder)), name="dying", route_prefix="/v1")
    client: Any = _get_global_client()
    yield f"http://127.0.0.1:{client.http_config.port}"
    serve.delete("dying")


def post(address: str, how: str) -> httpx.Response:
    return httpx.post(f"{address}{CHAT}", json={"how": how}, timeout=60, trust_env=False)


def test_a_killed_gateway_costs_an_unanswered_request_nothing(address: str) -> None:
    answer = post(address, "before")
    assert (answer.status_code, answer.text) == (200, '{"how":"before"}')


def test_a_killed_gateway_ends_its_streams_with_a_retriable_error(address: str) -> None:
    answer = post(address, "stream")
    assert answer.status_code == 200
    assert answer.text.startswith("data: 1\n\n")
    assert '"code":"replica_lost"' in answer.text


async def test_serves_own_429_is_the_apis(address: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as client:
        answers = await asyncio.gather(*(client.post(CHAT, json={"how": "slow"}) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused, [(answer.status_code, answer.text) for answer in answers]
    assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
    assert {answer.status_code for answer in answers} == {200, 429}

"""A gateway in this process: by ASGI, or by uvicorn on a port for clients that need a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from rag_service.api import create_app
from rag_service.config import Settings
from tests.fakes import Fakes, FakeTokenizer

MakeSettings = Callable[..., Settings]
MODEL = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal before the first token keeps its status however busy this machine is."""
    monkeypatch.setattr("rag_service.api.chat.REFUSAL_GRACE_SECONDS", 10.0)


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings in a folder of their own, with overrides by dotted name."""

    def make(**overrides: Any) -> Settings:
        named = {name.replace("__", "."): value for name, value in overrides.items()}
        return Settings.load(None, {"data_folder": str(tmp_path), **named})

    return make


@contextlib.asynccontextmanager
async def serving(settings: Settings, fakes: Fakes) -> AsyncIterator[str]:
    """The gateway over ``fakes`` on a free port of this machine; its address."""
    app = create_app(settings, fakes.backends, FakeTokenizer())
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()


@contextlib.asynccontextmanager
async def asking(settings: Settings, fakes: Fakes, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client straight into the application."""
    transport = httpx.ASGITransport(app=create_app(settings, fakes.backends, FakeTokenizer()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield client


@pytest.fixture
async def client(make_settings: MakeSettings, fakes: Fakes) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(make_settings(), fakes) as client:
        yield client


@pytest.fixture
async def address(make_settings: MakeSettings, fakes: Fakes) -> AsyncIterator[str]:
    async with serving(make_settings(), fakes) as address:
        yield address


def ask(question: str = "When does the library open?", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], **fields}


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for ``condition``; ``TimeoutError`` when it does not come about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)

"""The pages served from this process, with stand-ins behind them and the real Recorder where it counts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from generation.types import GenerationChunk, GenerationRequest
from rag_service.api import create_app
from rag_service.config import Settings
from rag_service.pipeline import Backends
from rag_service.record import RequestRecord
from rag_service.recorder import Recorder
from retrieval.types import Document, DocumentInfo, Passage, SearchRequest, SearchResult
from tests.fakes import LEASE, FakeGenerator, FakeRetriever, Fakes, FakeTokenizer, passage_of

PASSAGE = "The library opens at nine on weekdays. Members may borrow six books."
PARTS = ("Founded in 1891. " * 60, PASSAGE, " The reading room needs no card." * 60)
RULES = Document("rules", "general", "Rules of the City Library", "".join(PARTS))
ANSWER = "The library opens at **nine on weekdays**.\n\n- Members may borrow six books.\n"


class SplitRetriever(FakeRetriever):
    """Holds the rules as three passages, of which it finds the middle one."""

    async def search(self, request: SearchRequest) -> SearchResult:
        result = await super().search(request)
        passages = tuple(
            replace(scored, passage=_parts()[1]) if scored.passage.document_id == RULES.id else scored
            for scored in result.passages
        )
        return replace(result, passages=passages)

    async def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None:
        found = await super().document(document_id, tenant)
        return (found[0], _parts()) if found is not None and document_id == RULES.id else found


def _parts() -> list[Passage]:
    passages, start = [], 0
    for number, text in enumerate(PARTS):
        whole = passage_of(RULES, f"rules#{number}")
        place = {**whole.metadata, "start": start, "end": start + len(text)}
        passages.append(replace(whole, text=text, metadata=place))
        start += len(text)
    return passages


class SpelledGenerator(FakeGenerator):
    """Gives every character a token of its own, so that the tokens spell the text; every third is not drafted."""

    async def _chunks(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        number = 0
        async for chunk in super()._chunks(request):
            if chunk.finish_reason is None:
                ids = tuple(ord(character) + 10 for character in chunk.text)
                number += 1
                chunk = replace(chunk, token_ids=ids, accepted=(number % 3 != 0,) * len(ids))
            yield chunk


class RecorderBackend:
    """The real Recorder, as the gateway wants it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def record(self, record: RequestRecord) -> None:
        self._recorder.record(record)

    async def acceptance(self, query: Mapping[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._recorder.acceptance, query)

    async def metrics(self) -> str:
        return self._recorder.metrics()

    async def ready(self) -> dict[str, str]:
        return self._recorder.ready()


@dataclass(frozen=True, slots=True)
class Site:
    """A served gateway: where, and what stands behind it."""

    address: str
    fakes: Fakes
    recorder: Recorder | None = None


@contextlib.contextmanager
def serving(settings: Settings, recorder: Recorder | None = None) -> Iterator[Site]:
    """Serve the application in a thread on a free port of this machine."""
    fakes = Fakes()
    fakes.retriever = SplitRetriever((RULES, LEASE))
    fakes.generator = SpelledGenerator(ANSWER)
    fakes.generator.delay_seconds = 0.002
    backends = fakes.backends
    if recorder is not None:
        backends = Backends(fakes.retriever, fakes.reranker, fakes.generator, RecorderBackend(recorder))
    app = create_app(settings, backends, FakeTokenizer())
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],), name="site", daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}", fakes, recorder)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()

"""Stand-in deployments that run as real Serve replicas: a target that streams words, and troubled ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from generation.types import (
    GenerationChunk,
    GenerationRequest,
    GenerationTimings,
    PromptTooLong,
    QueueFull,
    SpeculationStats,
)
from rag_service.record import RequestRecord


class WordsTarget:
    """Streams ``w0 w1 ...``, one token a word, ``step_seconds`` apart, up to ``max_tokens``.

    ``folder`` holds what survives the replica: ``started`` and ``cancelled`` list request ids, and the file
    ``die-<request id>`` (a number) makes the replica exit before that word, once.
    """

    def __init__(self, folder: str, step_seconds: float = 0.01) -> None:
        self._folder = Path(folder)
        self._step_seconds = step_seconds

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._note("started", request.request_id)
        if len(request.prompt_ids) > 1000:
            raise PromptTooLong(len(request.prompt_ids), 1000)
        if request.request_id == "full":
            raise QueueFull(64)
        if request.request_id == "bug":
            raise KeyError("/a/secret/path")
        try:
            for number in range(request.sampling.max_tokens):
                self._die_if_told(request.request_id, number)
                await asyncio.sleep(self._step_seconds)
                last = number + 1 == request.sampling.max_tokens
                yield GenerationChunk(
                    request.request_id,
                    f"w{number} ",
                    token_ids=(number,),
                    finish_reason="length" if last else None,
                    stats=SpeculationStats() if last else None,
                    timings=GenerationTimings() if last else None,
                    num_prompt_tokens=len(request.prompt_ids),
                    num_generated_tokens=number + 1,
                )
        except asyncio.CancelledError:
            self._note("cancelled", request.request_id)
            raise

    async def status(self) -> dict[str, Any]:
        return {"target": "words", "draft": None, "pid": os.getpid()}

    async def ready(self) -> dict[str, str]:
        return {}

    def _note(self, file: str, line: str) -> None:
        with (self._folder / file).open("a") as notes:
            notes.write(line + "\n")

    def _die_if_told(self, request_id: str, number: int) -> None:
        order = self._folder / f"die-{request_id}"
        if order.exists() and int(order.read_text()) == number:
            order.unlink()
            os._exit(1)


class ForgetfulRecorder:
    """Keeps request ids in a file; exits the process, once, when told to by the file ``die``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def record_many(self, records: Sequence[RequestRecord]) -> None:
        if any(record.request_id == "bad" for record in records):
            raise ValueError("not this one")
        order = self._folder / "die"
        if order.exists():
            order.unlink()
            os._exit(1)
        with (self._folder / "records").open("a") as lines:
            lines.writelines(record.request_id + "\n" for record in records)

    async def ready(self) -> dict[str, str]:
        return {"recorder": "its disk is full"}

"""Handles on real Serve replicas: streaming, cancellation, lost replicas, errors with their codes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from deployments import handles
from deployments.handles import GeneratorHandle, RetrieverHandle, call, original
from deployments.recorder_handle import RecorderHandle, open_breakers
from generation.types import GenerationError, GenerationRequest, PromptTooLong, QueueFull, SamplingParams
from rag_service.record import RequestRecord
from retrieval.types import RetrievalError, SearchRequest
from tests.deployments.stand_ins import ForgetfulRecorder, WordsTarget

pytestmark = pytest.mark.usefixtures("local_ray")


def deployed(replica: type[Any], folder: Path, name: str, **options: Any) -> Any:
    options = {"num_replicas": 1, "max_ongoing_requests": 16, "health_check_period_s": 0.5, **options}
    deployment = serve.deployment(name=name, ray_actor_options={"num_cpus": 0.1}, **options)(replica)
    return serve.run(deployment.bind(str(folder)), name=name, route_prefix=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(local_ray: None, folder: Path) -> Iterator[Any]:
    yield deployed(WordsTarget, folder, "words", num_replicas=2)
    serve.delete("words")


def request(request_id: str, num_tokens: int = 5, **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=num_tokens), **fields)


async def text_of(handle: GeneratorHandle, wanted: GenerationRequest) -> str:
    return "".join([chunk.text async for chunk in handle.generate(wanted)])


def lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen"
        await asyncio.sleep(0.02)


async def test_streams_chunk_by_chunk_and_the_last_carries_the_figures(target: Any) -> None:
    chunks = [chunk async for chunk in GeneratorHandle(target).generate(request("plain"))]
    assert [chunk.text for chunk in chunks] == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert chunks[-1].stats is not None


async def test_closing_the_iterator_cancels_in_the_replica(target: Any, folder: Path) -> None:
    stream = GeneratorHandle(target).generate(request("closed", 100_000))
    async for chunk in stream:
        if chunk.num_generated_tokens == 3:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: "closed" in lines(folder / "cancelled"))


async def test_cancelling_the_waiting_task_cancels_in_the_replica(target: Any, folder: Path) -> None:
    task = asyncio.create_task(text_of(GeneratorHandle(target), request("task", 100_000)))
    await until(lambda: "task" in lines(folder / "started"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: "task" in lines(folder / "cancelled"))


async def test_typed_errors_cross_with_message_and_code(target: Any) -> None:
    handle = GeneratorHandle(target)
    with pytest.raises(PromptTooLong) as too_long:
        await text_of(handle, GenerationRequest("long", (1,) * 1001, SamplingParams()))
    assert str(too_long.value) == "The prompt has 1001 tokens; the context holds 1000 including the answer."
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(QueueFull) as full:
        await text_of(handle, request("full"))
    assert full.value.code == "overloaded"
    assert str(full.value).startswith("64 requests are waiting")


async def test_an_unforeseen_error_tells_no_details(target: Any) -> None:
    with pytest.raises(GenerationError) as failed:
        await text_of(GeneratorHandle(target), request("bug"))
    assert failed.value.code == "internal_error"
    assert "secret" not in str(failed.value)


async def test_a_replica_lost_before_the_first_token_costs_nothing(target: Any, folder: Path) -> None:
    (folder / "die-unstarted").write_text("0")
    assert await text_of(GeneratorHandle(target), request("unstarted", 3)) == "w0 w1 w2 "
    assert lines(folder / "started").count("unstarted") == 2


async def test_without_retry_unstarted_the_loss_is_told(target: Any, folder: Path) -> None:
    (folder / "die-told").write_text("0")
    with pytest.raises(GenerationError, match="ask again") as lost:
        await text_of(GeneratorHandle(target, retry_unstarted=False), request("told", 3))
    assert lost.value.code == "replica_lost"


async def test_a_replica_lost_in_mid_answer_is_a_retriable_error_and_never_a_repeat(
    target: Any, folder: Path
) -> None:
    (folder / "die-midway").write_text("9")
    seen: list[str] = []

    async def listen() -> None:
        async for chunk in GeneratorHandle(target).generate(request("midway", 20)):
            seen.append(chunk.text)  # noqa: PERF401  what came before the error counts

    with pytest.raises(GenerationError) as lost:
        await listen()
    assert lost.value.code == "replica_lost"
    # The last chunk before the death may be lost with the replica; what came is in order and came once.
    assert seen == [f"w{number} " for number in range(len(seen))]
    assert 1 <= len(seen) <= 9
    assert await text_of(GeneratorHandle(target), request("after", 2)) == "w0 w1 "


async def test_an_overdue_stream_is_ended_and_cancelled(
    target: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "DEADLINE_GRACE_SECONDS", 0.1)
    with pytest.raises(GenerationError, match="in time") as overdue:
        await text_of(GeneratorHandle(target), request("overdue", 100_000, deadline_seconds=0.2))
    assert overdue.value.code == "deadline_exceeded"
    await until(lambda: "overdue" in lines(folder / "cancelled"))


async def test_a_frozen_replica_is_replaced_and_its_unstarted_request_answered(tmp_path: Path) -> None:
    target = deployed(WordsTarget, tmp_path, "frozen", health_check_timeout_s=3.0)
    handle = GeneratorHandle(target)
    assert await text_of(handle, request("warm", 2)) == "w0 w1 "
    pid = (await handle.status())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await asyncio.wait_for(text_of(handle, request("held", 3)), 120) == "w0 w1 w2 "
        assert (await handle.status())["pid"] != pid
    finally:
        serve.delete("frozen")


async def test_a_killed_controller_is_not_noticed_by_those_who_ask(target: Any) -> None:
    handle = GeneratorHandle(target)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    running = asyncio.create_task(text_of(handle, request("through", 100)))
    ray.kill(controller, no_restart=False)
    assert len((await running).split()) == 100
    assert await text_of(handle, request("then", 2)) == "w0 w1 "


async def test_status_tells_of_every_replica(target: Any) -> None:
    async def both() -> dict[str, Any]:
        while "replicas" not in (status := await GeneratorHandle(target).status()):
            await asyncio.sleep(0.1)  # one may still be coming back from the tests above
        return status

    status = await asyncio.wait_for(both(), 30)
    assert status["target"] == "words"
    assert len({replica["pid"] for replica in status["replicas"]}) == 2
    assert await GeneratorHandle(target).ready() == {}


async def test_serves_own_queue_limit_is_the_typed_error(tmp_path: Path) -> None:
    narrow = deployed(WordsTarget, tmp_path, "narrow", max_ongoing_requests=1, max_queued_requests=1)
    handle = GeneratorHandle(narrow)
    tasks = [asyncio.create_task(text_of(handle, request(f"n{n}", 50))) for n in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueFull)]
    answered = [result for result in results if isinstance(result, str)]
    assert refused, results
    assert answered
    assert len(refused) + len(answered) == 6
    serve.delete("narrow")


async def test_records_wait_for_a_recorder_that_dies_and_a_bad_one_holds_up_nobody(tmp_path: Path) -> None:
    handle = RecorderHandle(deployed(ForgetfulRecorder, tmp_path, "forgetful"))
    assert await handle.ready() == {"recorder": "its disk is full"}
    await handle.record(record("one"))
    assert lines(tmp_path / "records") == ["one"]
    (tmp_path / "die").touch()
    await handle.record(record("two"))
    await handle.record(record("three"))
    await until(lambda: lines(tmp_path / "records") == ["one", "two", "three"], 60)
    await handle.record(record("bad"))
    await until(lambda: handle.num_dropped == 1)
    await handle.record(record("four"))
    await until(lambda: lines(tmp_path / "records")[-1] == "four")
    serve.delete("forgetful")


async def test_a_missing_method_is_an_internal_error_of_the_retriever(target: Any) -> None:
    with pytest.raises(RetrievalError) as failed:
        await RetrieverHandle(target).search(SearchRequest("q"))
    assert failed.value.code == "internal_error"


async def test_a_call_that_takes_too_long_ends(target: Any) -> None:
    with pytest.raises(TimeoutError):
        await call(target, "status", seconds=0.0)


def record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id, 0.0, "other", "default", "ok", 0.1)


def test_original_leaves_plain_errors_alone() -> None:
    error = ValueError("x")
    assert original(error) is error


def test_a_breaker_counts_as_open_when_any_target_has_it_so() -> None:
    def status(**breakers: str) -> dict[str, Any]:
        return {"link": {"breakers": breakers}}

    assert open_breakers({"link": None}) == {}
    assert open_breakers(status(d1="closed", d2="half_open")) == {"d1": False, "d2": True}
    both = {"replicas": [status(d1="open"), status(d1="closed", d2="closed")]}
    assert open_breakers(both) == {"d1": True, "d2": False}

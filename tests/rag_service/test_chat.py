"""``POST /v1/chat/completions``: streams, refusals, cancellation, records, backpressure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from generation.types import GenerationError, PromptTooLong, QueueFull
from rag_service.schemas import ChatRequest
from retrieval.types import RetrievalError
from tests.fakes import ANSWER, Fakes, FakeTokenizer
from tests.rag_service.conftest import MODEL, MakeSettings, ask, asking, until

URL = "/v1/chat/completions"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_stream_in_order(client: httpx.AsyncClient, fakes: Fakes) -> None:
    body = ask(stream=True, stream_options={"include_usage": True}, n=2, rag={"domain": "general"})
    response = await client.post(URL, json=body, headers={"x-request-id": "mine-1", "traceparent": TRACE})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["traceparent"] == TRACE
    assert "search;dur=2.0" in response.headers["server-timing"]
    first, *deltas, metrics, usage = _events(response.text)
    assert first["choices"] == []
    assert first["sources"][0]["index"] == 1
    assert first["rag"] == {
        "domain": "general",
        "domain_inferred": False,
        "query": "When does the library open?",
    }
    ends = [d["choices"][0] for d in deltas if d["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert ends[0]["delta"]["annotations"][0]["url_citation"]["url"] == "/v1/documents/library"
    assert metrics["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 16
    assert usage["usage"]["completion_tokens"] == 2 * -(-len(ANSWER) // 4)
    assert all(event["usage"] is None for event in (first, *deltas, metrics))
    requests = fakes.generator.requests
    assert requests[0].request_id != requests[1].request_id, "without a seed the draws follow the id"
    await client.post(URL, json=ask(n=2, seed=5))
    assert [request.sampling.seed for request in fakes.generator.requests[2:]] == [5, 6]


async def test_domain_is_inferred_and_says_so(client: httpx.AsyncClient, fakes: Fakes) -> None:
    answer = (await client.post(URL, json=ask("What deposit does the tenant pay?", rag={"top_k": 1}))).json()
    assert answer["rag"]["domain"] == "legal"
    assert answer["rag"]["domain_inferred"] is True
    assert fakes.recorder.records[0].domain == "legal"
    fakes.retriever.by_id.clear()
    answer = (await client.post(URL, json=ask())).json()
    assert answer["rag"]["domain"] == "other"
    assert answer["rag"]["domain_inferred"] is False
    assert answer["sources"] == []


async def test_plain_chat_without_retrieval(client: httpx.AsyncClient, fakes: Fakes) -> None:
    answer = (await client.post(URL, json=ask(rag={"enabled": False}))).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["sources"] == []
    assert fakes.retriever.searches == []


async def test_conversation_is_searched_by_a_rewritten_query(client: httpx.AsyncClient, fakes: Fakes) -> None:
    messages = [
        {"role": "user", "content": "When does the Ashgrove library open?"},
        {"role": "assistant", "content": "At nine [1]."},
        {"role": "user", "content": "And on Sundays?"},
    ]
    await client.post(URL, json=ask(messages=messages))
    await client.post(URL, json=ask(messages=messages, rag={"rewrite": False}))
    queries = [search.query for search in fakes.retriever.searches]
    assert queries == ["And on Sundays? ashgrove library open", "And on Sundays?"]
    prompt = FakeTokenizer().decode(list(fakes.generator.requests[0].prompt_ids))
    assert "<s>assistant\nAt nine.</s><s>user\nSources:\n[1] Library\n" in prompt


async def test_the_same_request_id_twice_at_once(client: httpx.AsyncClient, fakes: Fakes) -> None:
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(client.post(URL, json=ask(), headers=headers) for _ in range(2)))
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({request.request_id for request in fakes.generator.requests}) == 2


async def test_logprobs_and_json_leave_the_text_alone(client: httpx.AsyncClient, fakes: Fakes) -> None:
    answer = (await client.post(URL, json=ask(logprobs=True, top_logprobs=1))).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == ANSWER
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == ANSWER
    assert tokens[0]["top_logprobs"][0]["logprob"] == -0.5
    spans = [a["url_citation"] for a in choice["message"]["annotations"]]
    assert ANSWER[spans[0]["start_index"] : spans[0]["end_index"]] == "The library opens at nine on weekdays."
    answer = (await client.post(URL, json=ask(response_format={"type": "json_object"}))).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert fakes.generator.requests[-1].sampling.json_schema == '{"type": "object"}'


async def test_accepted_tokens_on_demand(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json=ask(speculation={"show_accepted": True, "mode": "off"}))).json()
    assert [token["accepted"] for token in answer["choices"][0]["tokens"][:3]] == [True, False, True]
    stream = _events(
        (await client.post(URL, json=ask(stream=True, speculation={"show_accepted": True}))).text
    )
    assert stream[1]["choices"][0]["tokens"] == [{"text": "T", "accepted": True}]


async def test_length_is_told(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json=ask(max_tokens=3))).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"),
    [
        (PromptTooLong(9000, 8192), 400, "context_length_exceeded", "client_error"),
        (QueueFull(64), 429, "overloaded", "overloaded"),
        (GenerationError("The target is not available.", "unavailable"), 503, "unavailable", "error"),
        (GenerationError("Bad schema.", "invalid_schema"), 400, "invalid_schema", "client_error"),
        (GenerationError("No token may follow.", "no_token_left"), 400, "no_token_left", "client_error"),
        (RuntimeError("secret"), 500, "internal", "error"),
        (GenerationError("secret", "internal"), 500, "internal", "error"),
        (TimeoutError(), 408, "deadline_exceeded", "error"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"stream": True, "n": 2}])
async def test_refusals_before_the_first_token(
    client: httpx.AsyncClient,
    fakes: Fakes,
    error: Exception,
    status: int,
    code: str,
    outcome: str,
    fields: dict[str, Any],
) -> None:
    fakes.generator.error = error
    response = await client.post(URL, json=ask(**fields))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) is (status == 429)
    fakes.generator.error = None
    assert (await client.post(URL, json=ask())).status_code == 200
    assert [record.outcome for record in fakes.recorder.records] == [outcome, "ok"]
    assert fakes.recorder.records[0].error_code == code
    assert fakes.generator.num_running == 0


async def test_retrieval_errors(client: httpx.AsyncClient, fakes: Fakes) -> None:
    fakes.retriever.error = RetrievalError("The retriever is not available.", "unavailable")
    response = await client.post(URL, json=ask(stream=True))
    assert response.status_code == 503
    assert (await client.post("/v1/search", json={"query": "x"})).status_code == 503


async def test_bad_bodies_and_the_next_request_works(client: httpx.AsyncClient, fakes: Fakes) -> None:
    kind = {"content-type": "application/json"}
    for content, status, code in (
        (b'{"model": ', 400, "invalid_json"),
        (b"[]", 400, "invalid_value"),
        (b"\xff\xfe", 400, None),
        (b"", 400, "missing_field"),
        (json.dumps(ask("x" * 1_000_000)).encode(), 413, "too_large"),
        (json.dumps(ask("x" * 100_000)).encode(), 400, "too_long"),
        (json.dumps(ask("")).encode(), 400, "invalid_value"),
        (json.dumps(ask(max_tokens=-4)).encode(), 400, "invalid_value"),
        (json.dumps({"messages": []}).encode(), 400, "missing_field"),
        (json.dumps(ask(tools=[{"type": "function"}])).encode(), 400, "unsupported_field"),
    ):
        response = await client.post(URL, content=content, headers=kind)
        error = response.json()["error"]
        assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"})
        assert code is None or error["code"] == code
        assert (await client.post(URL, json=ask())).status_code == 200
    assert {record.outcome for record in fakes.recorder.records} == {"client_error", "ok"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"n": True}, "n"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
        ({"rag": {"top_k": True}}, "rag.top_k"),
    ],
)
async def test_the_field_at_fault_is_named_as_the_client_wrote_it(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(URL, json={**ask(), **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_client_that_goes_cancels_everything(address: str, fakes: Fakes) -> None:
    fakes.generator.delay_seconds = 0.02
    for stream in (True, False):
        async with httpx.AsyncClient(base_url=address) as client:
            sending = asyncio.create_task(_read(client, ask(stream=stream)))
            await until(lambda: fakes.generator.num_running == 1)
            await asyncio.sleep(0.1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        await until(lambda: fakes.generator.num_running == 0, seconds=1.0)
        await until(lambda: len(fakes.recorder.records) == fakes.generator.num_closed_early)
    assert fakes.generator.num_closed_early == 2
    assert [record.outcome for record in fakes.recorder.records] == ["cancelled", "cancelled"]
    assert all(0 < record.num_generated_tokens < 17 for record in fakes.recorder.records)


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", URL, json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_heartbeats_while_nothing_is_said(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.retriever.delay_seconds = 0.15
    async with asking(make_settings(service__heartbeat_seconds=0.04), fakes) as client:
        text = (await client.post(URL, json=ask(stream=True))).text
    assert text.startswith(": working\n\n")
    assert _events(text)[0]["sources"]


async def test_deadline(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.generator.hold = asyncio.Event()
    async with asking(make_settings(service__request_deadline_seconds=0.2), fakes) as client:
        response = await client.post(URL, json=ask())
        assert response.status_code == 408
        assert response.json()["error"]["type"] == "timeout_error"
        text = (await client.post(URL, json=ask(stream=True))).text
    assert json.loads(text.strip().split("data: ")[-1])["error"]["code"] == "deadline_exceeded"
    assert fakes.generator.num_running == 0


async def test_a_recorder_that_fails_costs_no_request(client: httpx.AsyncClient, fakes: Fakes) -> None:
    fakes.recorder.error = RuntimeError("full")
    assert (await client.post(URL, json=ask())).status_code == 200


async def test_records_hold_stages_and_no_text(make_settings: MakeSettings, fakes: Fakes) -> None:
    async with asking(make_settings(), fakes) as client:
        await client.post(
            URL, json=ask(temperature=0.5, speculation={"mode": "off"}), headers={"traceparent": TRACE}
        )
    (record,) = fakes.recorder.records
    assert set(record.stage_seconds) == {"embed", "search", "rerank", "prompt", "queue", "prefill", "decode"}
    assert (record.question, record.answer, record.temperature, record.mode) == (None, None, 0.5, "off")
    assert (record.target, record.draft) == ("fake", "small@01234567")
    assert record.stats is not None
    assert record.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    async with asking(make_settings(telemetry__keep_text=True), fakes) as client:
        await client.post(URL, json=ask())
    assert fakes.recorder.records[1].question == "When does the library open?"
    assert "[1]" in (fakes.recorder.records[1].answer or "")


def test_the_documented_example_is_valid() -> None:
    example = ChatRequest.model_json_schema()["example"]
    assert ChatRequest.model_validate(example).model == MODEL


async def test_an_answer_ends_where_the_model_makes_up_the_next_question(
    client: httpx.AsyncClient, fakes: Fakes
) -> None:
    await client.post(URL, json=ask(stop=["END"]))
    await client.post(URL, json=ask(rag={"enabled": False}))
    stops = [request.sampling.stop for request in fakes.generator.requests]
    assert stops == [("END", "\n\nQuestion:"), ()]

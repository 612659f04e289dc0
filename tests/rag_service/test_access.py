"""Who gets in and how many: keys, limits, foreign pages, overload, slow readers."""

from __future__ import annotations

import asyncio
import json

import httpx

from rag_service.auth import KeyStore
from tests.fakes import Fakes
from tests.rag_service.conftest import MakeSettings, ask, asking, serving, until

URL = "/v1/chat/completions"


async def test_overload_is_refused_early(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.generator.hold = asyncio.Event()
    async with asking(make_settings(limits__max_in_flight=2), fakes) as client:
        running = [asyncio.create_task(client.post(URL, json=ask())) for _ in range(2)]
        await until(lambda: fakes.generator.num_running == 2)
        refused = await client.post(URL, json=ask(stream=True))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert (await client.post("/v1/search", json={"query": "x"})).status_code == 429
        assert (await client.get("/healthz")).status_code == 200
        fakes.generator.hold.set()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert (await client.post(URL, json=ask())).status_code == 200
    assert sorted(record.outcome for record in fakes.recorder.records) == ["ok", "ok", "ok", "overloaded"]


async def test_keys_scopes_and_limits(make_settings: MakeSettings, fakes: Fakes) -> None:
    settings = make_settings(limits__tokens_per_minute=300)
    key, _ = KeyStore(settings.keys_file).create("acme", ("search",))
    chat, _ = KeyStore(settings.keys_file).create("acme", ("chat",), requests_per_minute=100)
    async with asking(settings, fakes) as client:
        assert (await client.post(URL, json=ask())).status_code == 401
        assert (
            await client.post(URL, json=ask(), headers={"Authorization": f"Bearer {key}"})
        ).status_code == 403
        headers = {"Authorization": f"Bearer {chat}"}
        first = await client.post(URL, json=ask(), headers=headers)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "99"
        refused = first
        while refused.status_code == 200:
            refused = await client.post(URL, json=ask(), headers=headers)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert fakes.retriever.searches[0].tenant == "acme"


async def test_pages_of_other_sites_may_not_post(
    client: httpx.AsyncClient, make_settings: MakeSettings, fakes: Fakes
) -> None:
    assert (await client.post(URL, json=ask(), headers={"origin": "https://evil.example"})).status_code == 403
    assert (await client.post(URL, json=ask(), headers={"origin": "http://test"})).status_code == 200
    async with asking(make_settings(service__cors_origins=["https://app.example"]), fakes) as other:
        allowed = await other.post(URL, json=ask(), headers={"origin": "https://app.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert allowed.status_code == 200
        preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
        assert (await other.options(URL, headers=preflight)).status_code == 200


async def test_a_slow_reader_holds_nobody_up(make_settings: MakeSettings, fakes: Fakes) -> None:
    fakes.generator.text = "word " * 20_000
    fakes.generator.piece = 100
    async with serving(make_settings(service__max_tokens_limit=4096), fakes) as address:
        host, port = address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(ask(stream=True, max_tokens=4000)).encode()
        kind = "content-type: application/json"
        head = f"POST {URL} HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await until(lambda: bool(fakes.generator.requests))
        async with httpx.AsyncClient(base_url=address) as client:
            answer = await client.post(URL, json=ask(max_tokens=5))
        assert answer.status_code == 200
        writer.close()
        assert await reader.read(10)

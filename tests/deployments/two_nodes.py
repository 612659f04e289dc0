"""A cluster of two Ray nodes on this machine, the target on one and the draft on the other; run as a program.

``python -m tests.deployments.two_nodes FOLDER`` prints one JSON object. A program of its own, since a process has
one Ray.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.context import _get_global_client

from deployments.app import build_generator
from deployments.handles import GeneratorHandle
from generation.types import GenerationChunk, GenerationRequest, SamplingParams
from tests.deployments.tiny_pair import save_tiny_model, tiny_settings

APPLICATION = "two-nodes"
NUM_PROMPTS = 8
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


async def ask(target: GeneratorHandle, number: int, mode: str, tag: str) -> list[GenerationChunk]:
    prompt = tuple(3 + (number * 7 + i * i) % 200 for i in range(12 + number % 5))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    request = GenerationRequest(f"{tag}/{mode}/{number}", prompt, sampling, mode=mode)
    return [chunk async for chunk in target.generate(request)]


async def answers(target: GeneratorHandle, mode: str, tag: str) -> dict[str, Any]:
    """Token ids of every prompt, and what the draft had to do with them."""
    found = await asyncio.gather(*(ask(target, number, mode, tag) for number in range(NUM_PROMPTS)))
    stats = [chunks[-1].stats for chunks in found]
    return {
        "ids": [[token for chunk in chunks for token in chunk.token_ids] for chunks in found],
        "ends": [chunks[-1].finish_reason for chunks in found],
        "accepted": sum(s.num_accepted_tokens for s in stats if s),
        "hits": sum(s.lookahead_hits for s in stats if s),
    }


def node_of(deployment: str) -> str:
    """The node that a deployment's replica runs on."""
    client = _get_global_client()
    assert client is not None
    replicas = client.get_serve_details()["applications"][APPLICATION]["deployments"][deployment]["replicas"]
    return str(replicas[0]["node_id"])


async def work(target: GeneratorHandle, kill_draft_node: Callable[[], None]) -> dict[str, Any]:
    await until_drafting(target, "start")
    result = {mode: await answers(target, mode, "calm") for mode in ("off", "synchronous", "lookahead")}
    while_dying = asyncio.create_task(answers(target, "lookahead", "dying"))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(kill_draft_node)
    result["dying"] = await while_dying
    result["without"] = await answers(target, "lookahead", "without")
    return result


async def until_drafting(target: GeneratorHandle, tag: str, seconds: float = 120.0) -> float:
    """Seconds until the draft proposes. Raises ``TimeoutError``."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if (await answers(target, "lookahead", f"{tag}-{time.monotonic()}"))["accepted"]:
            return time.monotonic() - began
        await asyncio.sleep(0.5)
    raise TimeoutError("the draft proposes nothing")


def main(folder: Path) -> dict[str, Any]:
    save_tiny_model(folder / "model")
    resources = {f"deployments.{name}.resources": {name: 0.01} for name in ("target", "draft")}
    settings = tiny_settings(folder / "model", folder / "data", **resources)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "resources": {"target": 1.0}, "include_dashboard": False},
    )
    try:
        drafts = cluster.add_node(**NODE, resources={"draft": 1.0})
        ray.init(address=cluster.address, log_to_driver=False, namespace="rag-service")
        cluster.wait_for_nodes()
        handle = serve.run(build_generator(settings), name=APPLICATION, route_prefix=None)
        target = GeneratorHandle(handle)
        nodes = {name: node_of(name) for name in ("Target", "Draft")}
        result = asyncio.run(work(target, lambda: cluster.remove_node(drafts, allow_graceful=False)))
        cluster.add_node(**NODE, resources={"draft": 1.0})
        result["back_after_seconds"] = asyncio.run(until_drafting(GeneratorHandle(handle), "back", 240.0))
        return {**result, "nodes": nodes}
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

"""The stock ``openai`` client: a streamed answer with its sources, citations and acceptance rate.

Run it with a question: ``python examples/clients/ask_openai.py "What does the deposit cover?" legal``.
RAG_URL and RAG_KEY name another service and its key.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from openai import OpenAI

QUESTION = "What are the early signs of dehydration in adults?"


def main(question: str = QUESTION, domain: str | None = None) -> None:
    """Print the sources, then the answer as it comes, then its figures."""
    url = os.environ.get("RAG_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RAG_KEY", "none"))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"rag": {"domain": domain}},
    )
    for chunk in stream:
        extra: dict[str, Any] = chunk.model_extra or {}
        for source in extra.get("sources", ()):
            print(f"[{source['index']}] {source['title'] or source['document_id']} ({source['url']})")
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if "metrics" in extra:
            figures, timings = extra["metrics"]["speculative_decoding"], extra["metrics"]["timings"]
            print(f"\n\nacceptance rate {figures['acceptance_rate']}, drafter {figures['drafter']}")
            print(f"first token after {timings['time_to_first_token_seconds']:.3f} s")
        if chunk.usage:
            print(f"{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:3])

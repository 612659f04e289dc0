"""One question by the stock openai client, streamed: sources first, then text, then the figures."""

import os

from openai import OpenAI

url = os.environ.get("RAG_URL", "http://127.0.0.1:8000")
client = OpenAI(
    base_url=f"{url}/v1", api_key=os.environ.get("RAG_SERVICE_API_KEY", "none-needed-on-loopback")
)

stream = client.chat.completions.create(
    model="smollm2-135m-instruct",
    messages=[
        {"role": "user", "content": "When does Corvane Instruments recognise revenue from selling equipment?"}
    ],
    stream=True,
    extra_body={"rag": {"domain": "finance"}},
)
for chunk in stream:
    extra = chunk.model_extra or {}
    for source in extra.get("sources") or []:
        print(f"[{source['index']}] {source['document_id']}: {source['title']}")
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if extra.get("metrics"):
        figures = extra["metrics"]["speculative_decoding"]
        print(f"\nacceptance rate {figures['acceptance_rate']}, drafter {figures['drafter']}")

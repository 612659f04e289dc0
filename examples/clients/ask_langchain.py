"""LangChain on rag-service: ``pip install langchain-openai``, then ``python examples/clients/ask_langchain.py``.

The service retrieves by itself, so the chain is the model alone; ``extra_body`` carries our ``rag`` options.
"""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

QUESTION = "What are the early signs of dehydration in adults?"


def main(question: str = QUESTION) -> None:
    """Print an answer as it streams, then a whole one with its token counts."""
    model = ChatOpenAI(
        base_url=os.environ.get("RAG_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=SecretStr(os.environ.get("RAG_KEY", "none")),
        model="smollm2-135m-instruct",
        stream_usage=True,
        extra_body={"rag": {"top_k": 3}},
    )
    for piece in model.stream(question):
        print(piece.text, end="", flush=True)
    answer = model.invoke([("system", "Be brief."), ("user", question)])
    print("\n\n" + answer.text)
    print(answer.usage_metadata)


if __name__ == "__main__":
    main(*sys.argv[1:2])

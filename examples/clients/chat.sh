#!/bin/sh
# One question by curl. Needs a running service (make serve).
curl -s "${RAG_URL:-http://127.0.0.1:8000}/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "smollm2-135m-instruct",
  "messages": [{"role": "user", "content": "What are the early signs of dehydration in adults?"}],
  "rag": {"domain": "medical"}
}'

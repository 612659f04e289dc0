#!/bin/sh
# A question by curl, plain and streamed. RAG_URL and RAG_KEY name another service and its key.
set -eu
url="${RAG_URL:-http://127.0.0.1:8000}"
question="${1:-What are the early signs of dehydration in adults?}"

body() {
  # printf %s leaves the question as it is; a real client builds its JSON with a library.
  printf '{"model": "smollm2-135m-instruct", "stream": %s, "messages": [{"role": "user", "content": "%s"}]}' \
    "$1" "$question"
}

echo "# the whole answer"
body false | curl --silent --show-error --fail-with-body "$url/v1/chat/completions" \
  -H "Content-Type: application/json" -H "Authorization: Bearer ${RAG_KEY:-none}" --data @-
echo
echo "# as it is written"
body true | curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" \
  -H "Content-Type: application/json" -H "Authorization: Bearer ${RAG_KEY:-none}" --data @-

#!/bin/sh
# The same gate for any other pipeline: exit status 1 blocks it, gate/gate.xml is JUnit.
# Usage: gate.sh CONFIG QUESTIONS DOCUMENTS [MIN_ALPHA]
set -eu

config=$1
questions=$2
documents=$3
bar=${4:-0.7}

rag-service models fetch
rag-service gate \
    --config "$config" \
    --questions "$questions" \
    --documents "$documents" \
    --min-alpha "$bar" \
    --output gate

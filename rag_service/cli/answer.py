"""An answer for people: text as it comes, numbered sources, stage timings, acceptance."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any


def question_body(
    question: str, domain: str | None, model: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The request of one question; ``options`` that are None are left out."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    if domain is not None:
        body["rag"] = {"domain": domain}
    body.update({name: value for name, value in options.items() if value is not None})
    return body


def print_stream(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Print the text while it streams; returns ``sources`` and ``metrics`` of the answer."""
    found: dict[str, Any] = {}
    for event in events:
        for name in ("sources", "metrics", "usage"):
            if event.get(name) is not None:
                found[name] = event[name]
        for choice in event.get("choices", ()):
            sys.stdout.write((choice.get("delta") or {}).get("content") or "")
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return found


def answer_text(response: Mapping[str, Any]) -> str:
    """The text of a response that was not streamed."""
    choices = response.get("choices") or [{}]
    return str((choices[0].get("message") or {}).get("content") or "")


def describe(response: Mapping[str, Any]) -> str:
    """Sources, timings and acceptance of an answer, one line each."""
    metrics = response.get("metrics") or {}
    lines = ["", "Sources:", *_sources(response.get("sources") or ())]
    lines += ["", f"Timings: {_timings(metrics.get('timings') or {})}"]
    lines.append(f"Acceptance: {_acceptance(metrics.get('speculative_decoding') or {})}")
    return "\n".join(lines)


def _sources(sources: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = []
    for number, source in enumerate(sources, start=1):
        title = source.get("title") or source.get("document_id") or "untitled"
        lines.append(f"  [{source.get('index', number)}] {title} ({source.get('document_id', '?')})")
    return lines or ["  none"]


def _timings(timings: Mapping[str, Any]) -> str:
    parts = [
        f"{name.removesuffix('_seconds').replace('_', ' ')} {seconds:.3f} s"
        for name, seconds in timings.items()
        if isinstance(seconds, int | float)
    ]
    return ", ".join(parts) or "none"


def _acceptance(figures: Mapping[str, Any]) -> str:
    rate = figures.get("acceptance_rate")
    if rate is None:
        return "α none (no draft token was tested)"
    drafted, accepted = figures.get("num_draft_tokens", 0), figures.get("num_accepted_draft_tokens", 0)
    length = figures.get("mean_acceptance_length")
    shown = f"α {rate:.2f}, {accepted} of {drafted} draft tokens accepted"
    if length is not None:
        shown += f", {length:.2f} tokens a round"
    return f"{shown}, {figures.get('num_rounds', 0)} rounds, drafter {figures.get('drafter') or 'none'}"

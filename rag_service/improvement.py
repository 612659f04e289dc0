"""Which domains need a better draft, and what to train it on: the request log's own questions.

Questions are in the log only when the configuration keeps text (``telemetry.keep_text``), and only for its
retention time; without them there is nothing to train on, and that is said rather than worked around.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rag_service.acceptance_report import ALL, acceptance_report
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.gate_record import GateRecord
from rag_service.question_set import AskedQuestion
from rag_service.recorder import request_log_of
from rag_service.report_query import ReportQuery
from rag_service.request_columns import COLUMN_NAMES


class ImprovementError(ValueError):
    """Nothing can be improved; ``str()`` says what is missing."""

    exit_status = 1
    code = "nothing_to_improve"


@dataclass(frozen=True, slots=True)
class DriftedDomain:
    """A domain whose α fell: the rates before and after, and since when (Unix seconds)."""

    domain: str
    rate_before: float
    rate_after: float
    begun_at: float


def drifted_domains(settings: Settings, window: str, baselines: dict[str, float]) -> list[DriftedDomain]:
    """Domains whose acceptance rate fell beyond noise in the window (``7d``, ``24h``)."""
    domains = (*settings.service.domains, OTHER_DOMAIN)
    query = ReportQuery.of({"window": window}, time.time(), domains)
    with request_log_of(settings).reading(query.since, query.until, COLUMN_NAMES) as connection:
        report = acceptance_report(connection, query, domains, baselines)
    found = []
    for name, figures in report["domains"].items():
        drift: dict[str, Any] | None = figures.get("drift")
        if name != ALL and drift is not None and drift["direction"] == "fell":
            found.append(DriftedDomain(name, drift["rate_before"], drift["rate_after"], drift["begun_at"]))
    return found


def logged_questions(
    settings: Settings, window: str, domains: Collection[str], limit: int = 2000
) -> list[AskedQuestion]:
    """The newest distinct questions of the domains.

    The id is a hash of domain and question, so that the same question asked again falls on the same side of
    the training split. Raises ``ImprovementError`` when the log keeps no text.
    """
    if not settings.telemetry.keep_text:
        raise ImprovementError(
            "The request log keeps no text, so there is nothing to train on: set telemetry.keep_text and "
            "telemetry.retention_days, or name --questions."
        )
    query = ReportQuery.of({"window": window}, time.time(), (*settings.service.domains, OTHER_DOMAIN))
    columns = ("domain", "question", "started_at", "outcome")
    with request_log_of(settings).reading(query.since, query.until, columns) as connection:
        rows = connection.execute(
            "SELECT domain, question, max(started_at) AS latest FROM requests "
            "WHERE outcome = 'ok' AND question IS NOT NULL AND list_contains(?, domain) "
            "GROUP BY domain, question ORDER BY latest DESC LIMIT ?",
            [sorted(domains), limit],
        ).fetchall()
    if not rows:
        raise ImprovementError("The log has no answered question of " + ", ".join(sorted(domains)) + ".")
    return [AskedQuestion(_id(domain, text), domain, text) for domain, text, _ in rows]


def rehearsed_questions(settings: Settings, window: str, domains: Collection[str]) -> list[AskedQuestion]:
    """Questions of the other domains, at most 200 in all: a draft trained on one domain alone forgets the rest.

    Empty when the log has none.
    """
    others = {*settings.service.domains, OTHER_DOMAIN} - set(domains)
    try:
        return logged_questions(settings, window, others, 200)
    except ImprovementError:
        return []


def _id(domain: str, question: str) -> str:
    return "log-" + hashlib.sha256(f"{domain}\n{question}".encode()).hexdigest()[:16]


def proposal(draft: str, new_folder: str, record: GateRecord, comparison: list[str]) -> str:
    """What to do with the new draft, as Markdown: nothing is rolled out by itself."""
    lines = [f"# Proposal: replace the draft {draft}", ""]
    lines += [f"- {sentence}" for sentence in comparison]
    if record.passed:
        lines += [
            "",
            "The gate passed. To roll it out, set this in the configuration and redeploy one Draft replica first:",
            "",
            "```yaml",
            "draft:",
            "  draft:",
            f"    model: {new_folder}",
            "```",
        ]
    else:
        lines += ["", "The gate did not pass, so keep the present draft:", ""]
        lines += [f"- {reason}" for reason in record.failures]
    return "\n".join(lines) + "\n"

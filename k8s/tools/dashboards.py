"""Write the Grafana dashboards: ``python k8s/tools/dashboards.py``; ``--check`` writes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "monitoring" / "dashboards"
WIDTH, HEIGHT = 8, 8
DOMAIN = '{domain=~"$domain"}'
SERVE = '{application="rag"}'
ADMITTED = 'outcome=~"ok|error|overloaded"'
FAILED = 'outcome=~"error|overloaded"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. ``queries``: PromQL and the legend of its series. ``kind``: a Grafana panel type."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    says: str = ""
    kind: str = "timeseries"


def quantile(share: float, metric: str, by: str = "", where: str = 'domain=~"$domain"') -> str:
    """PromQL of a percentile of a histogram, by some labels."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"
    )


def rate(metric: str, by: str, where: str = DOMAIN) -> str:
    """PromQL of a counter's sum by some labels, a second."""
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def percentiles(metric: str, where: str = 'domain=~"$domain"') -> list[tuple[str, str]]:
    """P50, P95 and P99 of a histogram."""
    return [(quantile(share, metric, where=where), f"P{round(share * 100)}") for share in (0.5, 0.95, 0.99)]


def acceptance(by: str, accepted: str = "rag_spec_accepted_tokens_total") -> str:
    """PromQL of α over the range shown by one point, A / (A + R); of token-wise verification."""
    kept = f"sum by ({by}) (increase({accepted}{DOMAIN}[$__rate_interval]))"
    rejected = f"sum by ({by}) (increase(rag_spec_rejections_total{DOMAIN}[$__rate_interval]))"
    return f"{kept} / ({kept} + {rejected})"


SERVICE = [
    Panel("Requests a second", [(rate("rag_requests_total", "outcome"), "{{outcome}}")], "reqps"),
    Panel(
        "Share that failed or was refused for load",
        [
            (
                f'sum(rate(rag_requests_total{{domain=~"$domain", {FAILED}}}[$__rate_interval])) / '
                f'sum(rate(rag_requests_total{{domain=~"$domain", {ADMITTED}}}[$__rate_interval]))',
                "share",
            )
        ],
        "percentunit",
        "The objective allows 0.005.",
    ),
    Panel(
        "Answered within 8 seconds",
        [("1 - rag:slow_requests:ratio_rate5m", "share")],
        "percentunit",
        "Of all domains; the objective is 0.95.",
    ),
    Panel("Latency, end to end", percentiles("rag_request_seconds"), "s"),
    Panel("P95 by domain", [(quantile(0.95, "rag_request_seconds", "domain"), "{{domain}}")], "s"),
    Panel("Time to first token", percentiles("rag_time_to_first_token_seconds"), "s"),
    Panel("P95 by stage", [(quantile(0.95, "rag_stage_seconds", "stage"), "{{stage}}")], "s"),
    Panel("Generated tokens a second", [(rate("rag_generated_tokens_total", "domain"), "{{domain}}")]),
    Panel(
        "Request log",
        [
            ("max(rag_request_log_pending)", "rows waiting"),
            ("max(rag_request_log_failing)", "failing (1)"),
            ("sum(increase(rag_request_log_dropped_total[$__rate_interval]))", "rows lost"),
        ],
    ),
    Panel(
        "Ingestion",
        [
            ("max(rag_ingestion_jobs_waiting)", "jobs waiting or running"),
            ("sum by (state) (increase(rag_ingestion_jobs_total[$__rate_interval]))", "jobs {{state}}"),
            ("sum(increase(rag_ingestion_failed_documents_total[$__rate_interval]))", "documents failed"),
        ],
    ),
    Panel(
        "What runs",
        [("max by (version, target, draft) (rag_build_info)", "{{version}} {{target}} {{draft}}")],
        kind="stat",
    ),
]

GENERATION = [
    Panel(
        "α by domain",
        [('avg by (domain, cluster) (rag_acceptance_rate{domain=~"$domain"})', "{{domain}} {{cluster}}")],
        "percentunit",
        "Of the last 500 requests that speculated, none older than an hour.",
    ),
    Panel(
        "α below its gated baseline",
        [
            (
                'max by (domain) (rag_acceptance_rate_baseline{domain=~"$domain"}) - '
                'min by (domain) (rag_acceptance_rate{domain=~"$domain"})',
                "{{domain}}",
            )
        ],
        "percentunit",
        "Above 0.05 for half an hour alerts.",
    ),
    Panel(
        "Drift (1: α has changed for good)",
        [('max by (domain) (rag_acceptance_drift{domain=~"$domain"})', "{{domain}}")],
    ),
    Panel(
        "α by drafter",
        [(acceptance("drafter"), "{{drafter}}")],
        "percentunit",
        "A / (A + R): token-wise verification only.",
    ),
    Panel(
        "Accepted of drafted",
        [
            (
                rate("rag_spec_accepted_tokens_total", "drafter")
                + " / "
                + rate("rag_spec_draft_tokens_total", "drafter"),
                "{{drafter}}",
            )
        ],
        "percentunit",
        "Not α: it falls with longer proposals.",
    ),
    Panel(
        "Conditional acceptance by position",
        [
            (
                f"{rate('rag_spec_accepted_per_position_total', 'position')} / "
                f"{rate('rag_spec_tested_per_position_total', 'position')}",
                "{{position}}",
            )
        ],
        "percentunit",
    ),
    Panel(
        "Tokens a round",
        [
            (
                f"1 + {rate('rag_spec_accepted_tokens_total', 'domain')} / "
                + rate("rag_spec_rounds_total", "domain"),
                "{{domain}}",
            )
        ],
        says="Mean acceptance length; rounds without a proposal included.",
    ),
    Panel("Rounds by cause", [(rate("rag_spec_rounds_total", "cause"), "{{cause}}")]),
    Panel(
        "Look-ahead hit rate",
        [("rag:lookahead_hits:ratio_rate30m", "last half hour")],
        "percentunit",
        "Rounds begun from a table that had the outcome, of all that asked for one.",
    ),
    Panel(
        "Breakers of the draft",
        [("max by (replica) (rag_draft_breaker_open)", "{{replica}}")],
        says="1 while a replica is not asked.",
    ),
    Panel(
        "Prefill and decode, P95",
        [
            (
                quantile(
                    0.95, "rag_stage_seconds", "stage", 'domain=~"$domain", stage=~"queue|prefill|decode"'
                ),
                "{{stage}}",
            )
        ],
        "s",
    ),
]

RETRIEVAL = [
    Panel(
        f"{stage.capitalize()} time",
        percentiles("rag_stage_seconds", f'domain=~"$domain", stage="{stage}"'),
        "s",
    )
    for stage in ("embed", "search", "rerank", "prompt")
] + [
    Panel(
        "Search P95 by domain",
        [(quantile(0.95, "rag_stage_seconds", "domain", 'domain=~"$domain", stage="search"'), "{{domain}}")],
        "s",
    ),
    Panel(
        "Searches a second",
        [
            (
                rate("rag_stage_seconds_count", "domain", '{domain=~"$domain", stage="search"}'),
                "{{domain}}",
            )
        ],
        "reqps",
        "Of chat requests that ended well; /v1/search alone is not counted.",
    ),
    Panel(
        "Waiting for Retriever and Reranker",
        [
            (
                'sum by (deployment) (ray_serve_deployment_queued_queries{application="rag", '
                'deployment=~"Retriever|Reranker"})',
                "{{deployment}}",
            )
        ],
    ),
]

CAPACITY = [
    Panel(
        "Healthy replicas",
        [(f"sum by (deployment) (ray_serve_deployment_replica_healthy{SERVE})", "{{deployment}}")],
    ),
    Panel(
        "State of deployments",
        [(f"min by (deployment) (ray_serve_deployment_status{SERVE})", "{{deployment}}")],
        says="1 failed to deploy, 2 unhealthy, 3 updating, 4 and 5 scaling, 6 healthy.",
    ),
    Panel(
        "Waiting for a replica",
        [(f"sum by (deployment) (ray_serve_deployment_queued_queries{SERVE})", "{{deployment}}")],
    ),
    Panel(
        "At work in replicas",
        [(f"sum by (deployment) (ray_serve_replica_processing_queries{SERVE})", "{{deployment}}")],
    ),
    Panel(
        "Key-value slots of the targets",
        [("max(rag_kv_slots_used)", "used"), ("max(rag_kv_slots)", "there")],
    ),
    Panel(
        "Fullest target",
        [("max(rag_kv_use_max_ratio)", "slots in use")],
        "percentunit",
        "At 1 with requests waiting: RagKvExhausted.",
    ),
    Panel(
        "In the targets' own queues",
        [("max(rag_target_waiting_requests)", "waiting"), ("max(rag_target_running_requests)", "running")],
    ),
    Panel("Tokens waiting", [("max(rag_target_waiting_tokens)", "tokens yet to compute")]),
    Panel(
        "Replicas that answer",
        [("max(rag_target_replicas)", "targets"), ("max(rag_draft_replicas)", "drafts, as targets see them")],
    ),
    Panel(
        "GPU utilisation",
        [("avg by (instance, GpuIndex) (ray_node_gpus_utilization)", "{{instance}} {{GpuIndex}}")],
        "percent",
    ),
    Panel(
        "GPU memory used",
        [("max by (instance, GpuIndex) (ray_node_gram_used)", "{{instance}} {{GpuIndex}}")],
        "decmbytes",
    ),
    Panel("Processor", [("avg by (instance) (ray_node_cpu_utilization)", "{{instance}}")], "percent"),
    Panel(
        "Memory",
        [("max by (instance) (ray_node_mem_used / ray_node_mem_total)", "{{instance}}")],
        "percentunit",
    ),
    Panel(
        "Volumes",
        [
            (
                'min by (persistentvolumeclaim) (kubelet_volume_stats_available_bytes{namespace="rag-service"} / '
                'kubelet_volume_stats_capacity_bytes{namespace="rag-service"})',
                "{{persistentvolumeclaim}}",
            )
        ],
        "percentunit",
        "Free share.",
    ),
]

DASHBOARDS = {
    "service": ("Service", SERVICE, True),
    "generation": ("Generation and α", GENERATION, True),
    "retrieval": ("Retrieval", RETRIEVAL, True),
    "capacity": ("Capacity", CAPACITY, False),
}


def panel(number: int, shown: Panel) -> dict[str, Any]:
    """Grafana's JSON of one panel, three in a row."""
    row, column = divmod(number, 24 // WIDTH)
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": shown.kind,
        "title": shown.title,
        "description": shown.says,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": shown.unit, "min": 0}, "overrides": []},
        "options": {"textMode": "name"} if shown.kind == "stat" else {"tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(shown.queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """Grafana's JSON of one dashboard."""
    title, panels, by_domain = DASHBOARDS[name]
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    if by_domain:
        query = "label_values(rag_requests_total, domain)"
        variables.append(
            {
                "name": "domain",
                "type": "query",
                "query": query,
                "definition": query,
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "refresh": 2,
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return {
        "uid": f"rag-service-{name}",
        "title": f"rag-service: {title}",
        "tags": ["rag-service"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [panel(number, shown) for number, shown in enumerate(panels)],
    }


def text(name: str) -> str:
    """The content of one dashboard's file."""
    return json.dumps(dashboard(name), ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    """Write, or check, every dashboard."""
    check, stale = "--check" in sys.argv, 0
    for name in DASHBOARDS:
        path = FOLDER / f"{name}.json"
        if path.exists() and path.read_text(encoding="utf-8") == text(name):
            continue
        stale += 1
        if not check:
            path.write_text(text(name), encoding="utf-8")
        print(f"{path.name} {'is out of date' if check else 'written'}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())

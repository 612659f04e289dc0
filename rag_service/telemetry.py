"""Prometheus metrics of the service, with bounded labels.

Names are those of docs/metrics.md. Every label takes its values from a closed list; anything else becomes
``other``, so no client can grow the number of series.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from generation.types import ROUND_CAUSES, SpeculationStats
from rag_service.acceptance_estimate import acceptance_sample
from rag_service.ingestion_figures import IngestionCollector
from rag_service.record import RequestRecord
from rag_service.target_load import LoadCollector, TargetLoad
from retrieval.types import JobCounts

OTHER: Final = "other"
STAGES: Final = ("queue", "embed", "search", "rerank", "prompt", "prefill", "decode")
OUTCOMES: Final = ("ok", "cancelled", "client_error", "overloaded", "error")
DRAFTERS: Final = ("model", "passages", "history", "none")
MAX_POSITIONS: Final = 16
"""The largest K that the configuration allows; positions are labelled 1 to K."""
MAX_REPLICAS: Final = 64
LATENCY_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
STAGE_BUCKETS: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
WINDOW_REQUESTS: Final = 500
WINDOW_SECONDS: Final = 3600.0

# Otherwise prometheus_client doubles the series with a creation time for each.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class RunningAcceptance(Collector):
    """α of the recent requests of each domain: the last 500 that speculated, none older than an hour.

    A domain with nothing tested in the window has no sample at all: absent, not 0. Requests under a lossy
    rule are left out, since their acceptance estimates no α.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._recent: dict[str, deque[tuple[float, SpeculationStats]]] = {}
        registry.register(self)

    def add(self, domain: str, finished_at: float, stats: SpeculationStats) -> None:
        if not stats.lossy and stats.num_draft_tokens:
            self._recent.setdefault(domain, deque(maxlen=WINDOW_REQUESTS)).append((finished_at, stats))

    def rate(self, domain: str, now: float) -> float | None:
        recent = [stats for at, stats in self._recent.get(domain, ()) if at >= now - WINDOW_SECONDS]
        return acceptance_sample(
            [stats.num_accepted_tokens for stats in recent],
            [stats.num_rejections for stats in recent],
            [stats.overlap_sum for stats in recent],
            [stats.num_overlap for stats in recent],
            [stats.acceptance_method for stats in recent],
        ).rate

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "rag_acceptance_rate",
            "Estimated acceptance rate of draft tokens over the recent requests of a domain.",
            labels=["domain"],
        )
        now = time.time()
        for domain in list(self._recent):
            rate = self.rate(domain, now)
            if rate is not None:
                family.add_metric([domain], rate)
        yield family


class Telemetry:
    """All metrics of one registry. Not thread-safe across ``observe`` calls; the recorder holds a lock."""

    def __init__(self, domains: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._num_log_dropped = 0
        self._domains = frozenset(domains) | {OTHER}
        self._running = RunningAcceptance(self.registry)
        self._load = LoadCollector(self.registry)
        self._jobs = IngestionCollector(self.registry)
        self._add_request_metrics()
        self._add_speculation_metrics()
        self._add_state_metrics()
        self._log_dropped = Counter(
            "rag_request_log_dropped", "Records lost because the log could not be written.",
            registry=self.registry,
        )  # fmt: skip

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        domain = self.domain_label(record.domain)
        self._requests.labels(domain, _known(record.outcome, OUTCOMES)).inc()
        if record.outcome == "ok":
            self._observe_times(domain, record)
        self._generated_tokens.labels(domain).inc(record.num_generated_tokens)
        if record.stats is not None:
            self._observe_stats(domain, record.stats)
            self._running.add(domain, record.started_at + record.total_seconds, record.stats)

    def exposition(self) -> str:
        """Prometheus text format."""
        return prometheus_client.generate_latest(self.registry).decode()

    def domain_label(self, domain: str) -> str:
        return domain if domain in self._domains else OTHER

    def set_baselines(self, rates: Mapping[str, float]) -> None:
        """Gated acceptance rates by domain; domains that are not configured are left out."""
        self._baseline.clear()
        for domain, rate in rates.items():
            if domain in self._domains:
                self._baseline.labels(domain).set(rate)

    def set_drift(self, drifting: Mapping[str, bool]) -> None:
        for domain, drifts in drifting.items():
            self._drift.labels(self.domain_label(domain)).set(float(drifts))

    def set_breakers(self, open_by_replica: Mapping[str, bool]) -> None:
        """The breakers of the draft replicas that exist now; the series of replicas that are gone go too."""
        self._breaker.clear()
        for replica in sorted(open_by_replica)[:MAX_REPLICAS]:
            self._breaker.labels(replica).set(float(open_by_replica[replica]))

    def set_load(self, load: TargetLoad | None) -> None:
        """How full the targets are now; None: not known, and then not shown."""
        self._load.load = load

    def set_jobs(self, counts: JobCounts | None) -> None:
        """How ingestion fares; None: not known, and then not shown."""
        self._jobs.counts = counts

    def set_build(self, version: str, target: str, draft: str) -> None:
        """What runs now: one series, replaced on a change."""
        self._build.clear()
        self._build.labels(version, target, draft).set(1.0)

    def set_log_dropped(self, total: int) -> None:
        """How many records the log has lost since the start."""
        self._log_dropped.inc(max(0, total - self._num_log_dropped))
        self._num_log_dropped = max(total, self._num_log_dropped)

    def _observe_times(self, domain: str, record: RequestRecord) -> None:
        """Times of requests that ended well; those of refused ones would flatter the percentiles."""
        self._request_seconds.labels(domain).observe(record.total_seconds)
        for stage, seconds in record.stage_seconds.items():
            self._stage_seconds.labels(domain, _known(stage, STAGES)).observe(seconds)
        if record.time_to_first_token_seconds is not None:
            self._first_token_seconds.labels(domain).observe(record.time_to_first_token_seconds)

    def _observe_stats(self, domain: str, stats: SpeculationStats) -> None:
        for cause, count in stats.rounds_by_cause.items():
            self._rounds.labels(domain, _known(cause, ROUND_CAUSES)).inc(count)
        for kind, counts in stats.by_drafter.items():
            drafter = _known(kind, DRAFTERS)
            self._draft_tokens.labels(domain, drafter).inc(counts.num_draft_tokens)
            self._accepted_tokens.labels(domain, drafter).inc(counts.num_accepted_tokens)
            self._rejections.labels(domain, drafter).inc(counts.num_rejections)
        for metric, counted in (
            (self._tested_positions, stats.tested_per_position),
            (self._accepted_positions, stats.accepted_per_position),
        ):
            for position, count in enumerate(counted[:MAX_POSITIONS], start=1):
                metric.labels(domain, str(position)).inc(count)
        if stats.lookahead_hits:
            self._lookahead.labels("hit").inc(stats.lookahead_hits)
        if stats.lookahead_misses:
            self._lookahead.labels("miss").inc(stats.lookahead_misses)

    def _add_request_metrics(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "rag_requests", "Finished requests.", ["domain", "outcome"], registry=registry
        )
        self._request_seconds = Histogram(
            "rag_request_seconds", "Time from arrival to the end of the answer, of requests that ended well.",
            ["domain"], registry=registry, buckets=LATENCY_BUCKETS,
        )  # fmt: skip
        self._stage_seconds = Histogram(
            "rag_stage_seconds", "Time by stage of a request.",
            ["domain", "stage"], registry=registry, buckets=STAGE_BUCKETS,
        )  # fmt: skip
        self._first_token_seconds = Histogram(
            "rag_time_to_first_token_seconds", "Time from arrival to the first token of the answer.",
            ["domain"], registry=registry, buckets=LATENCY_BUCKETS,
        )  # fmt: skip
        self._generated_tokens = Counter(
            "rag_generated_tokens", "Tokens generated.", ["domain"], registry=registry
        )

    def _add_speculation_metrics(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._rounds = counter("rag_spec_rounds", "Verification rounds by how they ended.", "domain", "cause")
        self._draft_tokens = counter("rag_spec_draft_tokens", "Draft tokens proposed.", "domain", "drafter")
        self._accepted_tokens = counter(
            "rag_spec_accepted_tokens", "Draft tokens accepted.", "domain", "drafter"
        )
        self._rejections = counter(
            "rag_spec_rejections", "Rounds ended by rejecting a token of this drafter.", "domain", "drafter"
        )
        self._tested_positions = counter(
            "rag_spec_tested_per_position", "Rounds in which a position was tested.", "domain", "position"
        )
        self._accepted_positions = counter(
            "rag_spec_accepted_per_position", "Rounds in which a position was accepted.", "domain", "position"
        )
        self._lookahead = counter("rag_spec_lookahead", "Rounds begun from a look-ahead table.", "result")

    def _add_state_metrics(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=self.registry)

        self._baseline = gauge(
            "rag_acceptance_rate_baseline", "Acceptance rate the running draft was gated with.", "domain"
        )
        self._drift = gauge(
            "rag_acceptance_drift", "1 while the acceptance rate of a domain has drifted, else 0.", "domain"
        )
        self._breaker = gauge("rag_draft_breaker_open", "1 while a draft replica is not asked.", "replica")
        self._build = gauge("rag_build_info", "What is running.", "version", "target", "draft")
        self.log_pending = gauge("rag_request_log_pending", "Records waiting to be written to the log.")
        self.log_failing = gauge("rag_request_log_failing", "1 while the request log cannot be written.")


def _known(value: str, values: tuple[str, ...]) -> str:
    return value if value in values else OTHER

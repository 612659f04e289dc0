"""How ingestion fares, for Prometheus: a job that fails is seen by its uploader alone otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from retrieval.types import JobCounts


class IngestionCollector(Collector):
    """The retrievers' own counts as last told. A restarted retriever counts from nought, as Prometheus expects
    of any counter; while they are not known there are no samples."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts: JobCounts | None = None
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        jobs = CounterMetricFamily("rag_ingestion_jobs", "Ingestion jobs that have ended.", labels=["state"])
        documents = CounterMetricFamily(
            "rag_ingestion_failed_documents", "Documents that could not be ingested."
        )
        waiting = GaugeMetricFamily("rag_ingestion_jobs_waiting", "Ingestion jobs that wait or run.")
        if self.counts is not None:
            jobs.add_metric(["succeeded"], self.counts.num_succeeded)
            jobs.add_metric(["failed"], self.counts.num_failed)
            documents.add_metric([], self.counts.num_failed_documents)
            waiting.add_metric([], self.counts.num_waiting)
        yield from (jobs, documents, waiting)

"""Where finished requests go: metrics at once, the request log for good, reports from the log.

Synchronous and thread-safe, without Ray: the Recorder deployment wraps it. A thread of its own forces the log
to the disk, compacts it and watches for drift.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import duckdb

from rag_service.acceptance_report import Report, acceptance_report
from rag_service.baseline import BaselineError, baselines_of
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.drift import WINDOW_SECONDS, detect_drift
from rag_service.record import RequestRecord
from rag_service.report_query import ReportQuery
from rag_service.request_columns import COLUMN_NAMES, load_columns
from rag_service.request_log import RequestLog
from rag_service.target_load import TargetLoad
from rag_service.telemetry import Telemetry
from retrieval.types import JobCounts

logger = logging.getLogger(__name__)
REMEMBERED_REQUESTS: Final = 20_000
"""Recent requests remembered so that one delivered twice counts once."""
WATCH_SECONDS: Final = 300.0
"""How often drift is looked for."""
REPORT_MEMORY_SECONDS: Final = 2.0
"""A report asked for again within this time is the same one: dashboards poll."""


class Recorder:
    """The one that counts. ``record`` never raises because of the log; ``acceptance`` may (see there)."""

    def __init__(self, settings: Settings) -> None:
        self._domains = (*settings.service.domains, OTHER_DOMAIN)
        self._telemetry = Telemetry(settings.service.domains)
        self._log = request_log_of(settings)
        self._baselines = _baselines(settings)
        self._telemetry.set_baselines(self._baselines)
        self._drifting: dict[str, Any] = {}
        self._build: tuple[str, str] | None = None
        self._seen: dict[tuple[str, float], None] = {}
        self._reports: dict[str, tuple[float, Report]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._due = threading.Event()
        self._num_unflushed = 0
        self._flush_seconds = settings.telemetry.flush_seconds
        self._flush_rows = settings.telemetry.flush_rows
        self._keeper = threading.Thread(target=self._keep, name="request-log", daemon=True)
        self._keeper.start()

    def record(self, record: RequestRecord) -> None:
        """Count and log one finished request; the same one delivered again is passed over."""
        key = (record.request_id, record.started_at)
        with self._lock:
            if key in self._seen:
                return
            self._seen[key] = None
            if len(self._seen) > REMEMBERED_REQUESTS:
                del self._seen[next(iter(self._seen))]
            self._telemetry.observe(record)
            if record.target and (record.target, record.draft) != self._build:
                self._build = (record.target, record.draft)
                self._telemetry.set_build(_version(), *self._build)
        self._log.append(record)
        self._num_unflushed += 1
        if self._num_unflushed >= self._flush_rows:
            self._due.set()

    def acceptance(self, query: Mapping[str, Any]) -> Report:
        """The acceptance report; parameters as ``ReportQuery.of``.

        Raises ``ReportQueryError`` for parameters that make no sense and ``OSError`` when the log cannot be
        read.
        """
        now = time.time()
        asked = ReportQuery.of(query, now, self._domains)
        key = repr(sorted((name, str(value)) for name, value in query.items()))
        with self._lock:
            at, report = self._reports.get(key, (0.0, {}))
        if now - at < REPORT_MEMORY_SECONDS:
            return report
        report = self._report(asked)
        with self._lock:
            self._reports = {
                known: found
                for known, found in self._reports.items()
                if now - found[0] < REPORT_MEMORY_SECONDS
            } | {key: (now, report)}
        return report

    def metrics(self) -> str:
        """Prometheus text exposition."""
        with self._lock:
            self._telemetry.log_pending.set(self._log.num_pending)
            self._telemetry.log_failing.set(float(self._log.failure is not None))
            self._telemetry.set_log_dropped(self._log.num_dropped)
            return self._telemetry.exposition()

    def set_breakers(self, open_by_replica: Mapping[str, bool]) -> None:
        """Say which draft replicas are not asked at present."""
        with self._lock:
            self._telemetry.set_breakers(open_by_replica)

    def set_load(self, load: TargetLoad | None) -> None:
        """Say how full the targets are; None: they do not say."""
        with self._lock:
            self._telemetry.set_load(load)

    def set_jobs(self, counts: JobCounts | None) -> None:
        """Say how ingestion fares; None: it does not say."""
        with self._lock:
            self._telemetry.set_jobs(counts)

    def ready(self) -> dict[str, str]:
        """Name → why it is not ready: never anything, since a log that fails must not stop the serving."""
        return {}

    def flush(self) -> None:
        """Force everything recorded to the disk."""
        self._log.flush()

    def close(self) -> None:
        """Stop the thread, write and compact what is left. Idempotent."""
        self._closed = True
        self._due.set()
        if self._keeper is not threading.current_thread():
            self._keeper.join(timeout=30.0)
        self._log.close()

    def _report(self, query: ReportQuery) -> Report:
        try:
            with self._log.reading(query.since, query.until, COLUMN_NAMES) as connection:
                return acceptance_report(connection, query, self._domains, self._baselines)
        except duckdb.Error as error:
            raise OSError(f"The request log cannot be read: {error}") from error

    def watch_drift(self) -> dict[str, Any]:
        """Judge every domain on the last two weeks and set the metric; domain → drift, where there is one."""
        since = time.time() - WINDOW_SECONDS
        with self._log.reading(since, columns=COLUMN_NAMES) as connection:
            columns = load_columns(connection, self._domains)
        found = {
            domain: detect_drift(
                columns.where(columns.names["domain"] == domain), self._baselines.get(domain)
            )
            for domain in sorted(set(columns.names["domain"]))
        }
        drifting = {domain: drift for domain, drift in found.items() if drift is not None}
        with self._lock:
            self._telemetry.set_drift(
                {
                    domain: drift is not None and drift["direction"] == "fell"
                    for domain, drift in found.items()
                }
            )
        for domain, drift in drifting.items():
            if domain not in self._drifting:
                logger.warning("the acceptance rate of %s %s: %s", domain, drift["direction"], drift)
        self._drifting = drifting
        return drifting

    def _keep(self) -> None:
        watched_at = time.monotonic()
        while not self._closed:
            self._due.wait(self._flush_seconds)
            self._due.clear()
            self._num_unflushed = 0
            try:
                failing = self._log.failure
                self._log.flush()
                self._log.maintain()
                if time.monotonic() - watched_at >= WATCH_SECONDS:
                    watched_at = time.monotonic()
                    self.watch_drift()
                if self._log.failure != failing and self._log.failure is not None:
                    logger.error("the request log cannot be written: %s", self._log.failure)
            except Exception:
                logger.exception("looking after the request log failed; it goes on")


def request_log_of(settings: Settings) -> RequestLog:
    """The configured request log."""
    return RequestLog(
        settings.telemetry_folder,
        local_folder=settings.data_folder / "requests",
        keep_text=settings.telemetry.keep_text,
        retention_days=settings.telemetry.retention_days,
    )


def _baselines(settings: Settings) -> dict[str, float]:
    try:
        return baselines_of(settings)
    except BaselineError as error:
        logger.error("no baselines: %s", error)
        return {}


def _version() -> str:
    try:
        return importlib.metadata.version("rag-service")
    except importlib.metadata.PackageNotFoundError:
        return "0"

"""Gated acceptance rates by domain: what drift is judged against.

From ``telemetry.baseline_file`` (what ``draft evaluate --json`` or ``gate`` wrote), or without one from the gate
record of exactly the configured pair in the service's own ``gates`` folder. A packaged draft's record does not
count here: it was measured on other people's questions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_service.config import Settings
from rag_service.draft_choice import draft_config, resolved
from rag_service.gate_record import GateRecordError, find_record, model_fingerprint, permission
from rag_service.models import ModelError

logger = logging.getLogger(__name__)


class BaselineError(ValueError):
    """A baseline file that cannot be used; ``str()`` is one clear sentence."""


def baselines_of(settings: Settings) -> dict[str, float]:
    """Domain → acceptance rate of the running pair; empty when nothing was gated.

    Raises ``BaselineError`` for a named file that cannot be used.
    """
    if settings.telemetry.baseline_file is not None:
        return read_baselines(settings.telemetry.baseline_file)
    folder = settings.data_folder / "gates"
    draft = draft_config(settings) if folder.is_dir() else None
    if draft is None:
        return {}
    try:
        target = resolved(settings.engine.target, settings)
        record = find_record([folder], model_fingerprint(target), model_fingerprint(draft))
    except (GateRecordError, ModelError, OSError) as error:
        logger.warning("no baselines from the gate record: %s", error)
        return {}
    # A draft that its gate keeps off proposes nothing: the service's own rate is then another thing.
    if record is None or not permission(record, settings.draft.force, record.target, record.draft).allowed:
        return {}
    return _rates(record.as_dict(), folder)


def read_baselines(path: Path) -> dict[str, float]:
    """Domain → acceptance rate, from ``{"domains": {NAME: {"acceptance_rate": x}}}``, ``{NAME: x}`` or a gate
    record, which holds both kinds of drafters: as served counts.

    Domains without a rate are left out. Raises ``BaselineError``.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"The baseline {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise BaselineError(f"The baseline {path} is no valid JSON.") from None
    return _rates(values, path)


def _rates(values: Any, path: Path) -> dict[str, float]:
    domains = _by_domain(values)
    if not isinstance(domains, Mapping):
        raise BaselineError(f"The baseline {path} has no acceptance rates by domain.")
    rates = {str(domain): _rate(value) for domain, value in domains.items()}
    for domain, rate in rates.items():
        if rate is not None and not 0.0 <= rate <= 1.0:
            raise BaselineError(f"The baseline {path} has {rate} for {domain}, which is no rate.")
    return {domain: rate for domain, rate in rates.items() if rate is not None}


def _by_domain(values: Any) -> Any:
    """The part of a baseline file that has a row a domain. Of a gate record: all drafters together, since that
    is what the service's own requests are counted as."""
    if not isinstance(values, Mapping):
        return None
    figures = values.get("figures")
    if "checks" in values and isinstance(figures, Mapping):
        served = figures.get("served")
        return served.get("domains") if isinstance(served, Mapping) else None
    return values.get("domains", values)


def _rate(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("acceptance_rate")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

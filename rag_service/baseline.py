"""Gated acceptance rates by domain, as ``draft evaluate`` and ``gate`` write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class BaselineError(ValueError):
    """A baseline file that cannot be used; ``str()`` is one clear sentence."""


def read_baselines(path: Path) -> dict[str, float]:
    """Domain → acceptance rate, from ``{"domains": {NAME: {"acceptance_rate": x}}}`` or ``{NAME: x}``.

    Domains without a rate are left out. Raises ``BaselineError``.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"The baseline {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise BaselineError(f"The baseline {path} is no valid JSON.") from None
    domains = values.get("domains", values) if isinstance(values, Mapping) else None
    if not isinstance(domains, Mapping):
        raise BaselineError(f"The baseline {path} has no acceptance rates by domain.")
    rates = {str(domain): _rate(value) for domain, value in domains.items()}
    for domain, rate in rates.items():
        if rate is not None and not 0.0 <= rate <= 1.0:
            raise BaselineError(f"The baseline {path} has {rate} for {domain}, which is no rate.")
    return {domain: rate for domain, rate in rates.items() if rate is not None}


def _rate(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("acceptance_rate")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

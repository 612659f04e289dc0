"""Gate records: what a pair of models was measured to be worth, and what that permits.

A record belongs to one exact pair: it is found by the fingerprints of both models' weights, so a changed file
invalidates it. Its ``digest`` covers everything else in it, so an edited record is not accepted either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from generation.config import ModelConfig
from generation.fingerprint import fingerprint

SLOW_BELOW = 0.6
"""An acceptance rate below this is refused even when forced: such a draft slows decoding down."""

Force = Literal["no", "yes", "even_slow"]


class GateRecordError(ValueError):
    """A record that cannot be trusted; ``str()`` is one clear sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing a gate looks at: ``name`` (``alpha/finance``, ``speed_up``, …), figures, and the outcome."""

    name: str
    passed: bool
    value: float | None
    interval: tuple[float, float] | None
    bar: float | None
    num_requests: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The signed-off result of one gate. Fingerprints are of weights; ``created_at`` is ISO 8601, UTC."""

    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    data_fingerprint: str
    created_at: str
    signed_off_by: str
    passed: bool
    min_alpha: float
    checks: tuple[Check, ...]
    acceptance_rate: float | None
    """Pooled over the domains, of the drafters that the bar was laid on."""
    drafters: str
    temperature: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Full tables: ``model``, ``served``, ``plain``, as ``draft evaluate`` gives them."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    format: int = 1

    @property
    def digest(self) -> str:
        """SHA-256 of the record's content."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(check.reason for check in self.checks if not check.passed)

    def as_dict(self) -> dict[str, Any]:
        return {**json.loads(json.dumps(asdict(self))), "digest": self.digest}


def record_from(values: Mapping[str, Any]) -> GateRecord:
    """A record read back. Raises ``GateRecordError`` when it was edited or is none."""
    row = dict(values)
    digest = row.pop("digest", None)
    try:
        checks = tuple(
            Check(**{**check, "interval": tuple(check["interval"]) if check["interval"] else None})
            for check in row["checks"]
        )
        record = GateRecord(**{**row, "checks": checks})
    except (KeyError, TypeError) as error:
        raise GateRecordError(f"This is no gate record: {error}.") from None
    if record.digest != digest:
        raise GateRecordError("The gate record was changed after it was written: its digest does not match.")
    return record


def model_fingerprint(config: ModelConfig) -> str:
    """Changes with any weight, the revision or the quantisation; the same whatever dtype it is run in."""
    return fingerprint(config.model, config.revision, f"weights/{config.quantization}")


def file_name(target_fingerprint: str, draft_fingerprint: str) -> str:
    return f"gate-{target_fingerprint}-{draft_fingerprint}.json"


def write_record(record: GateRecord, folder: Path) -> Path:
    """Put the record where the service looks it up; the newest gate of a pair replaces the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(record.target_fingerprint, record.draft_fingerprint)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def find_record(
    folders: Sequence[Path], target_fingerprint: str, draft_fingerprint: str
) -> GateRecord | None:
    """The pair's record from the first folder that has one; None when there is none.

    ``folders``: the service's own ``gates`` folder, then the draft's (a packaged draft carries its record).
    A record that cannot be trusted raises ``GateRecordError``.
    """
    for folder in folders:
        path = folder / file_name(target_fingerprint, draft_fingerprint)
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GateRecordError(f"The gate record {path} cannot be read: {error}.") from None
        record = record_from(values)
        if (record.target_fingerprint, record.draft_fingerprint) == (target_fingerprint, draft_fingerprint):
            return record
    return None


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether a model draft may be used; ``warning`` says why not, or what is doubtful, and what to do."""

    allowed: bool
    warning: str = ""


def permission(record: GateRecord | None, force: Force, target: str, draft: str) -> Permission:
    """What a pair's record (None: it has none) and the configuration allow."""
    command = f"rag-service gate --target {target} --draft {draft} --questions FILE --min-alpha 0.7"
    if record is None:
        reason = f"The draft {draft} has no gate record with the target {target}"
        if force == "no":
            return Permission(False, f"{reason}, so only passages propose. Gate it: {command}")
        return Permission(True, f"{reason}; it is used because the configuration forces it.")
    if record.passed:
        return Permission(True)
    alpha = record.acceptance_rate
    reason = f"The draft {draft} did not pass its gate with {target} ({'; '.join(record.failures)})"
    slow = alpha is None or alpha < SLOW_BELOW
    if force == "no" or (slow and force != "even_slow"):
        hint = ", which is below .6: only serve --allow-slow would use it" if slow and force != "no" else ""
        return Permission(False, f"{reason}{hint}. Only passages propose. Distil it further, then: {command}")
    return Permission(True, f"{reason}; it is used because the configuration forces it.")


def pair_permission(gates_folder: Path, target: ModelConfig, draft: ModelConfig, force: Force) -> Permission:
    """What the pair's record allows: looked for in ``gates_folder``, then beside the draft itself.

    Both configurations name folders (or files) whose weights are read for their fingerprints. A record that
    cannot be trusted allows nothing that ``force`` does not.
    """
    names = Path(target.model).name, Path(draft.model).name
    try:
        record = find_record(
            [gates_folder, Path(draft.model)], model_fingerprint(target), model_fingerprint(draft)
        )
    except GateRecordError as error:
        found = permission(None, force, *names)
        return Permission(found.allowed, f"{error} {found.warning}")
    return permission(record, force, *names)

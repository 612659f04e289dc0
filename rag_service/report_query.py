"""What an acceptance report is asked for, read from loosely typed parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

GROUPINGS: Final = ("domain", "draft", "target", "drafter", "temperature", "mode")
PARAMETERS: Final = ("window", "since", "until", "domain", "group_by", "bucket", "format")
DEFAULT_WINDOW: Final = "7d"
MAX_BUCKETS: Final = 400
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ROUND_BUCKETS: Final = (60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86_400, 7 * 86_400)


class ReportQueryError(ValueError):
    """A report that cannot be given as asked; ``str()`` is one clear sentence."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """A window of requests, [since, until) in Unix seconds, and how to group them.

    ``group_by`` never holds ``domain``: domains are always told apart. ``bucket_seconds``: width of the time
    series' buckets; None for no series.
    """

    since: float
    until: float
    domain: str | None = None
    group_by: tuple[str, ...] = ()
    bucket_seconds: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], now: float, domains: Iterable[str] = ()) -> ReportQuery:
        """Read ``window`` (``30m``, ``24h``, ``7d``, ``2w``), ``since`` and ``until`` (Unix seconds),
        ``domain``, ``group_by`` (a list, or names with commas) and ``bucket`` (as ``window``, or ``auto``).

        Raises ``ReportQueryError``. ``domains``: those known, to refuse any other; empty accepts every one.
        """
        for name in values:
            if name not in PARAMETERS:
                raise ReportQueryError(
                    f"There is no parameter {name}; there are {', '.join(PARAMETERS)}.", name
                )
        until = _instant(values, "until", now)
        since = _instant(
            values, "since", until - seconds_of(values.get("window") or DEFAULT_WINDOW, "window")
        )
        if not since < until:
            raise ReportQueryError("The window ends before it begins.", "since")
        return cls(
            since,
            until,
            _domain(values.get("domain"), list(domains)),
            _groupings(values.get("group_by")),
            _bucket(values.get("bucket"), until - since),
        )


def seconds_of(text: Any, param: str) -> float:
    """``7d`` → 604800. Raises ``ReportQueryError``."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhdw])", str(text).strip())
    if found is None or float(found[1]) == 0:
        raise ReportQueryError(
            f"{param} is a number with a unit, such as 30m, 24h or 7d; not {text!s:.40}.", param
        )
    return float(found[1]) * _UNITS[found[2]]


def _instant(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None or value == "":
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ReportQueryError(f"{name} is a time in Unix seconds, not {value!s:.40}.", name) from None


def _domain(value: Any, domains: list[str]) -> str | None:
    if value in (None, "", "all"):
        return None
    if domains and value not in domains:
        raise ReportQueryError(f"There is no domain {value!s:.40}; there are {', '.join(domains)}.", "domain")
    return str(value)


def _groupings(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else list(value or ())
    names = [str(name).strip() for name in names if str(name).strip()]
    for name in names:
        if name not in GROUPINGS:
            raise ReportQueryError(f"group_by knows {', '.join(GROUPINGS)}; not {name!s:.40}.", "group_by")
    return tuple(dict.fromkeys(name for name in names if name != "domain"))


def _bucket(value: Any, window_seconds: float) -> float | None:
    if value in (None, "", False):
        return None
    if value == "auto":
        fitting = (width for width in _ROUND_BUCKETS if window_seconds / width <= 60)
        return float(next(fitting, window_seconds / 60))
    width = seconds_of(value, "bucket")
    if window_seconds / width > MAX_BUCKETS:
        raise ReportQueryError(f"The window has more than {MAX_BUCKETS} buckets of {value}.", "bucket")
    return width

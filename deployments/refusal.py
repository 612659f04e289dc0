"""What the Recorder answers instead of a report.

Apart from the replica, whose databases a gateway need not load.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A report that was not given: the message, and the parameter at fault (None: no fault of the caller).

    Sent back as a value, since the error itself takes arguments that pickling does not carry.
    """

    message: str
    param: str | None

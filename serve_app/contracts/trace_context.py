"""The W3C trace context of a request: the client's, or a new one whose trace id is the digits of the request id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_IDS: Final = r"([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
# Versions after 00 may have more fields.
_TRACEPARENT: Final = re.compile(rf"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(?:-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_RANDOM_DIGITS: Final = 14  # hexadecimal digits at the end of a request id, all random


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids in hexadecimal digits. `span_id` is the gateway's span; `parent_id` is the client's, if it sent one."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = False  # requested by the client

    @classmethod
    def of(cls, traceparent: str | None, digits: str) -> TraceContext:
        """Returns a request's context. Without a valid `traceparent`, the trace id is the request id's 32 `digits`."""
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is None:
            return cls(digits, digits[16:])
        trace_id, parent_id, flags = (one for one in found.groups() if one is not None)
        if trace_id == _NO_TRACE or parent_id == _NO_SPAN:
            return cls(digits, digits[16:])
        return cls(trace_id, digits[16:], parent_id, bool(int(flags, 16) & 1))

    def is_among(self, share: float) -> bool:
        """Returns whether the request is in a random `share` (0 to 1) of all requests. Clients cannot affect this."""
        return int(self.span_id[-_RANDOM_DIGITS:], 16) < share * 16**_RANDOM_DIGITS


@dataclass(frozen=True, slots=True)
class TraceCall:
    """Data for a replica's spans. A replica keeps the spans of calls that failed or took at least `slow_s` seconds."""

    trace_id: str
    parent_id: str
    slow_s: float  # 0: all are kept

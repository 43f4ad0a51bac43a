"""The W3C trace context of a request: the client's, or one of our own whose trace id is that of the request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_RANDOM_DIGITS: Final = 14  # at the end of a trace id: those that a sampler may rely on


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids in hexadecimal digits. `span_id` is that of the gateway's span, `parent_id` the client's, if it sent one."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = False  # the client's wish

    @classmethod
    def of(cls, traceparent: str | None, digits: str) -> TraceContext:
        """`digits`: 32 of them, unique to the request. Without a valid `traceparent` they are the trace id."""
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
            return cls(digits, digits[16:])
        return cls(found[1], digits[16:], found[2], bool(int(found[3], 16) & 1))

    def is_among(self, share: float) -> bool:
        """Whether the trace is one of this share of all; the same for every process that asks."""
        return int(self.trace_id[-_RANDOM_DIGITS:], 16) < share * 16**_RANDOM_DIGITS


@dataclass(frozen=True, slots=True)
class TraceCall:
    """What a replica needs for its spans: the trace, their parent, and how long a call takes whose spans are kept."""

    trace_id: str
    parent_id: str
    slow_s: float  # 0: all are kept

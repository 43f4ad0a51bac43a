"""Ejects backends from an identifier's traffic, judged by the gateway's own requests.

A backend is bad for an identifier when, within WINDOW_S, at least MIN_BAD of the requests on it failed or missed their
latency targets. These must be at least half of its requests, and more than twice the share of the other backends.
Faulty requests or too much load would affect all backends alike.

A bad backend is ejected. After a pause it is half open: it gets one request every PROBE_S. GOOD_PROBES good requests in
a row bring it back. A bad one starts a pause of twice the length, up to LONGEST_PAUSE_S.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

WINDOW_S: Final = 10.0
MIN_BAD: Final = 3
PAUSE_S: Final = 10.0
LONGEST_PAUSE_S: Final = 120.0
PROBE_S: Final = 1.0
GOOD_PROBES: Final = 3

Key = tuple[str, str]
"""Identifier and backend."""


class Verdict(StrEnum):
    """The result of one request."""

    GOOD = "good"
    LATE = "late"  # missed a latency target
    FAILED = "failed"  # the backend's fault, not the client's


@dataclass(slots=True)
class _Record:
    verdicts: dict[str, tuple[float, Verdict]] = field(default_factory=dict)  # by request, oldest first
    ejected_at: float | None = None
    pause_s: float = PAUSE_S
    probe_at: float = 0.0  # earliest time of the next probe


@dataclass(frozen=True, slots=True)
class Ejection:
    """A backend that was just ejected. `reason` is readable text."""

    identifier: str
    backend: str
    reason: str


class BackendHealth:
    """The health of the backends, as one gateway sees it. `clock` returns seconds and never runs backwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[Key, _Record] = {}

    def note(self, key: Key, request_id: str, verdict: Verdict) -> None:
        """Records the verdict on a request.

        A later verdict replaces the first one: a request can fail after it started in time.
        """
        verdicts = self._records.setdefault(key, _Record()).verdicts
        verdicts.pop(request_id, None)
        verdicts[request_id] = self._clock(), verdict

    @property
    def ejected(self) -> frozenset[Key]:
        """The ejected backends, including the half-open ones."""
        return frozenset(key for key, record in self._records.items() if record.ejected_at is not None)

    def keep(self, served: Collection[Key]) -> None:
        """Forgets all other backends. A backend that comes back later starts with an empty record."""
        for key in self._records.keys() - set(served):
            del self._records[key]

    def judge(self, identifier: str, ready: Collection[str]) -> list[Ejection]:
        """Ejects backends of an identifier and brings them back. Returns the new ejections.

        `ready` names the backends that run and could take its requests. The last of them is never ejected.
        """
        now, ejections = self._clock(), []
        names = [backend for of, backend in self._records if of == identifier]
        for name in names:
            self._drop_old(self._records[identifier, name], now)
        for name in names:
            record = self._records[identifier, name]
            if record.ejected_at is not None:
                self._judge_probes(record, now)
                continue
            others = [one for one in ready if one != name and not self._is_out((identifier, one))]
            if not others or not self._is_worse(identifier, name, others):
                continue
            ejections.append(Ejection(identifier, name, _reason(record)))
            record.ejected_at, record.pause_s = now, PAUSE_S
            record.verdicts.clear()
        return ejections

    def due_probes(self) -> set[Key]:
        """Returns the half-open backends that may get a request now, each once every PROBE_S."""
        now, due = self._clock(), set()
        for key, record in self._records.items():
            if record.ejected_at is None or now < max(record.ejected_at + record.pause_s, record.probe_at):
                continue
            record.probe_at = now + PROBE_S
            due.add(key)
        return due

    def _judge_probes(self, record: _Record, now: float) -> None:
        assert record.ejected_at is not None
        if now < record.ejected_at + record.pause_s:
            record.verdicts.clear()  # they belong to requests that started earlier
            return
        verdicts = [verdict for _, verdict in record.verdicts.values()]
        if any(verdict is not Verdict.GOOD for verdict in verdicts):
            record.ejected_at, record.pause_s = now, min(LONGEST_PAUSE_S, 2 * record.pause_s)
            record.verdicts.clear()
        elif len(verdicts) >= GOOD_PROBES:
            record.ejected_at = None

    def _is_out(self, key: Key) -> bool:
        record = self._records.get(key)
        return record is not None and record.ejected_at is not None

    def _is_worse(self, identifier: str, name: str, others: Iterable[str]) -> bool:
        bad, count = _counts([self._records[identifier, name]])
        others_bad, others_count = _counts(
            [self._records[identifier, one] for one in others if (identifier, one) in self._records]
        )
        share, others_share = bad / max(1, count), others_bad / max(1, others_count)
        return bad >= MIN_BAD and share >= 0.5 and share > 2 * others_share

    def _drop_old(self, record: _Record, now: float) -> None:
        # A half-open backend gets at most one probe a second: all verdicts since the end of the pause count.
        begins = now - WINDOW_S if record.ejected_at is None else record.ejected_at
        for request_id, (at, _) in list(record.verdicts.items()):
            if at >= begins:
                return
            del record.verdicts[request_id]


def _counts(records: Iterable[_Record]) -> tuple[int, int]:
    """Returns the number of bad requests and the number of all requests."""
    verdicts = [verdict for record in records for _, verdict in record.verdicts.values()]
    return sum(verdict is not Verdict.GOOD for verdict in verdicts), len(verdicts)


def _reason(record: _Record) -> str:
    verdicts = [verdict for _, verdict in record.verdicts.values()]
    failed, late = verdicts.count(Verdict.FAILED), verdicts.count(Verdict.LATE)
    first, _ = next(iter(record.verdicts.values()))
    last, _ = record.verdicts[next(reversed(record.verdicts))]
    parts = [f"{failed} failed"] * (failed > 0) + [f"{late} were late"] * (late > 0)
    return f"of {len(verdicts)} requests in {max(1, round(last - first))} s {' and '.join(parts)}"

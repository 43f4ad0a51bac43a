"""Ejects failing backends from an identifier's traffic. Each gateway judges by its own requests.

Each account has one vote on a backend. The vote is bad when at least half of the account's requests within WINDOW_S
failed or missed their latency targets. An account that also votes bad on another backend has no vote: its requests may
be the cause. A backend is ejected from an identifier when all of this is true:

- The bad votes come from at least MIN_ACCOUNTS accounts with at least MIN_BAD bad requests in total. One account alone
  can therefore not eject a backend that serves others.
- At least half of the votes on the backend are bad.
- The share of bad votes is more than twice that of the other backends. Too much load would affect all backends alike.

If an identifier has had only one account for ALONE_S, an ejection can affect no other account. Each request then counts
as one vote.

After a pause, an ejected backend is half open: every PROBE_S it may get one request, a probe. GOOD_PROBES good probes
bring it back. Bad probes from MIN_ACCOUNTS accounts start a pause of twice the length, up to LONGEST_PAUSE_S. If the
identifier has had only one account for ALONE_S, one bad probe is enough. After a bad probe, an account sends no more
probes until the next pause ends. So its requests neither keep the backend out nor fail repeatedly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Final

WINDOW_S: Final = 10.0
MIN_BAD: Final = 3  # minimum number of bad requests for an ejection
MIN_ACCOUNTS: Final = 2
ALONE_S: Final = 600.0
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

    @property
    def is_bad(self) -> bool:
        return self is not Verdict.GOOD


@dataclass(slots=True)
class _Record:
    verdicts: dict[str, tuple[float, str, Verdict]] = field(default_factory=dict)  # by request, oldest first
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
        self._began = clock()
        self._records: dict[Key, _Record] = {}
        self._seen: dict[str, dict[str, float]] = {}  # by identifier: the two accounts seen last, and when

    def note(self, key: Key, request_id: str, account_id: str, verdict: Verdict) -> None:
        """Records the verdict on a request.

        A later verdict replaces the first one: a request can fail after it started in time.
        """
        now, seen = self._clock(), self._seen.setdefault(key[0], {})
        verdicts = self._records.setdefault(key, _Record()).verdicts
        verdicts.pop(request_id, None)
        verdicts[request_id] = now, account_id, verdict
        seen.pop(account_id, None)
        seen[account_id] = now
        if len(seen) > MIN_ACCOUNTS:
            del seen[next(iter(seen))]

    @property
    def ejected(self) -> frozenset[Key]:
        """The ejected backends, including the half-open ones."""
        return frozenset(key for key, record in self._records.items() if record.ejected_at is not None)

    def keep(self, served: Collection[Key]) -> None:
        """Drops the records of backends that are not in `served`. A backend that is served again starts anew."""
        for key in self._records.keys() - set(served):
            del self._records[key]
        for identifier in self._seen.keys() - {name for name, _ in served}:
            del self._seen[identifier]

    def judge(self, identifier: str, ready: Collection[str]) -> list[Ejection]:
        """Ejects backends of an identifier and brings them back. Returns the new ejections.

        `ready` names the backends that run and could take the identifier's requests. A backend is not ejected if all
        others of `ready` are.
        """
        now, ejections = self._clock(), []
        names = [backend for of, backend in self._records if of == identifier]
        for name in names:
            self._drop_old(self._records[identifier, name], now)
        for name in names:
            record = self._records[identifier, name]
            if record.ejected_at is not None:
                self._judge_probes(identifier, record, now)
                continue
            others = [one for one in ready if one != name and not self._is_out((identifier, one))]
            if not others or not self._is_worse(identifier, name, others):
                continue
            ejections.append(Ejection(identifier, name, _reason(record)))
            record.ejected_at, record.pause_s = now, PAUSE_S
            record.verdicts.clear()
        return ejections

    def due_probes(self) -> dict[Key, frozenset[str]]:
        """Returns the half-open backends that may get a request now, each once every PROBE_S.

        The values are the accounts that must not send the probe, because they have sent a bad one.
        """
        now, due = self._clock(), {}
        for key, record in self._records.items():
            if record.ejected_at is None or now < max(record.ejected_at + record.pause_s, record.probe_at):
                continue
            record.probe_at = now + PROBE_S
            due[key] = frozenset(_voters(record, by_request=False)[True])
        return due

    def _judge_probes(self, identifier: str, record: _Record, now: float) -> None:
        assert record.ejected_at is not None
        if now < record.ejected_at + record.pause_s:
            record.verdicts.clear()  # they belong to requests sent before the ejection
            return
        votes = _voters(record, by_request=False)
        if len(votes[True]) >= (1 if self._has_one_account(identifier) else MIN_ACCOUNTS):
            record.ejected_at, record.pause_s = now, min(LONGEST_PAUSE_S, 2 * record.pause_s)
            record.verdicts.clear()
        elif sum(verdict is Verdict.GOOD for _, _, verdict in record.verdicts.values()) >= GOOD_PROBES:
            record.ejected_at = None
            record.verdicts.clear()

    def _has_one_account(self, identifier: str) -> bool:
        """Returns whether at most one account used the identifier in the last ALONE_S.

        Always False until this gateway has run for ALONE_S.
        """
        since = self._clock() - ALONE_S
        return since >= self._began and sum(at > since for at in self._seen.get(identifier, {}).values()) <= 1

    def _is_out(self, key: Key) -> bool:
        record = self._records.get(key)
        return record is not None and record.ejected_at is not None

    def _is_worse(self, identifier: str, name: str, others: Iterable[str]) -> bool:
        alone = self._has_one_account(identifier)
        record = self._records[identifier, name]
        votes = _voters(record, by_request=alone)
        rest = [
            _voters(self._records[identifier, one], by_request=alone)
            for one in others
            if (identifier, one) in self._records
        ]
        bad = votes[True].difference(*(one[True] for one in rest))
        others_bad, others_count = sum(len(one[True]) for one in rest), sum(len(one[True] | one[False]) for one in rest)
        share, others_share = len(bad) / max(1, len(bad | votes[False])), others_bad / max(1, others_count)
        requests = sum(account in bad or alone for _, account, verdict in record.verdicts.values() if verdict.is_bad)
        enough = requests >= MIN_BAD and (alone or len(bad) >= MIN_ACCOUNTS)
        return enough and share >= 0.5 and share > 2 * others_share

    def _drop_old(self, record: _Record, now: float) -> None:
        # A half-open backend gets few requests, so all verdicts since the end of the pause count, however old.
        begins = now - WINDOW_S if record.ejected_at is None else record.ejected_at
        for request_id, _ in list(takewhile(lambda verdict: verdict[1][0] < begins, record.verdicts.items())):
            del record.verdicts[request_id]


def _voters(record: _Record, *, by_request: bool) -> dict[bool, set[str]]:
    """Returns the accounts, or the requests if `by_request`, that vote bad (True) and those that vote good (False)."""
    bad, count = defaultdict[str, int](int), defaultdict[str, int](int)
    for request_id, (_, account_id, verdict) in record.verdicts.items():
        voter = request_id if by_request else account_id
        count[voter] += 1
        bad[voter] += verdict.is_bad
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for voter, requests in count.items():
        found[2 * bad[voter] >= requests].add(voter)
    return found


def _reason(record: _Record) -> str:
    times, accounts, verdicts = zip(*record.verdicts.values(), strict=True)
    failed, late = verdicts.count(Verdict.FAILED), verdicts.count(Verdict.LATE)
    parts = [f"{failed} failed"] * (failed > 0) + [f"{late} were late"] * (late > 0)
    within_s = max(1, round(times[-1] - times[0]))
    return f"{' and '.join(parts)}, of {len(verdicts)} requests within {within_s} s (accounts: {len(set(accounts))})"

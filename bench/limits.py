"""Measures the microseconds of the limiter's decisions, such as an admit + release, or a refusal.

Run with `python bench/limits.py [requests]`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.limiting import Adjust, Admit, Release, Renew
from serve_app.contracts.limits import Contract
from serve_app.limiter.admission import Admission

ACCOUNTS = 1000
OPEN = 1000
KEY_TERMS: dict[str, Any] = {
    "models": ("svc-chat",), "limits": {"rpm": 10**9, "tpm": 10**12, "concurrency": 10**6}, "budget": 10**18,
    "budget_period": "day", "expires_at": 1e11,
}  # fmt: skip


def build() -> Admission:
    contract = Contract(rpm=10**9, tpm=10**12, concurrency=10**6)
    admission = Admission(time.monotonic, random.Random(1), contract, recovery_s=0.0)
    for n in range(ACCOUNTS):
        admission.apply(account(n, 1))
        admission.apply(key(n, 1))
    for n in range(OPEN):
        admission.admit(ask(f"open{n}", n))
    return admission


def account(n: int, version: int, **limits: int) -> AccountSnapshot:
    return AccountSnapshot(f"a{n}", "", True, "EUR", 0, 10**18, version, 0.0, limits)


def key(n: int, version: int, **terms: Any) -> KeySnapshot:
    return KeySnapshot(f"k{n}", f"a{n}", "", f"d{n}", "", True, version, 0.0, **terms)


def ask(request_id: str, n: int) -> Admit:
    return Admit(request_id, "gateway-0", f"d{n % ACCOUNTS}", "svc-chat", 400, 1000, 270, 1100)


def per_call_us(calls: int, run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    admission = build()
    asks = [ask(f"r{n}", n) for n in range(calls)]
    adjusts = [Adjust(f"r{n}", 380) for n in range(calls)]
    ends = [Release(f"r{n}", 380, 90, 10**18 - n, n + 2) for n in range(calls)]

    def admit_and_release() -> None:
        for one, end in zip(asks, ends, strict=True):
            admission.admit(one)
            admission.release(end)

    def admit_adjust_and_release() -> None:
        for one, count, end in zip(asks, adjusts, ends, strict=True):
            admission.admit(one)
            admission.adjust(count)
            admission.release(end)

    def refuse() -> None:
        for one in asks:
            admission.admit(one)

    beat = Renew("gateway-0", tuple(f"open{n}" for n in range(OPEN)))

    def renew() -> None:
        admission.renew(beat)

    print(f"admit + release                  {per_call_us(calls, admit_and_release):6.2f} us")
    print(f"admit + adjust + release         {per_call_us(calls, admit_adjust_and_release):6.2f} us")
    print(f"renew, each open hold            {per_call_us(OPEN, renew):6.2f} us")
    for n in range(ACCOUNTS):
        admission.apply(key(n, 2, **KEY_TERMS))
    print(f"admit + release, key with limits {per_call_us(calls, admit_and_release):6.2f} us")
    for n in range(ACCOUNTS):
        admission.apply(account(n, 10**9, rpm=0))
    print(f"refuse (429)                     {per_call_us(calls, refuse):6.2f} us")


if __name__ == "__main__":
    main()

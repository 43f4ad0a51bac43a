"""Measures how long any of the gateways still accepts a revoked key, and how long a top-up is not yet usable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import httpx

from tests.service.chaos.report import Report
from tests.service.chaos.stand import Customer, Stand

PROMISED_S = 1.0
WATCHED_S = 1.3  # after the operator's call has returned
POLLERS = 3
PAUSE_S = 0.02
TOP_UP = 10**7  # nano-units: hundreds of short requests
SHORT: dict[str, Any] = {"model": "svc-chat", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of a poller."""

    sent_at: float  # of time.monotonic
    status: int


def delay(answers: list[Answer], changed_at: float, stale: int) -> float:
    """Seconds from the change to the last request with the status from before it."""
    return max((answer.sent_at - changed_at for answer in answers if answer.status == stale), default=0.0)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


async def measure(
    stand: Stand, times: int, say: Callable[[str], None] = lambda _: None
) -> tuple[list[float], list[float], list[str]]:
    """Delays of revocations and of top-ups in seconds, and the replies that must not occur."""
    revoked: list[float] = []
    usable: list[float] = []
    wrong: list[str] = []
    customer = await asyncio.to_thread(Customer, stand, "revocations", 10**9)
    # HAProxy chooses a gateway for each connection: with new ones all gateways are used.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=stand.base_url, timeout=60, limits=limits, trust_env=False, verify=stand.verify
    ) as http:
        for number in range(times):
            key, key_id = await asyncio.to_thread(customer.new_key)
            taken = await _change(http, key, stand, partial(stand.admin, "DELETE", f"/admin/keys/{key_id}"))
            wrong += _judge(taken, before=200, after=401)
            revoked.append(delay(taken.later, taken.changed_at, 200))

            poor = await asyncio.to_thread(Customer, stand, f"poor {number}", 0)
            taken = await _change(http, poor.key, stand, partial(poor.top_up, TOP_UP))
            wrong += _judge(taken, before=402, after=200)
            usable.append(delay(taken.later, taken.changed_at, 402))
            say(f"{number + 1} of {times}: refused after {revoked[-1]:.2f} s, usable after {usable[-1]:.2f} s")
    return revoked, usable, wrong


def report(stand: Stand, revoked: list[float], usable: list[float], wrong: list[str], seconds: float) -> Report:
    """The verdict over the measured delays."""
    found = Report("revocation", 0, seconds, stand.facts(), problems=wrong[:10])
    for name, values in (("a revoked key is refused after, s", revoked), ("a top-up is usable after, s", usable)):
        for share in (0.5, 0.99):
            found.figures[f"{name}, p{100 * share:.0f}"] = percentile(values, share)
        found.figures[f"{name}, measured"] = len(values)
        if percentile(values, 0.99) > PROMISED_S:
            found.problems.append(f"{name}: p99 of {percentile(values, 0.99):.2f}, promised are {PROMISED_S}")
    return found


@dataclass(frozen=True, slots=True)
class _Taken:
    earlier: list[Answer]
    later: list[Answer]  # sent after the change was confirmed
    changed_at: float


async def _change(http: httpx.AsyncClient, key: str, stand: Stand, change: Callable[[], Any]) -> _Taken:
    """Polls with the key, makes the change, and goes on polling for WATCHED_S."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def poll() -> None:
        while not over.is_set():
            sent_at = time.monotonic()
            answer = await http.post("/v1/chat/completions", json=SHORT, headers={"authorization": f"Bearer {key}"})
            answers.append(Answer(sent_at, answer.status_code))
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(POLLERS):
            group.create_task(poll())
        # Every gateway knows the key by then.
        while len(answers) < 4 * stand.shape.gateways:
            await asyncio.sleep(PAUSE_S)
        began_at = time.monotonic()
        await asyncio.to_thread(change)
        changed_at = time.monotonic()
        await asyncio.sleep(WATCHED_S)
        over.set()
    return _Taken(
        [answer for answer in answers if answer.sent_at < began_at],
        [answer for answer in answers if answer.sent_at > changed_at],
        changed_at,
    )


def _judge(taken: _Taken, *, before: int, after: int) -> list[str]:
    """Every answer before the change is `before`; after it one of the two, and `after` at the end."""
    wrong = [f"status {one.status} before the change" for one in taken.earlier if one.status != before]
    wrong += [f"status {one.status} after the change" for one in taken.later if one.status not in (before, after)]
    if not any(answer.status == after for answer in taken.later):
        wrong.append(f"never status {after} after the change")
    return wrong

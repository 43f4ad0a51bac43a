"""A good customer that often hangs up, or has a few refused requests. Its next requests must not become slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bench.attack.figures import Sent, factor, window
from bench.attack.ordinary import GIVEN_UP_S, exchanged, status_of
from bench.harness.client import Call, exchange

HANG_UPS: Final = (64, 128, 512)
HANG_UPS_S: Final = 2.0  # seconds over which a case spreads its hang-ups
HANG_UP_S: Final = 0.3  # seconds from a request to its hang-up
NEXT: Final = 200  # measured requests after the hang-ups
NEXT_PER_S: Final = 20.0
MANY: Final = 1000
MANY_PER_S: Final = 100.0
REFUSED_EVERY: Final = 17  # one request in 17 (6%) is refused
MAX_TOKENS: Final = 256
MEASURED: Final = "svc-coder"
SOURCE: Final = "127.0.0.8"


class Customer:
    """Sends small requests with one key.

    Measured requests use the model MEASURED, whose backend replies immediately. A real model would be too slow.
    """

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key

    async def run(self) -> list[dict[str, Any]]:
        """Returns a row for each case: the windows `calm` and `after`, and the ratio of their p99."""
        rows = []
        calm = await self._measure(NEXT, NEXT_PER_S)
        for number in HANG_UPS:
            await self._paced(number, number / HANG_UPS_S, lambda _: self._hang_up())
            after = await self._measure(NEXT, NEXT_PER_S)
            rows.append(
                _row(f"{number} hang-ups in {HANG_UPS_S:g} s, then {NEXT_PER_S:g} requests a second", calm, after)
            )
        calm = await self._measure(MANY, MANY_PER_S)
        after = await self._measure(MANY, MANY_PER_S, REFUSED_EVERY)
        rows.append(_row(f"{MANY_PER_S:g} requests per s, {1 / REFUSED_EVERY:.0%} of them refused", calm, after))
        return rows

    async def _measure(self, number: int, per_s: float, refused_every: int = 0) -> dict[str, Any]:
        """Sends requests and returns their figures. Requests that are meant to be refused are left out."""
        began = time.perf_counter()
        found: list[Sent] = []

        async def send(place: int) -> None:
            if refused_every and place % refused_every == 0:
                await exchanged(self._call(model="no-such-model"), GIVEN_UP_S)
            else:
                began, raw = await exchanged(self._call(), GIVEN_UP_S)
                first_at, status = raw.pieces[0][0] if raw.pieces else None, status_of(raw)
                is_whole = status == 200 and raw.ended_at is not None
                found.append(Sent(began, first_at if status == 200 else None, raw.ended_at, status, is_whole))

        await self._paced(number, per_s, send)
        return window(found, began, time.perf_counter(), GIVEN_UP_S)

    async def _hang_up(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(exchange(self._call("svc-chat", stream=True), []), HANG_UP_S)

    async def _paced(self, number: int, per_s: float, send: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for place in range(number):
                await asyncio.sleep(max(0.0, began + place / per_s - time.perf_counter()))
                tasks.create_task(send(place))

    def _call(self, model: str = MEASURED, stream: bool = False) -> Call:
        messages = [{"role": "user", "content": "Hi"}]
        fields = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "stream": stream}
        body = json.dumps({**fields, "min_tokens": MAX_TOKENS, "temperature": 0}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return Call(self._port, head.encode() + body, MAX_TOKENS, SOURCE)


def _row(case: str, calm: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {"case": case, "calm": calm, "after": after, "factor": factor(calm, after)}

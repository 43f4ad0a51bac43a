"""The ordinary clients: small streamed requests at a steady rate, and probes of the service's health.

A request is sent when it is due, even if earlier ones have no replies yet. Its time to the first token includes
opening the connection, because a service that is slow to accept connections is also slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, Final

from bench.attack.figures import Probe, Sent
from bench.harness.client import Call, exchange
from bench.harness.replies import RawReply, read

GIVEN_UP_S: Final = 30.0  # maximum wait of an ordinary client
PROBE_S: Final = 5.0
PROBES: Final = ("/health", "/ready")
PROBE_EVERY_S: Final = 0.5
PROBER: Final = "127.0.0.9"
REPLY_TOKENS: Final = 2
WORDS: Final = ("river", "stone", "lamp", "garden", "north", "paper", "music", "glass", "winter", "harbour")


class Ordinary:
    """Sends the requests of a few accounts, each from a different address on loopback.

    `new_keys` are valid keys that were never used. One request in `new_key_every` uses the next of them.
    """

    def __init__(
        self, port: int, keys: Sequence[str], new_keys: Sequence[str], per_s: float, new_key_every: int, seed: int
    ) -> None:
        self._port, self._keys, self._per_s = port, keys, per_s
        self._new_keys, self._new_key_every = iter(new_keys), new_key_every
        self._rng = Random(seed)
        self._running: set[asyncio.Task[None]] = set()
        self.sent: list[Sent] = []
        self.probes: list[Probe] = []

    async def run(self) -> None:
        """Sends until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._arrive())
            for path in PROBES:
                tasks.create_task(self._probe(path))

    async def finish(self) -> None:
        """Waits for outstanding replies, at most `GIVEN_UP_S`."""
        await asyncio.gather(*self._running)

    async def _arrive(self) -> None:
        began = time.perf_counter()
        for number in itertools.count():
            # At even intervals, with jitter against synchronization with other periodic work.
            due = began + (number + self._rng.random() / 2) / self._per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            place = number % len(self._keys)
            key, is_new = self._keys[place], False
            if number % self._new_key_every == self._new_key_every - 1 and (new := next(self._new_keys, None)):
                key, is_new = new, True
            self._start(self._send(key, f"127.0.0.{2 + place}", is_new))

    async def _send(self, key: str, source: str, is_new: bool) -> None:
        words = " ".join(self._rng.choices(WORDS, k=12))
        body = json.dumps(
            {
                "model": "svc-chat",
                "messages": [{"role": "user", "content": words}],
                "max_tokens": REPLY_TOKENS,
                "min_tokens": REPLY_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        began, raw = await exchanged(Call(self._port, head.encode() + body, REPLY_TOKENS, source), GIVEN_UP_S)
        self.sent.append(sent(began, raw, is_new))

    async def _probe(self, path: str) -> None:
        data = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
        due = time.perf_counter()
        while True:
            self._start(self._look(path, data))
            due += PROBE_EVERY_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _look(self, path: str, data: bytes) -> None:
        began, raw = await exchanged(Call(self._port, data, 0, PROBER), PROBE_S)
        self.probes.append(Probe(path, began, time.perf_counter(), status_of(raw)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def exchanged(call: Call, most_s: float) -> tuple[float, RawReply]:
    """Sends a request, and gives up after `most_s`. Returns the time at which it began to connect, and the reply."""
    began = time.perf_counter()
    into: list[RawReply] = []
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(exchange(call, into), most_s)
    return began, into[0]


def status_of(raw: RawReply) -> int:
    """The response's status; 0 without one."""
    start = b"".join(data for _, data in raw.pieces[:2])[:12]
    return int(start[9:12]) if start.startswith(b"HTTP/1.") and start[9:12].isdigit() else 0


def sent(began: float, raw: RawReply, is_new: bool) -> Sent:
    """Converts an exchange to `Sent`. `began` is the time before its connection was opened."""
    reply, status = read(raw), status_of(raw)
    is_whole = status == 200 and raw.ended_at is not None and reply.problem is None
    return Sent(
        began_at=began,
        first_at=reply.first_at if status == 200 else None,
        ended_at=raw.ended_at,
        status=status,
        is_whole=is_whole and reply.completion_tokens is not None,
        is_new=is_new,
    )

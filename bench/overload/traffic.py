"""Sends requests to the running service: a fixed number at a time, or at a rate. Replies are decoded after the load."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from random import Random
from typing import Final

from bench.harness.client import Call, exchange
from bench.harness.replies import RawReply, read
from bench.harness.words import WORDS
from bench.overload.figures import Sent

REPLY_TOKENS: Final = 32
WORDS_OF_A_PROMPT: Final = 24


@dataclass(frozen=True, slots=True)
class Caller:
    """An account that sends requests."""

    name: str
    key: str


class Traffic:
    """Sends streamed requests. All replies have `REPLY_TOKENS` tokens, and all prompts differ."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = Random(seed)
        self._replies: list[tuple[Caller, RawReply]] = []

    async def full(self, caller: Caller, clients: int, seconds: float, words: int = WORDS_OF_A_PROMPT) -> None:
        """Keeps `clients` requests in flight for `seconds`."""
        until = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until:
                await self._send(caller, words)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def arrive(self, callers: list[Caller], per_s: float, seconds: float) -> None:
        """Each caller sends `per_s` requests per second at random times, without waiting for earlier replies."""
        at = time.perf_counter()
        until = at + seconds
        running: list[asyncio.Task[None]] = []
        while (at := at + self._rng.expovariate(per_s * len(callers))) < until:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            running.append(asyncio.create_task(self._send(self._rng.choice(callers))))
        await asyncio.gather(*running)

    def take(self) -> list[Sent]:
        """Returns the requests since the last call."""
        replies, self._replies = self._replies, []
        return [sent(caller.name, raw) for caller, raw in replies]

    async def _send(self, caller: Caller, count: int = WORDS_OF_A_PROMPT) -> None:
        words = " ".join(self._rng.choices(WORDS, k=count))
        body = json.dumps(
            {
                "model": "svc-chat",
                "messages": [{"role": "user", "content": f"Tell a story with these words: {words}."}],
                "max_tokens": REPLY_TOKENS,
                "min_tokens": REPLY_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {caller.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        into: list[RawReply] = []
        try:
            await exchange(Call(self._port, head.encode() + body, REPLY_TOKENS), into)
        finally:
            self._replies += ((caller, raw) for raw in into)


def sent(account: str, raw: RawReply) -> Sent:
    """Converts an exchange to `Sent`."""
    head = b"".join(data for _, data in raw.pieces).split(b"\r\n\r\n", 1)[0].lower()
    status = int(head[9:12]) if head.startswith(b"http/1.1 ") and head[9:12].isdigit() else 0
    reply = read(raw)
    is_whole = status == 200 and reply.problem is None and reply.completion_tokens is not None
    return Sent(
        account,
        raw.sent_at,
        raw.ended_at if raw.ended_at is not None else raw.sent_at,
        status,
        tokens=(reply.completion_tokens or 0) if is_whole else 0,
        first_at=reply.first_at if status == 200 else None,
        retry_after=b"\r\nretry-after: " in head,
        is_broken=status == 0 or (status == 200 and not is_whole),
        prompt_tokens=reply.prompt_tokens or 0,
    )

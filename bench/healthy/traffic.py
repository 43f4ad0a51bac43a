"""Ordinary traffic: conversations, streams, tools, and a few refused requests, at a rate that the service can take."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import httpx

from bench.harness.words import WORDS

TURNS: Final = 3  # maximum requests per conversation
PAUSE_S: Final = 1.5  # mean pause between two requests of a client
HANG_UPS: Final = 0.03  # share of streams whose client hangs up
TOOL: Final = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys of an account with high limits, and of one that sometimes exceeds its requests per minute."""

    roomy: str
    narrow: str


class Traffic:
    """Clients that send at random times; the same seed sends the same requests."""

    def __init__(
        self, base_url: str, keys: Keys, seed: int, models: tuple[str, ...] = ("svc-chat", "svc-coder")
    ) -> None:
        self.statuses: Counter[int] = Counter()  # 499: hung up; 0: no reply
        self._base_url = base_url
        self._keys = keys
        self._seed = seed
        self._models = models

    async def send(self, clients: int, seconds: float) -> None:
        """Runs `clients` for `seconds`, and waits for their last replies."""
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=self._base_url, timeout=120, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, Random(f"{self._seed} {one}"), until) for one in range(clients)))

    async def _client(self, http: httpx.AsyncClient, rng: Random, until: float) -> None:
        while True:
            for key, body in self.conversation(rng):
                await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
                if time.monotonic() >= until:
                    return
                status = await self.ask(http, key, body, hangs_up=rng.random() < HANG_UPS)
                self.statuses[status] += 1

    def conversation(self, rng: Random) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields requests that continue one conversation, each with the key that sends it."""
        asked: list[dict[str, str]] = []
        model = rng.choice(self._models)
        for _ in range(rng.randint(1, TURNS)):
            words = " ".join(rng.choices(WORDS, k=rng.choice((6, 12, 24, 150))))
            asked = [*asked, {"role": "user", "content": f"Tell me something about these: {words}."}]
            body = {
                "model": model,
                "messages": asked,
                "max_tokens": rng.choice((8, 24, 64)),
                "stream": rng.random() < 0.7,
            }
            yield self._keys.roomy, body
            asked = [*asked, {"role": "assistant", "content": f"Yes, the {words.split()[0]}."}]
        kind = rng.random()
        if kind < 0.15:
            tools = {"tools": [TOOL], "tool_choice": "required", "stream": False}
            yield self._keys.roomy, {"model": model, "messages": asked[:1], "max_tokens": 40, **tools}
        elif kind < 0.25:
            for _ in range(2):
                yield self._keys.narrow, {"model": model, "messages": asked[:1], "max_tokens": 8, "stream": False}
        elif kind < 0.3:
            yield self._keys.roomy, {"model": "no-such-model", "messages": asked[:1], "stream": False}

    async def ask(self, http: httpx.AsyncClient, key: str, body: dict[str, Any], *, hangs_up: bool) -> int:
        """Sends a request and returns the status that the client sees."""
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if hangs_up and body["stream"] and reply.status_code == 200:
                        return 499
                    if line.startswith("data: {") and "error" in json.loads(line[6:]):
                        return 500  # an error event within the stream, whose HTTP status is 200
                return reply.status_code
        except httpx.HTTPError:
            return 0

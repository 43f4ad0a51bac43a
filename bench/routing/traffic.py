"""Conversations of several accounts, and a single request during another account's flood."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Final

from bench.harness.client import Call, exchange
from bench.harness.replies import RawReply, Reply, read
from bench.harness.words import WORDS

REPLY_TOKENS: Final = 24
TURNS: Final = (4, 8)
FIRST_WORDS: Final = 900  # a word is about one token
LAST_WORDS: Final = 2800  # words of the whole prompt in a conversation's last turn
FLOOD: Final = 50


class TrafficError(Exception):
    """A reply was not complete."""


@dataclass(frozen=True, slots=True)
class Script:
    """A client's script: for each turn of each conversation, the words and the seconds of thinking before it."""

    starts_after_s: float
    conversations: tuple[tuple[tuple[str, float], ...], ...]


def script(seed: int, client: int, conversations: int, think_s: float) -> Script:
    """Creates a client's script. The same arguments give the same script."""
    rng = Random(f"{seed} {client}")
    said = []
    for _ in range(conversations):
        turns = rng.randint(*TURNS)
        more = (LAST_WORDS - FIRST_WORDS) // (turns - 1) - REPLY_TOKENS
        counts = [FIRST_WORDS, *[more] * (turns - 1)]
        said.append(tuple((" ".join(rng.choices(WORDS, k=count)), rng.uniform(0.5, 1.5) * think_s) for count in counts))
    return Script(rng.uniform(0.0, think_s), tuple(said))


@dataclass(slots=True)
class Caller:
    """Sends streamed requests with an account's key."""

    port: int
    key: str
    raw: list[RawReply] = field(default_factory=list)  # as they arrive

    async def hold(self, script: Script) -> None:
        """Holds the conversations of a script, one after another. Each prompt contains the earlier replies."""
        await asyncio.sleep(script.starts_after_s)
        for conversation in script.conversations:
            messages: list[dict[str, str]] = []
            for words, think_s in conversation:
                await asyncio.sleep(think_s)
                messages.append({"role": "user", "content": words})
                reply = await self.ask(messages)
                messages.append({"role": "assistant", "content": reply.text})

    async def ask(self, messages: list[dict[str, str]]) -> Reply:
        """Sends a request. Raises TrafficError unless its reply is complete."""
        body = json.dumps(
            {
                "model": "svc-chat",
                "messages": messages,
                "max_tokens": REPLY_TOKENS,
                "min_tokens": REPLY_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        reply = read(await exchange(Call(self.port, head.encode() + body, REPLY_TOKENS), self.raw))
        if reply.problem is not None or reply.completion_tokens is None:
            raise TrafficError(f"incomplete reply: {reply.problem or 'no usage'}")
        return reply


async def wait_beside(crowd: Caller, one: Caller, requests: int, seed: int) -> float:
    """Seconds to the first token of a request that `one` sends while `requests` requests of `crowd` run or wait.

    The crowd's requests belong to one conversation, so a router with only a hash would send them all to one replica.
    """
    rng = Random(seed)
    opening = {"role": "user", "content": " ".join(rng.choices(WORDS, k=40))}
    turns = [
        [opening, {"role": "assistant", "content": "And?"}, {"role": "user", "content": f"Part {number}. " + words}]
        for number, words in ((number, " ".join(rng.choices(WORDS, k=60))) for number in range(requests))
    ]
    before = len(crowd.raw)
    running = [asyncio.create_task(crowd.ask(messages)) for messages in turns]
    # Waits until the reply to one of them has begun. Polling every 20 ms does not disturb the measurement.
    while not any(raw.pieces for raw in crowd.raw[before:]) and not any(task.done() for task in running):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # time for all of them to reach the replicas' queues
    reply = await one.ask([{"role": "user", "content": " ".join(rng.choices(WORDS, k=60))}])
    await asyncio.gather(*running)
    assert reply.first_at is not None
    return reply.first_at - reply.sent_at

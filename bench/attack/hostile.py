"""Attacks by hostile clients. Each is limited in connections, bytes and seconds.

An attack is prepared before the calm window, so that its preparation does not disturb measurements.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from bench.attack.connections import OPENED_PER_S, Hammer, Holder, Strategy, Tally
from serve_app.contracts.key_format import new_key

MB: Final = 2**20
LARGE: Final = 4 * MB - 1024  # bytes, just below the limit in config.yaml
LONG: Final = 60_000  # characters of a prompt
HANG_UP_S: Final = 0.3  # seconds from a request to its hang-up, which is before the first token
FALSE_KEYS: Final = 40_000  # each is sent exactly twice
SLOW: Final = 3000  # connections
IDLE: Final = 4500  # connections, more than Serve's HAProxy accepts by default


@dataclass(frozen=True, slots=True)
class Target:
    """The service that this benchmark has started, and keys of the attacker's accounts."""

    port: int
    key: str  # of an account with a balance and default limits
    broke_key: str  # of an account without balance


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `prepare` returns its strategy."""

    title: str
    what: str
    prepare: Callable[[Target, Tally], Strategy]


def head(path: str, key: str | None, length: int | None, *more: str) -> bytes:
    """The head of a POST with a body of `length` bytes; if it is None, of a GET."""
    lines = [f"{'GET' if length is None else 'POST'} {path} HTTP/1.1", "host: 127.0.0.1", *more]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if length is not None:
        lines += ["content-type: application/json", f"content-length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


def chat(content: str, **fields: Any) -> bytes:
    """The body of a chat request."""
    message = {"role": "user", "content": content}
    return json.dumps({"model": "svc-chat", "messages": [message], **fields}).encode()


def post(key: str | None, body: bytes) -> tuple[bytes, bytes]:
    """A chat request in two pieces, so that requests can share a body."""
    return head("/v1/chat/completions", key, len(body)), body


def large_bodies() -> list[bytes]:
    """JSON of 4 MB with very many items: a map, messages, an unknown field, deep nesting."""
    fields = {
        "logit_bias": ("{", "}", (f'"{number}":1' for number in itertools.count())),
        "messages": ("[", "]", itertools.repeat('{"role":"user","content":""}')),
        "extra": ("[", "]", itertools.repeat("[{}]")),
        "user": ("[" * 500, "]" * 500, itertools.repeat("[]")),
    }
    bodies = []
    for name, (begin, end, items) in fields.items():
        text = [f'{{"model":"svc-chat","{name}":{begin}{next(items)}']
        size = len(text[0]) + len(end) + 1
        while (size := size + len(item := next(items)) + 1) < LARGE:
            text.append(item)
        bodies.append((",".join(text) + end + "}").encode())
    return bodies


def grammar_bombs() -> list[dict[str, Any]]:
    """Schemas that are slow to compile, or large."""
    text = {"type": "string"}
    patterns = (
        "^a{100000}$", "^(a{1,300}){1,300}$", "^((a{0,50}){0,50}){0,50}$", "^(a|aa|aaa|aaaa){1,20000}$",
        "^[a-z]{1,5000}@[a-z]{1,5000}$", "^(.*a){30}$",
    )  # fmt: skip
    large: list[dict[str, Any]] = [{**text, "pattern": pattern} for pattern in patterns]
    large.append({**text, "enum": [f"choice {number} of many" for number in range(20_000)]})
    large.append({**text, "maxLength": 10**6, "minLength": 10**5})
    large.append({"type": "array", "items": {"type": "integer"}, "minItems": 5000, "maxItems": 9000})
    many = {f"n{prime}": {"type": "integer", "multipleOf": prime} for prime in (7, 13, 97, 997, 7919, 104729)}
    large.append({"type": "object", "properties": many, "required": list(many), "additionalProperties": False})
    wide: dict[str, Any] = {f"field{number}": {"anyOf": [text, {"type": "number"}]} for number in range(2000)}
    large.append({"type": "object", "properties": wide, "additionalProperties": False})
    deep: dict[str, Any] = {"type": "null"}
    for level in range(60):
        deep = {"type": "object", "properties": {f"a{level}": deep, "b": deep if level < 12 else text}}
    large.append(deep)
    return large


def _large_bodies(target: Target, tally: Tally) -> Strategy:
    bodies, keys = large_bodies(), itertools.cycle([new_key() for _ in range(5000)])

    def requests(number: int) -> Iterator[tuple[bytes, ...]]:
        for turn in itertools.count(number):
            # Every fourth connection sends no key.
            yield post(None if number % 4 == 3 else next(keys), bodies[turn % len(bodies)])

    return Hammer(target.port, tally, 8, requests)


def _slow_bodies(target: Target, tally: Tally) -> Strategy:
    keys = itertools.cycle([new_key() for _ in range(SLOW)])
    return Holder(target.port, tally, SLOW, lambda _: head("/v1/chat/completions", next(keys), 100_000), drip=b" ")


def _idle(target: Target, tally: Tally) -> Strategy:
    half = head("/v1/chat/completions", new_key(), 100)[:-20]
    return Holder(target.port, tally, IDLE, lambda number: half if number % 2 else b"", drip=b"")


def _wrong_keys(target: Target, tally: Tally) -> Strategy:
    body = chat("Hi", max_tokens=1)
    # All connections take requests from one iterator, so that no key is sent a third time.
    twice = iter([request for _ in range(FALSE_KEYS) for request in [b"".join(post(new_key(), body))] * 2])
    return Hammer(target.port, tally, 32, lambda _: ((data,) for data in twice))


def _cancelled(target: Target, tally: Tally) -> Strategy:
    rng = random.Random(1)
    words = [f"{rng.randrange(10**6):06d} river stone lamp garden" for _ in range(LONG // 30)]
    text = " ".join(words)[: LONG - 40]

    def requests(number: int) -> Iterator[tuple[bytes, ...]]:
        for turn in itertools.count():  # all prompts begin differently, so none is cached
            yield post(target.key, chat(f"{number} {turn} {rng.random()}: {text}", max_tokens=64, stream=True))

    return Hammer(target.port, tally, 8, requests, hang_up_s=HANG_UP_S)


def _grammars(target: Target, tally: Tally) -> Strategy:
    bombs = grammar_bombs()

    def requests(number: int) -> Iterator[tuple[bytes, ...]]:
        for turn in itertools.count(number):
            schema = {**bombs[turn % len(bombs)], "title": f"{number}.{turn}"}  # all schemas differ
            format = {"type": "json_schema", "json_schema": {"name": "bomb", "strict": True, "schema": schema}}
            yield post(target.key, chat("Hi", max_tokens=4, response_format=format))

    return Hammer(target.port, tally, 8, requests)


def _broke(target: Target, tally: Tally) -> Strategy:
    both = [(head(path, target.broke_key, None),) for path in ("/v1/user/usage", "/v1/models")]
    return Hammer(target.port, tally, 32, lambda number: itertools.cycle(both[number % 2 :] + both[: number % 2]))


ATTACKS: Final = {
    "large-bodies": Attack(
        "large bodies", "8 connections send JSON of 4 MB, 6 of them with unknown keys, 2 without a key", _large_bodies
    ),
    "slow-bodies": Attack(
        "slow bodies",
        f"up to {SLOW:,} connections with unknown keys, at most {OPENED_PER_S} opened a second, try to stay open: each "
        "announces a body and sends a byte a second",
        _slow_bodies,
    ),
    "idle": Attack("idle connections", f"{IDLE:,} connections; every other one sends half of a request header", _idle),
    "wrong-keys": Attack(
        "wrong keys", "32 connections send false, well-formed keys as fast as they can, each twice", _wrong_keys
    ),
    "cancelled": Attack(
        "cancelled prompts",
        f"8 connections send prompts of {LONG // 1000} KB with a valid key and hang up after {HANG_UP_S:g} s",
        _cancelled,
    ),
    "grammars": Attack(
        "grammar bombs", "8 connections with a valid key send schemas that are large or slow to compile", _grammars
    ),
    "broke": Attack(
        "empty balance",
        "32 connections ask for `/v1/user/usage` and `/v1/models` with a key of an account without balance",
        _broke,
    ),
}


async def run(strategy: Strategy, seconds: float) -> None:
    """Runs a strategy for `seconds` and closes its connections."""
    task = asyncio.ensure_future(strategy.run())
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.wait([task])
        strategy.close()
    if not task.cancelled():
        task.result()

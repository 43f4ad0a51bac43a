"""The load: clients that stream or wait, hang up now and then, and note every usage that reaches them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.service.chaos.stand import Customer, Stand

PATIENCE_S = 90.0
PAUSE_S = 0.2  # after a failure
MAX_TOKENS = 100
CUT_SHARE = 0.12  # of the requests whose client hangs up
STREAM_SHARE = 0.6
#: Statuses that a correct client may get while parts of the service are killed.
EXPECTED = {200, 402, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage block of one reply, as its client received it."""

    request_id: str  # of the reply, which is what the ledger knows; `x-request-id` is for logs
    account_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Tally:
    """Counts and usages that the clients received."""

    sent: Counter[str] = field(default_factory=Counter)  # requests by account
    answers: Counter[str] = field(default_factory=Counter)
    received: list[Usage] = field(default_factory=list)
    received_at: list[float] = field(default_factory=list)  # of `time.monotonic`, in order
    wrong: list[str] = field(default_factory=list)  # replies that no client may get

    def usage(self, account_id: str, reply: dict[str, Any]) -> None:
        """Notes the usage of a reply or of a stream's last chunk."""
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = usage["prompt_tokens"], cached, usage["completion_tokens"]
        self.received.append(Usage(reply["id"], account_id, *counts))
        self.received_at.append(time.monotonic())

    def refused(self, answer: httpx.Response, text: str) -> None:
        """Notes a reply other than 200."""
        status, own = answer.status_code, is_own_error(answer, text)
        self.answers[f"{status}" if own or status == 402 else f"{status} of the load balancer"] += 1
        if status not in EXPECTED or (status == 402 and not own):
            self.wrong.append(f"{status}: {text[:200]}")
        if status == 503 and own and not 1 <= int(answer.headers.get("retry-after") or 0) <= 60:
            self.wrong.append(f"503 without a time to wait: {dict(answer.headers)}")


def is_own_error(answer: httpx.Response, text: str) -> bool:
    """Returns whether the service made an error. A load balancer without a gateway behind it uses another form."""
    try:
        error = json.loads(text)["error"]
        return bool(error["message"] and error["type"]) and "x-request-id" in answer.headers
    except (ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    stream: bool
    words: int
    max_tokens: int
    cut_after: int | None  # pieces of a stream, or tenths of a second of one that is not streamed

    def body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "word " * self.words}]
        body = {"model": "svc-chat", "messages": messages, "max_tokens": self.max_tokens, "ignore_eos": True}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def draw(rng: Random) -> Ask:
    """A request of the mix."""
    return Ask(
        stream=rng.random() < STREAM_SHARE,
        words=rng.randint(1, 60),
        max_tokens=rng.randint(1, MAX_TOKENS),
        cut_after=rng.randint(1, 6) if rng.random() < CUT_SHARE else None,
    )


class Load:
    """Closed loops of clients, spread evenly over customers. Each request opens a connection of its own."""

    def __init__(self, stand: Stand, customers: Sequence[Customer], clients: int, seed: int) -> None:
        self.tally = Tally()
        self._customers = customers
        self._clients = clients
        self._seed = seed
        self._over = asyncio.Event()
        self._http = httpx.AsyncClient(
            base_url=stand.base_url,
            verify=stand.verify,
            timeout=httpx.Timeout(PATIENCE_S, connect=60),
            # HAProxy chooses a gateway for each connection: with new ones all gateways are used.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def run(self) -> None:
        """Until `end`; then the running requests finish."""
        async with self._http, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                customer = self._customers[number % len(self._customers)]
                group.create_task(self._client(customer, Random(f"{self._seed}:{number}")))

    def move(self, base_url: str) -> None:
        """Requests that begin from now on go to another service."""
        self._http.base_url = httpx.URL(base_url)

    def end(self) -> None:
        """No new requests."""
        self._over.set()

    async def _client(self, customer: Customer, rng: Random) -> None:
        while not self._over.is_set():
            try:
                served = await ask_once(self._http, customer, draw(rng), self.tally)
            except httpx.HTTPError as error:
                self.tally.answers[f"no complete reply ({type(error).__name__})"] += 1
                served = False
            except (ValueError, KeyError, TypeError) as error:
                self.tally.wrong.append(f"a reply that can't be read: {type(error).__name__}: {error}")
                served = False
            if not served:
                await asyncio.sleep(PAUSE_S)


async def ask_once(http: httpx.AsyncClient, customer: Customer, ask: Ask, tally: Tally) -> bool:
    """One request; True when its reply was complete, or cut by ourselves. Raises httpx.HTTPError."""
    tally.sent[customer.id] += 1
    headers = {"authorization": f"Bearer {customer.key}"}
    whole_s = None if ask.stream or ask.cut_after is None else ask.cut_after / 10
    try:
        async with (
            asyncio.timeout(whole_s),
            http.stream("POST", "/v1/chat/completions", json=ask.body(), headers=headers) as answer,
        ):
            if answer.status_code != 200:
                tally.refused(answer, (await answer.aread()).decode(errors="replace"))
                return False
            if ask.stream:
                return await _read_stream(answer, customer, ask, tally)
            tally.usage(customer.id, json.loads(await answer.aread()))
            tally.answers["200"] += 1
            return True
    except TimeoutError:
        tally.answers["hung up"] += 1
        return True


async def _read_stream(answer: httpx.Response, customer: Customer, ask: Ask, tally: Tally) -> bool:
    pieces = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            tally.answers["200"] += 1
            return True
        event = json.loads(line[6:])
        if "error" in event:
            tally.answers[f"error event {event['error']['type']}"] += 1
            return False
        if event.get("usage"):
            tally.usage(customer.id, event)
        pieces += 1
        if ask.cut_after is not None and pieces > ask.cut_after:
            tally.answers["hung up"] += 1
            return True
    tally.answers["a stream without its end"] += 1
    return False

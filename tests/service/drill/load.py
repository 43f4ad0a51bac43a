"""The load: official SDK clients with default retries, which know what each reply is."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import openai

from tests.service.chaos.load import Tally
from tests.service.chaos.stand import Customer

CLIENTS: Final = 16
QUESTIONS: Final = 8
TOKENS: Final = 48
PAUSE_S: Final = 0.5  # after a failure


@dataclass(slots=True)
class Seen:
    """Counts of what the clients have seen."""

    tally: Tally = field(default_factory=Tally)
    calls: int = 0  # complete and right
    streams: int = 0
    cut: int = 0  # streams that ended in an error; their text up to there was right
    wrong: list[str] = field(default_factory=list)


class Load:
    """Closed loops: one half makes calls that are not streamed, the other streams with `resume`."""

    def __init__(self, base_url: str, customers: list[Customer]) -> None:
        self.seen = Seen()
        self._over = False
        self._expected: dict[int, str] = {}
        self._clients = [self._client(base_url, customer) for customer in customers]

    def _client(self, base_url: str, customer: Customer) -> tuple[Customer, openai.AsyncOpenAI]:
        async def sent(_: httpx.Request) -> None:
            self.seen.tally.sent[customer.id] += 1

        # Each request opens a connection, so that the balancer chooses a gateway for it.
        limits = httpx.Limits(max_keepalive_connections=0)
        http = openai.DefaultAsyncHttpxClient(limits=limits, event_hooks={"request": [sent]}, trust_env=False)
        return customer, openai.AsyncOpenAI(api_key=customer.key, base_url=f"{base_url}/v1", http_client=http)

    async def learn(self) -> None:
        """The reply to each question while nothing is wrong."""
        customer, sdk = self._clients[0]
        for number in range(QUESTIONS):
            self._expected[number] = await self._whole(customer, sdk, number)

    async def run(self) -> None:
        """Until `end`."""
        async with asyncio.TaskGroup() as group:
            for number, (customer, sdk) in zip(range(CLIENTS), itertools.cycle(self._clients), strict=False):
                group.create_task(self._loop(customer, sdk, number))

    def end(self) -> None:
        """No new requests."""
        self._over = True

    async def close(self) -> None:
        for _, sdk in self._clients:
            await sdk.close()

    async def _loop(self, customer: Customer, sdk: openai.AsyncOpenAI, number: int) -> None:
        for question in itertools.count(number):
            if self._over:
                return
            began = time.monotonic()
            try:
                ask = self._resumed if number % 2 else self._call
                await ask(customer, sdk, question % QUESTIONS)
            except openai.OpenAIError as error:
                spent = time.monotonic() - began
                self.seen.wrong.append(f"after {spent:.0f} s and retries: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(PAUSE_S)

    async def _call(self, customer: Customer, sdk: openai.AsyncOpenAI, question: int) -> None:
        text = await self._whole(customer, sdk, question)
        self.seen.calls += 1
        if text != self._expected[question]:
            self.seen.wrong.append(f"another reply to question {question}: {text!r}")

    async def _whole(self, customer: Customer, sdk: openai.AsyncOpenAI, question: int) -> str:
        reply = await sdk.chat.completions.create(**asked(question), extra_body={"ignore_eos": True})
        self.seen.tally.usage(customer.id, reply.model_dump())
        return reply.choices[0].message.content or ""

    async def _resumed(self, customer: Customer, sdk: openai.AsyncOpenAI, question: int) -> None:
        options = {"ignore_eos": True, "stream_options": {"include_usage": True, "resume": True}}
        # Until the stream begins the SDK repeats the request; afterwards nobody does.
        stream = await sdk.chat.completions.create(**asked(question), stream=True, extra_body=options)
        text, ended = "", False
        try:
            async for chunk in stream:
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
                    ended = ended or chunk.choices[0].finish_reason == "length"
                if chunk.usage is not None:
                    self.seen.tally.usage(customer.id, chunk.model_dump())
        except (openai.OpenAIError, httpx.HTTPError):
            ended = False
        if not ended:
            self.seen.cut += 1
            if not self._expected[question].startswith(text):
                self.seen.wrong.append(f"a stream that was cut had other text: {text!r}")
            return
        self.seen.streams += 1
        if text != self._expected[question]:
            self.seen.wrong.append(f"another stream of question {question}: {text!r}")


def asked(question: int, tokens: int = TOKENS) -> dict[str, Any]:
    """The arguments of one question."""
    content = f"Tell a story about {question + 3} rivers and their bridges."
    return {
        "model": "svc-chat",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }


async def long_streams(base_url: str, customer: Customer, tokens: int, begun: asyncio.Event, count: int) -> list[str]:
    """Streams without `resume`, which begin together. What is wrong with them; `begun` once all have text."""
    pieces = Counter[int]()

    async def one(number: int) -> str:
        ended = ""
        options = {"ignore_eos": True}
        try:
            async for chunk in await sdk.chat.completions.create(
                **asked(number, tokens), stream=True, extra_body=options
            ):
                pieces[number] += 1
                if len(pieces) == count:
                    begun.set()
                ended = chunk.choices[0].finish_reason or ended if chunk.choices else ended
        except (openai.OpenAIError, httpx.HTTPError) as error:
            return f"stream {number} was cut after {pieces[number]} pieces: {type(error).__name__}: {error}"
        return "" if ended == "length" else f"stream {number} ended by {ended!r} after {pieces[number]} pieces"

    http = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)
    async with openai.AsyncOpenAI(api_key=customer.key, base_url=f"{base_url}/v1", http_client=http) as sdk:
        return [problem for problem in await asyncio.gather(*map(one, range(count))) if problem]

"""The load of the official SDK, whose default retries may hide what a restart costs, and nothing more."""

from __future__ import annotations

import asyncio

import openai

from tests.service.chaos.stand import Customer, Stand

CLIENTS = 16
PATIENCE_S = 300.0


class Clients:
    """The official SDK with its default retries: half of the requests streamed."""

    def __init__(self, stand: Stand, customer: Customer) -> None:
        self._sdk = openai.AsyncOpenAI(api_key=customer.key, base_url=f"{stand.base_url}/v1")
        self._over = False
        self.complete = 0
        self.failures: list[str] = []

    def move(self, stand: Stand) -> None:
        self._sdk.base_url = f"{stand.base_url}/v1"

    def change_key(self, key: str) -> None:
        """For requests that begin from now on."""
        self._sdk.api_key = key

    def end(self) -> None:
        self._over = True

    async def more(self, replies: int = 4 * CLIENTS) -> None:
        """Returns when so many have ended from now on: the default is more than those that run. Raises TimeoutError."""
        wanted = self.complete + replies
        async with asyncio.timeout(PATIENCE_S):
            while self.complete + len(self.failures) < wanted:
                await asyncio.sleep(0.05)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(bool(number % 2)))

    async def _ask(self, stream: bool) -> None:
        while not self._over:
            try:
                finish = await (self._streamed() if stream else self._whole())
            except openai.OpenAIError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            else:
                self.complete += 1
                if finish != "length":
                    self.failures.append(f"a reply ended by {finish}")

    async def _whole(self) -> str | None:
        reply = await self._sdk.chat.completions.create(
            model="svc-chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=60
        )
        return reply.choices[0].finish_reason

    async def _streamed(self) -> str | None:
        finish = None
        async for chunk in await self._sdk.chat.completions.create(
            model="svc-chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=60, stream=True
        ):
            finish = chunk.choices[0].finish_reason or finish
        return finish

"""Many requests at once on a balance that pays for a part of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.service.harness import NANO, PRICE_CACHED, PRICE_IN, PRICE_OUT, Account, Service, nano

LOOKS = 50  # at the balance; a key may ask 60 times a minute
LIMITS = {"rpm": 10**6, "tpm": 10**9, "concurrency": 10**4}


@dataclass(frozen=True)
class Crowd:
    """So many requests for the same reply at once, half of them streamed, on a balance that pays for `paid` of them."""

    model: str
    messages: Sequence[dict[str, str]]
    prompt: int  # its tokens
    cached: int  # of them
    tokens: int
    requests: int
    paid: int

    @property
    def credit(self) -> int:
        return self.paid * cost(self.prompt, self.cached, self.tokens)

    async def buy(self, service: Service) -> Account:
        """Sends all requests. Checks that the billed amount is what was received, and no more than the balance."""
        credit = f"{self.credit // NANO}.{self.credit % NANO:09d}"
        account = await asyncio.to_thread(service.account, "crowd", credit, **LIMITS)
        answers, received = await self._ask_all(service, account)
        assert set(answers) == {200, 402}
        assert answers[200] >= self.paid - 1
        view = await asyncio.to_thread(account.settled, answers[200])
        charged = nano(view["usage"]["charged"])
        # Every usage was received, so what was billed is exactly the sum of them.
        assert charged == received <= self.credit
        assert nano(view["balance"]) == self.credit - charged
        assert service.cli("ledger", "check")["ok"]
        return account

    async def _ask_all(self, service: Service, account: Account) -> tuple[Counter[int], int]:
        """The answers by status, and what the usages cost that were received. Meanwhile the balance is looked at.

        The looks have a key of their own: the crowd's is refused so often that its requests wait.
        """
        created = await asyncio.to_thread(
            service.admin, "POST", f"/admin/accounts/{account.id}/keys", {"name": "looks"}
        )
        looks = {"authorization": f"Bearer {created['key']}"}
        over = asyncio.Event()
        shown: list[int] = []

        async def look(http: httpx.AsyncClient) -> None:
            answer = await http.get("/user/balance", headers=looks)
            assert answer.status_code == 200, answer.text
            (info,) = answer.json()["balance_infos"]
            assert not info["total_balance"].startswith("-")
            shown.append(nano(info["total_balance"]))
            view = await asyncio.to_thread(account.show)
            assert not view["balance"].startswith("-")
            assert not view["held"].startswith("-")

        async def watch(http: httpx.AsyncClient) -> None:
            while not over.is_set() and len(shown) < LOOKS:
                await look(http)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), 0.1)

        async with httpx.AsyncClient(
            base_url=service.base_url,
            headers={"authorization": f"Bearer {account.key}"},
            timeout=300,
            # Each on a connection of its own: then all gateways get some.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            verify=service.verify,
        ) as http:
            watching = asyncio.create_task(watch(http))
            answers = await asyncio.gather(*(self._ask(http, bool(number % 2)) for number in range(self.requests)))
            over.set()
            await watching
            await look(http)
        assert all(earlier >= later for earlier, later in itertools.pairwise(shown))
        return Counter(status for status, _ in answers), sum(charged for _, charged in answers)

    async def _ask(self, http: httpx.AsyncClient, stream: bool) -> tuple[int, int]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            assert answer.json()["error"]["type"] == "insufficient_balance", answer.text
            return answer.status_code, 0
        if stream:
            *_, event, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            assert done == "data: [DONE]"
            usage = json.loads(event.removeprefix("data: "))["usage"]
        else:
            usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer.status_code, cost(usage["prompt_tokens"], cached, usage["completion_tokens"])


def cost(prompt: int, cached: int, completion: int) -> int:
    """Nano-units."""
    return (prompt - cached) * PRICE_IN + cached * PRICE_CACHED + completion * PRICE_OUT

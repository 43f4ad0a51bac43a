"""Measures how much 50 people who browse the console slow down chat requests: `make bench-console`, six minutes.

Windows with and without the 50 sessions alternate in one run. Each session opens a page, reads it for some seconds,
and opens the next one. The service is config.yaml with the console.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from random import Random
from typing import Any, Final
from urllib.error import URLError

import httpx

from bench.console.service import EMAIL, PAGES, PASSWORD, WithConsole
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import ServerError

READS_S: Final = 10.0  # per page, on average
REST_S: Final = 2.0
_CSRF: Final = re.compile(r'name="csrf" value="([0-9a-f]{64})"')


class Readers:
    """Signed-in sessions of one person. `waits` has the seconds that each page took."""

    def __init__(self, base_url: str, account_id: str, sessions: int) -> None:
        self.waits: list[float] = []
        self.wrong = 0
        self._account = f"/console/accounts/{account_id}"
        self._http = [_client(base_url, number) for number in range(sessions)]

    async def sign_in(self, link: str) -> None:
        """The first session accepts the invitation. The others sign in one by one, as each takes 64 MiB."""
        first, *others = self._http
        await self._submit(first, link, name="Reader", new_password=PASSWORD)
        for http in others:
            await self._submit(http, "/console/sign-in", email=EMAIL, password=PASSWORD)

    async def browse(self, seed: int) -> None:
        """Opens pages until it is cancelled."""
        await asyncio.gather(*(self._read(http, Random(f"{seed} {n}")) for n, http in enumerate(self._http)))

    async def close(self) -> None:
        for http in self._http:
            await http.aclose()

    async def _read(self, http: httpx.AsyncClient, rng: Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / READS_S))
            began = time.perf_counter()
            answer = await http.get(self._account + rng.choice(PAGES))
            self.waits.append(time.perf_counter() - began)
            self.wrong += answer.status_code != 200

    async def _submit(self, http: httpx.AsyncClient, path: str, **fields: str) -> None:
        answer = await http.get(path)
        if (found := _CSRF.search(answer.text)) is not None:
            answer = await http.post(path, data={"csrf": found[1], **fields})
        if answer.status_code != 303:
            raise ServerError(f"sign-in at {path} failed: {answer.status_code} {answer.text[-500:]}")


def _client(base_url: str, number: int) -> httpx.AsyncClient:
    """Creates a client with a separate address, because one address may not sign in 50 times."""
    headers = {"x-forwarded-for": f"192.0.2.{number + 1}"}
    return httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False, headers=headers)


async def chat(base_url: str, key: str, clients: int, seconds: float) -> list[float]:
    """Requests streamed replies in closed loops. Returns the seconds that each reply took."""
    waits: list[float] = []
    until = time.monotonic() + seconds
    head = {"authorization": f"Bearer {key}"}

    async def client(number: int) -> None:
        for turn in range(10**9):
            if time.monotonic() >= until:
                return
            body = {"model": "svc-chat", "stream": True, "max_tokens": 16, "temperature": 0}
            body["messages"] = [{"role": "user", "content": f"Client {number} asks question {turn}."}]
            began = time.perf_counter()
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=head) as answer:
                text = await answer.aread()
            if answer.status_code != 200 or b"[DONE]" not in text:
                raise ServerError(f"a chat request failed with {answer.status_code}: {text[-200:]!r}")
            waits.append(time.perf_counter() - began)

    async with httpx.AsyncClient(base_url=base_url, timeout=120, trust_env=False) as http:
        await asyncio.gather(*(client(number) for number in range(clients)))
    return waits


async def measure(server: WithConsole, options: argparse.Namespace) -> dict[str, Any]:
    account_id, key = server.new_account("bench", "1000", rpm=1_000_000, tpm=10**9)
    invited = server.admin(f"/admin/accounts/{account_id}/people", {"email": EMAIL, "role": "owner"})
    readers = Readers(server.base_url, account_id, options.sessions)
    say(f"signing in {options.sessions} sessions")
    await readers.sign_in(f"/console{invited['path']}")
    await chat(server.base_url, key, options.clients, options.seconds / 3)
    windows: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for browsed in (False, True) if number % 2 else (True, False):
            say(f"round {number + 1} of {options.rounds}, {'with' if browsed else 'without'} the sessions")
            browsing = asyncio.create_task(readers.browse(number)) if browsed else None
            await asyncio.sleep(REST_S)
            windows[browsed].append(await chat(server.base_url, key, options.clients, options.seconds))
            if browsing is not None:
                browsing.cancel()
                await asyncio.wait([browsing])
    await readers.close()
    quantiles = {browsed: [_quantile(one, 0.99) for one in found] for browsed, found in windows.items()}
    ratios = [there / alone for alone, there in zip(quantiles[False], quantiles[True], strict=True)]
    return {
        "machine": describe(),
        "sessions": options.sessions,
        "chat clients": options.clients,
        "replies without and with": [sum(map(len, windows[browsed])) for browsed in (False, True)],
        "chat p99 without, s": [round(one, 3) for one in quantiles[False]],
        "chat p99 with, s": [round(one, 3) for one in quantiles[True]],
        "median ratio of p99": round(statistics.median(ratios), 3),
        "chat p50 without and with, s": [
            round(_quantile([wait for one in windows[browsed] for wait in one], 0.5), 3) for browsed in (False, True)
        ],
        "pages": len(readers.waits),
        "pages that failed": readers.wrong,
        "page p50 and p99, s": [round(_quantile(readers.waits, part), 3) for part in (0.5, 0.99)],
    }


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--sessions", type=int, default=50, help="default: 50")
    parser.add_argument("--clients", type=int, default=4, help="chat clients; default: 4")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of two windows; default: 4")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window; default: 30")
    options = parser.parse_args(arguments)
    server = WithConsole(PEERS)

    def run() -> dict[str, Any]:
        try:
            server.start()
            return asyncio.run(measure(server, options))
        finally:
            server.stop()

    print(json.dumps(completed(run, (ServerError, URLError, httpx.HTTPError)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

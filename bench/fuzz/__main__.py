"""Starts a service and sends it random requests while another account streams: `make fuzz`.

It fails if a request causes a 5xx or an error in its stream, if text that a client received has no bill, if a bill
differs from the usage in the reply, if the other account's stream stalls, or if its cached prompt is lost. Everything
stays on this machine. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from urllib.error import URLError

import httpx

from bench.fuzz.bystander import beside
from bench.fuzz.requests import Drawn, draw
from bench.harness.command import PEERS, completed, say
from bench.harness.machine import describe
from bench.harness.servers import OneReplica, ServerError

STALL_S: Final = 0.3
MAX_UNCACHED: Final = 32  # maximum tokens of a cached prompt to compute again: the last block, which may be partial
SETTLED_S: Final = 30.0  # maximum time until every reply is in the ledger
MAX_EXAMPLES: Final = 20  # number to keep for each kind of finding


class Fuzzed(OneReplica):
    """The service that gets the requests."""

    name = "fuzz"


@dataclass
class Findings:
    """Counts and examples (request ids, bodies, numbers) of each problem."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, what: str, example: object) -> None:
        self.counts[what] += 1
        if self.counts[what] <= MAX_EXAMPLES:
            self.examples.setdefault(what, []).append(example)


@dataclass(frozen=True, slots=True)
class Received:
    """The part of a reply that a client received."""

    request_id: str
    text: bool  # any content, call or reasoning
    usage: tuple[int, int] | None  # prompt and completion tokens as reported in the reply


class Client:
    """Sends random requests and records the replies."""

    def __init__(self, base_url: str, key: str) -> None:
        self.statuses: Counter[str] = Counter()
        self.findings = Findings()
        self.replies: dict[str, Received] = {}
        self.slowest_s = 0.0
        self.sent: list[tuple[float, float, int, dict[str, Any]]] = []  # begin and end time, number, body
        self._http = httpx.AsyncClient(base_url=base_url, timeout=180, trust_env=False)
        self._head = {"authorization": f"Bearer {key}"}

    async def run(self, seed: int, requests: int, at_once: int) -> None:
        """Sends requests generated from `seed`, `at_once` at a time."""
        rng = Random(seed)
        todo = iter(range(requests))

        async def one() -> None:
            for number in todo:
                await self._send(number, draw(rng))
                if number % 1000 == 999:
                    say(f"{number + 1:,} of {requests:,} requests; {dict(self.findings.counts) or 'no finding'}")

        async with self._http:
            await asyncio.gather(*(one() for _ in range(at_once)))

    async def _send(self, number: int, drawn: Drawn) -> None:
        began = time.monotonic()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=drawn.body, headers=self._head) as reply:
                self.statuses[str(reply.status_code)] += 1
                if reply.status_code >= 500:
                    self.findings.add("5xx", {"error": (await reply.aread()).decode(), "body": drawn.body})
                elif reply.status_code == 200:
                    streamed = drawn.body["stream"]
                    parts = self._streamed(reply, drawn, began) if streamed else self._whole(reply)
                    received = await _received(parts)
                    self.replies[received.request_id] = received
        except httpx.HTTPError as error:
            self.findings.add("broken connection", {"error": repr(error), "body": drawn.body})
        ended = time.monotonic()
        self.slowest_s = max(self.slowest_s, ended - began)
        self.sent.append((began, ended, number, drawn.body))

    def running(self, begin: float, end: float) -> dict[int, dict[str, Any]]:
        """Returns the bodies, by number, of requests that ran during a stall and began at most 0.5 s before it."""
        return {number: body for began, ended, number, body in self.sent if begin - 0.5 < began < end and ended > begin}

    async def _whole(self, reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        yield json.loads(await reply.aread())

    async def _streamed(self, reply: httpx.Response, drawn: Drawn, began: float) -> AsyncIterator[dict[str, Any]]:
        ended = False
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    self.findings.add("error in a stream", {"error": event, "body": drawn.body})
                yield event
            ended = ended or line == "data: [DONE]"
            if drawn.hangs_up_s is not None and time.monotonic() - began > drawn.hangs_up_s:
                self.statuses["hung up"] += 1
                return
        if not ended:
            self.findings.add("stream without its end", drawn.body)


async def _received(events: AsyncIterator[dict[str, Any]]) -> Received:
    request_id, text, usage = "", False, None
    async for event in events:
        request_id = event.get("id", request_id)
        for choice in event.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or {}
            text = text or any(said.get(name) for name in ("content", "tool_calls", "reasoning_content"))
        if counts := event.get("usage"):
            usage = (counts["prompt_tokens"], counts["completion_tokens"])
    return Received(request_id, text, usage)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and returns the results. Stops everything that it started before it returns or raises."""
    server = Fuzzed(PEERS)
    began = time.time()
    try:
        server.start()
        lifted = {"rpm": 10**6, "tpm": 10**9, "concurrency": 1000}
        account, key = server.new_account("random", "100000", **lifted)
        _, other_key = server.new_account("bystander", "100000", **lifted)
        calm = beside(server.base_url, other_key, lambda: time.sleep(options.calm_s))
        client = Client(server.base_url, key)
        busy = beside(
            server.base_url, other_key, lambda: asyncio.run(client.run(options.seed, options.requests, options.at_once))
        )
        _compare_with_books(server, account, client)
    finally:
        server.stop()
    gaps, uncached = busy
    for at, gap in gaps:
        if gap > STALL_S:
            example = {"gap, s": round(gap, 3), "began meanwhile": client.running(at - gap, at)}
            client.findings.add("stall of another account's stream", example)
    for tokens in uncached[1:]:
        if tokens > MAX_UNCACHED:
            client.findings.add("another account's prompt left the cache", tokens)
    return {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "seconds": round(time.time() - began),
        "requests": options.requests,
        "seed": options.seed,
        "statuses": dict(sorted(client.statuses.items())),
        "replies with text": sum(reply.text for reply in client.replies.values()),
        "slowest request, s": round(client.slowest_s, 1),
        "longest gap of the other stream, s": {"calm": _longest(calm[0]), "beside": _longest(gaps)},
        "findings": {"counts": dict(client.findings.counts), "examples": client.findings.examples},
    }


def _longest(gaps: list[tuple[float, float]]) -> float:
    return round(max((gap for _, gap in gaps), default=0.0), 3)


def _compare_with_books(server: OneReplica, account: str, client: Client) -> None:
    """Finds text without a bill, and bills that differ from the usage in the reply."""
    until = time.monotonic() + SETTLED_S
    while True:
        rows = {row["request_id"]: row for row in server.admin(f"/admin/usage/export?format=json&account={account}")}
        missing = [one for one, reply in client.replies.items() if reply.text and one not in rows]
        if not missing or time.monotonic() > until:
            break
        time.sleep(1)
    for request_id in missing:
        client.findings.add("text without a bill", request_id)
    for request_id, reply in client.replies.items():
        row = rows.get(request_id)
        if row is None:
            continue
        if reply.text and (row["completion_tokens"] == 0 or float(row["charged"]) == 0):
            client.findings.add("text without a bill", request_id)
        if reply.usage not in (None, (row["prompt_tokens"], row["completion_tokens"])):
            client.findings.add("bill differs from the usage in the reply", request_id)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 without findings, else 1. Raises SystemExit: 130 after Ctrl-C, 1 after a failure."""
    options = _options(arguments)
    found = completed(lambda: run(options), (ServerError, URLError, httpx.HTTPError))
    print(json.dumps(found, indent=1))
    return 1 if found["findings"]["counts"] else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="default: 20,000, about half an hour")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time; default: 4")
    parser.add_argument("--calm-s", type=float, default=20.0, help="seconds with the other account only; default: 20")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
